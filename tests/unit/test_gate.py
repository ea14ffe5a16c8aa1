"""The gate: how many are inside, who is alone, what an outage does, and how it opens again."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from service.reliability.gate import Gate, Turn
from service.reliability.stopping import Stopping
from service.telemetry import Metrics
from tests.support.waiting import eventually


class Bench:
    """A gate whose database can be taken away, and deliveries that stay inside until they are told to leave."""

    def __init__(self, capacity: int = 4) -> None:
        self.answers = True
        self.probes = 0
        self.hopeless = False
        self.taken_back: set[str] = set()
        self.inside: list[str] = []
        self.sent_away: list[str] = []
        self.turns: dict[str, Turn] = {}
        self.most_inside = 0
        self.leave = asyncio.Event()
        self.metrics = Metrics()
        self.stopping = Stopping()
        self.gate = Gate(
            capacity,
            self._probe,
            self.metrics,
            jitter=lambda: 0.0,
            stopping=self.stopping,
            first_pause=timedelta(milliseconds=1),
            longest_pause=timedelta(milliseconds=5),
        )

    async def _probe(self) -> bool:
        self.probes += 1
        if self.probes % 2:
            raise OSError("no route")
        return self.answers

    def arrive(self, name: str, *, alone: bool = False, stay: bool = True) -> asyncio.Task[None]:
        """Start a delivery's way through the gate."""

        async def deliver() -> None:
            def is_hopeless() -> bool:
                return self.hopeless or name in self.taken_back

            async with self.gate.turn(alone=alone, is_hopeless=is_hopeless) as turn:
                self.turns[name] = turn
                if not turn.came:
                    self.sent_away.append(name)
                    return
                self.inside.append(name)
                self.most_inside = max(self.most_inside, len(self.inside))
                try:
                    await (self.leave.wait() if stay else asyncio.sleep(0.001))
                finally:
                    self.inside.remove(name)
                self.gate.succeeded(turn)

        return asyncio.create_task(deliver())

    async def settle(self) -> None:
        """Let everybody go as far as he gets."""
        for _ in range(5):
            await asyncio.sleep(0)

    def is_open(self) -> float | None:
        """Return what the metric says."""
        return self.metrics.registry.get_sample_value("billing_gate_open")


async def test_as_many_are_inside_as_there_is_room_in_the_order_of_their_arrival() -> None:
    bench = Bench(capacity=2)
    tasks = [bench.arrive(name) for name in "abc"]
    await bench.settle()
    assert bench.inside == ["a", "b"]
    bench.leave.set()
    await asyncio.gather(*tasks)
    assert bench.most_inside == 2


async def test_who_is_to_be_alone_does_not_wait_for_a_delivery_that_was_taken_back() -> None:
    """A handler that hangs held up everybody: the next redelivery waited for it, and all others for that one."""
    bench = Bench()
    hanging = bench.arrive("hangs")
    await bench.settle()
    again, following = bench.arrive("again", alone=True), bench.arrive("next")
    await bench.settle()
    assert bench.inside == ["hangs"]
    bench.taken_back.add("hangs")
    bench.gate.sweep()
    await bench.settle()
    assert bench.inside == ["hangs", "again"]
    hanging.cancel()
    await bench.settle()
    assert bench.inside == ["again"], "who leaves was not the one who is alone"
    bench.leave.set()
    await asyncio.gather(again, following)


async def test_who_comes_again_is_alone_and_goes_before_those_who_wait() -> None:
    bench = Bench()
    first = bench.arrive("first")
    await bench.settle()
    again = bench.arrive("again", alone=True)
    another = bench.arrive("another again", alone=True)
    later = bench.arrive("later")
    await bench.settle()
    assert bench.inside == ["first"], "nobody joins while one waits to be alone"
    first.cancel()
    await bench.settle()
    assert bench.inside == ["again"]
    again.cancel()
    await bench.settle()
    assert bench.inside == ["another again"]
    another.cancel()
    await bench.settle()
    assert bench.inside == ["later"]
    later.cancel()


@pytest.mark.parametrize("alone", [False, True])
async def test_who_is_cancelled_takes_no_room(alone: bool) -> None:
    """While waiting, and in the very moment when the turn has come."""
    bench = Bench(capacity=1)
    first, second, third = bench.arrive("first"), bench.arrive("second", alone=alone), bench.arrive("third")
    await bench.settle()
    second.cancel()
    await bench.settle()
    bench.leave.set()
    await first
    third.cancel()  # its turn has come, it has not run yet
    fourth = bench.arrive("fourth")
    await asyncio.wait_for(fourth, 1)
    assert third.cancelled() or third.done()


