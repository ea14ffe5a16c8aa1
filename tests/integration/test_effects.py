"""G2: one effect per consumer and message id, however often and however concurrently it is delivered."""

import asyncio
import json
from contextlib import suppress

import asyncpg
import pytest

from service.app import BillingUnitOfWork
from tests.support.rabbit import EVENTS, Rabbit
from tests.support.stock import TYPE, Received, add, settings, stock_service
from tests.support.waiting import eventually

BODY = b'{"sku": "nail", "quantity": 100}'


@pytest.mark.guarantee("G2")
async def test_a_message_delivered_twice_has_one_effect(stock_url: str, rabbit: Rabbit) -> None:
    """G2: remove the claim and this fails, since the handler adds."""
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        await rabbit.publish(TYPE, BODY, message_id="m-1")
        await stock.has_stock(100)
        await rabbit.publish(TYPE, BODY, message_id="m-1")
        await rabbit.publish(TYPE, BODY, message_id="m-2")
        await stock.has_stock(200)
        await eventually(lambda: rabbit.count("orders.work"), lambda n: n == 0)
        assert await stock.stock() == 200
        assert await stock.pool.fetchval("select count(*) from outbox_messages") == 2
        assert await rabbit.count("orders.parking") == 0


@pytest.mark.guarantee("G2")
async def test_forty_copies_at_once_have_one_effect(stock_url: str, rabbit: Rabbit) -> None:
    """G2, E01: the copies wait for the winner inside the database."""
    async with stock_service(settings(stock_url, rabbit.url, concurrency=20)) as stock:
        await asyncio.gather(*(rabbit.publish(TYPE, BODY, message_id="m-1") for _ in range(40)))
        await stock.has_stock(100)
        await rabbit.publish(TYPE, b'{"sku": "last"}')
        await eventually(lambda: stock.stock("last"), lambda n: n == 100)
        await eventually(stock.settled, lambda n: n == 41)
        assert await stock.stock() == 100
        assert await stock.pool.fetchval("select count(*) from outbox_messages where key = 'nail'") == 1
        assert await rabbit.count("orders.parking") == 0


@pytest.mark.guarantee("G2")
async def test_a_copy_takes_over_when_the_first_one_rolls_back(stock_url: str, rabbit: Rabbit) -> None:
    """G2: the winner's rollback must not take the message with it."""
    first_holds, first_may_fail = asyncio.Event(), asyncio.Event()

    async def fail_first(received: Received, work: BillingUnitOfWork) -> None:
        await add(received, work)
        if not first_holds.is_set():
            first_holds.set()
            await first_may_fail.wait()
            raise RuntimeError("the first copy fails after its work")

    async with stock_service(settings(stock_url, rabbit.url, retry_delays="60"), fail_first) as stock:
        await rabbit.publish(TYPE, BODY, message_id="m-1")
        await asyncio.wait_for(first_holds.wait(), 10)
        await rabbit.publish(TYPE, BODY, message_id="m-1")
        await eventually(lambda: _waiting_for_a_lock(stock.pool), lambda n: n == 1)
        first_may_fail.set()
        await stock.has_stock(100)
        await eventually(lambda: rabbit.count("orders.wait.1m"), lambda n: n == 1)
        assert await stock.pool.fetchval("select count(*) from outbox_messages") == 1


async def test_the_same_id_with_other_content_is_parked(stock_url: str, rabbit: Rabbit) -> None:
    """A changed message under a used id is a producer's error: never silently acked."""
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        await rabbit.publish(TYPE, BODY, message_id="m-1")
        await stock.has_stock(100)
        await rabbit.publish(TYPE, b'{"quantity": 100,   "sku": "nail"}', message_id="m-1")
        await rabbit.publish(TYPE, b'{"sku": "nail", "quantity": 7}', message_id="m-1")
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)
        [parked] = await rabbit.take("orders.parking")
        assert parked.headers["x-parked-reason"] == "message-id-conflict"
        assert parked.headers["x-attempts"] == 0
        assert json.loads(parked.body)["quantity"] == 7
        assert await stock.stock() == 100


@pytest.mark.guarantee("G2")
async def test_another_unique_violation_is_not_a_duplicate(stock_url: str, rabbit: Rabbit) -> None:
    """A unique violation of the business is a failure of the handler, not a processed message."""
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        await rabbit.publish(TYPE, b'{"reference": "r-1"}', message_id="m-1")
        await stock.has_stock(100)
        await rabbit.publish(TYPE, b'{"reference": "r-1"}', message_id="m-2")
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)
        [parked] = await rabbit.take("orders.parking")
        assert parked.message_id == "m-2"
        assert parked.headers["x-parked-reason"] == "attempts-exhausted"
        assert "23505, constraint deliveries_reference_key" in parked.headers["x-exception-message"]
        assert await stock.stock() == 100
        assert await stock.pool.fetchval("select array_agg(message_id) from processed_messages") == ["m-1"]


