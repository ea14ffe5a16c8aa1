"""Looks at the results from outside: the events as their consumer, parked messages as a consumer, the tables with SQL.

It takes the events; what is parked goes back to its queue when the auditor leaves, for people to look at.
"""

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage

from service.demo.orders import Message
from service.demo.servers import (
    AUDIT,
    BILLING_EXCHANGE,
    CONNECT_TIMEOUT,
    PARKING,
    SLOW,
    WAITS,
    WORK,
    Servers,
    connect_rabbitmq,
)

SLOW_LENGTH = 3
"""Events that the slow consumer's queue holds before it refuses."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One copy of an event, as it arrived."""

    id: str
    type: str
    causation_id: str
    content: dict[str, Any]
    properties: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parked:
    """One parked message."""

    id: str | None
    reason: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Findings:
    """All that there is at one moment.

    Attributes:
        invoices: rows by order.
        inbox: how many rows there are of each message id.
        outbox: rows in sequence order.
        arrivals: copies of events in the order of their arrival.
        parked: the copies parked of each body.
        depths: messages in the work and wait queues.
    """

    invoices: dict[str, dict[str, Any]]
    inbox: dict[str, int]
    outbox: list[dict[str, Any]]
    arrivals: list[Arrival]
    parked: dict[bytes, list[Parked]]
    depths: dict[str, int]

    def outcome(self, identity: str | None, body: bytes) -> str:
        """Return what became of a message, in the words of `Message.fate`."""
        reasons = {parked.reason for parked in self.parked.get(body, ())}
        return " and ".join(sorted(reasons)) or ("processed" if identity in self.inbox else "nothing")


@dataclass(slots=True)
class Auditor:
    """Reads, from its own connections."""

    connection: AbstractConnection
    database: asyncpg.Connection
    events: AbstractChannel
    arrivals: list[Arrival] = field(default_factory=list)
    parked: dict[bytes, list[Parked]] = field(default_factory=dict)

    async def listen_to_events(self, *types: str) -> None:
        """Bind the audit queue to more event types."""
        queue = await self.events.get_queue(AUDIT)
        for event_type in types:
            await queue.bind(BILLING_EXCHANGE, event_type)

    async def listen_to_parking(self) -> None:
        """Take note of everything that is parked or will be, once the service has made the queue."""
        channel = await self.connection.channel()
        await (await channel.get_queue(PARKING)).consume(self._note_parked)

    async def open_slow_queue(self) -> None:
        """Make a queue for paid invoices that soon refuses, since nobody consumes it."""
        arguments: dict[str, Any] = {"x-max-length": SLOW_LENGTH, "x-overflow": "reject-publish"}
        queue = await self.events.declare_queue(SLOW, durable=True, arguments=arguments)
        await queue.bind(BILLING_EXCHANGE, "invoice.paid")

    async def drain_slow_queue(self) -> None:
        """Consume it from now on."""
        await (await self.events.get_queue(SLOW)).consume(lambda message: message.ack())

    async def invoiced(self) -> int:
        """Return how many invoices there are."""
        return int(await self.database.fetchval("select count(*) from invoices"))

    async def unsent(self) -> list[str]:
        """Return, for each event that has not left, the error of its last publish."""
        rows = await self.database.fetch("select last_error from outbox_messages where sent_at is null")
        return [row["last_error"] or "" for row in rows]

    async def unsettled(self, messages: Iterable[Message]) -> list[Message]:
        """Return those that are neither processed nor parked."""
        rows = await self.database.fetch("select distinct message_id from processed_messages")
        processed = {row["message_id"] for row in rows}
        return [m for m in dict.fromkeys(messages) if m.id not in processed and m.body not in self.parked]

    async def look(self) -> Findings:
        """Return everything."""
        inbox = await self.database.fetch("select message_id, count(*) as n from processed_messages group by 1")
        return Findings(
            invoices={str(row["order_id"]): row for row in await self._rows("select * from invoices")},
            inbox={row["message_id"]: row["n"] for row in inbox},
            outbox=await self._rows("select * from outbox_messages order by sequence"),
            arrivals=list(self.arrivals),
            parked={body: list(copies) for body, copies in self.parked.items()},
            depths=await self.depths(),
        )

    async def depths(self) -> dict[str, int]:
        """Return how many messages wait in the work queue and the wait queues."""
        return {queue: await self._depth(queue) for queue in (WORK, *WAITS)}

    async def _rows(self, statement: str) -> list[dict[str, Any]]:
        return [dict(row) for row in await self.database.fetch(statement)]

    async def _depth(self, queue: str) -> int:
        async with self.connection.channel() as channel:
            found = await channel.declare_queue(queue, passive=True)
        return found.declaration_result.message_count or 0

    async def note_event(self, message: AbstractIncomingMessage) -> None:
        """Write down an event that arrived."""
        cause = str(message.headers.get("causation-id"))
        properties = {
            "delivery_mode": int(message.delivery_mode or 0),
            "content_type": message.content_type,
            "app_id": message.app_id,
            "correlation_id": message.correlation_id,
            "schema-version": message.headers.get("schema-version"),
            "timestamp": message.timestamp is not None,
        }
        content = json.loads(message.body)
        self.arrivals.append(Arrival(str(message.message_id), str(message.type), cause, content, properties))
        await message.ack()

    async def _note_parked(self, message: AbstractIncomingMessage) -> None:
        reason, attempts = (message.headers.get(name) for name in ("x-parked-reason", "x-attempts"))
        parked = Parked(message.message_id, str(reason), attempts if isinstance(attempts, int) else -1)
        self.parked.setdefault(message.body, []).append(parked)


@asynccontextmanager
async def auditor(servers: Servers) -> AsyncIterator[Auditor]:
    """Connect, and be bound to the events of issued and paid invoices before the service is there."""
    connection = await connect_rabbitmq(servers.rabbitmq_url, "billing-demo-auditor")
    database = await asyncpg.connect(servers.database_url, timeout=CONNECT_TIMEOUT, command_timeout=CONNECT_TIMEOUT)
    try:
        await database.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
        channel = await connection.channel()
        await channel.declare_exchange(BILLING_EXCHANGE, "topic", durable=True)
        queue = await channel.declare_queue(AUDIT, durable=True, arguments={"x-queue-type": "quorum"})
        audit = Auditor(connection, database, channel)
        await audit.listen_to_events("invoice.created", "invoice.paid")
        await queue.consume(audit.note_event)
        yield audit
    finally:
        await connection.close()
        await database.close()
