"""A consumer of any queue family on the real broker, wired as the service wires its own, with a database in memory."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

from faststream.rabbit import RabbitBroker

from service.reliability import topology
from service.reliability.consumer import Consumer
from service.reliability.gate import Gate
from service.reliability.hosts import Hosts
from service.reliability.inbound import Inbound
from service.reliability.link import BrokerLink
from service.reliability.middleware import Reliability
from service.reliability.publisher import ConfirmingPublisher
from service.reliability.settlement import Settlement
from service.reliability.topology import QueueFamily
from service.telemetry import Metrics
from service.testing.memory import MemoryDatabase
from tests.support.stock import Received


async def _yes() -> bool:
    return True


@asynccontextmanager
async def consuming(family: QueueFamily, url: str, act: Callable[[Received], Awaitable[None]]) -> AsyncIterator[None]:
    """Consume the family's work queue, each of its keys with `act`, until the block ends."""
    broker, metrics = RabbitBroker(logger=None), Metrics()
    inbound = Inbound(broker, family)
    for key in family.keys:

        @inbound.subscriber(key, Received, consumer=f"test.{key}")
        async def handle(message: Received) -> None:
            await act(message)

    hosts = Hosts([url])
    async with BrokerLink(hosts, "test-consumer") as link, BrokerLink(hosts, "test-publisher") as publishing:

        async def declare() -> None:
            await topology.declare(publishing, family.topology)

        settlement = Settlement(
            family=family,
            publisher=ConfirmingPublisher(publishing, timedelta(seconds=3)),
            metrics=metrics,
            now=lambda: datetime.now(UTC),
            jitter=random.random,
        )
        gate = Gate(8, _yes, metrics, random.random)
        broker.add_middleware(
            Reliability(
                inbound=inbound,
                transactions=MemoryDatabase(datetime.now(UTC)),
                settlement=settlement,
                metrics=metrics,
                handler_timeout=timedelta(seconds=10),
                max_body_bytes=10_000,
                gate=gate,
                jitter=random.random,
            )
        )
        inbound.prepare()
        consumer = Consumer(link, inbound, settlement, declare, gate, prefetch=10, jitter=random.random)
        running = asyncio.create_task(consumer.run())
        try:
            yield
        finally:
            await consumer.cancel(asyncio.get_running_loop().time() + 5)
            await running
