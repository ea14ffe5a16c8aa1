"""The path of a message in, top to bottom: envelope, decode, begin, claim, handler, commit, settle.

Every delivery leaves through `Settlement`; no exception of a handler, of the framework or of the database gets past
`_execute`. Only the cancellation of the task does, and then the delivery is unsettled and comes again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import structlog
from aio_pika import IncomingMessage
from faststream import BaseMiddleware
from faststream.message import StreamMessage

from service.reliability.barrier import Barrier, no_barrier
from service.reliability.envelope import Envelope, digest, identify, require_size
from service.reliability.errors import (
    ClaimContestedError,
    DatabaseUnavailableError,
    HandlerCancelledError,
    HandlerTimeoutError,
    PermanentError,
    SessionLostError,
)
from service.reliability.gate import Gate
from service.reliability.inbound import Inbound, Subscription, _current
from service.reliability.inbox import Claim
from service.reliability.outcome import Ack, Diagnosis, Outcome, Park, Reason, Return
from service.reliability.retry import backoff, diagnose
from service.reliability.settlement import Settlement
from service.reliability.starts import MOST_CRASHES
from service.reliability.stopping import Stopping, is_being_cancelled
from service.reliability.unit_of_work import Transactions, UnitOfWork
from service.telemetry import Metrics

Next = Callable[[StreamMessage[Any]], Awaitable[Any]]

_CONFLICT = PermanentError(Reason.MESSAGE_ID_CONFLICT, "the message id was used before, for other content")

LONGEST_HOLD = timedelta(minutes=25)
"""Below the broker's consumer time-out of 30 minutes, which would take back everything on the channel at once."""

