"""G1, G4, G5: what fails comes back after its delay, is executed so often and no oftener, and is parked with why."""

import asyncio
import gzip
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from aio_pika.exceptions import ChannelNotFoundEntity, PublishError

from service.app import BillingUnitOfWork
from tests.support.proxy import proxy_to
from tests.support.rabbit import Rabbit, close_connections, rabbitmqctl
from tests.support.stock import TYPE, Received, add, settings, stock_service
from tests.support.waiting import eventually

BODY = b'{"sku": "nail", "quantity": 100}'


async def fail(received: Received, work: BillingUnitOfWork) -> None:
    """Fail after some work, as handlers do."""
    await add(received, work)
    raise RuntimeError(f"no luck with {received.sku}")


@pytest.mark.guarantee("G5")
async def test_a_failing_message_is_executed_max_attempts_times_and_parked(stock_url: str, rabbit: Rabbit) -> None:
    """G5: three executions, two delays, then parking with the diagnosis; nothing of it is stored or published."""
    executions: list[datetime] = []

    async def note_and_fail(received: Received, work: BillingUnitOfWork) -> None:
        executions.append(datetime.now(UTC))
        await fail(received, work)

    async with stock_service(settings(stock_url, rabbit.url), note_and_fail) as stock:
        await rabbit.publish(
            TYPE,
            BODY,
            message_id="m-1",
            correlation_id="c-1",
            headers={"tenant": "a", "x-attempt": 3, "x-death": "junk"},
        )
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)
        assert len(executions) == 3
        assert executions[1] - executions[0] >= timedelta(seconds=0.2)
        assert executions[2] - executions[1] >= timedelta(seconds=0.4)
        assert await stock.stock() == 0
        assert await stock.pool.fetchval("select count(*) from outbox_messages") == 0
        assert await stock.pool.fetchval("select count(*) from processed_messages") == 0

        [parked] = await rabbit.take("orders.parking")
        assert parked.body == BODY
        assert (parked.message_id, parked.type, parked.correlation_id) == ("m-1", TYPE, "c-1")
        assert parked.content_type == "application/json"
        assert parked.delivery_mode == 2
        headers = parked.headers
        assert abs(datetime.fromisoformat(headers.pop("x-parked-at")) - datetime.now(UTC)) < timedelta(seconds=30)
        message = headers.pop("x-exception-message")
        assert message.startswith("RuntimeError at ")
        assert "nail" not in message
        assert headers == {
            "tenant": "a",
            "x-parked-reason": "attempts-exhausted",
            "x-attempts": 3,
            "x-exception-type": "builtins.RuntimeError",
            "x-original-exchange": "orders",
            "x-original-routing-key": TYPE,
            "x-original-queue": "orders.work",
        }


