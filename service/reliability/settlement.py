"""The one place that tells the broker how a delivery ended.

The order is what keeps messages: a successor (the copy for a wait queue or for parking) is confirmed by the broker
before the original is acked. A successor that is not confirmed is held and published again, for as long as it takes.
Only the loss of the delivery's own channel ends that, or the end of the service: the broker then delivers the original
again. Nothing is dropped; what is left to the broker is a nack, by strategies whose queues bring it back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, assert_never

import structlog
from aio_pika import DeliveryMode, IncomingMessage, Message
from aio_pika.exceptions import AMQPError
from pamqp import encode

from service.reliability.barrier import Barrier, no_barrier
from service.reliability.envelope import Envelope, parked_headers, waiting_headers
from service.reliability.outcome import Ack, Outcome, Park, Retry, Return
from service.reliability.publisher import Confirmed, Publisher, Returned, Unconfirmed
from service.reliability.retry import backoff
from service.reliability.stopping import Stopping, is_being_cancelled
from service.reliability.topology import Copy, Nack, QueueFamily
from service.telemetry import Metrics

HEADERS_LIMIT = 64 * 1024
"""Bytes of a successor's headers. All properties must fit one frame of 128 KiB, or the broker closes the connection."""

AWAY_PAUSE = timedelta(seconds=5)
"""Between publishes of a successor at most, while there is no connection: it goes soon after there is one again."""

NAME_LIMIT = 128
"""Bytes of a header's name that AMQP allows; brokers let 255 pass."""

_LENGTH = 4
"""Bytes of a table's own length."""

log = structlog.get_logger(__name__)


def channel_is_closed(message: IncomingMessage) -> bool:
    """Tell whether the channel that a delivery came on is gone, so that the broker delivers it again."""
    try:
        return message.channel.is_closed
    except RuntimeError:  # aio-pika raises ChannelInvalidStateError, a RuntimeError, for a closed channel
        return True


async def _nothing_to_repair() -> None:
    return


