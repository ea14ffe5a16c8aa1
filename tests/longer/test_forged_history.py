"""RabbitMQ 3.10, whose dead-lettering a producer can end, is repaired as docs/failure-modes.md says."""

import struct

import pytest

from service.app import BillingUnitOfWork
from tests.support.own_broker import OwnBroker, own_broker
from tests.support.rabbit import BROKER, Rabbit, rabbit_client
from tests.support.stock import TYPE, Received, add, settings, stock_service
from tests.support.waiting import eventually
from tests.support.wire import publish_bytes, short_string, table

FORGED = table((b"x-death", b"A" + struct.pack(">I", 5) + b"I\0\0\0\1"))
"""A history that is one number."""


async def send_forged(node: OwnBroker, rabbit: Rabbit) -> None:
    """Publish what expires at once, where nobody consumes; wait for what the broker makes of it."""

    async def is_over() -> bool:
        parked = await rabbit.count("orders.parking") == 1
        return parked or "undefined" in await node.ctl("eval", "whereis(rabbit_fifo_dlx_sup).")

    await publish_bytes(
        node.url(), TYPE.encode(), b"{}", message_id=short_string(b"m-0"), headers=FORGED, expiration=short_string(b"1")
    )
    await eventually(is_over, bool, within=60)


@pytest.mark.timeout(300)
async def test_a_forged_history_costs_nothing_but_itself(stock_url: str) -> None:
    """On 4.x there is nothing to repair: it is parked."""
    failed: set[str] = set()

    async def fail_once(received: Received, work: BillingUnitOfWork) -> None:
        if received.sku not in failed:
            failed.add(received.sku)
            raise RuntimeError
        await add(received, work)

    async with own_broker() as node, rabbit_client(node.url(), keep=True) as rabbit:
        configuration = settings(stock_url, node.url(), retry_delays="1")
        async with stock_service(configuration):
            pass
        await send_forged(node, rabbit)
        async with stock_service(configuration, fail_once) as stock:
            await rabbit.publish(TYPE, b'{"sku": "early"}')
            await eventually(stock.settled, lambda n: n == 1)
            if BROKER.version in {None, "3.10"}:
                assert await rabbit.count("orders.parking") == 0
                await repair(node, rabbit)
            await rabbit.publish(TYPE, b'{"sku": "late"}')
            for sku in ("early", "late"):
                await eventually(lambda sku=sku: stock.stock(sku), lambda n: n == 100)  # type: ignore[misc]


async def repair(node: OwnBroker, rabbit: Rabbit) -> None:
    """Do what the page says."""
    await node.ctl("eval", "supervisor:restart_child(rabbit_sup, rabbit_fifo_dlx_sup).")
    await eventually(lambda: rabbit.count("orders.work"), lambda n: n == 0)
    await node.ctl("delete_queue", "-p", "billing", "orders.work")
    await eventually(lambda: rabbit.consumers("orders.work"), lambda n: n == 1)
    await node.ctl("eval", "exit(whereis('billing_orders.wait.1s'), kill).")
