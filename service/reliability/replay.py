"""Parked messages, sent to the work queue again or thrown away: one at a time, each with its row in the audit.

The copy is confirmed before the parked one is removed. Interrupted between the two, the next run sends it again, and
the inbox knows it: a copy has the parked message's id, or one that is made from it and always the same.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from uuid import UUID, uuid5

from aio_pika import IncomingMessage, Message

from service.reliability import audit
from service.reliability.audit import Deed
from service.reliability.connection import Connection
from service.reliability.envelope import ORIGINAL_EXCHANGE, ORIGINAL_ROUTING_KEY, REPLAYED_FROM
from service.reliability.link import BrokerLink
from service.reliability.parking import Parked, Selection, Visit, original, visit
from service.reliability.publisher import Confirmed, Publisher
from service.reliability.settlement import successor
from service.reliability.stopping import Stopping
from service.reliability.topology import QueueFamily

_NAMESPACE = UUID("f0a2c1be-6d5f-4f0e-9d4c-0d2c7b1f7c11")

LONGEST_VISIT = timedelta(minutes=10)
"""Below the broker's consumer time-out of 30 minutes, after which it takes back everything in our hands."""


class Result(StrEnum):
    """What became of a parked message that was meant."""

    REPLAYED = "replayed"
    DISCARDED = "discarded"
    COMPLETED = "completed"
    ALREADY_PROCESSED = "already processed"
    TOO_OLD = "too old"
    WITHOUT_ID = "without an id"
    NOT_CONFIRMED = "not confirmed"
    WOULD_BE = "would be done"


EXPLANATIONS = {
    Result.COMPLETED: "an interrupted replay had sent it, and it is processed: only removed from parking",
    Result.ALREADY_PROCESSED: "its id is in the inbox: a replay would do nothing; discard it, or give it a --new-id",
    Result.TOO_OLD: "parked longer than BILLING_REPLAY_HORIZON, or at an unknown time: "
    "the inbox may have forgotten it; --force sends it all the same",
    Result.WITHOUT_ID: "its producer set no message_id: --new-id gives it one",
    Result.NOT_CONFIRMED: "the broker did not confirm the copy: it is still parked",
}
"""What a person needs to know of a result."""


@dataclass(frozen=True, slots=True)
class Done:
    """A parked message that was meant, and what became of it."""

    parked: Parked
    result: Result
    new_message_id: str | None = None
    explanation: str | None = None


@dataclass(frozen=True, slots=True)
class Orders:
    """What to do with the messages that are meant.

    Attributes:
        deed: replay or discard, by whom, and why.
        body: replaces the parked one; its copy gets a new id.
        new_id: the copy gets a new id.
        force: in spite of its age.
        dry_run: only tell what would be done.
        rate: messages per second at most.
    """

    deed: Deed
    body: bytes | None = None
    new_id: bool = False
    force: bool = False
    dry_run: bool = False
    rate: float = 100.0


