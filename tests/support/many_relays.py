"""Several relays on a real database, with a broker that answers when and what the test says, on a clock of the test's.

Nothing here sleeps: the event loop's time and the database's `now()` are one number, which `World.pass_time` moves. A
process that is stopped stands still wherever it waits for the database or the broker; one that is killed never goes on.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import asyncpg
from aio_pika import Message

from service.reliability.dispatch import Dispatcher
from service.reliability.publisher import Confirmed, Publication, Refused, Returned, Unconfirmed, Unsendable
from service.reliability.relay import Relay
from service.telemetry import Metrics

BATCH, WINDOW = 4, 3
STEP = 0.25
"""Seconds by which time moves at once: less than any pause of the relay."""

ARRIVED_UNCONFIRMED = Unconfirmed("no answer; it had arrived")
LOST = Unconfirmed("the channel is gone", lost=True)

ANSWERS = (
    Confirmed(),
    Returned("nobody is bound"),
    Refused("the queue is full"),
    Unconfirmed("no answer"),
    ARRIVED_UNCONFIRMED,
    LOST,
    Unsendable("no frame can be made of it"),
)

CLOCK = """
create schema clock;
create table clock.hands as select now() + interval '1 hour' as at;
create function clock.now() returns timestamptz stable language sql as 'select at from clock.hands';
"""

APPEND = """
insert into outbox_messages (id, exchange, routing_key, type, key, payload, headers)
values (gen_random_uuid(), 'billing', $1, $1, $2, $3, '{}')
"""

STATES = """
select
    convert_from(payload, 'utf8')::int as event,
    sent_at is not null as sent,
    quarantined_at is not null as quarantined
from outbox_messages order by sequence
"""


class ViolationError(AssertionError):
    """Something happened that the relays must never do."""


class FrozenClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until it is told otherwise."""

    now = 1000.0

    def time(self) -> float:
        """Return the test's time in seconds."""
        return self.now


@dataclass(frozen=True, slots=True)
class Event:
    """What was appended; events are numbered in their order."""

    key: str
    destination: str


@dataclass(eq=False, slots=True)
class Publish:
    """One publish of an event that is on its way.

    Attributes:
        life: of the process when it began; another one now means that it was stopped, killed or cut off since.
    """

    event: int
    process: "Process"
    life: int
    answer: asyncio.Future[Publication]


@dataclass(eq=False, slots=True)
class Process:
    """An instance of the service, as far as its relay goes; the relay's publisher and its only session.

    Attributes:
        unbound: destinations of which it knows that nobody is bound.
        life: grows with everything that happens to it.
    """

    world: "World"
    relay: Relay = field(init=False)
    running: asyncio.Event = field(default_factory=asyncio.Event)
    unbound: set[str] = field(default_factory=set)
    life: int = 0
    killed: bool = False
    session: asyncpg.Connection | None = None
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        metrics = Metrics()
        self.running.set()
        self.relay = Relay(
            connect=self.connect,
            dispatcher=Dispatcher(self, metrics, window=WINDOW, jitter=lambda: 0.5),
            metrics=metrics,
            poll=timedelta(seconds=STEP),
            batch=BATCH,
            jitter=lambda: 0.5,
        )
        self.task = asyncio.get_running_loop().create_task(self.relay.run())

    async def connect(self) -> asyncpg.Connection:
        """Open the relay's session."""
        await self.goes_on()
        async with self.world.statement():
            self.session = await asyncpg.connect(
                self.world.database_url, server_settings={"search_path": "clock, public, pg_catalog"}
            )
        return cast(asyncpg.Connection, Session(self, self.session))

    async def publish(self, message: Message, exchange: str, routing_key: str) -> Publication:  # noqa: ARG002 - the publisher's
        """Hand a message to the broker; wait until the test answers."""
        event = int(message.body)
        if not self.running.is_set():
            self.world.excused.add(event)  # what had begun when it was stopped is sent when it goes on
        await self.goes_on()
        self.world.tell(f"{self} publishes {event}")
        publish = Publish(event, self, self.life, asyncio.get_running_loop().create_future())
        self.world.publishes.append(publish)
        answer = await publish.answer
        await self.goes_on()
        return answer

    async def goes_on(self) -> None:
        """Stand still as long as it is stopped."""
        await self.running.wait()
        if self.killed:
            raise asyncpg.InterfaceError("killed")

    def __str__(self) -> str:
        """Return its number."""
        return f"relay {self.world.all_processes.index(self) if self in self.world.all_processes else '?'}"

    def suffer(self) -> None:
        """Note that from now on it cannot be held to what was on its way."""
        self.life += 1
        self.world.excused |= {p.event for p in self.world.publishes if p.process is self}
        self.world.excused |= {told.event for told in self.world.told if told.process is self}


