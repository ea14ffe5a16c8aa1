"""What is in a parking queue: looked at as a whole, taken out one by one, never lost and never reordered.

Everything is fetched unacknowledged on one channel, and what is not removed goes back when that is closed. It is always
everything: a quorum queue puts what comes back behind what came back earlier, so that looking at a part would reorder
the queue. A look costs each message a delivery count, which the queue's own limit allows for.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, cast

from aio_pika import IncomingMessage
from aiormq import Channel as Wire
from aiormq.abc import DeliveredMessage

from service.reliability.envelope import (
    PARKED_AT,
    PARKED_REASON,
    Envelope,
    read_envelope,
    short_text,
)
from service.reliability.frames import build
from service.reliability.link import BrokerLink, losses_are_errors
from service.reliability.outcome import Reason
from service.reliability.stopping import Stopping

BODIES_KEPT = 64 * 1024 * 1024
"""Bytes of bodies held in memory at once; whoever needs more of them visits again."""

MOST = 65_535
"""Messages in one visit: the largest prefetch that AMQP has. None at all is no answer: quorum queues then take 2000."""

QUIET = 3.0
"""Seconds without a delivery, after which what is missing is taken to be in other hands."""

RETURN_TIMEOUT = 10.0
"""Seconds for the broker to have everything back."""

BROKER_REASONS = {
    "delivery_limit": ("broker-delivery-limit", "delivered too often without an answer: its consumers died each time"),
    "expired": ("broker-expired", "nobody consumed it within the time that its producer set by expiration"),
    "rejected": ("broker-rejected", "rejected by a consumer that was none of ours: the service never does that"),
    "maxlen": ("broker-maxlen", "a policy limits the length of the work queue"),
}
"""What the broker's own x-death says of what it parked itself: the reason's name, and what it means."""

REASONS = (*map(str, Reason), *(name for name, _ in BROKER_REASONS.values()), "unknown")
"""Every reason that the tools can tell."""


@dataclass(frozen=True, slots=True)
class Parked:
    """One parked message.

    Attributes:
        message_id: as its producer set it; None where it set none.
        parked_at: None where nothing believable tells it.
        attempts: executions so far; None where the broker parked it.
        size: bytes of the body.
        key: tells this message from every other in the queue, in each visit.
    """

    message_id: str | None
    type: str
    reason: str
    parked_at: datetime | None
    attempts: int | None
    exception_type: str | None
    explanation: str | None
    size: int
    key: str


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages are meant; what is empty or None allows all.

    Attributes:
        parked_after, parked_before: of a message whose time is not known, neither is true.
    """

    ids: frozenset[str] = frozenset()
    reasons: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    parked_after: datetime | None = None
    parked_before: datetime | None = None

    @property
    def is_everything(self) -> bool:
        """Tell whether nothing is left out."""
        return self == Selection()

    def has(self, parked: Parked) -> bool:
        """Tell whether a message is meant."""
        return (
            _allows(self.ids, parked.message_id)
            and _allows(self.reasons, parked.reason)
            and _allows(self.types, parked.type)
            and (self.parked_after is None or (parked.parked_at is not None and parked.parked_at > self.parked_after))
            and (self.parked_before is None or (parked.parked_at is not None and parked.parked_at < self.parked_before))
        )


@dataclass(slots=True)
class Visit:
    """Everything that was in the parking queue, in our hands.

    Attributes:
        messages: in the queue's order.
        missing: how many others there were: beyond `MOST`, or in other hands.
    """

    _wire: Wire
    messages: list[Parked] = field(default_factory=list)
    missing: int = 0
    _tags: dict[str, int] = field(default_factory=dict)
    _kept: dict[str, IncomingMessage] = field(default_factory=dict)
    _room: int = BODIES_KEPT
    _removed: int = 0

    @property
    def reasons(self) -> dict[str, int]:
        """How many messages were parked for each reason, the most frequent first."""
        return dict(Counter(message.reason for message in self.messages).most_common())

    def kept(self) -> Iterable[tuple[Parked, IncomingMessage]]:
        """Return the messages whose bodies were wanted, and had room."""
        return ((parked, self._kept[parked.key]) for parked in self.messages if parked.key in self._kept)

    async def remove(self, parked: Parked) -> None:
        """Take a message out of the queue for good.

        Raises:
            OSError, aio_pika.exceptions.AMQPError: the channel was lost; the message is still there.
        """
        with losses_are_errors():
            await self._wire.basic_ack(self._tags[parked.key])
        self._removed += 1

    def add(self, delivered: DeliveredMessage, wants: Callable[[Parked], bool]) -> None:
        """Take note of a delivery."""
        message, _ = build(delivered)  # what the broker parked itself may be unreadable
        parked = describe(message)
        while parked.key in self._tags:
            parked = replace(parked, key=f"{parked.key}+")
        self.messages.append(parked)
        self._tags[parked.key] = message.delivery_tag or 0
        if wants(parked) and (parked.size <= self._room or not self._kept):
            self._kept[parked.key] = message
            self._room -= parked.size


def _nothing(_parked: Parked) -> bool:
    return False