MOST_SESSIONS = 10
"""Database sessions that a delivery may lose while its handler runs; an outage takes one. The last is a failure like
any other: a handler can end its own session, or bring the server down, and would be held for ever."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Reliability:
    """Makes the middleware of each delivery; what they share is here.

    Attributes:
        inbound: the subscribers, for the consumer names.
        transactions: opens the handler's transaction.
        settlement: tells the broker.
        metrics: handler durations and held deliveries.
        handler_timeout: for the handler; then rolled back and an attempt spent. Connecting, beginning, claiming and
            committing have time-outs of their own: they are no handler's fault.
        max_body_bytes: larger bodies are parked unparsed.
        gate: lets in as many handlers as may run at once, and none during an outage; deliveries wait in front of it
            without a database connection.
        jitter: a number in [0, 1), for pauses.
        stopping: once set, no further handler starts.
        longest_hold: from its arrival, after which a delivery that could not be executed is given back.
    """

    inbound: Inbound
    transactions: Transactions[Any]
    settlement: Settlement
    metrics: Metrics
    handler_timeout: timedelta
    max_body_bytes: int
    gate: Gate
    jitter: Callable[[], float]
    stopping: Stopping = field(default_factory=Stopping)
    barrier: Barrier = no_barrier
    first_pause: timedelta = timedelta(milliseconds=500)
    longest_pause: timedelta = timedelta(seconds=5)
    longest_hold: timedelta = LONGEST_HOLD
    _marked: set[tuple[str, str]] = field(default_factory=set)
    _executing: set[tuple[str, str]] = field(default_factory=set)

    def __call__(self, message: IncomingMessage | None, /, *, context: Any) -> "DeliveryMiddleware":
        """Return the middleware of one delivery: FastStream calls this for each."""
        return DeliveryMiddleware(self, message, context=context)

    async def process(
        self, call_next: Next, message: StreamMessage[IncomingMessage], subscription: Subscription
    ) -> None:
        """Execute a delivery and settle it."""
        envelope = self.inbound.family.read(message.raw_message)
        outcome = await self._outcome(call_next, message, envelope, subscription)
        await self.settlement.settle(message.raw_message, envelope, outcome)
        if isinstance(outcome, Park) and outcome.reason is Reason.CRASHED_CONSUMER:
            # Not before it is parked: until then a further crash must not let it start anew.
            await self._clear_starts(subscription.consumer, envelope.message_id or "")

    async def _outcome(
        self, call_next: Next, message: StreamMessage[IncomingMessage], envelope: Envelope, subscription: Subscription
    ) -> Outcome:
        """Wait for a turn and execute; hold what meets an outage, and execute it again when the database is back."""
        try:
            require_size(message.body, self.max_body_bytes)
            message_id = identify(envelope)
        except PermanentError as error:
            return _unexecuted(error, envelope)
        is_hopeless = self._is_hopeless(message.raw_message)
        key = subscription.consumer, message_id
        contests = sessions_lost = 0
        # A delivery whose channel is lost comes again: executed here as well, it would be one execution too many.
        while not is_hopeless():
            if envelope.redelivered and key in self._executing:
                # The broker took it back from a handler that is at work here. Inside, it would only wait for that one.
                contests += 1
                await self._pause(contests)
                continue
            async with self.gate.turn(alone=envelope.redelivered, is_hopeless=is_hopeless) as turn:
                if not turn.came or is_hopeless():
                    break
                try:
                    self._executing.add(key)
                    execute = self._execute_marked if envelope.redelivered else self._execute
                    outcome = await execute(call_next, message, envelope, subscription, message_id)
                except DatabaseUnavailableError as error:
                    self._hold(message_id, error)
                    self.gate.close(str(error), turn)
                    sessions_lost += isinstance(error, SessionLostError)
                    if sessions_lost < MOST_SESSIONS:
                        continue
                    await self._clear_starts(*key)
                    return self.inbound.family.policy.decide(error, envelope.attempt)
                except ClaimContestedError as error:
                    self._hold(message_id, error)
                else:
                    self.gate.succeeded(turn)
                    return outcome
                finally:
                    self._executing.discard(key)
            contests += 1
            await self._pause(contests)
        return Return()

    async def _pause(self, contests: int) -> None:
        await self.stopping.pause(backoff(contests, self.jitter(), first=self.first_pause, longest=self.longest_pause))

    def _is_hopeless(self, message: IncomingMessage) -> Callable[[], bool]:
        """Return what tells that a delivery cannot be executed here any more."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.longest_hold.total_seconds()
        return lambda: self.stopping.is_set() or self.settlement.is_lost(message) or loop.time() > deadline

    def _hold(self, message_id: str, error: Exception) -> None:
        self.metrics.outages.inc()
        log.warning("delivery_held", message_id=message_id, explanation=str(error))

    async def _execute_marked(
        self,
        call_next: Next,
        message: StreamMessage[IncomingMessage],
        envelope: Envelope,
        subscription: Subscription,
        message_id: str,
    ) -> Outcome:
        """Execute a delivery that comes again, with a durable mark for as long as it runs.

        What this very process has marked and not finished is not counted again: then the channel was lost, or the
        database, and nobody has crashed.
        """
        key = subscription.consumer, message_id
        if key not in self._marked:
            self._marked.add(key)  # before: where the answer is lost, the start may have been counted all the same
            starts = await self.transactions.count_start(*key)
            if starts > MOST_CRASHES:
                self._marked.discard(key)
                return _crashed(envelope)
        try:
            outcome = await self._execute(call_next, message, envelope, subscription, message_id)
        except (DatabaseUnavailableError, ClaimContestedError):
            raise  # executed again, under the same mark
        except BaseException:  # cut off by the end of the service: no crash
            await self._clear_starts(*key)
            raise
        await self._clear_starts(*key)
        return outcome

    async def _clear_starts(self, consumer: str, message_id: str) -> None:
        self._marked.discard((consumer, message_id))
        try:
            await self.transactions.clear_starts(consumer, message_id)
        except Exception as error:  # at worst a later crash is counted once too often
            log.warning("starts_not_cleared", message_id=message_id, error=type(error).__name__)

    async def _execute(
        self,
        call_next: Next,
        message: StreamMessage[IncomingMessage],
        envelope: Envelope,
        subscription: Subscription,
        message_id: str,
    ) -> Outcome:
        """Decode and run the handler; return how the delivery ends.

        Raises:
            DatabaseUnavailableError, ClaimContestedError: not the message's fault.
        """
        try:
            await message.decode()
            content = digest(subscription.event_type, message.body)
        except Exception as error:  # whatever a decoder raises, the message was not executed
            return _unexecuted(error, envelope)
        try:
            with self.metrics.handler_seconds.labels(subscription.consumer).time():
                return await self._transact(call_next, message, envelope, subscription.consumer, message_id, content)
        except (DatabaseUnavailableError, ClaimContestedError):
            raise
        except Exception as error:  # the policy decides what a handler's failure leads to
            return self.inbound.family.policy.decide(error, envelope.attempt)

    async def _transact(
        self,
        call_next: Next,
        message: StreamMessage[IncomingMessage],
        envelope: Envelope,
        consumer: str,
        message_id: str,
        content: bytes,
    ) -> Outcome:
        handling = False
        try:
            async with self.transactions.begin(envelope) as work:
                claim = await self._claim(work, consumer, message_id, content)
                await self.barrier("claimed")
                match claim:
                    case Claim.DUPLICATE:
                        return Ack(duplicate=True)
                    case Claim.CONFLICT:
                        return _unexecuted(_CONFLICT, envelope)
                    case Claim.NEW:
                        handling = True
                        async with self._handler_time():
                            token = _current.set(work)
                            try:
                                await call_next(message)
                            finally:
                                _current.reset(token)
                        handling = False
                        await self.barrier("handled")
        except DatabaseUnavailableError as error:
            if handling:
                raise SessionLostError(str(error)) from error
            raise
        await self.barrier("committed")
        return Ack()

    async def _claim(self, work: UnitOfWork, consumer: str, message_id: str, content: bytes) -> Claim:
        """Claim the message; waits for a concurrent copy, whose slowness is not this one's failure."""
        try:
            async with asyncio.timeout(self.handler_timeout.total_seconds()) as time:
                return await work.claim(consumer, message_id, content)
        except TimeoutError:
            if time.expired():
                raise ClaimContestedError("another copy of the message is being processed") from None
            raise

    @asynccontextmanager
    async def _handler_time(self) -> AsyncIterator[None]:
        """Limit the time of a handler; turn the end of it, and a cancellation that it ran into, into failures."""
        limit = self.handler_timeout.total_seconds()
        try:
            async with asyncio.timeout(limit) as time:
                yield
        except TimeoutError:
            if time.expired():
                raise HandlerTimeoutError(f"the handler did not finish within {limit:g} s") from None
            raise
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            raise HandlerCancelledError(
                "the handler ran into a cancellation, in a task that nobody cancelled"
            ) from None


class DeliveryMiddleware(BaseMiddleware[Any, IncomingMessage | None]):
    """FastStream's hook around one delivery."""

    def __init__(self, reliability: Reliability, message: IncomingMessage | None, /, *, context: Any) -> None:
        """Bind to one delivery."""
        super().__init__(message, context=context)
        self._reliability = reliability

    async def consume_scope(self, call_next: Next, msg: StreamMessage[IncomingMessage]) -> None:
        """Run the delivery through the middleware layer."""
        subscription = self._reliability.inbound.subscription(self.context.get_local("handler_"))
        await self._reliability.process(call_next, msg, subscription)


def _crashed(envelope: Envelope) -> Park:
    explanation = f"its execution did not end {MOST_CRASHES} times: each time the process died"
    return Park(Reason.CRASHED_CONSUMER, envelope.attempt - 1 + MOST_CRASHES, Diagnosis("ProcessCrashed", explanation))


def _unexecuted(error: Exception, envelope: Envelope) -> Park:
    reason = error.reason if isinstance(error, PermanentError) else Reason.UNREADABLE
    return Park(reason, envelope.attempt - 1, diagnose(error))
