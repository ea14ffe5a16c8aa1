"""G8: whatever happens to several relays at any time, events leave in order, once while all live, and all of them."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from service.reliability import lease, outbox
from service.reliability.publisher import Confirmed, Refused, Unsendable
from service.reliability.relay import Relay
from tests.support import databases
from tests.support.many_relays import ANSWERS, CLOCK, STEP, FrozenClockLoop, Process, ViolationError, World

EMPTY = "truncate outbox_messages, relay_lease restart identity"

SOME = st.integers(0, 100)


class Relays(RuleBasedStateMachine):
    """Two relays, three keys, two destinations, and all that can happen."""

    database_url: str
    runner: asyncio.Runner
    connection: asyncpg.Connection

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.runner.run(coroutine)

    @initialize()
    def begin(self) -> None:
        async def begin() -> None:
            await self.connection.execute(EMPTY)
            self.world = World(self.database_url, self.connection)
            await self.world.start_process()
            await self.world.start_process()

        self._run(begin())

    def _process(self, n: int) -> Process:
        return self.world.processes[n % len(self.world.processes)]

    @rule(key=st.sampled_from("ab"), destination=st.sampled_from(["x", "y"]), times=st.integers(1, 3))
    def append(self, key: str, destination: str, times: int) -> None:
        for _ in range(times):
            self._run(self.world.append(key, destination))

    @rule(seconds=st.sampled_from([0.25, 0.75, 2, 4]))
    def pass_time(self, seconds: float) -> None:
        self._run(self.world.pass_time(seconds))

    @rule(n=SOME, answer=st.sampled_from(ANSWERS))
    def answer(self, n: int, answer: Any) -> None:
        if self.world.publishes:
            self._run(self.world.answer(self.world.publishes[n % len(self.world.publishes)], answer))

    @rule()
    def confirm_all(self) -> None:
        for publish in list(self.world.publishes):
            self._run(self.world.answer(publish, Confirmed()))

    @rule(n=SOME)
    def stop(self, n: int) -> None:
        self._run(self.world.stop(self._process(n)))

    @rule(n=SOME, answer=st.sampled_from(ANSWERS))
    def stop_for_longer_than_the_lease(self, n: int, answer: Any) -> None:
        """Of a relay in the middle of a batch: the narrowest case, which single steps hit rarely."""
        if not self.world.publishes:
            return
        process = self.world.publishes[n % len(self.world.publishes)].process
        self._run(self.world.stop(process))
        for publish in list(self.world.publishes):
            if publish.process is process and publish in self.world.publishes:
                self._run(self.world.answer(publish, answer))
        self._run(self.world.pass_time(4))
        self._run(self.world.go_on(process))
        self.confirm_all()

    @rule(n=SOME)
    def go_on(self, n: int) -> None:
        self._run(self.world.go_on(self._process(n)))

    @rule(n=SOME)
    def cut_off(self, n: int) -> None:
        self._run(self.world.cut_off(self._process(n)))

    @rule(n=SOME)
    def kill_and_start_another(self, n: int) -> None:
        self._run(self.world.kill(self._process(n)))
        self._run(self.world.start_process())

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self._run(self.world.finish())
        finally:
            self._run(self.world.close())


@contextmanager
def _clocks_of_the_test(template: str) -> Iterator[tuple[asyncio.Runner, str, asyncpg.Connection]]:
    with structlog.testing.capture_logs(), asyncio.Runner(loop_factory=FrozenClockLoop) as runner:
        new = databases.new_database(template)
        url = databases.url_of(runner.run(new.__aenter__()))
        try:
            connection = runner.run(asyncpg.connect(url))
            runner.run(connection.execute(CLOCK))
            yield runner, url, connection
            runner.run(connection.close())
        finally:
            runner.run(new.__aexit__(None, None, None))


def _look_for_a_violation(template: str, examples: int, *, the_same_each_time: bool) -> None:
    with _clocks_of_the_test(template) as (runner, url, connection):

        class Machine(Relays):
            database_url = url

        Machine.runner, Machine.connection = runner, connection
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=40,
                deadline=None,
                database=None,
                phases=(Phase.generate,),  # its history can be read, and shrinking takes minutes
                derandomize=the_same_each_time,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )


async def _two_stand_by_each_other(world: World) -> None:
    await world.start_process()
    await world.start_process()
    await world.append("a", "x")
    await world.pass_time(STEP)


async def _an_event_follows_one_that_was_refused(world: World) -> None:
    await world.start_process()
    await world.append("a", "x")
    await world.pass_time(STEP)
    await world.answer(world.publishes[0], Refused("the queue is full"))
    await world.append("a", "y")
    await world.pass_time(STEP)


async def _a_relay_goes_on_after_it_was_replaced(world: World) -> None:
    await world.start_process()
    await world.append("a", "x")
    await world.append("a", "x")
    await world.pass_time(STEP)
    (first,) = world.publishes
    await world.stop(first.process)
    await world.answer(first, Confirmed())
    await world.start_process()
    await world.pass_time(4)
    await world.answer(world.publishes[0], Confirmed())
    await world.go_on(first.process)


async def _a_relay_hears_after_it_was_replaced_that_an_event_cannot_be_sent(world: World) -> None:
    await world.start_process()
    await world.append("a", "x")
    await world.pass_time(STEP)
    (late,) = world.publishes
    await world.stop(late.process)
    await world.answer(late, Unsendable("no frame can be made of it"))
    await world.start_process()
    await world.pass_time(4)
    await world.go_on(late.process)


def _play(scenario: Callable[[World], Coroutine[Any, Any, None]], template: str) -> None:
    async def play(world: World) -> None:
        try:
            await scenario(world)
            await world.finish()
        finally:
            await world.close()

    with _clocks_of_the_test(template) as (runner, url, connection):
        runner.run(play(World(url, connection)))


@pytest.mark.guarantee("G8")
def test_nothing_leads_to_a_violation(template: str) -> None:
    """Appends, answers, time, SIGSTOP, SIGKILL and lost sessions in any order."""
    _look_for_a_violation(template, examples=60, the_same_each_time=False)


def _without_key_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = outbox.READ[outbox.READ.index("    and not exists (") : outbox.READ.index("order by")]
    unguarded = "    and cardinality($4::text[]) = cardinality($5::text[])\n"
    monkeypatch.setattr(outbox, "READ", outbox.READ.replace(guard, unguarded))


def _without_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    held = "where lease.holder = excluded.holder or lease.expires_at < now()"
    assert held in lease.HOLD
    monkeypatch.setattr(lease, "HOLD", lease.HOLD.replace(held, ""))


def _without_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Relay, "_may_publish", lambda relay: not relay._lost.is_set())


def _without_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    fence = "and exists (select from relay_lease where name = 'outbox' and holder = $5)"
    assert fence in outbox.RECORD
    monkeypatch.setattr(outbox, "RECORD", outbox.RECORD.replace(fence, "and $5::uuid is not null"))


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    ("scenario", "remove", "violation"),
    [
        (_two_stand_by_each_other, _without_lease, "arrived twice"),
        (_an_event_follows_one_that_was_refused, _without_key_guard, "arrived before event 0 of its key"),
        (_a_relay_goes_on_after_it_was_replaced, _without_own_clock, "arrived twice"),
        (
            _a_relay_hears_after_it_was_replaced_that_an_event_cannot_be_sent,
            _without_fence,
            "confirmed and does not count as sent",
        ),
    ],
)
def test_each_guard_is_needed(
    scenario: Callable[[World], Coroutine[Any, Any, None]],
    remove: Callable[[pytest.MonkeyPatch], None],
    violation: str,
    template: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shortest stories in which it matters: with it all is well, without it something is seen."""
    _play(scenario, template)
    remove(monkeypatch)
    with pytest.raises(ViolationError, match=violation):
        _play(scenario, template)


def test_the_search_finds_a_missing_guard(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `test_nothing_leads_to_a_violation` is worth."""
    _without_lease(monkeypatch)
    with pytest.raises((ViolationError, ExceptionGroup)):
        _look_for_a_violation(template, examples=200, the_same_each_time=True)