@dataclass(slots=True)
class Clerk:
    """Carries out orders on a family's parking queue.

    Attributes:
        link: the connection to fetch on.
        publisher: for the copies.
        connection: to the database, locked by `audit.lock`.
        consumers: for each event type, the stable name of its consumer in the inbox.
        horizon: age up to which a replay is known to be recognised by the inbox.
        now: the time at which the work begins.
    """

    link: BrokerLink
    publisher: Publisher
    connection: Connection
    family: QueueFamily
    consumers: Mapping[str, str]
    horizon: timedelta
    now: datetime

    async def carry_out(self, orders: Orders, selection: Selection) -> AsyncIterator[Done | int]:
        """Do what is ordered; yield first how many messages are meant, then what became of each.

        A visit that has no room for all bodies, or takes long, is followed by another, until each message that was
        there at the beginning has had its turn. What is parked meanwhile is left alone: a message that fails again
        would be replayed for ever.
        """
        pace = _Pace(orders.rate)
        wants: Callable[[Parked], bool] = selection.has
        due: set[str] | None = None
        while due is None or due:
            async with visit(self.link, self.family.parking, wants) as seen:
                if due is None:
                    due = {parked.key for parked in seen.messages if selection.has(parked)}
                    wants = _those(due)
                    yield len(due)
                end = pace.now() + LONGEST_VISIT.total_seconds()
                for parked, message in seen.kept():
                    if pace.now() > end:
                        break
                    due.discard(parked.key)
                    await pace.keep()
                    yield await self._treat(orders, seen, parked, message)
                due &= {parked.key for parked in seen.messages}  # taken by others, in spite of all

    async def _treat(self, orders: Orders, seen: Visit, parked: Parked, message: IncomingMessage) -> Done:
        if orders.deed.action == "discard":
            if orders.dry_run:
                return Done(parked, Result.WOULD_BE)
            row = await audit.begin(self.connection, orders.deed, parked)
            await seen.remove(parked)
            await audit.finish(self.connection, row)
            return Done(parked, Result.DISCARDED)
        return await self._replay(orders, seen, parked, message)

    async def _replay(self, orders: Orders, seen: Visit, parked: Parked, message: IncomingMessage) -> Done:
        new_id = _new_id(parked, message.body, orders.body) if orders.new_id or orders.body is not None else None
        message_id = new_id or parked.message_id
        if message_id is None:
            return Done(parked, Result.WITHOUT_ID)
        consumer = self.consumers.get(parked.type)
        if consumer and await audit.is_processed(self.connection, consumer, message_id):
            return await self._already_processed(orders, seen, parked, new_id)
        if not orders.force and not self._is_young(parked):
            return Done(parked, Result.TOO_OLD)
        if orders.dry_run:
            return Done(parked, Result.WOULD_BE, new_id)
        row = await audit.begin(self.connection, orders.deed, parked, new_id)
        copy = replayed(message, parked, orders.body, new_id)
        publication = await self.publisher.publish(copy, "", self.family.work)
        if not isinstance(publication, Confirmed):
            return Done(parked, Result.NOT_CONFIRMED, new_id, publication.explanation)
        await seen.remove(parked)
        await audit.finish(self.connection, row)
        return Done(parked, Result.REPLAYED, new_id)

    async def _already_processed(self, orders: Orders, seen: Visit, parked: Parked, new_id: str | None) -> Done:
        row = await audit.unfinished_replay(self.connection, parked)
        if row is None:
            return Done(parked, Result.ALREADY_PROCESSED, new_id)
        if not orders.dry_run:
            await seen.remove(parked)
            await audit.finish(self.connection, row)
        return Done(parked, Result.COMPLETED, new_id)

    def _is_young(self, parked: Parked) -> bool:
        return parked.parked_at is not None and self.now - parked.parked_at <= self.horizon


def replayed(message: IncomingMessage, parked: Parked, body: bytes | None, new_id: str | None) -> Message:
    """Return the copy of a parked message that goes to the work queue: it begins with its first attempt."""
    envelope = original(message)
    headers = {
        **envelope.headers,
        ORIGINAL_EXCHANGE: envelope.exchange,
        ORIGINAL_ROUTING_KEY: envelope.routing_key,
    }
    if new_id is not None and parked.message_id is not None:
        headers[REPLAYED_FROM] = parked.message_id
    copy = successor(message, envelope, headers)
    if new_id is not None:
        copy.message_id = new_id
    if body is not None:
        copy.body, copy.body_size = body, len(body)
    return copy


def _new_id(parked: Parked, body: bytes, new_body: bytes | None) -> str:
    """Return an id made of the message's and of its bodies: always the same, so that two replays have one effect."""
    bodies = " ".join(sha256(each).hexdigest() for each in (body, new_body) if each is not None)
    return str(uuid5(_NAMESPACE, f"{parked.message_id or parked.key} {bodies}"))


def _those(keys: Collection[str]) -> Callable[[Parked], bool]:
    return lambda parked: parked.key in keys


class _Pace:
    """Spreads messages evenly over time."""

    def __init__(self, rate: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._step = 1 / rate
        self._next = self.now()

    def now(self) -> float:
        return self._loop.time()

    async def keep(self) -> None:
        """Wait until the next message is due."""
        await Stopping().pause(timedelta(seconds=max(0.0, self._next - self.now())))
        self._next = max(self._next + self._step, self.now() - 1.0)
