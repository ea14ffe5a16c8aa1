"""The service without servers, for the tests of those who write subscribers.

    async with InMemoryService() as billing:
        settled = await billing.publish("order.placed", order)
    assert settled.processed
    assert [event.type for event in settled.events] == ["invoice.created"]

Subscribers, decoding, middleware, retry policy and settlement are the real ones, under FastStream's
`TestRabbitBroker`; the database and the broker's answers are in memory. One behaviour suite runs over this and over
real servers (`tests/contract/test_behaviour.py`). Not emulated: SQL, concurrency, outages, retry strategies other than
`staged`, and time: a wait queue gives its message back when `after_wait` is called. Test those against the servers.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from aio_pika import Message
from aiormq.abc import DeliveredMessage
from faststream.rabbit import RabbitBroker, TestRabbitBroker
from pamqp import commands, frame
from pamqp.header import ContentHeader
from pydantic import BaseModel

from service.app import orders_family
from service.billing import handlers
from service.reliability.consumer import Consumer
from service.reliability.gate import Gate
from service.reliability.hosts import Hosts
from service.reliability.inbound import Inbound
from service.reliability.link import BrokerLink
from service.reliability.middleware import Reliability
from service.reliability.outcome import Reason
from service.reliability.publisher import Confirmed
from service.reliability.settlement import Settlement
from service.reliability.strategies import Staged
from service.settings import Settings, default_settings
from service.telemetry import Metrics
from service.testing.memory import MemoryDatabase, MemoryEvent

NOW = datetime(2026, 1, 1, tzinfo=UTC)

NEW = "a new one"
"""Stands for a message id that is made up."""


_delivering: ContextVar[bool] = ContextVar("delivering", default=False)


@dataclass(frozen=True, slots=True)
class Successor:
    """The copy of a message that went to another queue of ours instead of it."""

    queue: str
    message: Message


@dataclass(frozen=True, slots=True)
class Settled:
    """How a delivery ended.

    Attributes:
        acked: the broker was told; otherwise it would deliver the message again.
        processed: the handler ran and its transaction was committed, in this delivery.
        events: what the transaction appended to the outbox.
        successor: the copy in a wait queue or in parking; confirmed before the ack.
    """

    acked: bool
    processed: bool
    events: tuple[MemoryEvent, ...] = ()
    successor: Successor | None = None

    @property
    def duplicate(self) -> bool:
        """The message was processed before; nothing was done."""
        return self.acked and not self.processed and self.successor is None

    @property
    def next_attempt(self) -> int | None:
        """Of a message that is to be tried again: which attempt comes next."""
        attempt = self._header("x-attempt")
        return attempt if isinstance(attempt, int) else None

    @property
    def parked(self) -> Reason | None:
        """Of a parked message: why."""
        reason = self._header("x-parked-reason")
        return None if reason is None else Reason(str(reason))

    @property
    def explanation(self) -> str | None:
        """Of a parked message: what a person is told."""
        explanation = self._header("x-exception-message")
        return None if explanation is None else str(explanation)

    def _header(self, name: str) -> object:
        return None if self.successor is None else self.successor.message.headers.get(name)


class InMemoryService:
    """The application with `TestRabbitBroker` and a database in memory.

    Attributes:
        broker: FastStream's; `broker.publish(…, "order.placed", "orders", message_id=…)` works as well, and drives
            the same code, but tells nothing about how the delivery ended.
        database: its `tables` are what was committed.
    """

    def __init__(
        self,
        subscribe: Callable[[Inbound], None] = handlers.subscribe,
        *,
        settings: Settings | None = None,
        database: MemoryDatabase | None = None,
    ) -> None:
        """Wire the parts as the service does.

        Args:
            subscribe: declares the subscribers.
            settings: the defaults where they are not given; attempts, delays, time-outs and limits are taken from it.
            database: where to start from; an empty one where it is not given.
        """
        settings = settings or default_settings()
        family = replace(orders_family(settings), strategy=Staged())
        self.database = database or MemoryDatabase(NOW)
        self.broker = RabbitBroker(logger=None)
        self._publisher = _ConfirmingAll()
        inbound = Inbound(self.broker, family)
        subscribe(inbound)
        metrics = Metrics()
        settlement = Settlement(
            family, self._publisher, metrics, now=lambda: NOW, jitter=lambda: 0.0, is_lost=lambda _: False
        )
        gate = Gate(settings.concurrency, _answers, metrics, jitter=lambda: 0.0)
        reliability = Reliability(
            inbound=inbound,
            transactions=self.database,
            settlement=settlement,
            metrics=metrics,
            handler_timeout=settings.handler_timeout,
            max_body_bytes=settings.max_body_bytes,
            gate=gate,
            jitter=lambda: 0.0,
        )
        self.broker.add_middleware(reliability)
        self._family = family
        self._consumer = Consumer(
            link=BrokerLink(Hosts(["amqp://nowhere"]), "in-memory"),  # never opened
            inbound=inbound,
            settlement=settlement,
            declare=_nothing_to_declare,
            gate=gate,
            prefetch=1,
            jitter=lambda: 0.0,
        )
        self._test_broker = TestRabbitBroker(self.broker)
        self._started = False
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Start the test broker."""
        await self._test_broker.__aenter__()
        self._started = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the test broker."""
        self._started = False
        await self._test_broker.__aexit__(kind, error, traceback)

    async def publish(
        self,
        event_type: str,
        body: BaseModel | Mapping[str, Any] | bytes,
        *,
        message_id: str | None = NEW,
        headers: Mapping[str, Any] | None = None,
        **properties: Any,
    ) -> Settled:
        """Deliver a message as the broker would that a producer publishes to the family's exchange.

        Args:
            event_type: the routing key.
            body: what is sent; a model or a mapping is written as JSON, with money as strings in it.
            message_id: a new one where it is not given; None sends none.
            headers: application headers.
            properties: of AMQP, by their names there; the event type is `message_type`.

        Raises:
            ValueError: no queue of the family is bound with the event type: a broker would return the message.
            RuntimeError: outside of `async with`, or in a handler.
        """
        if event_type not in self._family.keys:
            raise ValueError(f"{event_type!r} is bound to no queue; bound are {', '.join(self._family.keys)}")
        given: dict[str, Any] = {
            "content_type": "application/json",
            "delivery_mode": 2,
            "headers": dict(headers or {}),
            "message_id": str(uuid4()) if message_id is NEW else message_id,
        } | properties
        return await self._deliver(self._family.name, event_type, _written(body), commands.Basic.Properties(**given))

    async def after_wait(self, settled: Settled) -> Settled:
        """Deliver a retried message again, as the broker does when the time in its wait queue is over.

        Raises:
            ValueError: it is in no wait queue.
        """
        if settled.successor is None or settled.next_attempt is None:
            raise ValueError("the message waits nowhere: it was processed or parked")
        copy = settled.successor.message
        return await self._deliver("", self._family.work, copy.body, copy.properties)

    async def _deliver(
        self, exchange: str, routing_key: str, body: bytes, properties: commands.Basic.Properties
    ) -> Settled:
        if not self._started:
            raise RuntimeError("deliver inside `async with`")
        if _delivering.get():
            raise RuntimeError("a handler appends events to the outbox, it does not publish")
        async with self._turn:
            token = _delivering.set(True)
            try:
                return await self._deliver_alone(exchange, routing_key, body, properties)
            finally:
                _delivering.reset(token)

    async def _deliver_alone(
        self, exchange: str, routing_key: str, body: bytes, properties: commands.Basic.Properties
    ) -> Settled:
        channel = _Channel()
        tables = self.database.tables
        processed, told = len(tables.processed), len(tables.events)
        self._publisher.published.clear()
        await self._consumer.deliver(
            DeliveredMessage(
                delivery=commands.Basic.Deliver("in-memory", 1, False, exchange, routing_key),
                header=_as_received(body, properties),
                body=body,
                channel=channel,  # type: ignore[arg-type]  # the part of it that settles
            )
        )
        tables = self.database.tables
        return Settled(
            acked=channel.told == ["ack"],
            processed=len(tables.processed) > processed,
            events=tuple(tables.events[told:]),
            successor=self._publisher.published[-1] if self._publisher.published else None,
        )


@dataclass(slots=True)
class _ConfirmingAll:
    """A broker that takes everything."""

    published: list[Successor] = field(default_factory=list)

    async def publish(self, message: Message, exchange: str, routing_key: str) -> Confirmed:  # noqa: ARG002 - always the default exchange
        self.published.append(Successor(routing_key, message))
        return Confirmed()


@dataclass(slots=True)
class _Channel:
    """The channel of a delivery: notes what the broker is told."""

    told: list[str] = field(default_factory=list)
    number: int = 1
    is_closed: bool = False

    async def basic_ack(self, *_: Any, **__: Any) -> None:
        self.told.append("ack")

    async def basic_nack(self, *_: Any, **__: Any) -> None:
        self.told.append("nack")

    async def basic_reject(self, *_: Any, **__: Any) -> None:
        self.told.append("reject")


async def _answers() -> bool:
    return True


async def _nothing_to_declare() -> None:
    return


def _written(body: BaseModel | Mapping[str, Any] | bytes) -> bytes:
    match body:
        case bytes():
            return body
        case BaseModel():
            return body.model_dump_json().encode()
        case _:
            return json.dumps(dict(body)).encode()


def _as_received(body: bytes, properties: commands.Basic.Properties) -> ContentHeader:
    """Return the properties as they come off the wire: AMQP has fewer types than Python."""
    _, _, header = frame.unmarshal(frame.marshal(ContentHeader(0, len(body), properties), 1))
    if not isinstance(header, ContentHeader):
        raise TypeError(header)
    return header
