"""G7 on a broker of the test's own: stopped, killed, away for long, out of memory. What is executed is counted.

Each test records how many seconds the service took to go on after the broker's return (pytest --junitxml).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.support.outage import FAILING, Handler, Probes, client, metric, probing, publish
from tests.support.own_broker import VHOST, OwnBroker, own_broker
from tests.support.ports import free_port
from tests.support.process import ServiceProcess
from tests.support.proxy import proxy_to
from tests.support.rabbit import Rabbit
from tests.support.stock import TYPE, StockService, settings, stock_service
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(240)

BEFORE, AFTER, DOOMED = 600, 50, 4
ATTEMPTS = 3
RESUMED_WITHIN = 10.0
"""Seconds from the broker's return to the next execution."""

HALF_OPEN_RESUMED_WITHIN = 20.0
"""The same where nothing was reset: an attempt to connect that hangs has ten seconds."""


@pytest.fixture
async def node() -> AsyncIterator[OwnBroker]:
    """A broker to break."""
    async with own_broker() as node:
        yield node


def configure(stock_url: str, rabbitmq_url: str, **changes: Any) -> Any:
    """Return settings with delays that outlast a fault's beginning."""
    values = {"http_port": free_port(), "max_attempts": ATTEMPTS, "retry_delays": "1,2"}
    return settings(stock_url, rabbitmq_url, **(values | changes))


async def stopped_and_started(node: OwnBroker) -> None:
    """Restart as for an upgrade."""
    await node.restart()


async def killed_and_started(node: OwnBroker) -> None:
    """Die and come back."""
    await node.kill()
    await node.start()


async def away_for_forty_seconds(node: OwnBroker) -> None:
    """Stay away until every pause between attempts has grown to its longest."""
    await node.stop()
    await asyncio.sleep(40)
    await node.start()


async def all_connections_closed_twenty_times(node: OwnBroker) -> None:
    """Close by force whatever is connected, again as soon as it has come back."""
    for _ in range(20):
        await node.ctl("close_all_connections", "--vhost", VHOST, "closed by a test")


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize(
    ("fault", "pause"),
    [
        (stopped_and_started, 0.1),
        (killed_and_started, 0.1),
        (away_for_forty_seconds, 0.1),
        (all_connections_closed_twenty_times, 0.2),
    ],
)
async def test_a_broker_that_went_away_costs_no_attempt_and_work_goes_on_at_its_return(
    stock_url: str,
    node: OwnBroker,
    fault: Callable[[OwnBroker], Awaitable[None]],
    pause: float,
    record_property: Callable[[str, object], None],
) -> None:
    """G01, G07: in the middle of work, with failing messages on their way and events to send.

    `pause` makes the work outlast the fault.
    """
    loop = asyncio.get_running_loop()
    handler = Handler(pause)
    configuration = configure(stock_url, node.url())
    async with stock_service(configuration, handler) as stock, probing(configuration.http_port) as probes:
        async with client(node) as rabbit:
            await rabbit.collect_events()
            await publish(rabbit, (f"doomed-{n}" for n in range(DOOMED)), FAILING)
            await publish(rabbit, (f"before-{n}" for n in range(BEFORE)))
            await eventually(stock.stock, lambda pieces: pieces >= BEFORE / 10)
        await fault(node)
        back, executed = loop.time(), await handler.executed()
        await eventually(handler.executed, lambda now: now > executed, within=60)
        resumed = loop.time() - back
        await eventually(stock.is_ready, bool, within=60)
        ready = loop.time() - back
        async with client(node) as rabbit:
            await publish(rabbit, (f"after-{n}" for n in range(AFTER)))
            await everything_is_as_if_nothing_had_been(stock, rabbit, handler, probes, BEFORE + AFTER)
    record_property("resumed, ready", (round(resumed, 1), round(ready, 1)))
    assert resumed <= RESUMED_WITHIN
    assert "consumer" in probes.reasons


