"""The service on real servers, with the face of the one in memory: what a test sees of both must be the same."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

import asyncpg
from aio_pika.exceptions import QueueEmpty

from service.app import Service
from service.settings import Settings
from service.testing import MemoryEvent, Settled, Successor
from service.testing.kit import NEW
from tests.support.rabbit import Rabbit
from tests.support.stock import deliveries_settled
from tests.support.waiting import eventually
from tests.support.wire import publish_raw


class ServiceOnServers:
    """Publishes one message at a time and tells from queues and tables how its delivery ended."""

    def __init__(self, service: Service, rabbit: Rabbit, connection: asyncpg.Connection) -> None:
        """Keep the parts to look at."""
        self._service = service
        self._rabbit = rabbit
        self._connection = connection
        self._deliveries = 0

    async def publish(
        self,
        event_type: str,
        body: bytes,
        *,
        message_id: str | None = NEW,
        headers: Mapping[str, Any] | None = None,
        **properties: Any,
    ) -> Settled:
        """Publish to the exchange and wait until the delivery is settled."""
        properties = {
            "content_type": "application/json",
            "delivery_mode": 2,
            "headers": dict(headers or {}),
            "message_id": str(uuid4()) if message_id is NEW else message_id,
        } | properties
        before = await self._rows()
        await publish_raw(self._rabbit.url, event_type, body, **properties)
        return await self._settled(before, properties["message_id"])

    async def after_wait(self, settled: Settled) -> Settled:
        """Wait until the message comes back from its wait queue and is settled."""
        assert settled.successor is not None
        assert settled.next_attempt is not None
        return await self._settled(await self._rows(), settled.successor.message.message_id)

    async def _settled(self, before: tuple[int, int], message_id: str | None) -> Settled:
        self._deliveries += 1
        await eventually(self._count, lambda n: n == self._deliveries)
        processed, told = await self._rows()
        return Settled(
            acked=True,  # only then it is counted
            processed=processed > before[0],
            events=await self._events(told - before[1]),
            successor=await self._successor(message_id),
        )

    async def _count(self) -> int:
        return deliveries_settled(self._service)

    async def _rows(self) -> tuple[int, int]:
        row = await self._connection.fetchrow(
            "select (select count(*) from processed_messages), (select count(*) from outbox_messages)"
        )
        return row[0], row[1]

    async def _events(self, number: int) -> tuple[MemoryEvent, ...]:
        rows = await self._connection.fetch(
            "select type, key, payload, headers from outbox_messages order by sequence desc limit $1", number
        )
        return tuple(MemoryEvent(r["type"], r["key"], r["payload"], json.loads(r["headers"])) for r in reversed(rows))

    async def _successor(self, message_id: str | None) -> Successor | None:
        """Return the message's copy in a wait queue, left there, or the one in parking, taken out."""
        for message in await self._rabbit.take(self._service.family.parking):
            return Successor(self._service.family.parking, message)
        for delay in self._service.family.policy.delays:
            queue = self._service.family.wait(delay)
            async with self._rabbit.connection.channel() as channel:
                with suppress(QueueEmpty):
                    copy = await (await channel.get_queue(queue, ensure=False)).get()
                    if copy.message_id == message_id:
                        return Successor(queue, copy)
        return None


@asynccontextmanager
async def service_on_servers(settings: Settings, rabbit: Rabbit) -> AsyncIterator[ServiceOnServers]:
    """Run the service until the block ends."""
    service = Service(settings)
    connection = await asyncpg.connect(settings.database_url.get_secret_value())
    running = asyncio.create_task(service.run())
    try:
        await eventually(service.health.parts, lambda parts: bool(parts) and all(parts.values()))
        yield ServiceOnServers(service, rabbit, connection)
    finally:
        service.stopping.set()
        await asyncio.wait_for(running, 20)
        await connection.close()
