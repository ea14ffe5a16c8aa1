"""The path of an event out, top to bottom: wait, read, publish, record.

The relay runs in every instance and is active in one, which holds a session advisory lock; the others stand by and
take over when that session dies. No transaction is open while it publishes. What it records goes over the connection
that holds the lock: whoever has lost it can complete nothing. A row counts as sent only after the broker's confirm.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

import asyncpg
import structlog
from aio_pika import DeliveryMode, Message

from service.reliability import outbox
from service.reliability.barrier import Barrier, no_barrier
from service.reliability.connection import Connection
from service.reliability.outbox import OutboxRow, Recorded
from service.reliability.publisher import Confirmed, Publication, Publisher, Unconfirmed
from service.reliability.retry import backoff, short
from service.reliability.stopping import Stopping
from service.telemetry import Metrics

APP_ID = "billing"

FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=1), timedelta(seconds=60)
"""Between publishes of a row that was not confirmed, doubling; nothing is ever given up."""

FIRST_RECONNECT, LONGEST_RECONNECT = timedelta(milliseconds=200), timedelta(seconds=2)
"""Between attempts to reach the database, doubling: with the time to connect, within ten seconds of its return."""

NOTIFY_INTERVAL = timedelta(milliseconds=10)
"""Commits within it share one NOTIFY: each takes a lock that all committing transactions of the database share."""

STALE_AFTER = 15.0
"""Seconds without a sign of life after which readiness no longer believes the relay's state."""

log = structlog.get_logger(__name__)


class RelayState(StrEnum):
    """What the relay of this instance does."""

    DOWN = "down"
    STANDBY = "standby"
    ACTIVE = "active"