@dataclass(slots=True)
class Settlement:
    """Acts on outcomes for one queue family.

    Attributes:
        family: decides the wait queues and the parking queue.
        publisher: for successors; not on the connection that consumes.
        metrics: counts what was settled how.
        now: the clock, for `x-parked-at`.
        jitter: a number in [0, 1), for pauses.
        stopping: once set, a successor is tried once and not held; what is unsettled goes back with the channel.
        repair: called when a successor's queue is gone: declares the topology again.
        is_lost: tells whether a delivery can no longer be settled; the framework's test broker has no channels.
        barrier: where crash tests stop the process.
    """

    family: QueueFamily
    publisher: Publisher
    metrics: Metrics
    now: Callable[[], datetime]
    jitter: Callable[[], float]
    stopping: Stopping = field(default_factory=Stopping)
    repair: Callable[[], Awaitable[None]] = _nothing_to_repair
    is_lost: Callable[[IncomingMessage], bool] = channel_is_closed
    barrier: Barrier = no_barrier
    first_pause: timedelta = timedelta(seconds=1)
    longest_pause: timedelta = timedelta(seconds=30)

    async def settle(self, message: IncomingMessage, envelope: Envelope, outcome: Outcome) -> None:
        """Tell the broker; return when the delivery is settled or its channel is lost."""
        match outcome:
            case Ack():
                await self._finish(envelope, outcome, message.ack)
            case Retry():
                await self._send_back(message, envelope, outcome)
            case Park():
                headers = parked_headers(envelope, outcome, self.family.work, self.now())
                if await self._hand_over(message, envelope, headers, self.family.parking):
                    await self._finish(envelope, outcome, message.ack)
            case Return():
                # Not a nack: where the broker itself delays retries, it counts that as an attempt.
                await self._finish(envelope, outcome, lambda: message.reject(requeue=True))
            case _:
                assert_never(outcome)

    async def _send_back(self, message: IncomingMessage, envelope: Envelope, retry: Retry) -> None:
        match self.family.strategy.way_back(self.family, message, retry):
            case Copy(queue):
                if await self._hand_over(message, envelope, waiting_headers(envelope, retry), queue):
                    await self._finish(envelope, retry, message.ack)
            case Nack(requeue):
                await self._finish(envelope, retry, lambda: message.nack(requeue=requeue))
            case never:
                assert_never(never)

    async def _hand_over(
        self, message: IncomingMessage, envelope: Envelope, headers: dict[str, Any], queue: str
    ) -> bool:
        """Publish the successor until the broker has confirmed it; tell whether it has."""
        failures = 0
        while not self.is_lost(message):
            publication = await self.publisher.publish(successor(message, envelope, headers), "", queue)
            if isinstance(publication, Confirmed):
                await self.barrier("successor-confirmed")
                return True
            failures += 1
            self.metrics.successors_refused.labels(queue).inc()
            log.warning(
                "successor_held",
                queue=queue,
                message_id=envelope.message_id,
                failures=failures,
                publication=type(publication).__name__,
                explanation=publication.explanation,
            )
            if self.stopping.is_set():
                break
            if isinstance(publication, Returned):
                await self._try_to_repair()
            away = isinstance(publication, Unconfirmed) and publication.away
            longest = min(self.longest_pause, AWAY_PAUSE) if away else self.longest_pause
            await self.stopping.pause(backoff(failures, self.jitter(), first=self.first_pause, longest=longest))
        log.warning(
            "delivery_left_unsettled", message_id=envelope.message_id, explanation="the broker delivers it again"
        )
        return False

    async def _try_to_repair(self) -> None:
        try:
            await self.repair()
        except Exception as error:  # held either way; the next round tries again
            log.warning("topology_repair_failed", error=type(error).__name__, explanation=str(error))

    async def _finish(self, envelope: Envelope, outcome: Outcome, tell: Callable[[], Awaitable[None]]) -> None:
        name = _outcome_name(outcome)
        try:
            await tell()
        except (AMQPError, OSError, RuntimeError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            log.warning(
                "settlement_lost",
                outcome=name,
                message_id=envelope.message_id,
                error=type(error).__name__,
                explanation="the delivery's channel is gone: the broker delivers it again, and the inbox recognises it",
            )
            return
        # A producer's invented types must not become label values without end.
        known = envelope.type if envelope.type in self.family.keys else "other"
        self.metrics.deliveries.labels(known, name).inc()
        if isinstance(outcome, Park):
            self.metrics.parked.labels(outcome.reason).inc()
        _log_settled(envelope, outcome, name)


def successor(message: IncomingMessage, envelope: Envelope, headers: dict[str, Any]) -> Message:
    """Return the copy that goes to another queue of ours: same body and identity, other headers.

    Not carried over: expiration (it would expire in parking), user_id (the broker compares it with our connection),
    reply_to, priority. A header that cannot be sent again, or for which there is no room, is left out.
    """
    own = {name: value for name, value in headers.items() if name not in envelope.headers}
    return Message(
        message.body,
        headers=_sendable(envelope.headers, own) | own,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        delivery_mode=DeliveryMode.PERSISTENT,
        correlation_id=message.correlation_id,
        message_id=message.message_id,
        timestamp=message.timestamp,
        type=envelope.type,
        app_id=message.app_id,
    )


def _sendable(headers: Mapping[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return those of a producer's headers that can be sent again, as many as there is room for beside our own."""
    room = HEADERS_LIMIT - len(encode.field_table(own))
    sendable: dict[str, Any] = {}
    for name, value in headers.items():
        entry, size = _entry(name, value)
        if size <= room:
            sendable |= entry
            room -= size
    return sendable


def _entry(name: str, value: Any) -> tuple[dict[str, Any], int]:
    """Return a header as it can be sent, and its bytes; nothing, without any, where it arrived but cannot be sent."""
    try:
        entry = _writable({name: value})
        return entry, len(encode.field_table(entry)) - _LENGTH
    except Exception:  # whatever the encoder raises
        return {}, 0


def _writable(value: Any) -> Any:
    """Return a header's value as the library can write it: it reads text that is no UTF-8 as `bytes`.

    Raises:
        ValueError: for a name that the library would cut off, and log.
    """
    match value:
        case bytes():
            return bytearray(value)
        case Mapping():
            if any(len(name.encode()) > NAME_LIMIT for name in value):
                raise ValueError("a name is too long")
            return {name: _writable(inner) for name, inner in value.items()}
        case list():
            return [_writable(inner) for inner in value]
        case _:
            return value


def _outcome_name(outcome: Outcome) -> str:
    match outcome:
        case Ack(duplicate=duplicate):
            return "duplicate" if duplicate else "processed"
        case Retry():
            return "retried"
        case Park():
            return "parked"
        case Return():
            return "returned"
        case _:
            assert_never(outcome)


def _log_settled(envelope: Envelope, outcome: Outcome, name: str) -> None:
    fields: dict[str, Any] = {
        "message_id": envelope.message_id,
        "type": envelope.type,
        "attempt": envelope.attempt,
        "redelivered": envelope.redelivered,
    }
    match outcome:
        case Retry(delay=delay, diagnosis=diagnosis):
            fields |= {
                "delay": delay.total_seconds(),
                "error": diagnosis.exception_type,
                "explanation": diagnosis.explanation,
            }
            log.warning("message_retried", **fields)
        case Park(reason=reason, diagnosis=diagnosis):
            fields |= {"reason": str(reason), "error": diagnosis.exception_type, "explanation": diagnosis.explanation}
            log.warning("message_parked", **fields)
        case _:
            log.info("delivery_settled", outcome=name, **fields)
