"""A search for what several relays must never do: steps in any order, on `many_relays`."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
import structlog
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from service.reliability.publisher import Confirmed
from tests.support import databases
from tests.support.many_relays import ANSWERS, CLOCK, FrozenClockLoop, Process, World

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
def clocks_of_the_test(template: str) -> Iterator[tuple[asyncio.Runner, str, asyncpg.Connection]]:
    """Yield a loop whose time stands still, and a database with the same clock."""
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


def look_for_a_violation(template: str, examples: int, *, the_same_each_time: bool) -> None:
    """Raise ViolationError, or a group that holds one, where one of so many examples leads to it."""
    with clocks_of_the_test(template) as (runner, url, connection):

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
