"""What becomes of each event of a batch, by what the broker said of it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from aio_pika import Message

from service.reliability.destinations import Destination
from service.reliability.dispatch import Batch, Dispatcher
from service.reliability.outbox import OutboxRow
from service.reliability.publisher import (
    Confirmed,
    Publication,
    Refused,
    Returned,
    Unconfirmed,
)
from service.telemetry import Metrics


def row(sequence: int, key: str = "", routing_key: str = "ok", headers: Any = None) -> OutboxRow:
    """Return an event; its body is its number."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    body = str(sequence).encode()
    return OutboxRow(
        uuid4(), "billing", routing_key, "t", key or f"key-{sequence}", body, headers or {}, at, 0, sequence
    )


@dataclass(slots=True)
class Edge:
    """The broker's edge: answers by routing key; what is poison takes everything in flight with it."""

    poison: frozenset[int] = frozenset()
    answers: dict[str, Publication] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    _kill: asyncio.Event = field(default_factory=asyncio.Event)

    async def publish(self, message: Message, exchange: str, routing_key: str) -> Publication:  # noqa: ARG002 - the publisher's
        """Answer after a moment, in which others join in."""
        number = int(message.body)
        self.published.append(number)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        kill = self._kill
        await asyncio.sleep(0.001)
        if number in self.poison and not kill.is_set():
            kill.set()
            self._kill = asyncio.Event()
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        if kill.is_set():
            return Unconfirmed("PRECONDITION_FAILED", lost=True, blamed=True)
        return self.answers.get(routing_key, Confirmed())


def dispatcher(edge: Edge, window: int = 100) -> Dispatcher:
    """Return a dispatcher before a scripted broker."""
    return Dispatcher(edge, Metrics(), window, lambda: 0.0)


def always(_batch: Batch) -> bool:
    """Let every publish start."""
    return True


def errors(batch: Batch, rows: list[OutboxRow]) -> dict[int, str | None]:
    """Return what was recorded, by number."""
    by_id = {r.id: r.sequence for r in rows}
    return {by_id[result.id]: result.error for result in batch.results}


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("poison", [{0}, {57}, {99}, {3, 4}, {10, 60, 90}])
async def test_what_takes_the_channel_down_is_found_and_quarantined(poison: set[int]) -> None:
    """I03: a hundred in flight are lost with it; all but the culprits are confirmed within the same batch."""
    rows = [row(number) for number in range(100)]
    edge = Edge(frozenset(poison))
    batch = await dispatcher(edge).dispatch(rows, always)
    quarantined = {r.id for r in rows if r.sequence in poison}
    assert {result.id for result in batch.results if result.quarantined} == quarantined
    assert {result.id for result in batch.results if result.error is None} == {r.id for r in rows} - quarantined
    assert len(batch.results) == 100
    assert len(edge.published) <= 100 * (2 + 2 * len(poison))


async def test_a_lost_connection_alone_blames_nobody() -> None:
    """Closed by force, or with the broker: lost, but the broker named no message."""

    class Lost(Edge):
        async def publish(self, message: Message, exchange: str, routing_key: str) -> Publication:  # noqa: ARG002 - the publisher's
            self.published.append(int(message.body))
            return Unconfirmed("ConnectionError", lost=True)

    rows = [row(number) for number in range(8)]
    batch = await dispatcher(Lost()).dispatch(rows, always)
    assert set(errors(batch, rows).values()) == {"unconfirmed: ConnectionError"}
    assert not any(result.quarantined for result in batch.results)


async def test_what_cannot_be_built_is_quarantined_and_its_key_goes_on() -> None:
    rows = [row(0, "k", headers=["by hand"]), row(1, "k")]
    batch = await dispatcher(Edge()).dispatch(rows, always)
    found = errors(batch, rows)
    assert (found[0] or "").startswith("quarantined: ")
    assert found[1] is None


