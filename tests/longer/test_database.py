"""The database at work: fewer connections than deliveries, migrations under load, another language, deadlocks."""

import asyncio
import json
from typing import Any

import asyncpg
import pytest

from service.app import BillingUnitOfWork
from tests.support.outages import stock_postgres
from tests.support.rabbit import EVENTS, Rabbit
from tests.support.stock import TYPE, Received, add, settings, stock_service
from tests.support.waiting import eventually

SESSIONS = """
select count(*) from pg_stat_activity where datname = current_database() and application_name = 'billing'
"""


async def publish(rabbit: Rabbit, number: int, **fields: Any) -> None:
    """Publish so many messages, each for a stock of its own."""
    for each in range(number):
        await rabbit.publish(TYPE, json.dumps({"sku": f"nail-{each}", "quantity": 1} | fields).encode())


async def total(connection: asyncpg.Connection) -> int:
    """Return what is in stock of everything."""
    return await connection.fetchval("select coalesce(sum(quantity), 0) from stock")


async def test_what_is_prefetched_waits_without_a_connection(
    stock_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """F03: two handlers at once, fifty deliveries in hand: nobody runs into a time-out, and events leave."""
    go_on = asyncio.Event()

    async def wait(received: Received, work: BillingUnitOfWork) -> None:
        await add(received, work)
        await go_on.wait()

    await rabbit.collect_events()
    async with stock_service(
        settings(stock_url, rabbit.url, concurrency=2, prefetch=50, max_attempts=1), wait
    ) as stock:
        await publish(rabbit, 60)
        await eventually(lambda: rabbit.count("orders.work"), lambda ready: ready == 10)
        used = SESSIONS + " and state = 'idle in transaction'"
        await eventually(lambda: connection.fetchval(used), lambda n: n == 2)
        assert await connection.fetchval(SESSIONS) <= 3
        assert await stock.is_ready(), "probes have a connection left"
        go_on.set()
        await eventually(lambda: total(connection), lambda n: n == 60)
        await eventually(lambda: rabbit.count(EVENTS), lambda n: n == 60)
        assert await rabbit.count("orders.parking") == 0
        assert await stock.held() == 0


@pytest.mark.parametrize(
    "migration",
    [
        "alter table processed_messages add column note text default 'x'",
        "alter table outbox_messages add column note text",
        "alter table stock add column note text",
        "alter table stock alter column quantity type bigint",
        "alter table outbox_messages alter column publish_attempts type bigint",
        """alter table processed_messages drop constraint processed_messages_pkey,
           add constraint processed_messages_pkey primary key (consumer, message_id)""",
        "drop index outbox_messages_unsent_idx",
    ],
)
async def test_a_migration_under_load_costs_a_delayed_retry_at_most(
    migration: str, stock_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """F05: each connection has its statements prepared, under a schema that is no more."""
    sent = 0

    async def keep_publishing() -> None:
        nonlocal sent
        while True:
            await asyncio.shield(rabbit.publish(TYPE, json.dumps({"sku": f"nail-{sent}", "quantity": 1}).encode()))
            sent += 1

    await rabbit.collect_events()
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        publishing = asyncio.create_task(keep_publishing())
        await eventually(lambda: total(connection), lambda n: n >= 20)
        await connection.execute(migration)
        enough = await total(connection) + 40
        await eventually(lambda: total(connection), lambda n: n >= enough)
        publishing.cancel()
        await asyncio.wait({publishing})
        await eventually(lambda: total(connection), lambda n: n == len(rabbit.published))
        await eventually(lambda: rabbit.count(EVENTS), lambda n: n >= len(rabbit.published))
        assert await rabbit.count("orders.parking") == 0
        await eventually(stock.is_ready, bool)


async def test_a_server_that_speaks_another_language_is_understood(rabbit: Rabbit) -> None:
    """E04: in German; a duplicate, and a database that takes no connections, are told without a word."""
    async with stock_postgres() as postgres:
        postgres.environment["LANGUAGE"] = "de"
        postgres.settings["lc_messages"] = "C.utf8"
        await postgres.restart()
        with pytest.raises(asyncpg.UndefinedTableError) as told:
            await postgres.sql("select from nowhere")
        assert "existiert nicht" in str(told.value), "PostgreSQL's German texts are missing: its package has them"
        async with stock_service(settings(postgres.url, rabbit.url, max_attempts=1)) as stock:
            for _ in range(2):
                await rabbit.publish(TYPE, b'{"sku": "nail"}', message_id="m-1")
            await eventually(stock.settled, lambda n: n == 2)
            await postgres.restart()
            await rabbit.publish(TYPE, b'{"sku": "nail"}', message_id="m-2")
            await stock.has_stock(200)
            assert await rabbit.count("orders.parking") == 0


async def test_two_that_wait_for_each_other_are_both_processed(stock_url: str, rabbit: Rabbit) -> None:
    """E10: a deadlock in earnest; PostgreSQL ends one of the two, and its delayed retry succeeds."""
    both = asyncio.Barrier(2)
    executions = 0

    async def in_their_own_order(received: Received, work: BillingUnitOfWork) -> None:
        nonlocal executions
        executions += 1
        first, second = ("left", "right") if received.sku == "left" else ("right", "left")
        await add(Received(sku=first, quantity=1), work)
        if executions <= 2:
            await both.wait()
        await add(Received(sku=second, quantity=1), work)

    async with stock_service(settings(stock_url, rabbit.url, max_attempts=2), in_their_own_order) as stock:
        for sku in ("left", "right"):
            await rabbit.publish(TYPE, json.dumps({"sku": sku}).encode())
        await eventually(lambda: stock.stock("left"), lambda n: n == 2)
        assert (await stock.stock("right"), executions) == (2, 3)
        assert await rabbit.count("orders.parking") == 0