@dataclass(slots=True)
class Session:
    """A real session that stands still with its process."""

    process: Process
    real: asyncpg.Connection

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.real, name)
        if name == "add_termination_listener":
            return cast(Callable[..., Any], method)

        async def run(*args: Any, **options: Any) -> Any:
            await self.process.goes_on()
            async with self.process.world.statement():
                result = await method(*args, **options)
            await self.process.goes_on()
            return result

        return run


@dataclass(slots=True)
class World:
    """The database, the broker, the processes, and what was seen.

    Attributes:
        events: that were appended; the number of one is its place.
        publishes: that wait for the broker's answer.
        told: answers of which it was not yet seen that they were recorded.
        excused: events that may arrive again, since it was lost what became of them.
        returned: events that had a destination, for a while, of which a relay knew that nobody was bound: those of
            other destinations need not wait for them.
        quarantined: events that nobody needs to wait for.
        arrivals: numbers of events in the order in which they reached the broker's queue.
        history: all that happened, for a person to read.
    """

    database_url: str
    connection: asyncpg.Connection
    processes: list[Process] = field(default_factory=list)
    all_processes: list[Process] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    told: list[Publish] = field(default_factory=list)
    excused: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    quarantined: set[int] = field(default_factory=set)
    arrivals: list[int] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _busy: int = 0
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def statement(self) -> AsyncIterator[None]:
        """Mark that the database works; in the order of asking, so that a run can be repeated."""
        self._busy += 1
        self._quiet.clear()
        try:
            async with self._one_at_a_time:
                yield
        finally:
            self._busy -= 1
            if not self._busy:
                self._quiet.set()

    async def settle(self) -> None:
        """Wait until every process waits for time, an answer, or to go on; then look at what was recorded."""
        idle = 0
        while idle < 30:
            await asyncio.sleep(0)
            idle += 1
            if self._busy:
                await self._quiet.wait()
                idle = 0
        await self._check_records()

    async def start_process(self) -> None:
        """Start another instance."""
        process = Process(self)
        self.processes.append(process)
        self.all_processes.append(process)
        await self.settle()

    async def append(self, key: str, destination: str) -> None:
        """Commit an event."""
        await self.connection.execute(APPEND, destination, key, str(len(self.events)).encode())
        if any(destination in process.unbound for process in self.processes):
            self.returned.add(len(self.events))
        self.events.append(Event(key, destination))
        self.tell(f"event {len(self.events) - 1} appended: key {key}, to {destination}")

    async def pass_time(self, seconds: float) -> None:
        """Move both clocks."""
        self.tell(f"{seconds} s pass")
        for _ in range(int(seconds / STEP)):
            await self.connection.execute("update clock.hands set at = at + $1", timedelta(seconds=STEP))
            cast(FrozenClockLoop, asyncio.get_running_loop()).now += STEP
            await self.settle()

    async def answer(self, publish: Publish, answer: Publication) -> None:
        """Let the broker answer; a lost channel takes everything with it that the process had on its way."""
        answered = [p for p in self.publishes if p.process is publish.process] if answer is LOST else [publish]
        for each in answered:
            self.tell(f"{each.process} is told of {each.event}: {answer}")
            self._note(each, answer)
            self.publishes.remove(each)
            each.answer.set_result(answer)
            if each.life == each.process.life:
                self.told.append(each)
        await self.settle()

    async def stop(self, process: Process) -> None:
        """Let it stand still, as SIGSTOP does."""
        self.tell(f"{process} is stopped")
        process.running.clear()
        process.suffer()

    async def go_on(self, process: Process) -> None:
        """Let it go on, as SIGCONT does."""
        self.tell(f"{process} goes on")
        process.running.set()
        await self.settle()

    async def kill(self, process: Process) -> None:
        """End it, as SIGKILL does; what it had sent is on its way all the same."""
        self.tell(f"{process} is killed")
        await self.stop(process)
        if process.session is not None:
            process.session.terminate()
        self.processes.remove(process)
        await self.settle()

    async def cut_off(self, process: Process) -> None:
        """End its session with the database."""
        self.tell(f"{process} loses its session")
        process.suffer()
        if process.session is not None:
            process.session.terminate()
        await self.settle()

    async def finish(self) -> None:
        """Let everything go well from now on, and see that everything has left."""
        for process in self.processes:
            await self.go_on(process)
        if not self.processes:
            await self.start_process()
        for _ in range(60):
            while self.publishes:
                await self.answer(self.publishes[0], Confirmed())
            await self.pass_time(1)
            if all(row["sent"] or row["quarantined"] for row in await self.connection.fetch(STATES)):
                break
        for row in await self.connection.fetch(STATES):
            if not row["sent"] and not row["quarantined"]:
                raise self.violation(f"event {row['event']} never left")
            if row["sent"] and row["event"] not in self.arrivals:
                raise self.violation(f"event {row['event']} counts as sent and did not arrive")

    async def close(self) -> None:
        """End what is left."""
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for process in self.all_processes:
            process.killed = True
            process.running.set()
            if process.session is not None:
                process.session.terminate()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note(self, publish: Publish, answer: Publication) -> None:
        number = publish.event
        destination = self.events[number].destination
        publish.process.unbound.discard(destination)
        match answer:
            case Confirmed():
                self._arrive(number)
            case Unconfirmed():
                self.excused.add(number)
                if answer is ARRIVED_UNCONFIRMED:
                    self._arrive(number)
            case Returned():
                publish.process.unbound.add(destination)
                self.returned |= {n for n, event in enumerate(self.events) if event.destination == destination}
            case Unsendable():
                self.quarantined.add(number)

    def _arrive(self, number: int) -> None:
        """Note an arrival, and see that it may be now."""
        if number in self.arrivals:
            if number not in self.excused:
                raise self.violation(f"event {number} arrived twice, and nothing had happened to whom sent it")
            self.arrivals.append(number)
            return
        event = self.events[number]
        for earlier, other in enumerate(self.events[:number]):
            if other.key != event.key or earlier in self.arrivals or earlier in self.quarantined:
                continue
            if other.destination == event.destination or earlier not in self.returned:
                raise self.violation(f"event {number} arrived before event {earlier} of its key")
        self.arrivals.append(number)

    async def _check_records(self) -> None:
        """See that what a process was told, to which nothing happened, is what was recorded."""
        rows = {row["event"]: row for row in await self.connection.fetch(STATES)}
        for told in list(self.told):
            if told.life != told.process.life:
                self.told.remove(told)
            elif not any(p.process is told.process for p in self.publishes):
                self.told.remove(told)
                answer = told.answer.result()
                if isinstance(answer, Confirmed) and not rows[told.event]["sent"]:
                    raise self.violation(f"event {told.event} was confirmed and does not count as sent")
                if isinstance(answer, Unsendable) and not rows[told.event]["quarantined"]:
                    raise self.violation(f"event {told.event} cannot be sent and is not quarantined")

    def violation(self, what: str) -> ViolationError:
        """Return an error with all that led to it."""
        return ViolationError("\n".join((what, *self.history)))

    def tell(self, what: str) -> None:
        """Note what happens."""
        self.history.append(f"{asyncio.get_running_loop().time() - 1000:6.2f} {what}")

    def doubles(self) -> int:
        """Return how many arrivals were not the first of their event."""
        return sum(n - 1 for n in Counter(self.arrivals).values())
