"""G1 to G5 under SIGKILL: the service is stopped at a named point of its paths and killed there."""

import asyncio
import json
import random
from pathlib import Path

import asyncpg
import pytest

from tests.support.orders import cancelled, paid, placed
from tests.support.process import ServiceProcess
from tests.support.rabbit import EVENTS, Rabbit
from tests.support.waiting import eventually
from tests.support.wire import publish_raw

ORDER = "5d2e1f0a-0000-4000-8000-000000000001"


async def _killed_at(
    point: str,
    environment: dict[str, str],
    tmp_path: Path,
    message: tuple[str, bytes],
    rabbit: Rabbit,
    *,
    when_events: int = 0,
) -> str:
    """Start a service that holds at `point`, publish, see that it got there, kill it; return the message id.

    It is killed once so many events have arrived: a publish under way at the point is let reach the broker.
    """
    stopped = ServiceProcess(environment, tmp_path / "stopped.log", ("-m", "tests.support.stopped_at", point)).start()
    await stopped.ready()
    message_id = await rabbit.publish(*message)
    [reached] = await stopped.logged("barrier_reached")
    assert reached["point"] == point
    await eventually(lambda: rabbit.count(EVENTS), when_events.__le__)
    stopped.kill()
    return message_id


@pytest.mark.parametrize("point", ["claimed", "handled", "committed"])
async def test_a_kill_on_the_way_in_has_one_effect(
    point: str, environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """E07, E09, I13: killed after the claim, after the handler, after the commit before the ack."""
    await rabbit.collect_events()
    await _killed_at(point, environment, tmp_path, placed(ORDER), rabbit)
    committed = point == "committed"
    assert await connection.fetchval("select count(*) from invoices") == committed
    assert await connection.fetchval("select count(*) from outbox_messages") == committed
    assert await connection.fetchval("select count(*) from processed_messages") == committed

    survivor = await ServiceProcess(environment, tmp_path / "survivor.log").start().ready()
    await eventually(lambda: rabbit.count(EVENTS), lambda n: n >= 1)
    await survivor.logged("delivery_settled")
    assert survivor.records("delivery_settled")[0]["outcome"] == ("duplicate" if committed else "processed")
    assert await survivor.stop() == 0
    assert await connection.fetchval("select count(*) from invoices") == 1
    assert await connection.fetchval("select count(*) from outbox_messages") == 1
    events = await rabbit.events()  # twice where the killed one had published it and not yet recorded that
    assert len({event.message_id for event in events}) == 1
    assert json.loads(events[0].body)["order_id"] == ORDER


@pytest.mark.guarantee("G4")
async def test_a_kill_between_a_successors_confirm_and_the_ack_loses_nothing(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """G4, G5: the copy waits and the original comes again; one effect, and at most one life more."""
    await rabbit.collect_events()
    environment |= {"BILLING_RETRY_DELAYS": "2"}  # long enough for the order to arrive before the attempts are spent
    await _killed_at("successor-confirmed", environment, tmp_path, paid(ORDER, "19.90"), rabbit)
    survivor = await ServiceProcess(environment, tmp_path / "survivor.log").start().ready()
    await rabbit.publish(*placed(ORDER))
    await eventually(lambda: connection.fetchval("select status from invoices"), lambda status: status == "paid")
    await eventually(lambda: rabbit.count(EVENTS), lambda n: n == 2)
    await eventually(_nothing_left(rabbit), lambda left: left == 0)
    assert await survivor.stop() == 0
    assert await rabbit.count("orders.parking") == 0
    assert sorted(event.type or "" for event in await rabbit.events()) == ["invoice.created", "invoice.paid"]


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("point", ["event-sent", "event-confirmed"])
async def test_a_kill_on_the_way_out_publishes_again_under_the_same_id(
    point: str, environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """J06: killed after the publish before the confirm was seen, and after the confirm before it was recorded."""
    await rabbit.collect_events()
    await _killed_at(point, environment, tmp_path, placed(ORDER), rabbit, when_events=1)
    assert await rabbit.count(EVENTS) == 1
    assert await connection.fetchval("select count(*) from outbox_messages where sent_at is null") == 1

    survivor = await ServiceProcess(environment, tmp_path / "survivor.log").start().ready()
    await eventually(
        lambda: connection.fetchval("select count(*) from outbox_messages where sent_at is not null"), lambda n: n == 1
    )
    assert await survivor.stop() == 0
    first, second = await rabbit.events()
    event_id = str(await connection.fetchval("select id from outbox_messages"))
    assert first.message_id == second.message_id == event_id
    assert first.body == second.body
    assert first.headers == second.headers
    assert first.properties.timestamp == second.properties.timestamp


@pytest.mark.guarantee("G2")
async def test_many_messages_committed_and_never_acked_are_duplicates_for_the_next(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """E09: what one service committed and never acked is a duplicate for the next, for every one of many messages."""
    await rabbit.collect_events()
    orders = [f"5d2e1f0a-0000-4000-8000-{number:012d}" for number in range(50)]
    many = environment | {"BILLING_CONCURRENCY": "20"}  # as many as are to be stopped after their commit
    stopped = ServiceProcess(many, tmp_path / "stopped.log", ("-m", "tests.support.stopped_at", "committed"))
    await stopped.start().ready()
    for order in orders:
        await rabbit.publish(*placed(order))
    await eventually(lambda: connection.fetchval("select count(*) from invoices"), lambda n: n >= 20)
    stopped.kill()
    survivor = await ServiceProcess(environment, tmp_path / "survivor.log").start().ready()
    await eventually(_nothing_left(rabbit), lambda left: left == 0)
    await eventually(
        lambda: connection.fetchval("select count(*) from outbox_messages where sent_at is not null"), lambda n: n == 50
    )
    assert await survivor.stop() == 0
    outcomes = [record["outcome"] for record in survivor.records("delivery_settled")]
    assert outcomes.count("duplicate") >= 20
    assert await connection.fetchval("select count(*) from invoices") == 50
    events = await rabbit.events()
    assert len({event.message_id for event in events}) == 50
    assert sorted(json.loads(event.body)["order_id"] for event in {e.message_id: e for e in events}.values()) == orders


async def test_a_cancellation_after_its_order_is_published_once(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """A kill after the commit of the second event of an order keeps the first in front of it."""
    await rabbit.collect_events()
    await rabbit.channel.declare_exchange("orders", "direct", durable=True)
    first = await ServiceProcess(environment, tmp_path / "first.log").start().ready()
    await rabbit.publish(*placed(ORDER))
    await eventually(lambda: rabbit.count(EVENTS), lambda n: n == 1)
    assert await first.stop() == 0
    await _killed_at("committed", environment, tmp_path, cancelled(ORDER), rabbit)
    survivor = await ServiceProcess(environment, tmp_path / "survivor.log").start().ready()
    await eventually(lambda: rabbit.count(EVENTS), lambda n: n >= 2)
    await eventually(_nothing_left(rabbit), lambda left: left == 0)
    assert await survivor.stop() == 0
    types = list(dict.fromkeys(event.type for event in await rabbit.events()))
    assert types == ["invoice.created", "invoice.voided"]
    assert await connection.fetchval("select status from invoices") == "void"


@pytest.mark.guarantee("G1", "G2")
async def test_random_kills_add_to_a_stock_once_for_each_message(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, stock_url: str, connection: asyncpg.Connection
) -> None:
    """E07, G2: a handler that adds; kills at any moment, between claim and write as well as after the commit."""
    stock = ServiceProcess(environment, tmp_path / "stock.log", ("-m", "tests.support.stopped_at", "never", "stock"))
    await stock.start().ready()
    publishing = asyncio.create_task(_publish_many(rabbit, 600))
    chance = random.Random(600)
    for _ in range(5):
        enough = min(await _stock(connection) + chance.randint(5, 60), 600)
        await eventually(lambda: _stock(connection), enough.__le__, every=0.01)
        stock.kill()
        await stock.start().ready()
    await publishing
    await eventually(_nothing_left(rabbit), lambda left: left == 0)
    await eventually(lambda: _stock(connection), lambda n: n == 600)
    assert await stock.stop() == 0
    assert await _stock(connection) == 600
    assert await connection.fetchval("select count(*) from outbox_messages") == 600
    assert await rabbit.count("orders.parking") == 0
    outcomes = [record["outcome"] for record in stock.records("delivery_settled")]
    assert len(outcomes) >= 600
    assert len(stock.records("http_started")) == 6


async def test_a_message_without_an_id_is_parked_and_no_invented_id_is_stored(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """B01: not even a redelivery, which would invent another id, has an effect."""
    service = await ServiceProcess(environment, tmp_path / "service.log").start().ready()
    for properties in ({}, {"delivery_mode": 2, "correlation_id": "c-1"}):
        await publish_raw(rabbit.url, "order.placed", placed(ORDER)[1], **properties)
    await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 2)
    for _ in range(2):  # the second time, what was parked is published again as it is
        parked = await rabbit.take("orders.parking")
        for copy in parked:
            assert copy.headers["x-parked-reason"] == "missing-message-id"
            assert copy.headers["x-attempts"] == 0
            assert copy.body == placed(ORDER)[1]
            await rabbit.channel.default_exchange.publish(copy, "orders.work")
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 2)
    await rabbit.publish(*placed(ORDER), message_id="m-1")
    await eventually(lambda: connection.fetchval("select count(*) from invoices"), lambda n: n == 1)
    assert await connection.fetchval("select array_agg(message_id) from processed_messages") == ["m-1"]
    assert await service.stop() == 0


async def _stock(connection: asyncpg.Connection) -> int:
    return await connection.fetchval("select coalesce(sum(quantity), 0)::int from stock")


async def _publish_many(rabbit: Rabbit, number: int) -> None:
    """Publish messages of one each, some of them twice."""
    for n in range(number):
        for _ in range(1 + n % 2):
            await rabbit.publish("order.placed", b'{"sku": "%d", "quantity": 1}' % (n % 7), message_id=f"m-{n}")


def _nothing_left(rabbit: Rabbit):
    async def read() -> int:
        queues = ("orders.work", "orders.wait.200ms", "orders.wait.400ms", "orders.wait.2s")
        return sum([max(await rabbit.count(queue), 0) for queue in queues])

    return read