@dataclass(slots=True)
class Relay:
    """Moves committed events from the outbox to the broker.

    Attributes:
        connect: opens the relay's own database connection; a pool's would lose the session lock.
        publisher: on a connection of its own.
        poll: how long to wait where nothing wakes it: the net under lost notifications, and the standby's attempt.
        batch: rows read at once.
        window: publishes in flight at once.
        competes: False keeps the relay out of this instance; it then only notifies the active one.
    """

    connect: Callable[[], Awaitable[asyncpg.Connection]]
    publisher: Publisher
    metrics: Metrics
    poll: timedelta
    batch: int
    window: int
    jitter: Callable[[], float]
    competes: bool = True
    barrier: Barrier = no_barrier
    state: RelayState = RelayState.DOWN
    _stopping: Stopping = field(default_factory=Stopping)
    _wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    _lost: asyncio.Event = field(default_factory=asyncio.Event)
    _seen_alive: float = 0.0
    _away: str | None = None

    def wake(self) -> None:
        """Tell the relay that something was committed, in this process or by notification."""
        self._wakeup.set()

    def is_alive(self) -> bool:
        """Tell whether the relay works or stands by, and was seen doing so lately."""
        age = asyncio.get_running_loop().time() - self._seen_alive
        return self.state is not RelayState.DOWN and age < STALE_AFTER

    def renew(self) -> None:
        """Go on with a new connection when what is in flight is recorded: the old one may lead to an old primary."""
        self._lost.set()
        self.wake()

    def stop(self) -> None:
        """Stop when the batch in hand is recorded and one more is sent: what was committed meanwhile."""
        self._stopping.set()
        self.wake()

    async def run(self) -> None:
        """Relay until stopped, over any number of database connections."""
        failures = 0
        while not self._stopping.is_set():
            try:
                await self._session()
                failures = 0
            except Exception as error:  # whatever happened, the relay must go on
                failures += 1
                log.warning("relay_failed", failures=failures, error=type(error).__name__, explanation=short(error))
            finally:
                self._enter(RelayState.DOWN)
            await self._stopping.pause(
                backoff(failures, self.jitter(), first=FIRST_RECONNECT, longest=LONGEST_RECONNECT)
            )

    async def _session(self) -> None:
        """Relay or stand by on one database connection, until it or the broker is lost or the service stops."""
        connection = await self.connect()
        self._away = None
        lost = self._lost = asyncio.Event()

        def notice_loss(_connection: Connection) -> None:
            lost.set()
            self.wake()

        connection.add_termination_listener(notice_loss)
        try:
            self._enter(RelayState.STANDBY)
            while not lost.is_set():
                last = self._stopping.is_set()
                if self.state is RelayState.ACTIVE:
                    await self._drain(connection, lost)
                elif self.competes and not last and await outbox.try_lock(connection):
                    await connection.add_listener(outbox.CHANNEL, lambda *_: self.wake())
                    self._enter(RelayState.ACTIVE)
                    continue
                elif self._wakeup.is_set():
                    self._wakeup.clear()
                    await outbox.notify(connection)
                    await self._stopping.pause(NOTIFY_INTERVAL)
                self._seen_alive = asyncio.get_running_loop().time()
                if last:
                    return
                await self._sleep()
        finally:
            with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await connection.close(timeout=0.3)

    async def _drain(self, connection: Connection, lost: asyncio.Event) -> None:
        """Send what is due, batch by batch, until a batch is short or nothing of it could be sent, or until stopped."""
        while not lost.is_set():
            self._wakeup.clear()
            rows = await outbox.read(connection, self.batch)
            if not rows:
                return
            results = await self._publish_all(rows, lost)
            await self.barrier("event-confirmed")
            await outbox.record(connection, results)
            if self._away is not None:
                raise ConnectionError(self._away)  # which gives the lock to an instance that may reach the broker
            self._seen_alive = asyncio.get_running_loop().time()
            exhausted = len(rows) < self.batch or all(result.error for result in results)
            if exhausted or self._stopping.is_set():
                return

    async def _publish_all(self, rows: list[OutboxRow], lost: asyncio.Event) -> list[Recorded]:
        """Publish with a window in flight; rows of one key one after another, each after the one before it."""
        results: list[Recorded] = []
        window = asyncio.Semaphore(self.window)
        async with asyncio.TaskGroup() as tasks:
            for chain in _chains(rows):
                tasks.create_task(self._publish_chain(chain, window, lost, results))
        return results

    async def _publish_chain(
        self, rows: list[OutboxRow], window: asyncio.Semaphore, lost: asyncio.Event, results: list[Recorded]
    ) -> None:
        for row in rows:
            async with window:
                if lost.is_set() or self._away is not None:
                    return  # with the lock; what is not started waits for the next holder
                if self._stopping.is_set() and any(result.error for result in results):
                    return  # the broker does not take everything: what is not started would cost the shutdown's time
                publication = await self._publish(row)
            if isinstance(publication, Unconfirmed) and publication.away:
                self._away = publication.explanation
                return  # it is not the row's fault: no attempt is spent, and it goes at once when the broker is back
            results.append(self._result(row, publication))
            if not isinstance(publication, Confirmed):
                return  # the rows behind it in this batch wait for it

    async def _publish(self, row: OutboxRow) -> Publication:
        try:
            message = event_message(row)
        except (TypeError, ValueError) as error:  # headers that somebody wrote into the table by hand
            return Unconfirmed(f"cannot be built: {type(error).__name__}: {error}")
        publishing = asyncio.ensure_future(self.publisher.publish(message, row.exchange, row.routing_key))
        await self.barrier("event-sent")
        return await publishing

    def _result(self, row: OutboxRow, publication: Publication) -> Recorded:
        self.metrics.publications.labels(type(publication).__name__.lower()).inc()
        if isinstance(publication, Confirmed):
            return Recorded(row.id)
        pause = backoff(row.publish_attempts + 1, self.jitter(), first=FIRST_PAUSE, longest=LONGEST_PAUSE)
        log.warning(
            "event_not_sent",
            event_id=str(row.id),
            type=row.type,
            publication=type(publication).__name__,
            explanation=publication.explanation,
            attempts=row.publish_attempts + 1,
            pause=pause.total_seconds(),
        )
        return Recorded(row.id, f"{type(publication).__name__.lower()}: {publication.explanation}", pause)

    async def _sleep(self) -> None:
        """Wait until woken, or for the poll interval."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.poll.total_seconds()):
                await self._wakeup.wait()

    def _enter(self, state: RelayState) -> None:
        if state is not self.state:
            log.info("relay_state_changed", state=str(state), before=str(self.state))
        self.state = state
        self._seen_alive = asyncio.get_running_loop().time()


def event_message(row: OutboxRow) -> Message:
    """Return the message of an event: equal at every publish of the same row."""
    headers = dict(row.headers)
    correlation_id = headers.pop("correlation-id", None)
    return Message(
        row.payload,
        headers=dict(headers),
        content_type="application/json",
        delivery_mode=DeliveryMode.PERSISTENT,
        message_id=str(row.id),
        correlation_id=None if correlation_id is None else str(correlation_id),
        timestamp=row.created_at,
        type=row.type,
        app_id=APP_ID,
    )


def _chains(rows: Iterable[OutboxRow]) -> list[list[OutboxRow]]:
    """Return the rows of each key in their order."""
    chains: dict[str, list[OutboxRow]] = {}
    for row in rows:
        chains.setdefault(row.key, []).append(row)
    return list(chains.values())
