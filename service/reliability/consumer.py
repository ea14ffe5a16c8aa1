"""The one consumer of a family's work queue: receives, dispatches by type, survives what the broker does to it.

Handlers run in tasks of their own. The client library would run them in tasks that it cancels when the connection
dies, in the middle of a transaction; here they finish, and only their ack is lost. When the channel is closed or the
broker cancels the consumer (queue deleted, consumer time-out), everything is closed, the topology is declared again
and a new channel consumes under a new tag.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import structlog
from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import ChannelNotFoundEntity
from aiormq import Channel as Wire
from aiormq.abc import DeliveredMessage

from service.reliability.errors import TopologyError
from service.reliability.frames import build
from service.reliability.gate import Gate
from service.reliability.inbound import Inbound
from service.reliability.link import BrokerLink, losses_are_errors
from service.reliability.outcome import Diagnosis, Park, Reason
from service.reliability.retry import backoff, diagnose, short
from service.reliability.settlement import Settlement
from service.reliability.stopping import Stopping

PROBE_TIMEOUT = 2.0
"""Seconds for the broker to answer on the consumer's channel when asked for readiness."""

CANCEL_TIMEOUT = 5.0
"""Seconds for the broker to answer the cancel at shutdown."""

SHORTEST_CONSUMER_TIMEOUT = 5.0
"""Seconds that no consumer time-out is below: what was in hand for less was not taken back for it."""

