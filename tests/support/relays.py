"""The relay by itself, on a real database, with a real broker or with a publisher that answers from a script."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from uuid import UUID

import asyncpg

from service import database
from service.reliability.dispatch import Dispatcher
from service.reliability.hosts import Hosts
from service.reliability.link import BrokerLink
from service.reliability.publisher import ConfirmingPublisher, Publisher
from service.reliability.relay import Relay
from service.telemetry import Metrics

APPEND = """
insert into outbox_messages (id, exchange, routing_key, type, key, payload, headers)
values (gen_random_uuid(), coalesce($2, 'billing'), $1, $1, coalesce($3, 'k'), '{"n": 1}',
        '{"schema-version": 1, "causation-id": "m-1", "correlation-id": "c-1"}')
returning id
"""


async def append(
    connection: asyncpg.Connection,
    routing_key: str = "invoice.created",
    exchange: str | None = None,
    key: str | None = None,
) -> UUID:
    """Store an event as a handler would."""
    return await connection.fetchval(APPEND, routing_key, exchange, key)


@asynccontextmanager
async def relaying(
    database_url: str,
    rabbitmq_url: str,
    *,
    competes: bool = True,
    poll: float = 0.2,
    confirm_timeout: float = 20,
    batch: int = 50,
    publisher: Publisher | None = None,
) -> AsyncIterator[Relay]:
    """Run a relay until the end of the block."""
    metrics = Metrics()
    async with BrokerLink(Hosts([rabbitmq_url]), "billing-relay") as link:
        relay = Relay(
            connect=lambda: database.connect(database_url, "relay"),
            dispatcher=Dispatcher(
                publisher or ConfirmingPublisher(link, timedelta(seconds=confirm_timeout)),
                metrics,
                window=10,
                jitter=random.random,
            ),
            metrics=metrics,
            poll=timedelta(seconds=poll),
            batch=batch,
            jitter=random.random,
            competes=competes,
        )
        running = asyncio.create_task(relay.run())
        try:
            yield relay
        finally:
            relay.stop()
            await asyncio.wait_for(running, 10)
