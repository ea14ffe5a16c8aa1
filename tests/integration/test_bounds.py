"""G10: what the broker sends ahead, what runs at once, and what each of them holds."""

import asyncio
import time

import asyncpg
import pytest

from service.app import BillingUnitOfWork
from tests.support.outage import publish
from tests.support.rabbit import Rabbit
from tests.support.stock import Received, add, settings, stock_service
from tests.support.waiting import eventually

PREFETCH, CONCURRENCY = 100, 4


@pytest.mark.guarantee("G10")
async def test_what_is_prefetched_waits_without_a_database_connection(
    stock_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """Of 150 messages 100 are sent ahead, 4 run, each with its connection, and 50 stay with the broker."""
    running, most = 0, 0
    go_on = asyncio.Event()

    async def wait(received: Received, work: BillingUnitOfWork) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.wait()
        await add(received.model_copy(update={"reference": None}), work)
        running -= 1

    async def sessions() -> int:
        return await connection.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in%'"
        )

    configuration = settings(stock_url, rabbit.url, prefetch=PREFETCH, concurrency=CONCURRENCY)
    async with stock_service(configuration, wait) as stock:
        await publish(rabbit, (f"m-{n}" for n in range(150)))
        await eventually(lambda: rabbit.count("orders.work"), lambda ready: ready == 150 - PREFETCH)
        await eventually(sessions, lambda n: n == CONCURRENCY)
        pool = (
            "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'billing'"
        )
        assert await connection.fetchval(pool) <= CONCURRENCY + 1
        go_on.set()
        await stock.has_stock(150)
    assert most == CONCURRENCY


async def test_a_handler_that_blocks_the_loop_longer_than_the_heartbeat_has_one_effect(
    stock_url: str, rabbit: Rabbit
) -> None:
    """G09: the broker takes the connection for dead and delivers again; the copies are duplicates."""
    blocked = 0

    async def block_once(received: Received, work: BillingUnitOfWork) -> None:
        nonlocal blocked
        await add(received.model_copy(update={"reference": None}), work)
        if not blocked:
            blocked += 1
            time.sleep(6)  # noqa: ASYNC251 - what the test is about

    async with stock_service(settings(stock_url, f"{rabbit.url}?heartbeat=1", max_attempts=1), block_once) as stock:
        await publish(rabbit, (f"m-{n}" for n in range(20)))
        await stock.has_stock(20)
        await eventually(stock.is_ready, bool, within=30)
        await publish(rabbit, ["another"])
        await stock.has_stock(21)
        assert await rabbit.count("orders.parking") == 0