FIRST_PAUSE, LONGEST_PAUSE = timedelta(milliseconds=200), timedelta(seconds=2)
"""Between attempts to consume again, doubling."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Consumer:
    """Consumes one family's work queue.

    Attributes:
        link: the connection to consume on; nothing is published there.
        inbound: the subscribers to feed.
        settlement: for what no subscriber takes.
        declare: makes or verifies the topology; called before each consume.
        gate: told when deliveries are lost, which then wait for nothing.
        prefetch: unsettled deliveries at most.
    """

    link: BrokerLink
    inbound: Inbound
    settlement: Settlement
    declare: Callable[[], Awaitable[None]]
    gate: Gate
    prefetch: int
    jitter: Callable[[], float]
    _stopping: Stopping = field(default_factory=Stopping)
    _cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: dict[asyncio.Task[None], float] = field(default_factory=dict)
    _retiring: set[asyncio.Task[None]] = field(default_factory=set)
    _wire: Wire | None = None
    _tag: str | None = None

    async def run(self) -> None:
        """Consume until cancelled, over any number of connections.

        Raises:
            TopologyError: the broker's queues are not what the contract says.
        """
        try:
            failures = 0
            while not self._stopping.is_set():
                try:
                    with losses_are_errors():
                        await self._consume()
                    failures = 0
                except TopologyError:
                    raise
                except Exception as error:  # the broker's absence, in whatever form the client tells it
                    failures += 1
                    log.warning(
                        "consumer_failed", failures=failures, error=type(error).__name__, explanation=short(error)
                    )
                await self._stopping.pause(backoff(failures, self.jitter(), first=FIRST_PAUSE, longest=LONGEST_PAUSE))
        finally:
            self._cancelled.set()

    async def cancel(self, deadline: float) -> None:
        """Stop receiving; return when the broker has said that nothing more comes, or at `deadline` (loop time)."""
        self._stopping.set()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._cancelled.wait()

    async def drain(self, deadline: float) -> int:
        """Finish what is in flight until `deadline` (loop time); return how many deliveries were cut off."""
        loop = asyncio.get_running_loop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(0.0, deadline - loop.time()))
        unfinished = [task for task in self._tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=0.2)
        return len(unfinished)

    async def deliver(self, delivered: DeliveredMessage) -> None:
        """Hand a delivery to the subscriber of its type; park it where there is none or where it cannot be read."""
        message, unreadable = build(delivered)
        envelope = self.inbound.family.read(message)
        try:
            if unreadable is not None:
                park = Park(Reason.UNREADABLE, envelope.attempt - 1, unreadable)
                await self.settlement.settle(message, envelope, park)
            elif (subscriber := self.inbound.find(envelope.type)) is None:
                known = ", ".join(self.inbound.handled)
                diagnosis = Diagnosis("UnknownType", f"nobody handles this type; handled are {known}")
                await self.settlement.settle(
                    message, envelope, Park(Reason.UNKNOWN_TYPE, envelope.attempt - 1, diagnosis)
                )
            else:
                await subscriber.process_message(message)
        except Exception as error:  # a fault of the framework or of ours must not leave it unsettled
            # Without the traceback: its last line may quote the payload.
            log.error("delivery_failed", message_id=envelope.message_id, **_fields(diagnose(error)))  # noqa: TRY400
            await self.settlement.settle(message, envelope, self.inbound.family.policy.decide(error, envelope.attempt))

    async def is_consuming(self) -> bool:
        """Tell whether the broker answers on the very channel that has our consumer."""
        wire, tag = self._wire, self._tag
        if wire is None or wire.is_closed or tag not in wire.consumers:
            return False
        # A round trip without effect. It is not cancelled when the time is over: that would close the channel.
        probe = asyncio.ensure_future(wire.basic_qos(prefetch_count=self.prefetch))
        probe.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({probe}, timeout=PROBE_TIMEOUT)
        return probe.done() and not probe.cancelled() and probe.exception() is None

    async def _consume(self) -> None:
        """Declare, consume, and return when the consumer is gone or the service stops."""
        # First, since it notices that the last connection was lost: `declare` then goes to another host as well.
        channel = await self.link.channel()
        try:
            await self.declare()
            await channel.set_qos(prefetch_count=self.prefetch)
            wire = cast("Wire", await channel.get_underlay_channel())
            cancelled = asyncio.Event()
            wire.on_consumer_cancel_callbacks.add(lambda _frame: cancelled.set())
            consuming = await wire.basic_consume(self.inbound.family.work, self._receive, no_ack=False)
            self._wire, self._tag = wire, consuming.consumer_tag
            log.info("consumer_started", queue=self.inbound.family.work, prefetch=self.prefetch)
            why = await _first(wire.closing, self._stopping.wait(), cancelled.wait())
            if self._stopping.is_set():
                await wire.basic_cancel(consuming.consumer_tag or "", timeout=CANCEL_TIMEOUT)
                log.info("consumer_cancelled", queue=self.inbound.family.work)
                return  # the channel stays open: what is in flight is still to be settled on it
            log.warning("consumer_lost", queue=self.inbound.family.work, why=why)
            if not wire.closing.done() and await self._are_deliveries_taken_back():
                await _close(channel)
        finally:
            self._tag = None
            if not self._stopping.is_set():
                self._wire = None
                self.gate.sweep()
                self._retire(channel)

    async def _are_deliveries_taken_back(self) -> bool:
        """Tell whether the broker has cancelled the consumer for its time-out, as RabbitMQ 4.3 does.

        Else the queue was deleted, and we alone have what is in our hands, even where the queue is there again.
        """
        now = asyncio.get_running_loop().time()
        if not any(now - arrived > SHORTEST_CONSUMER_TIMEOUT for arrived in self._tasks.values()):
            return False
        channel = await self.link.channel()
        try:
            await channel.declare_queue(self.inbound.family.work, passive=True)
        except ChannelNotFoundEntity:
            return False
        await channel.close()
        return True

    def _retire(self, channel: AbstractChannel) -> None:
        """Close a channel when its deliveries are settled.

        The broker may have cancelled the consumer because the queue was deleted, and nobody else has them any more.
        Where it has taken them back, the channel is closed already.
        """

        async def close_when_settled(deliveries: set[asyncio.Task[None]]) -> None:
            if deliveries:
                await asyncio.wait(deliveries)
            await _close(channel)

        task = asyncio.get_running_loop().create_task(close_when_settled(set(self._tasks)))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _receive(self, delivered: DeliveredMessage) -> None:
        """Start a task of our own for the delivery: the client cancels its tasks when the connection dies."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.deliver(delivered))
        self._tasks[task] = loop.time()
        task.add_done_callback(self._tasks.pop)


def _fields(diagnosis: Diagnosis) -> dict[str, str]:
    return {"error": diagnosis.exception_type, "explanation": diagnosis.explanation}


async def _first(closing: asyncio.Future[object], *others: Awaitable[object]) -> str:
    """Wait for the first of the channel's end and the others; say which it was."""
    tasks = [asyncio.ensure_future(other) for other in others]
    try:
        await asyncio.wait([closing, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    if not closing.done():
        return "cancelled by the broker"
    return "channel closed" if closing.cancelled() or closing.exception() is None else str(closing.exception())[:500]


async def _close(channel: AbstractChannel) -> None:
    try:
        async with asyncio.timeout(2):
            await channel.close()
    except Exception as error:  # it is being given up; the link reconnects
        log.debug("channel_close_failed", error=type(error).__name__)