@pytest.mark.guarantee("G8")
async def test_what_comes_after_a_refused_event_of_its_key_waits_and_other_keys_go_on() -> None:
    rows = [row(0, "a", "full"), row(1, "a"), row(2, "b")]
    batch = await dispatcher(Edge(answers={"full": Refused("full")})).dispatch(rows, always)
    assert errors(batch, rows) == {0: "refused: full", 2: None}
    assert batch.stuck == {}


async def test_what_comes_after_a_returned_event_of_its_key_goes_on_but_not_to_the_same_destination() -> None:
    rows = [row(0, "a", "nobody"), row(1, "a"), row(2, "a", "nobody"), row(3, "a")]
    batch = await dispatcher(Edge(answers={"nobody": Returned("NO_ROUTE")})).dispatch(rows, always)
    assert errors(batch, rows) == {0: "returned: NO_ROUTE", 1: None, 3: None}
    assert batch.stuck == {Destination("billing", "nobody"): "returned: NO_ROUTE"}


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("first", [Returned("NO_ROUTE"), None], ids=["returned", "passed over"])
async def test_a_destination_released_within_a_batch_gets_a_keys_events_in_order(first: Publication | None) -> None:
    """Its earlier event waits for the next batch, and so its later one must."""
    its_key_goes_on = asyncio.Event()

    class ReleasedByAnotherKey(Edge):
        async def publish(self, message: Message, exchange: str, routing_key: str) -> Publication:  # noqa: ARG002 - the publisher's
            number = int(message.body)
            self.published.append(number)
            if number == 1 and first is not None:
                return first
            if number == 2:
                its_key_goes_on.set()
                await asyncio.sleep(0.01)
            await its_key_goes_on.wait()
            return Confirmed()

    edge = ReleasedByAnotherKey()
    sender = dispatcher(edge)
    if first is None:
        sender.destinations.failed(Destination("billing", "late"), 0, 0.0, holds_keys=False)

    rows = [row(0, "b", "late"), row(1, "a", "late"), row(2, "a"), row(3, "a", "late")]
    batch = await sender.dispatch(rows, always)
    assert batch.released == [Destination("billing", "late")]
    assert 3 not in edge.published
    assert {number for number, error in errors(batch, rows).items() if error is None} == {0, 2}


async def test_only_one_event_probes_a_destination_and_its_confirm_releases_it() -> None:
    edge = Edge(answers={"nobody": Returned("NO_ROUTE")})
    sender = dispatcher(edge)
    await sender.dispatch([row(0, routing_key="nobody")], always)
    edge.published.clear()
    rows = [row(number, routing_key="nobody") for number in range(1, 9)]
    await sender.dispatch(rows, always)
    assert edge.published == [1]
    edge.answers.clear()
    batch = await sender.dispatch([row(9, routing_key="nobody")], always)
    assert batch.released == [Destination("billing", "nobody")]
    assert not list(sender.destinations.waiting())


async def test_a_full_queue_costs_a_window_and_then_one_publish() -> None:
    """A thousand events that a full queue refuses: those in flight find out, the others are not tried."""
    edge = Edge(answers={"full": Refused("full")})
    sender = dispatcher(edge, window=10)
    rows = [row(number, routing_key="full" if number % 2 else "ok") for number in range(1000)]
    batch = await sender.dispatch(rows, always)
    assert sum(error is None for error in errors(batch, rows).values()) == 500
    assert len(edge.published) - 500 <= 10
    assert edge.most_in_flight == 10


async def test_an_absent_broker_costs_no_event_an_attempt() -> None:
    edge = Edge(answers={"ok": Unconfirmed("no connection", away=True)})
    batch = await dispatcher(edge, window=5).dispatch([row(number) for number in range(50)], always)
    assert batch.results == []
    assert batch.away == "no connection"
    assert len(edge.published) == 5


def _after(times: int) -> Callable[[Batch], bool]:
    """Return a lease that is lost after so many publishes."""
    left = iter(range(times))
    return lambda _batch: next(left, None) is not None


async def test_nothing_starts_once_the_lease_is_lost() -> None:
    edge = Edge()
    rows = [row(number) for number in range(50)]
    batch = await dispatcher(edge, window=5).dispatch(rows, _after(7))
    assert len(edge.published) == len(batch.results) == 7
