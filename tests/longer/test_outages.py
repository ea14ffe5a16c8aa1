"""G7 where it takes time: servers that fall silent are told from slow ones by time-outs only.

`resumed` is written into the test report, as by the quicker ones.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest

from tests.support.outages import stock_postgres, stream, through
from tests.support.own_postgres import OwnPostgres
from tests.support.proxy import proxy_to
from tests.support.rabbit import Rabbit

pytestmark = pytest.mark.timeout(180)

Record = Callable[[str, object], None]


@pytest.fixture
async def postgres() -> AsyncIterator[OwnPostgres]:
    """A server of the test's own, with the stock's tables."""
    async with stock_postgres() as server:
        yield server


async def test_a_database_that_falls_silent_costs_nothing(
    postgres: OwnPostgres, rabbit: Rabbit, record_property: Record
) -> None:
    """Packets vanish for half a minute; then the same connections go on."""
    async with (
        proxy_to("127.0.0.1", postgres.port) as proxy,
        stream(postgres, rabbit, database_url=through(proxy, postgres.url)) as seen,
    ):
        proxy.passing.clear()
        await seen.is_told(within=60)
        await asyncio.sleep(10)
        proxy.passing.set()
        record_property("resumed", await seen.resumes())
        await seen.flows()
        await seen.ends_well(postgres)


async def test_connections_that_are_silent_for_ever_cost_nothing(
    postgres: OwnPostgres, rabbit: Rabbit, record_property: Record
) -> None:
    """A network that forgot them: the server has given them up, nobody has told us. Who waits on one gives up, too."""
    async with (
        proxy_to("127.0.0.1", postgres.port) as proxy,
        stream(postgres, rabbit, database_url=through(proxy, postgres.url), handler_timeout=5) as seen,
    ):
        loop = asyncio.get_running_loop()
        start = loop.time()
        proxy.strand()
        await seen.flows()
        record_property("flows after", loop.time() - start)
        await seen.ends_well(postgres)
        record_property("all done after", loop.time() - start)


async def test_database_and_broker_that_fall_silent_at_once_lose_and_double_nothing(
    postgres: OwnPostgres, rabbit: Rabbit, record_property: Record
) -> None:
    """The broker's loss is noticed by the missing heartbeats: the deliveries come again, each alone."""
    async with (
        proxy_to("127.0.0.1", postgres.port) as to_database,
        proxy_to("127.0.0.1", urlsplit(rabbit.url).port or 0) as to_broker,
        stream(
            postgres,
            rabbit,
            database_url=through(to_database, postgres.url),
            broker_url=through(to_broker, rabbit.url),
        ) as seen,
    ):
        for proxy in (to_database, to_broker):
            proxy.passing.clear()
        await seen.is_told(within=60)
        await asyncio.sleep(25)
        for proxy in (to_database, to_broker):
            proxy.passing.set()
        record_property("resumed", await seen.resumes())
        await seen.flows()
        await seen.ends_well(postgres, redelivered=True)