async def test_the_same_id_counts_once_for_each_consumer(stock_url: str, rabbit: Rabbit) -> None:
    """B06: another consumer's message with the same id is another message."""
    async with stock_service(settings(stock_url, rabbit.url), consumer="first") as stock:
        await rabbit.publish(TYPE, BODY, message_id="m-1")
        await stock.has_stock(100)
    async with stock_service(settings(stock_url, rabbit.url), consumer="second") as stock:
        await rabbit.publish(TYPE, BODY, message_id="m-1")
        await stock.has_stock(200)


@pytest.mark.parametrize("length", [36, 64, 65, 128, 255])
async def test_an_id_of_any_length_is_processed_once(stock_url: str, rabbit: Rabbit, length: int) -> None:
    """B04: no truncation, so two ids that differ in their last byte are two messages."""
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        for last in "ab":
            for _ in range(2):
                await rabbit.publish(TYPE, BODY, message_id="x" * (length - 1) + last)
        await stock.has_stock(200)
        await eventually(stock.settled, lambda n: n == 4)
        assert await stock.stock() == 200


async def test_a_duplicate_leaves_the_session_usable(stock_url: str, rabbit: Rabbit) -> None:
    """E06: with one connection in the pool, what follows a duplicate is processed."""
    async with stock_service(settings(stock_url, rabbit.url, concurrency=1)) as stock:
        for message_id in ("m-1", "m-1", "m-2", "m-1", "m-3"):
            await rabbit.publish(TYPE, BODY, message_id=message_id)
        await stock.has_stock(300)
        await eventually(stock.settled, lambda n: n == 5)
        assert await rabbit.count("orders.parking") == 0


async def test_a_duplicate_is_recognised_without_any_error_of_the_database(stock_url: str, rabbit: Rabbit) -> None:
    """E04: where no error is raised, none can be misread: texts depend on the server's language."""
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        for _ in range(3):
            await rabbit.publish(TYPE, BODY, message_id="m-1")
        await eventually(stock.settled, lambda n: n == 3)
        assert await stock.stock() == 100
    connection = await asyncpg.connect(stock_url)
    rolled_back = "select xact_rollback from pg_stat_database where datname = current_database()"
    assert await connection.fetchval(rolled_back) == 0
    await connection.close()


@pytest.mark.guarantee("G3")
async def test_a_swallowed_statement_error_is_not_taken_for_success(stock_url: str, rabbit: Rabbit) -> None:
    """COMMIT of an aborted transaction succeeds and stores nothing: the message must not be acked for that."""
    swallowed = 0

    async def swallow_once(received: Received, work: BillingUnitOfWork) -> None:
        nonlocal swallowed
        await add(received, work)
        if not swallowed:
            swallowed += 1
            with suppress(asyncpg.UniqueViolationError):
                await work.connection.execute("insert into stock values ('nail', 1)")

    async with stock_service(settings(stock_url, rabbit.url), swallow_once) as stock:
        await rabbit.publish(TYPE, BODY)
        await stock.has_stock(100)
        assert swallowed == 1
        await eventually(lambda: stock.pool.fetchval("select count(*) from outbox_messages"), lambda n: n == 1)


async def test_a_commit_wakes_the_relay_long_before_its_poll(stock_url: str, rabbit: Rabbit) -> None:
    """In memory, in the same process."""
    await rabbit.collect_events()
    async with stock_service(settings(stock_url, rabbit.url, relay_poll_interval=10)):
        for number in range(1, 4):
            await rabbit.publish(TYPE, BODY)
            await eventually(lambda: rabbit.count(EVENTS), number.__eq__, within=5)


@pytest.mark.parametrize("state", ["40P01", "40001"])
async def test_a_deadlock_is_tried_again(state: str, stock_url: str, rabbit: Rabbit) -> None:
    """E10: a serialization failure or a deadlock is nobody's fault; the whole transaction runs again."""
    executions = 0

    async def fail_twice(received: Received, work: BillingUnitOfWork) -> None:
        nonlocal executions
        executions += 1
        await add(received, work)
        if executions <= 2:
            await work.connection.execute(f"do $$ begin raise exception using errcode = '{state}'; end $$")

    async with stock_service(settings(stock_url, rabbit.url), fail_twice) as stock:
        await rabbit.publish(TYPE, BODY)
        await stock.has_stock(100)
        assert executions == 3
        assert await rabbit.count("orders.parking") == 0


async def _waiting_for_a_lock(pool: asyncpg.Pool) -> int:
    return await pool.fetchval(
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    )
