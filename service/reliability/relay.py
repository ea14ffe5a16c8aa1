"""The path of an event out, top to bottom: hold the lease, read, publish, record, wait.

The relay runs in every instance and is active in one, which holds the lease; the others stand by and take over when it
is silent. No transaction is open while it publishes. A row counts as sent only after the broker's confirm.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from uuid import UUID, uuid4

import asyncpg
import structlog

from service.reliability import lease, outbox
from service.reliability.barrier import Barrier, no_barrier
from service.reliability.connection import Connection
from service.reliability.dispatch import Batch, Dispatcher
from service.reliability.outbox import OutboxRow
from service.reliability.retry import backoff, short
from service.reliability.stopping import Stopping
from service.telemetry import Metrics

FIRST_RECONNECT, LONGEST_RECONNECT = timedelta(milliseconds=200), timedelta(seconds=2)
"""Between attempts to reach the database, doubling: with the time to connect, within ten seconds of its return."""

NOTIFY_INTERVAL = timedelta(milliseconds=10)
"""Commits within it share one NOTIFY: each takes a lock that all committing transactions of the database share."""

HEARD_WITHIN = 1.0
"""Seconds for the relay's own notification to come back; behind a pooler that shares sessions it never does."""

STALE_AFTER = 15.0
"""Seconds without a sign of life after which readiness no longer believes the relay's state."""