@pytest.mark.guarantee("G7")
async def test_a_broker_that_falls_silent_costs_no_attempt_and_work_goes_on_at_its_return(
    stock_url: str, node: OwnBroker, record_property: Callable[[str, object], None]
) -> None:
    """A lost network: nothing is reset, half-open connections die by their heartbeats, new ones hang."""
    loop = asyncio.get_running_loop()
    handler = Handler(pause=0.1)
    async with proxy_to("127.0.0.1", node.broker.port) as proxy:
        url = node.url().replace(f":{node.broker.port}/", f":{proxy.listening_on}/") + "?heartbeat=2"
        configuration = configure(stock_url, url)
        async with (
            stock_service(configuration, handler) as stock,
            probing(configuration.http_port) as probes,
            client(node) as rabbit,
        ):
            await rabbit.collect_events()
            await publish(rabbit, (f"doomed-{n}" for n in range(DOOMED)), FAILING)
            await publish(rabbit, (f"before-{n}" for n in range(BEFORE)))
            await eventually(stock.stock, lambda pieces: pieces >= BEFORE / 10)
            proxy.passing.clear()
            await eventually(lambda: rabbit.consumers("orders.work"), lambda n: n == 0, within=60)
            await asyncio.sleep(15)  # until new connections hang, too
            executed = await handler.executed()
            proxy.passing.set()
            back = loop.time()
            await eventually(handler.executed, lambda now: now > executed, within=60)
            resumed = loop.time() - back
            await eventually(stock.is_ready, bool, within=60)
            record_property("resumed, ready", (round(resumed, 1), round(loop.time() - back, 1)))
            await everything_is_as_if_nothing_had_been(stock, rabbit, handler, probes, BEFORE)
    assert resumed <= HALF_OPEN_RESUMED_WITHIN
    assert "consumer" in probes.reasons


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("seconds", [15, 60])
async def test_a_memory_alarm_costs_no_attempt_doubles_nothing_and_is_shown(
    stock_url: str,
    node: OwnBroker,
    connection: asyncpg.Connection,
    seconds: int,
    record_property: Callable[[str, object], None],
) -> None:
    """J04, I07: what comes in goes on, what goes out waits, and nothing that waits is sent twice."""
    loop = asyncio.get_running_loop()
    handler = Handler(pause=0.1)
    configuration = configure(stock_url, node.url())
    async with (
        stock_service(configuration, handler) as stock,
        probing(configuration.http_port) as probes,
        client(node) as rabbit,
    ):
        await rabbit.collect_events()
        await publish(rabbit, (f"before-{n}" for n in range(BEFORE)))
        await publish(rabbit, (f"doomed-{n}" for n in range(DOOMED)), FAILING)
        await eventually(stock.stock, bool)
        await node.alarm(on=True)
        await stock.has_stock(BEFORE)
        await eventually(lambda: metric(stock, "billing_broker_blocked"), bool)
        end = loop.time() + seconds
        while loop.time() < end:
            assert (
                await connection.fetchval(
                    "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in%'"
                    " and now() - state_change > interval '5 seconds'"
                )
                == 0
            )
            await asyncio.sleep(1)
        assert not await stock.is_ready()
        assert await connection.fetchval("select count(*) from outbox_messages where sent_at is null") > 0
        await node.alarm(on=False)
        off = loop.time()
        await eventually(
            lambda: connection.fetchval("select count(*) from outbox_messages where sent_at is null"),
            lambda unsent: unsent == 0,
            within=60,
        )
        sent = loop.time() - off
        await eventually(stock.is_ready, bool, within=60)
        await eventually(lambda: metric(stock, "billing_broker_blocked"), lambda blocked: not blocked)
        await everything_is_as_if_nothing_had_been(stock, rabbit, handler, probes, BEFORE)
        assert {handler.executions[f"doomed-{n}"] for n in range(DOOMED)} == {ATTEMPTS}
        assert await connection.fetchval("select max(publish_attempts) from outbox_messages") == 1
    record_property("all events sent", round(sent, 1))
    assert sent <= RESUMED_WITHIN
    assert "publisher" in probes.reasons
    assert "consumer" not in probes.reasons


@pytest.mark.guarantee("G9")
async def test_sigterm_during_a_memory_alarm_ends_within_the_budget_and_loses_nothing(
    environment: dict[str, str], stock_url: str, node: OwnBroker, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    """It starts and consumes during the alarm, too; a copy and an event that cannot leave wait for the next start."""
    arguments = ("-m", "tests.support.stopped_at", "never", "stock")
    service = ServiceProcess(environment | {"BILLING_RABBITMQ_URL": node.url()}, tmp_path / "log", arguments)
    await service.start().ready()
    async with client(node) as rabbit:
        await rabbit.collect_events()
        assert await service.stop() == 0
        await publish(rabbit, ["m-1"])
        await rabbit.publish(TYPE, b"{", message_id="bad")
        await node.alarm(on=True)
        service.start()
        await service.logged("broker_blocked")
        await eventually(
            lambda: connection.fetchval("select coalesce(sum(quantity), 0) from stock"), lambda pieces: pieces == 1
        )
        assert await service.stop(within=15) == 0
        await node.alarm(on=False)
        await service.start().ready()
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n >= 1)
        assert {message.message_id for message in await rabbit.take("orders.parking")} == {"bad"}
        await eventually(rabbit.events, bool)
        assert await connection.fetchval("select sum(quantity) from stock") == 1
        assert len(service.records("broker_blocked")) == 1
        assert await service.stop() == 0


async def everything_is_as_if_nothing_had_been(
    stock: StockService, rabbit: Rabbit, handler: Handler, probes: Probes, pieces: int
) -> None:
    """One effect and one execution for each message; an event for each effect; the doomed parked after all attempts.

    A broker that goes away between a copy's confirm and the ack of its original starts another life of it, as a crash
    of the service there does.
    """
    await stock.has_stock(pieces, within=120)
    parked: list[Any] = []

    async def take_parked() -> int:
        parked.extend(await rabbit.take("orders.parking"))
        return len({message.message_id for message in parked})

    await eventually(take_parked, lambda n: n >= DOOMED, within=60)
    assert {message.message_id for message in parked} == {f"doomed-{n}" for n in range(DOOMED)}
    assert {message.headers["x-attempts"] for message in parked} == {ATTEMPTS}
    executions = {reference: n for reference, n in handler.executions.items() if not reference.startswith("doomed")}
    assert set(executions.values()) == {1}
    events: list[str] = []

    async def take_events() -> int:
        events.extend(event.message_id for event in await rabbit.events())
        return len(set(events))

    await eventually(take_events, lambda n: n == pieces, within=60)
    assert probes.live == {200}
    assert 503 in probes.ready