async def test_the_copy_that_waits_is_persistent_and_says_where_it_came_from(stock_url: str, rabbit: Rabbit) -> None:
    """I16: without the property, a restart of the broker loses what waits in a classic queue."""
    async with stock_service(settings(stock_url, rabbit.url, retry_delays="60"), fail):
        await rabbit.publish(
            TYPE, BODY, message_id="m-1", expiration=5, reply_to="somewhere", headers={"CC": ["elsewhere"]}
        )
        await eventually(lambda: rabbit.count("orders.wait.1m"), lambda n: n == 1)
        [waiting] = await rabbit.take("orders.wait.1m")
        assert waiting.delivery_mode == 2
        assert waiting.type == TYPE
        assert (waiting.expiration, waiting.reply_to, waiting.user_id) == (None, None, None)
        assert waiting.headers == {
            "x-attempt": 2,
            "x-original-exchange": "orders",
            "x-original-routing-key": TYPE,
        }


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize(
    ("reason", "body", "properties"),
    [
        ("unreadable", b"{not json", {}),
        ("unreadable", b"", {}),
        ("unreadable", b'{"sku": "\xff"}', {}),
        ("unreadable", BODY, {"content_encoding": "gzip"}),
        ("unreadable", gzip.compress(BODY, mtime=0), {"content_encoding": "gzip"}),
        ("unreadable", gzip.compress(BODY, mtime=0), {}),
        ("unreadable", BODY, {"content_encoding": "br"}),
        ("unreadable", b'{"sku": "nail", "remark": NaN}', {}),
        ("invalid", b"null", {}),
        ("invalid", b"[]", {}),
        ("invalid", b'"{\\"sku\\": \\"nail\\"}"', {}),
        ("invalid", b'{"quantity": "many"}', {}),
        ("unknown-type", BODY, {"type": "order.exploded"}),
    ],
)
async def test_a_message_that_can_never_succeed_is_parked_at_once(
    stock_url: str, rabbit: Rabbit, reason: str, body: bytes, properties: dict[str, str]
) -> None:
    """C01, C10: parked at the first delivery, body untouched, and the next message is processed."""
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        await rabbit.publish(TYPE, body, **properties)
        await rabbit.publish(TYPE, BODY)
        await stock.has_stock(100)
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)
        [parked] = await rabbit.take("orders.parking")
        assert parked.headers["x-parked-reason"] == reason
        assert parked.headers["x-attempts"] == 0
        assert parked.body == body
        assert parked.content_encoding == properties.get("content_encoding")


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "application/json;charset=utf-8",
        "APPLICATION/JSON",
        "application/vnd.x.v1+json",
        "text/plain",
        "application/octet-stream",
        "x" * 255,
    ],
)
async def test_the_content_type_decides_nothing(stock_url: str, rabbit: Rabbit, content_type: str | None) -> None:
    """C03: whatever a producer calls it, a body that is JSON is processed."""
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        await rabbit.publish(TYPE, BODY, content_type=content_type)
        await stock.has_stock(100)
        assert await rabbit.count("orders.parking") == 0


@pytest.mark.guarantee("G4")
async def test_a_full_parking_queue_is_waited_for(stock_url: str, rabbit: Rabbit) -> None:
    """G4: a refused successor is held and published again; the original is not acked and not dropped."""
    vhost = rabbit.url.rsplit("/", 1)[1]
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        rabbitmqctl(
            "set_policy", "-p", vhost, "--apply-to", "queues", "small", "^orders[.]parking$", '{"max-length":1}'
        )
        try:
            await rabbit.publish(TYPE, b"{", message_id="bad-0")
            await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)
            for number in range(1, 4):
                await rabbit.publish(TYPE, b"{", message_id=f"bad-{number}")
            await rabbit.publish(TYPE, BODY)
            await stock.has_stock(100)
            held = 'billing_successors_refused_total{queue="orders.parking"}'
            await eventually(lambda: _metric(stock, held), lambda n: n >= 2)
            parked: list[Any] = []

            async def make_room() -> int:
                parked.extend(await rabbit.take("orders.parking"))
                return len(parked)

            await eventually(make_room, lambda n: n == 4, within=45)
            assert {message.message_id for message in parked} == {f"bad-{number}" for number in range(4)}
        finally:
            rabbitmqctl("clear_policy", "-p", vhost, "small")


async def test_a_deleted_parking_queue_is_declared_again(stock_url: str, rabbit: Rabbit) -> None:
    """H06: no hot loop, no loss: the successor waits until its queue is there again."""
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        await rabbit.delete("orders.parking")
        await rabbit.publish(TYPE, b"{", message_id="bad")
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)
        await rabbit.publish(TYPE, BODY)
        await stock.has_stock(100)


async def test_a_handler_that_takes_too_long_is_rolled_back_and_tried_again(stock_url: str, rabbit: Rabbit) -> None:
    """Its transaction ends with it, and an attempt is spent."""
    executions = 0

    async def hang_once(received: Received, work: BillingUnitOfWork) -> None:
        nonlocal executions
        executions += 1
        await add(received, work)
        if executions == 1:
            await work.connection.execute("select pg_sleep(60)")

    async with stock_service(settings(stock_url, rabbit.url, handler_timeout=0.5), hang_once) as stock:
        await rabbit.publish(TYPE, BODY)
        await stock.has_stock(100)
        assert executions == 2


