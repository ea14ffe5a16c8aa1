"""What is done to the service, from the first start to the last stop: top to bottom as it happens."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from service.demo.auditor import Auditor
from service.demo.errors import StalledError
from service.demo.orders import Streams
from service.demo.process import Instance, Instances
from service.demo.producer import Producer
from service.demo.waiting import eventually, pause

PATIENCE = 12.0
"""Seconds without any progress after which the service hangs; its longest pause here is about 5."""

LONGEST_WAIT, SLOWEST = 40.0, 20.0
"""Seconds for one wait, progress or not; and messages a second, below which a machine is too slow for more of them."""

INVOICES_BEFORE_KILL = 5

WHILE_STARTING, WHILE_STOPPING = 3.0, 1.0
"""Seconds over which publishing goes on beside the start of an instance and the stop of another."""

HELD_WITHIN = 10.0
"""Seconds until the first events are held back."""


@dataclass(slots=True)
class Faults:
    """What was done to the service, measured at that moment.

    Attributes:
        unprocessed: accepted by the broker and not processed when the only instance was killed.
        unsent: events that were committed and not recorded as sent at that moment.
        while_dead: messages published while no instance ran.
        while_rolling: messages published between the SIGTERM of an instance and its end, beside its successor.
        returned, refused: events that stayed in the outbox with that reason.
        stops: exit code and seconds of each SIGTERM.
    """

    unprocessed: int = 0
    unsent: int = 0
    while_dead: int = 0
    while_rolling: int = 0
    returned: int = 0
    refused: int = 0
    stops: list[tuple[int | None, float]] = field(default_factory=list)


@dataclass(slots=True)
class Scenario:
    """Plays it; what was measured is in `faults`.

    Attributes:
        started: an instance was ready, so that there is something to audit.
    """

    streams: Streams
    instances: Instances
    producer: Producer
    auditor: Auditor
    say: Callable[[str], None]
    faults: Faults = field(default_factory=Faults)
    started: bool = False

    async def play(self) -> None:
        """Play all of it.

        Raises:
            StalledError: the service died or does not get on.
        """
        first = await self._started("first")
        self.started = True
        await self.auditor.listen_to_parking()
        second = await self._killed_in_the_middle(first)
        third = await self._rolled(second)
        await self._events_held()
        await self._stopped(third)

    async def _started(self, name: str) -> Instance:
        instance = self.instances.start(name)
        await instance.ready()
        self.say(f"the {name} instance is ready (process {instance.process.pid})")
        return instance

    async def _killed_in_the_middle(self, only: Instance) -> Instance:
        """Kill the only instance while it works; publish while nobody is there; start another one."""
        async with _meanwhile(self.producer.publish(self.streams.first)):
            await self._frozen_in_the_middle(only)
            only.kill()
        self.say(
            f"kill -9: {self.faults.unprocessed} accepted messages unprocessed, {self.faults.unsent} events unsent"
        )
        before = len(self.producer.confirmed)
        await self.producer.publish(self.streams.while_dead)
        self.faults.while_dead = len(self.producer.confirmed) - before
        self.say(f"{self.faults.while_dead} messages published while no instance runs")
        successor = await self._started("second")
        await self._settled()
        return successor

    async def _frozen_in_the_middle(self, instance: Instance) -> None:
        """Freeze it when messages are unprocessed and events unsent, so that what is counted is what the kill hits."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            instance.require_running()
            if await self.auditor.invoiced() >= INVOICES_BEFORE_KILL:
                instance.freeze(on=True)
                try:
                    accepted = list(self.producer.confirmed)
                    self.faults.unsent = len(await self.auditor.unsent())
                    self.faults.unprocessed = len(await self.auditor.unsettled(accepted))
                finally:
                    if not (in_flight := self.faults.unprocessed and self.faults.unsent):
                        instance.freeze(on=False)
                if in_flight:
                    return
            await pause(0.01)
        raise StalledError("the first instance was never seen with unprocessed messages and unsent events at once")

    async def _rolled(self, old: Instance) -> Instance:
        """Replace the instance by another one while publishing goes on."""
        half = len(self.streams.second) // 2
        async with _meanwhile(self._overtaking()):
            async with _meanwhile(self.producer.publish(self.streams.second[:half], seconds=WHILE_STARTING)):
                new = await self._started("third")
            before = len(self.producer.confirmed)
            async with _meanwhile(self.producer.publish(self.streams.second[half:], seconds=WHILE_STOPPING)):
                code, took = await self._stopped(old)
                self.faults.while_rolling = len(self.producer.confirmed) - before
        self.say(
            f"rolling restart: SIGTERM ended the second instance with {code} in {took:.1f} s,"
            f" {self.faults.while_rolling} messages published meanwhile"
        )
        await self._settled()
        return new

    async def _overtaking(self) -> None:
        """Publish payments a second before their orders."""
        await self.producer.publish(self.streams.overtaking)
        await pause(1.0)
        await self.producer.publish(self.streams.overtaken)

    async def _events_held(self) -> None:
        """Make events that nobody takes (voided) and that a full queue refuses (paid); then take them."""
        await self.auditor.open_slow_queue()
        await self.producer.publish(self.streams.third)

        async def held() -> tuple[int, int]:
            self.instances.require_running()
            errors = await self.auditor.unsent()
            return sum("returned" in error for error in errors), sum("refused" in error for error in errors)

        self.faults.returned, self.faults.refused = await eventually(held, all, within=HELD_WITHIN)
        self.say(f"events held in the outbox: {self.faults.returned} unroutable, {self.faults.refused} refused")
        await self._settled(all_sent=False)
        await self.auditor.listen_to_events("invoice.voided")
        await self.auditor.drain_slow_queue()
        self.say("their consumers are there now")
        await self._settled()
        await eventually(self._arrived, bool, within=PATIENCE)

    async def _arrived(self) -> bool:
        """Tell whether the auditor has seen every event: the broker has them, and hands them out."""
        stored = {str(row["id"]) for row in (await self.auditor.look()).outbox}
        return stored <= {arrival.id for arrival in self.auditor.arrivals}

    async def _stopped(self, instance: Instance) -> tuple[int | None, float]:
        stop = await instance.terminate()
        self.faults.stops.append(stop)
        return stop

    async def _settled(self, *, all_sent: bool = True) -> None:
        """Wait until every message sent so far is processed or parked, copies too, and every event has left."""
        end = time.monotonic() + max(LONGEST_WAIT, len(self.producer.confirmed) / SLOWEST)
        seen, since = (-1, -1), time.monotonic()
        while True:
            self.instances.require_running()
            unsettled = await self.auditor.unsettled(self.producer.confirmed)
            unsent = await self.auditor.unsent() if all_sent else []
            if not unsettled and not unsent and not any((await self.auditor.depths()).values()):
                return
            now = time.monotonic()
            if (state := (len(unsettled), len(unsent))) != seen:
                seen, since = state, now
            if now > min(end, since + PATIENCE):
                names = ", ".join(message.name for message in unsettled[:5])
                why = f"nothing has moved for {now - since:.0f} s" if now > since + PATIENCE else "this takes too long"
                raise StalledError(
                    f"{why}: {len(unsent)} events unsent, {len(unsettled)} messages"
                    f" neither processed nor parked ({names})"
                )
            await pause(0.1)


@asynccontextmanager
async def _meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do it beside what the block does, and to its end after it."""
    task = asyncio.create_task(work)
    try:
        yield
        await task
    finally:
        task.cancel()