@asynccontextmanager
async def visit(link: BrokerLink, queue: str, wants: Callable[[Parked], bool] = _nothing) -> AsyncIterator[Visit]:
    """Look at everything in the queue; at the end give back what was not removed.

    What arrives meanwhile is not looked at. Two visits at a time see each other's messages missing: see `audit.lock`.

    Args:
        link: the connection to fetch on.
        queue: the parking queue.
        wants: whose bodies to keep.

    Raises:
        OSError, aio_pika.exceptions.AMQPError, TimeoutError: the broker's absence, or a queue that is missing.
    """
    channel = await link.channel()
    with losses_are_errors():
        elsewhere = 0
        try:
            total = await length(link, queue)
            wire = cast("Wire", await channel.get_underlay_channel())
            seen = Visit(wire)
            await _fetch(wire, queue, min(total, MOST), lambda delivered: seen.add(delivered, wants), seen.messages)
            seen.missing = total - len(seen.messages)
            yield seen
        finally:
            if not channel.is_closed:
                elsewhere = await length(link, queue)
                await channel.close()
    await _wait_for_return(link, queue, elsewhere + len(seen.messages) - seen._removed)  # noqa: SLF001 - ours


async def length(link: BrokerLink, queue: str) -> int:
    """Return how many messages are in the queue, without looking at any; what somebody looks at is not among them.

    Raises:
        OSError, aio_pika.exceptions.AMQPError, TimeoutError: the broker's absence, or a queue that is missing.
    """
    channel = await link.channel()
    with losses_are_errors():
        try:
            return (await channel.declare_queue(queue, passive=True)).declaration_result.message_count or 0
        finally:
            if not channel.is_closed:
                await channel.close()


async def _fetch(
    wire: Wire, queue: str, total: int, add: Callable[[DeliveredMessage], None], fetched: Collection[Parked]
) -> None:
    """Consume `total` messages, or as many of them as come."""
    if total == 0:
        return
    arrived = asyncio.Event()

    async def receive(delivered: DeliveredMessage) -> None:
        if len(fetched) < total:  # what is parked meanwhile is not part of this visit
            add(delivered)
        arrived.set()

    await wire.basic_qos(prefetch_count=total)
    consuming = await wire.basic_consume(queue, receive, no_ack=False)
    while len(fetched) < total:
        arrived.clear()
        try:
            async with asyncio.timeout(QUIET):
                await arrived.wait()
        except TimeoutError:
            break
    await wire.basic_cancel(consuming.consumer_tag or "")


async def _wait_for_return(link: BrokerLink, queue: str, expected: int) -> None:
    """Wait until the broker has everything back: the next look would get it out of order before that."""
    try:
        async with asyncio.timeout(RETURN_TIMEOUT):
            while await length(link, queue) < expected:
                await Stopping().pause(timedelta(milliseconds=50))
    except TimeoutError:
        return  # somebody else has taken some of it


def describe(message: IncomingMessage) -> Parked:
    """Return what a parked message tells of itself."""
    headers = message.headers or {}
    envelope = original(message)
    attempts = headers.get("x-attempts")
    told = (_text(headers.get("x-exception-type")), _text(headers.get("x-exception-message")))
    death = _death(headers.get("x-death"))
    if (
        "x-death" in headers
    ):  # no copy of ours has that: what the broker moves keeps the producer's own, forged ones too
        reason, explanation = BROKER_REASONS.get(str(death.get("reason")), ("unknown", "the broker does not say why"))
        attempts, told, parked_at = None, (None, explanation), _instant(death.get("time"))
    else:
        reason, parked_at = _our_reason(headers), _instant(headers.get(PARKED_AT))
    return Parked(
        message_id=envelope.message_id,
        type=envelope.type,
        reason=reason,
        parked_at=parked_at,
        attempts=attempts if isinstance(attempts, int) else None,
        exception_type=told[0],
        explanation=told[1],
        size=len(message.body),
        key=f"{message.message_id} {parked_at} {sha256(message.body).hexdigest()}",
    )


def original(message: IncomingMessage) -> Envelope:
    """Return a parked message's envelope, with where it was published first; its attempts begin anew."""
    envelope = read_envelope(message, max_attempts=1)
    death = _death((message.headers or {}).get("x-death"))
    exchange, keys = short_text(death.get("exchange")), death.get("routing-keys")
    if not exchange or not isinstance(keys, list) or not keys:
        return envelope  # parked by us, or by the broker on the way back from a wait queue: our own headers say it
    routing_key = short_text(keys[0]) or ""
    return replace(envelope, exchange=exchange, routing_key=routing_key, type=message.type or routing_key)


def _death(deaths: Any) -> Mapping[str, Any]:
    """Return the newest entry of an x-death that tells why, empty where there is none."""
    for death in deaths if isinstance(deaths, list) else ():
        if isinstance(death, Mapping) and str(death.get("reason")) in BROKER_REASONS:
            return death
    return {}


def _our_reason(headers: Mapping[str, Any]) -> str:
    reason = headers.get(PARKED_REASON)
    return reason if reason in tuple(Reason) else "unknown"


def _instant(value: Any) -> datetime | None:
    """Return an instant with its zone from a header."""
    try:
        instant = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return instant if isinstance(instant, datetime) and instant.utcoffset() is not None else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _allows(allowed: frozenset[str], value: str | None) -> bool:
    return not allowed or value in allowed