@pytest.mark.guarantee("G1")
async def test_connections_closed_in_mid_flight_lose_and_double_nothing(stock_url: str, rabbit: Rabbit) -> None:
    """G1, G2: handlers finish although their channel is gone, and the copy that comes again is a duplicate."""
    running, go_on = asyncio.Event(), asyncio.Event()

    async def wait_first(received: Received, work: BillingUnitOfWork) -> None:
        await add(received, work)
        running.set()
        await go_on.wait()

    async with stock_service(settings(stock_url, rabbit.url), wait_first) as stock:
        for number in range(10):
            await rabbit.publish(TYPE, BODY, message_id=f"m-{number}")
        await asyncio.wait_for(running.wait(), 10)
        assert await asyncio.to_thread(close_connections, rabbit.url, name="billing-consumer") == 1
        go_on.set()
        await stock.has_stock(1000)
        await eventually(lambda: rabbit.consumers("orders.work"), lambda n: n == 1)
        await rabbit.publish(TYPE, BODY, message_id="m-10")
        await stock.has_stock(1100)
        await eventually(stock.is_ready, bool)
        assert await rabbit.count("orders.parking") == 0


async def test_the_work_queue_deleted_under_the_consumer_comes_back_with_its_bindings(
    stock_url: str, rabbit: Rabbit
) -> None:
    """A consumer that the broker cancelled must notice: declare again, bind again, consume again."""
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        await rabbit.delete("orders.work")
        await eventually(lambda: rabbit.consumers("orders.work"), lambda n: n == 1)
        await rabbit.publish(TYPE, BODY)
        await stock.has_stock(100)
        await eventually(stock.is_ready, bool)


@pytest.mark.guarantee("G7")
async def test_a_database_that_is_away_costs_no_attempt(stock_url: str, rabbit: Rabbit) -> None:
    """G7: sessions killed in mid-transaction are an outage, not the message's fault."""
    killed = 0

    async def lose_the_session(received: Received, work: BillingUnitOfWork) -> None:
        nonlocal killed
        await add(received, work)
        if killed < 4:
            killed += 1
            await work.connection.execute("select pg_terminate_backend(pg_backend_pid())")

    async with stock_service(settings(stock_url, rabbit.url, max_attempts=1), lose_the_session) as stock:
        await rabbit.publish(TYPE, BODY)
        await stock.has_stock(100)
        assert killed == 4
        assert await rabbit.count("orders.parking") == 0


@pytest.mark.guarantee("G7")
async def test_a_database_that_falls_silent_costs_no_attempt(stock_url: str, rabbit: Rabbit) -> None:
    """A lost network answers nothing: the handler's time is over, but the rollback gets no answer either."""
    async with proxy_to("127.0.0.1", 5432) as proxy:
        silent = 0

        async def fall_silent_once(received: Received, work: BillingUnitOfWork) -> None:
            nonlocal silent
            if not silent:
                silent += 1
                proxy.passing.clear()
            await add(received, work)

        url = stock_url.replace(":5432/", f":{proxy.listening_on}/")
        configuration = settings(url, rabbit.url, max_attempts=1, handler_timeout=1)
        async with stock_service(configuration, fall_silent_once, watch=stock_url) as stock:
            await rabbit.publish(TYPE, BODY)
            await eventually(stock.held, lambda n: n >= 1, within=30)
            assert await rabbit.count("orders.parking") == 0
            proxy.passing.set()
            await stock.has_stock(100, within=30)
            await eventually(stock.is_ready, bool, within=30)
        assert silent == 1
        assert await rabbit.count("orders.parking") == 0


async def test_a_handler_that_misuses_its_connection_is_no_outage(stock_url: str, rabbit: Rabbit) -> None:
    """Two statements at once: the driver refuses, the rollback too, and the message was held for ever."""

    async def misuse(received: Received, work: BillingUnitOfWork) -> None:
        await asyncio.gather(*(work.connection.fetchval("select pg_sleep(0.1)") for _ in range(2)))

    async with stock_service(settings(stock_url, rabbit.url), misuse) as stock:
        await rabbit.publish(TYPE, BODY)
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)
        assert await stock.held() == 0


