"""The gate in front of the handlers: how many run at once, who runs alone, and none while the database is away.

An outage is not the message's fault, and running into it again with each message helps nobody. The first execution
that meets it closes the gate: what was in flight is held, what was prefetched waits, without a database connection,
and the broker counts nothing. A probe opens the gate again, for one handler at first and for one more with each
success, since a server that has just come back must not meet all at once.

A delivery that comes again may be the one that killed the process, so it is executed alone: if the process dies, it is
known which one did it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import structlog

from service.reliability.retry import backoff
from service.reliability.stopping import Stopping
from service.telemetry import Metrics

PROBE_TIMEOUT = 5.0
"""Seconds for one probe."""

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Turn:
    """One delivery's way through the gate.

    Attributes:
        is_hopeless: tells that waiting has lost its sense.
        opening: the gate's opening by which it came in. What an execution meets tells of the time since then only: one
            that began before an outage neither ends it nor begins another.
        answer: whether it came, once that is known.
    """

    is_hopeless: Callable[[], bool]
    opening: int = 0
    answer: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def came(self) -> bool:
        """Tell whether it may go in: it was neither sent away nor cancelled."""
        return self.answer.done() and not self.answer.cancelled() and self.answer.result()


@dataclass(slots=True)
class Gate:
    """Lets deliveries in to be executed.

    Attributes:
        capacity: handlers at once.
        probe: tells whether the database takes writes; what it raises means no.
        metrics: one gauge says whether the gate is open.
        jitter: a number in [0, 1), for the pauses between probes.
        stopping: once set, nobody waits any longer.
        is_open: False from the first execution that met an outage until a probe succeeds.
    """

    capacity: int
    probe: Callable[[], Awaitable[bool]]
    metrics: Metrics
    jitter: Callable[[], float]
    stopping: Stopping = field(default_factory=Stopping)
    first_pause: timedelta = timedelta(milliseconds=250)
    longest_pause: timedelta = timedelta(seconds=2)
    is_open: bool = True
    _limit: int = field(init=False)
    _inside: list[Turn] = field(default_factory=list)
    _alone_inside: bool = False
    _opening: int = 0
    _alone: deque[Turn] = field(default_factory=deque)
    _others: deque[Turn] = field(default_factory=deque)
    _failures: int = 0
    _reopening: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        """Begin open, for as many as there is room."""
        self._limit = self.capacity
        self.metrics.gate_open.set(1)

    @asynccontextmanager
    async def turn(self, *, alone: bool, is_hopeless: Callable[[], bool]) -> AsyncIterator[Turn]:
        """Wait for a turn; yield it, whether it has come or not.

        Args:
            alone: nobody else is inside meanwhile; who is alone goes before all others.
            is_hopeless: tells that waiting has lost its sense; asked while the gate is closed, and by `sweep`. Who
                is inside and hopeless is not waited for by who is to be alone: its delivery was taken back, and
                whatever comes next must not be held up by a handler that hangs.
        """
        turn = Turn(is_hopeless)
        (self._alone if alone else self._others).append(turn)
        self._let_in()
        try:
            await turn.answer
            yield turn
        finally:
            if turn in self._inside:
                self._inside.remove(turn)
                self._alone_inside = self._alone_inside and not alone
                self._let_in()

    def close(self, why: str, turn: Turn | None = None) -> None:
        """Keep everybody out until a probe succeeds: the execution of `turn`, or whoever looks, has met an outage."""
        if self.is_open and (turn is None or turn.opening == self._opening):
            self.is_open = False
            self._limit = 1
            self._failures += 1
            self.metrics.gate_open.set(0)
            log.warning("gate_closed", explanation=why)
            self._reopening = asyncio.get_running_loop().create_task(self._reopen(), name="gate")

    def succeeded(self, turn: Turn) -> None:
        """Let one more in at once, up to the capacity: the execution of `turn` has met no outage."""
        if self.is_open and turn.opening == self._opening:
            self._failures = 0
            if self._limit < self.capacity:
                self._limit += 1
                self._let_in()

    def sweep(self) -> None:
        """Send away those for whom waiting has become hopeless."""
        for waiting in (*self._alone, *self._others):
            if not waiting.answer.done() and waiting.is_hopeless():
                waiting.answer.set_result(False)
        self._let_in()

    async def _reopen(self) -> None:
        while not self.stopping.is_set():
            await self.stopping.pause(
                backoff(self._failures, self.jitter(), first=self.first_pause, longest=self.longest_pause)
            )
            self.sweep()
            if await self._answers():
                self.is_open = True
                self._opening += 1
                self.metrics.gate_open.set(1)
                log.info("gate_opened", probes=self._failures)
                self._let_in()
                return
            self._failures += 1

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                return await self.probe()
        except Exception as error:  # whatever a driver raises, it is no answer
            log.debug("gate_probed", error=type(error).__name__)
            return False

    def _let_in(self) -> None:
        while self._has_room():
            queue = self._alone or self._others
            if not queue:
                return
            if queue[0].answer.done():  # sent away, or cancelled
                queue.popleft()
                continue
            if queue is self._alone:
                if not all(inside.is_hopeless() for inside in self._inside):
                    return  # it waits for those inside, and everybody else for it
                self._alone_inside = True
            turn = queue.popleft()
            turn.opening = self._opening
            self._inside.append(turn)
            turn.answer.set_result(True)

    def _has_room(self) -> bool:
        """Tell whether one more may come in; who is left from before an outage, perhaps hanging, keeps nobody out."""
        since_opening = sum(turn.opening == self._opening for turn in self._inside)
        return (
            self.is_open
            and len(self._inside) < self.capacity
            and since_opening < self._limit
            and not self._alone_inside
        )