_LOST_SESSION = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)

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
        connect: opens the relay's own database connection.
        dispatcher: publishes, on a connection of its own.
        poll: how long to wait where nothing wakes it: the net under lost notifications.
        batch: rows read at once.
        competes: False keeps the relay out of this instance; it then only notifies the active one.
        holder: what the lease knows this relay by.
        instance: what people know it by.
    """

    connect: Callable[[], Awaitable[asyncpg.Connection]]
    dispatcher: Dispatcher
    metrics: Metrics
    poll: timedelta
    batch: int
    jitter: Callable[[], float]
    competes: bool = True
    barrier: Barrier = no_barrier
    state: RelayState = RelayState.DOWN
    holder: UUID = field(default_factory=uuid4)
    instance: str = field(default_factory=lambda: f"{socket.gethostname()}, process {os.getpid()}")
    _stopping: Stopping = field(default_factory=Stopping)
    _wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    _lost: asyncio.Event = field(default_factory=asyncio.Event)
    _held_until: float = 0.0
    _read_at: float = 0.0
    _seen_alive: float = 0.0

    def wake(self) -> None:
        """Tell the relay that something was committed, in this process or by notification."""
        self._wakeup.set()

    def is_alive(self) -> bool:
        """Tell whether the relay works or stands by, and was seen doing so lately."""
        return self.state is not RelayState.DOWN and _now() - self._seen_alive < STALE_AFTER

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
        lost = self._lost = asyncio.Event()

        def notice_loss(_connection: Connection) -> None:
            lost.set()
            self.wake()

        connection.add_termination_listener(notice_loss)
        try:
            self._enter(RelayState.STANDBY)
            while not lost.is_set():
                last = self._stopping.is_set()
                if await self._holds_lease(connection):
                    await self._be_active(connection)
                else:
                    await self._stand_by(connection)
                self._seen_alive = _now()
                if last:
                    return
                await self._sleep()
        finally:
            if self.state is RelayState.ACTIVE and not lost.is_set():
                with suppress(*_LOST_SESSION):
                    await asyncio.wait_for(lease.give_up(connection, self.holder), 0.5)
            with suppress(*_LOST_SESSION):
                await connection.close(timeout=0.3)
            self._held_until = 0.0

    async def _holds_lease(self, connection: Connection) -> bool:
        """Tell whether this relay is the active one, after renewing or taking the lease where it is time to."""
        if not self._is_time_to_renew():
            return True
        if not self.competes or (self._stopping.is_set() and self.state is not RelayState.ACTIVE):
            return False
        return await self._ask(lease.hold(connection, self.holder, self.instance))

    def _is_time_to_renew(self) -> bool:
        return self._held_until - _now() <= (lease.LEASE - lease.RENEW_AFTER).total_seconds()

    async def _ask(self, question: Awaitable[bool]) -> bool:
        """Ask for the lease; what is granted counts from before the question."""
        asked_at = _now()
        held = await question
        self._held_until = asked_at + lease.LEASE.total_seconds() if held else 0.0
        return held

    async def _be_active(self, connection: Connection) -> None:
        if self.state is not RelayState.ACTIVE:
            self._enter(RelayState.ACTIVE)
            self._read_at = 0.0
            self.metrics.relay_listening.set(await self._listen(connection))
        if self._wakeup.is_set() or _now() >= self._next_read():
            await self._drain(connection)

    async def _stand_by(self, connection: Connection) -> None:
        self._enter(RelayState.STANDBY)
        if self._wakeup.is_set():
            self._wakeup.clear()
            await outbox.notify(connection)
            await self._stopping.pause(NOTIFY_INTERVAL)

    async def _listen(self, connection: Connection) -> bool:
        """Be woken by commits of other processes; return whether notifications reach this connection."""
        heard = asyncio.Event()

        def notice(_connection: Connection, _pid: int, _channel: str, payload: object) -> None:
            if payload == str(self.holder):
                heard.set()
            self.wake()

        await connection.add_listener(outbox.CHANNEL, notice)
        await outbox.notify(connection, str(self.holder))
        with suppress(TimeoutError):
            await asyncio.wait_for(heard.wait(), HEARD_WITHIN)
        if not heard.is_set():
            log.warning(
                "relay_hears_nothing",
                explanation="notifications do not arrive: other processes' events wait for the poll",
            )
        return heard.is_set()

    async def _drain(self, connection: Connection) -> None:
        """Send what is due, batch by batch, until a batch is short, or until stopped."""
        while self._may_publish():
            self._wakeup.clear()
            self._read_at = _now()
            rows = await self._read(connection)
            if not rows:
                return
            async with self._keeping_lease(connection):
                batch = await self.dispatcher.dispatch(rows, self._may_start)
            await self.barrier("event-confirmed")
            await outbox.record(connection, batch.results, self.holder)
            for destination in batch.released:
                await outbox.release(connection, destination)
            for destination, error in batch.stuck.items():
                await outbox.tell(connection, destination, error)
            if batch.away is not None:
                raise ConnectionError(batch.away)  # which gives the lease to an instance that may reach the broker
            self._seen_alive = _now()
            if self._stopping.is_set() or (len(rows) < self.batch and not batch.released):
                return

    async def _read(self, connection: Connection) -> list[OutboxRow]:
        """Read what may go, and one probe for each destination whose pause is over."""
        destinations = self.dispatcher.destinations
        holding = list(destinations.holding())
        rows = await outbox.read(connection, self.batch, destinations.waiting(), holding)
        for destination in destinations.to_probe(_now()):
            probe = await outbox.probe(connection, destination, holding)
            if not probe:
                destinations.forget(destination)
            rows += probe
        return sorted(rows, key=lambda row: row.sequence)

    def _may_publish(self) -> bool:
        return not self._lost.is_set() and _now() < self._held_until

    def _may_start(self, batch: Batch) -> bool:
        """Tell whether to begin a publish: not without the lease, nor at the shutdown's cost where one has failed."""
        return self._may_publish() and not (self._stopping.is_set() and any(result.error for result in batch.results))

    @asynccontextmanager
    async def _keeping_lease(self, connection: Connection) -> AsyncIterator[None]:
        """Renew the lease as long as the block takes; where it is lost, the block starts no more publishes.

        It is not taken again meanwhile: another may have published what the block still has in hand.
        """
        done = Stopping()

        async def keep() -> None:
            while not done.is_set():
                await done.pause(lease.RENEW_AFTER / 3)
                if done.is_set() or not self._is_time_to_renew():
                    continue
                if not await self._ask(lease.renew(connection, self.holder)):
                    return

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            done.set()
            try:
                await keeping
            except Exception:  # the session ends at the next statement, and says why
                self._lost.set()

    def _next_read(self) -> float:
        probe = self.dispatcher.destinations.next_probe()
        poll = self._read_at + self.poll.total_seconds()
        return poll if probe is None else min(poll, probe)

    async def _sleep(self) -> None:
        """Wait until woken, until it is time to read, or to renew or try for the lease."""
        if self.state is RelayState.ACTIVE:
            renewal = self._held_until - (lease.LEASE - lease.RENEW_AFTER).total_seconds()
            pause = min(self._next_read(), renewal) - _now()
        else:
            pause = lease.STANDBY_INTERVAL.total_seconds()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._wakeup.wait()

    def _enter(self, state: RelayState) -> None:
        if state is not self.state:
            log.info("relay_state_changed", state=str(state), before=str(self.state))
            self.metrics.relay_active.set(state is RelayState.ACTIVE)
            if state is not RelayState.ACTIVE:
                self.metrics.relay_listening.set(0)
        self.state = state
        self._seen_alive = _now()


def _now() -> float:
    return asyncio.get_running_loop().time()