async def test_during_an_outage_nobody_gets_in_until_a_probe_succeeds() -> None:
    bench = Bench()
    bench.answers = False
    bench.gate.close("gone")
    bench.gate.close("gone, says another")
    tasks = [bench.arrive(name) for name in "abc"]
    await eventually(_value(lambda: bench.probes), lambda n: n >= 4, every=0.001)
    assert (bench.inside, bench.is_open(), bench.gate.is_open) == ([], 0, False)
    bench.answers = True
    await eventually(_value(lambda: bench.gate.is_open), bool, every=0.001)
    await bench.settle()
    assert (bench.inside, bench.is_open()) == (["a"], 1), "one at first"
    bench.leave.set()
    await asyncio.gather(*tasks)


async def test_after_an_outage_each_success_lets_one_more_in() -> None:
    bench = Bench(capacity=4)
    bench.gate.close("gone")
    await eventually(_value(lambda: bench.gate.is_open), bool, every=0.001)
    together = []
    for _ in range(4):
        bench.leave.clear()
        first, *others = [bench.arrive(str(n)) for n in range(6)]
        await bench.settle()
        together.append(len(bench.inside))
        for other in others:
            other.cancel()
        bench.leave.set()
        await first
    assert together == [1, 2, 3, 4]


async def test_who_was_inside_before_an_outage_does_not_speed_up_the_opening() -> None:
    """A database at its limit serves those that it has: their success let everybody in at once."""
    bench = Bench(capacity=4)
    before = [bench.arrive(name) for name in "abc"]
    await bench.settle()
    bench.answers = False
    bench.gate.close("too many connections", bench.turns["a"])
    bench.leave.set()
    await asyncio.gather(*before)
    bench.leave.clear()
    after = [bench.arrive(name) for name in "defg"]
    bench.answers = True
    await eventually(_value(lambda: bench.gate.is_open), bool, every=0.001)
    await bench.settle()
    assert bench.inside == ["d"]
    bench.leave.set()
    await asyncio.gather(*after)


async def test_who_was_inside_before_an_outage_keeps_nobody_out_after_it() -> None:
    """One connection of many was lost: a handler that takes its time, or hangs, stopped all others for as long."""
    bench = Bench(capacity=3)
    before = [bench.arrive(name) for name in "ab"]
    await bench.settle()
    bench.gate.close("gone", bench.turns["a"])
    after = [bench.arrive(name) for name in "cd"]
    await eventually(_value(lambda: bench.gate.is_open), bool, every=0.001)
    await bench.settle()
    assert bench.inside == ["a", "b", "c"], "one more, and as many as there is room"
    bench.leave.set()
    await asyncio.gather(*before, *after)
    assert bench.most_inside == 3


async def test_who_was_inside_before_an_outage_does_not_tell_of_another() -> None:
    """Connections that died with the server are found dead one after another, some long after its return."""
    bench = Bench(capacity=3)
    before = bench.arrive("a")
    await bench.settle()
    bench.gate.close("gone", bench.turns["a"])
    await eventually(_value(lambda: bench.gate.is_open), bool, every=0.001)
    bench.gate.close("gone, says one who hung", bench.turns["a"])
    assert bench.gate.is_open
    bench.leave.set()
    await before
    after = bench.arrive("b")
    await after
    bench.gate.close("gone again", bench.turns["b"])
    assert not bench.gate.is_open
    bench.stopping.set()


async def test_who_waits_for_nothing_is_sent_away() -> None:
    """The delivery's channel is lost, the service stops, or it was held for too long."""
    bench = Bench()
    bench.answers = False
    bench.gate.close("gone")
    waiting = bench.arrive("a")
    await bench.settle()
    bench.hopeless = True
    await asyncio.wait_for(waiting, 1)
    assert bench.sent_away == ["a"]
    bench.stopping.set()


async def test_a_probe_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has fallen silent."""
    monkeypatch.setattr("service.reliability.gate.PROBE_TIMEOUT", 0.01)
    bench = Bench()
    asked = 0

    async def silent() -> bool:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0 if asked > 2 else 60)
        return True

    bench.gate.probe = silent
    bench.gate.close("gone")
    await eventually(_value(lambda: bench.gate.is_open), bool, every=0.001)
    assert asked == 3


def _value(read: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
    async def ask() -> Any:
        return read()

    return ask
