"""G8: whatever happens to several relays at any time, events leave in order, once while all live, and all of them."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from service.reliability import lease, outbox
from service.reliability.publisher import Confirmed, Refused, Unsendable
from service.reliability.relay import Relay
from tests.support.many_relays import STEP, ViolationError, World
from tests.support.relay_search import clocks_of_the_test, look_for_a_violation


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

    with clocks_of_the_test(template) as (runner, url, connection):
        runner.run(play(World(url, connection)))


@pytest.mark.guarantee("G8")
def test_nothing_leads_to_a_violation(template: str) -> None:
    """Appends, answers, time, SIGSTOP, SIGKILL and lost sessions in any order; tests/longer looks longer."""
    look_for_a_violation(template, examples=20, the_same_each_time=False)


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
        (_two_stand_by_each_other, _without_lease, "arrived twice|does not count as sent"),
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
        look_for_a_violation(template, examples=200, the_same_each_time=True)