async def test_waiting_for_another_copy_costs_no_attempt(stock_url: str, rabbit: Rabbit) -> None:
    """A session that claimed the message and hangs: whoever waits for it has not executed anything."""
    other = await asyncpg.connect(stock_url)
    claim = other.transaction()
    await claim.start()
    await other.execute("insert into processed_messages values ('test.stock', 'm-1', 'digest')")
    async with stock_service(settings(stock_url, rabbit.url, max_attempts=1, handler_timeout=0.3)) as stock:
        await rabbit.publish(TYPE, BODY, message_id="m-1")
        await eventually(stock.held, lambda n: n >= 2)
        assert await rabbit.count("orders.parking") == 0
        await claim.rollback()
        await stock.has_stock(100)
    await other.close()


async def test_a_delivery_that_fails_after_its_queue_was_deleted_is_parked(stock_url: str, rabbit: Rabbit) -> None:
    """Nobody else has it any more: the broker forgot it with its queue."""
    running, go_on = asyncio.Event(), asyncio.Event()

    async def fail_later(received: Received, work: BillingUnitOfWork) -> None:
        running.set()
        await go_on.wait()
        raise RuntimeError

    async with stock_service(settings(stock_url, rabbit.url, max_attempts=1), fail_later):
        await rabbit.publish(TYPE, BODY, message_id="m-1")
        await asyncio.wait_for(running.wait(), 10)
        await rabbit.delete("orders.work")
        await eventually(lambda: rabbit.consumers("orders.work"), lambda n: n == 1)
        go_on.set()
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)


async def test_health_answers_while_the_database_is_silent(stock_url: str, rabbit: Rabbit) -> None:
    """A driver waits for the answer to its cancellation, too; readiness must not wait with it."""
    async with proxy_to("127.0.0.1", 5432) as proxy:
        url = stock_url.replace(":5432/", f":{proxy.listening_on}/")
        async with stock_service(settings(url, rabbit.url), watch=stock_url) as stock:
            proxy.passing.clear()
            parts = await eventually(
                stock.service.health.parts, lambda parts: not parts["database"], within=15, every=0.5
            )
            assert parts["consumer"]
            async with asyncio.timeout(10):
                await stock.service._refresh_gauges()
            proxy.passing.set()
            await eventually(stock.is_ready, bool, within=30)


async def _metric(stock: object, line: str) -> float:
    """Return the value of a metric as Prometheus would read it."""
    name, labels = line.rstrip("}").split("{")
    key, value = labels.split("=")
    return stock.service.metrics.registry.get_sample_value(name, {key: value.strip('"')}) or 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("exchange", ["orders", "billing"])
async def test_an_exchange_deleted_while_running_is_made_again_with_its_bindings(
    stock_url: str, rabbit: Rabbit, exchange: str
) -> None:
    """Nobody would notice: producers are told that there is no route, and events stay in the outbox."""

    async def is_there() -> bool:
        try:
            async with rabbit.connection.channel() as channel:
                await channel.get_exchange(exchange, ensure=True)
        except ChannelNotFoundEntity:
            return False
        return True

    async def is_routed() -> bool:
        try:
            await rabbit.publish(TYPE, BODY)
        except PublishError:
            return False
        return True

    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        await rabbit.channel.exchange_delete(exchange)
        assert not await is_there()
        await eventually(is_there, bool)
        await rabbit.collect_events()
        await eventually(is_routed, bool)
        await stock.has_stock(100)
        await eventually(rabbit.events, lambda events: len(events) == 1)


@pytest.mark.guarantee("G7")
async def test_a_database_that_was_read_only_is_used_again_at_once(
    stock_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """As after a failover: a session that began while the server was read-only stays so, and is given up."""
    name = await connection.fetchval("select current_database()")
    async with stock_service(settings(stock_url, rabbit.url, max_attempts=1)) as stock:
        await connection.execute(f'alter database "{name}" set default_transaction_read_only = on')
        await connection.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = $1 and application_name = 'billing' and pid <> pg_backend_pid()",
            name,
        )
        await rabbit.publish(TYPE, BODY)
        await eventually(stock.held, lambda held: held == 1)
        await eventually(stock.is_ready, lambda ready: not ready)
        await connection.execute(f'alter database "{name}" reset default_transaction_read_only')
        await stock.has_stock(100, within=10)
        assert await rabbit.count("orders.parking") == 0
