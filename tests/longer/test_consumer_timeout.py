"""A delivery that is not settled within the broker's consumer time-out: taken back with all others, and nobody's end.

RabbitMQ 3.10 closes the channel, 4.3 cancels the consumer and leaves the channel open.
"""

import asyncio
from collections.abc import Callable

import asyncpg
import pytest

from service.app import BillingUnitOfWork
from tests.support.outage import client, publish
from tests.support.own_broker import OwnBroker, own_broker
from tests.support.stock import Received, StockService, add, settings, stock_service
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(240)

CONSUMER_TIMEOUT = 10
CONF = (f"consumer_timeout = {CONSUMER_TIMEOUT * 1000}",)


async def look_often(node: OwnBroker) -> None:
    """Have RabbitMQ 3.10 look every two seconds, where it is a minute, for channels that are over their time."""
    await node.ctl("eval", "application:set_env(rabbit, channel_tick_interval, 2000).")


async def unsettled(node: OwnBroker) -> int:
    """Return how many messages are in the work and wait queues, ready or not."""
    lines = (await node.ctl("list_queues", "-p", "billing", "name", "messages")).splitlines()
    counts = dict(line.split("\t") for line in lines if line.startswith("orders."))
    return sum(int(n) for queue, n in counts.items() if queue != "orders.parking")


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
async def test_a_handler_slower_than_the_consumer_timeout_has_one_effect_and_holds_nobody(
    stock_url: str, fails: bool, record_property: Callable[[str, object], None]
) -> None:
    """G05: the consumer comes back on a new channel while the handler still runs; a failure then is nobody's any more.

    RabbitMQ 4.3 ignores an ack of what it took back: a copy for parking would be a second life.
    """
    loop = asyncio.get_running_loop()
    executions = 0
    running, go_on = asyncio.Event(), asyncio.Event()

    async def hang_once(received: Received, work: BillingUnitOfWork) -> None:
        nonlocal executions
        if received.sku == "stuck":
            executions += 1
            running.set()
            if executions == 1:
                await go_on.wait()
                if fails:
                    raise RuntimeError
        await add(received.model_copy(update={"reference": None}), work)

    async with own_broker(conf=CONF) as node:
        await look_often(node)
        configuration = settings(stock_url, node.url(), handler_timeout=60, max_attempts=1)
        async with stock_service(configuration, hang_once) as stock, client(node) as rabbit:
            await publish(rabbit, ["stuck"], "stuck")
            await asyncio.wait_for(running.wait(), 10)
            at, first = loop.time(), await tag(stock)
            await publish(rabbit, (f"before-{n}" for n in range(20)))
            await stock.has_stock(20)
            await eventually(lambda: tag(stock), lambda now: now not in {None, first}, within=60)
            record_property("consumes again, after seconds of the handler", round(loop.time() - at, 1))
            await publish(rabbit, (f"after-{n}" for n in range(20)))
            await stock.has_stock(40)
            assert executions == 1
            go_on.set()
            await eventually(lambda: stock.stock("stuck"), bool)
            await eventually(lambda: unsettled(node), lambda n: n == 0, within=30, every=1)
            await eventually(stock.is_ready, bool)
            assert await stock.stock("stuck") == 1
            assert executions == (2 if fails else 1)
            assert await rabbit.count("orders.parking") == 0


@pytest.mark.guarantee("G7")
async def test_what_an_outage_holds_longer_than_the_consumer_timeout_is_processed_after_it(
    stock_url: str, connection: asyncpg.Connection
) -> None:
    """G05: held in front of the closed gate, taken back, delivered and held again; then each has one effect."""
    name = await connection.fetchval("select current_database()")
    async with own_broker(conf=CONF) as node:
        await look_often(node)
        configuration = settings(stock_url, node.url(), max_attempts=1)
        async with stock_service(configuration, watch=stock_url) as stock, client(node) as rabbit:
            await connection.execute(f'alter database "{name}" set default_transaction_read_only = on')
            await connection.fetch(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = $1 and application_name = 'billing' and pid <> pg_backend_pid()",
                name,
            )
            first = await tag(stock)
            await publish(rabbit, (f"m-{n}" for n in range(30)))
            await eventually(lambda: tag(stock), lambda now: now not in {None, first}, within=60)
            assert await stock.stock() == 0
            await connection.execute(f'alter database "{name}" reset default_transaction_read_only')
            await stock.has_stock(30)
            await eventually(lambda: unsettled(node), lambda n: n == 0, within=30, every=1)
            await eventually(stock.is_ready, bool)
            assert await rabbit.count("orders.parking") == 0


async def tag(stock: StockService) -> str | None:
    """Return the tag under which the service consumes."""
    return stock.service._consumer._tag
