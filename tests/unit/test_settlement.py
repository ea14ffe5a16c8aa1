"""The order in which the broker is told, and what is done when it does not want to hear."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from aio_pika import DeliveryMode, IncomingMessage, Message
from aio_pika.exceptions import AMQPConnectionError
from pamqp import encode
from structlog.testing import capture_logs

from service.reliability.barrier import Point
from service.reliability.envelope import read_envelope
from service.reliability.frames import guard
from service.reliability.outcome import Ack, Diagnosis, Outcome, Park, Reason, Retry, Return
from service.reliability.publisher import Publication, Refused, Returned, Unconfirmed
from service.reliability.retry import RetryPolicy
from service.reliability.settlement import HEADERS_LIMIT, Settlement, channel_is_closed, successor
from service.reliability.stopping import Stopping
from service.reliability.strategies import Broker, DeadLetter, Staged
from service.reliability.topology import QueueFamily, Strategy
from service.telemetry import Metrics
from tests.support.doubles import ScriptedPublisher, delivery

WHY = Diagnosis("E", "why")
RETRY = Retry(timedelta(seconds=5), 2, WHY)
PARK = Park(Reason.INVALID, 0, WHY)


class Bench:
    """A settlement with everything around it."""

    def __init__(self, *script: Publication, strategy: Strategy | None = None) -> None:
        self.journal: list[str] = []
        self.publisher = ScriptedPublisher(list(script), journal=self.journal)
        self.metrics = Metrics()
        self.settlement = Settlement(
            family=QueueFamily(
                "orders",
                ("order.placed",),
                RetryPolicy(5, (timedelta(seconds=5), timedelta(minutes=2))),
                strategy or Staged(),
            ),
            publisher=self.publisher,
            metrics=self.metrics,
            now=lambda: datetime(2026, 5, 4, tzinfo=UTC),
            jitter=random.random,
            repair=self.repair,
            barrier=self.barrier,
            first_pause=timedelta(milliseconds=1),
            longest_pause=timedelta(milliseconds=2),
        )

    async def barrier(self, point: Point) -> None:
        """Note how far a delivery is."""
        self.journal.append(point)

    async def repair(self) -> None:
        """Note that the topology is to be declared again."""
        self.journal.append("repair")

    async def settle(self, outcome: Outcome, **properties: Any) -> None:
        """Settle a delivery."""
        message = delivery(journal=self.journal, **properties)
        await self.settlement.settle(message, read_envelope(message, 5), outcome)

    def count(self, kind: str, outcome: str) -> float | None:
        """Return the metric of settled deliveries."""
        return self.metrics.registry.get_sample_value("billing_deliveries_total", {"type": kind, "outcome": outcome})

    def refused(self, queue: str) -> float | None:
        """Return the metric of successors that were not confirmed."""
        return self.metrics.registry.get_sample_value("billing_successors_refused_total", {"queue": queue})


@pytest.mark.parametrize("outcome", [Ack(), Ack(duplicate=True)])
async def test_what_is_processed_is_acked(outcome: Ack) -> None:
    bench = Bench()
    await bench.settle(outcome)
    assert bench.journal == ["ack"]


@pytest.mark.parametrize(
    ("strategy", "told"), [(DeadLetter(), "nack"), (Broker(), "nack requeue")], ids=["dead-letter", "broker"]
)
async def test_a_way_back_that_is_the_brokers_is_one_nack(strategy: Strategy, told: str) -> None:
    bench = Bench(strategy=strategy)
    await bench.settle(RETRY)
    assert bench.journal == [told]
    assert bench.count("order.placed", "retried") == 1


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize(("outcome", "queue"), [(RETRY, "orders.wait.5s"), (PARK, "orders.parking")])
async def test_a_successor_is_confirmed_before_the_original_is_acked(outcome: Outcome, queue: str) -> None:
    bench = Bench()
    await bench.settle(outcome)
    assert bench.journal == [f"confirmed {queue}", "successor-confirmed", "ack"]
    [(message, exchange, _)] = bench.publisher.published
    assert exchange == ""
    assert message.delivery_mode is DeliveryMode.PERSISTENT


async def test_a_successor_that_is_not_confirmed_is_published_again_until_it_is() -> None:
    bench = Bench(Refused("full"), Unconfirmed("late"), Refused("full"))
    await bench.settle(PARK)
    queue = "orders.parking"
    assert bench.journal == [
        f"refused {queue}",
        f"unconfirmed {queue}",
        f"refused {queue}",
        f"confirmed {queue}",
        "successor-confirmed",
        "ack",
    ]
    assert bench.refused(queue) == 3
    assert len({message.body for message, _, _ in bench.publisher.published}) == 1
    assert {message.message_id for message, _, _ in bench.publisher.published} == {"m-1"}


async def test_a_successor_whose_queue_is_gone_waits_for_the_topology_to_be_declared() -> None:
    bench = Bench(Returned("gone"))
    await bench.settle(PARK)
    assert bench.journal == [
        "returned orders.parking",
        "repair",
        "confirmed orders.parking",
        "successor-confirmed",
        "ack",
    ]


async def test_a_repair_that_fails_is_tried_again_and_the_delivery_is_held() -> None:
    bench = Bench(Returned("gone"), Returned("gone"))
    failures = [OSError("no broker"), RuntimeError("no luck")]

    async def fail() -> None:
        bench.journal.append("repair fails")
        raise failures.pop()

    bench.settlement.repair = fail
    await bench.settle(RETRY)
    assert bench.journal == [
        "returned orders.wait.5s",
        "repair fails",
        "returned orders.wait.5s",
        "repair fails",
        "confirmed orders.wait.5s",
        "successor-confirmed",
        "ack",
    ]


@pytest.mark.parametrize("publication", [Refused("full"), Unconfirmed("late")])
async def test_a_queue_that_is_there_is_not_repaired(publication: Publication) -> None:
    bench = Bench(publication)
    await bench.settle(PARK)
    assert "repair" not in bench.journal


async def test_a_channel_that_is_lost_while_the_successor_is_held_ends_the_holding() -> None:
    bench = Bench(Refused("full"), Refused("full"), Refused("full"))
    message = delivery(journal=bench.journal)

    def is_lost(lost: IncomingMessage) -> bool:
        assert lost is message
        return len(bench.journal) >= 2

    bench.settlement.is_lost = is_lost
    await bench.settlement.settle(message, read_envelope(message, 5), PARK)
    assert bench.journal == ["refused orders.parking", "refused orders.parking"]
    assert bench.count("order.placed", "parked") is None


async def test_a_channel_is_closed_when_it_says_so_or_cannot_be_asked() -> None:
    message = delivery()
    assert not channel_is_closed(message)
    message.channel.is_closed = True  # type: ignore[misc]
    assert channel_is_closed(message)


async def test_a_task_that_is_cancelled_while_it_holds_acks_nothing() -> None:
    bench = Bench(*(Refused("full") for _ in range(10_000)))
    task = asyncio.create_task(bench.settle(PARK))
    while len(bench.journal) < 3:
        await asyncio.wait({task}, timeout=0.001)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert set(bench.journal) == {"refused orders.parking"}


async def test_a_pause_ends_when_the_service_stops() -> None:
    bench = Bench(*(Refused("full") for _ in range(10)))
    bench.settlement.first_pause = bench.settlement.longest_pause = timedelta(hours=1)
    task = asyncio.create_task(bench.settle(PARK))
    while not bench.journal:
        await asyncio.wait({task}, timeout=0.001)
    bench.settlement.stopping.set()
    async with asyncio.timeout(5):
        await task
    assert bench.journal == ["refused orders.parking"] * 2


@pytest.mark.parametrize(
    ("publication", "expected"),
    [(Refused("full"), [1, 2, 4, 8, 16, 30, 30]), (Unconfirmed("no connection", away=True), [1, 2, 4, 5, 5, 5, 5])],
    ids=["refused", "away"],
)
async def test_pauses_double_up_to_the_longest(publication: Publication, expected: list[int]) -> None:
    bench = Bench(*[publication] * 7)
    pauses: list[float] = []

    class Pauses(Stopping):
        """Notes pauses instead of making them."""

        async def pause(self, duration: timedelta) -> None:
            pauses.append(duration.total_seconds())

    bench.settlement.stopping = Pauses()
    bench.settlement.jitter = lambda: 0.0
    bench.settlement.first_pause, bench.settlement.longest_pause = timedelta(seconds=1), timedelta(seconds=30)
    await bench.settle(PARK)
    assert pauses == expected


async def test_no_copy_is_made_of_a_delivery_whose_channel_is_lost() -> None:
    bench = Bench()
    message = delivery(journal=bench.journal)
    message.channel.is_closed = True  # type: ignore[misc]
    await bench.settlement.settle(message, read_envelope(message, 5), PARK)
    assert bench.journal == []
    assert bench.publisher.published == []


async def test_an_ack_that_comes_too_late_is_no_failure() -> None:
    bench = Bench()
    message = delivery(journal=bench.journal)
    message.channel.is_closed = True  # type: ignore[misc]
    await bench.settlement.settle(message, read_envelope(message, 5), Ack())
    assert bench.count("order.placed", "processed") is None


async def test_a_service_that_stops_tries_once_and_leaves_the_delivery_unsettled() -> None:
    bench = Bench(Refused("full"))
    bench.settlement.stopping.set()
    await bench.settle(RETRY)
    await bench.settle(RETRY)
    assert bench.journal == ["refused orders.wait.5s", "confirmed orders.wait.5s", "successor-confirmed", "ack"]


async def test_a_service_that_stops_repairs_nothing() -> None:
    bench = Bench(Returned("gone"))
    bench.settlement.stopping.set()
    await bench.settle(PARK)
    assert bench.journal == ["returned orders.parking"]


@pytest.mark.parametrize(
    "error", [AMQPConnectionError(), ConnectionResetError(), RuntimeError("closed"), asyncio.CancelledError()]
)
@pytest.mark.parametrize("outcome", [Ack(), RETRY, Return()])
async def test_whatever_the_client_raises_for_a_lost_channel_is_no_failure(
    outcome: Outcome, error: BaseException
) -> None:
    """The broker delivers it again, and the inbox recognises it. A death by heartbeat is told as a cancellation."""
    bench = Bench()
    message = delivery(journal=bench.journal)
    message.channel.error = error  # type: ignore[attr-defined]
    with capture_logs() as logs:
        await bench.settlement.settle(message, read_envelope(message, 5), outcome)
    assert [entry["event"] for entry in logs] == ["settlement_lost"]
    assert not {"ack", "reject requeue"} & set(bench.journal)


@pytest.mark.parametrize(
    ("delay", "queue"), [(timedelta(seconds=5), "orders.wait.5s"), (timedelta(minutes=2), "orders.wait.2m")]
)
async def test_a_retry_goes_to_the_wait_queue_of_its_delay_with_the_next_attempt(delay: timedelta, queue: str) -> None:
    bench = Bench()
    await bench.settle(Retry(delay, 4, WHY), headers={"tenant": "a"})
    [(message, exchange, routing_key)] = bench.publisher.published
    assert (exchange, routing_key) == ("", queue)
    assert message.headers == {
        "tenant": "a",
        "x-attempt": 4,
        "x-original-exchange": "orders",
        "x-original-routing-key": "order.placed",
    }


async def test_a_parked_copy_says_why_when_and_where() -> None:
    bench = Bench()
    await bench.settle(Park(Reason.ATTEMPTS_EXHAUSTED, 5, Diagnosis("pkg.E", "why")), headers={"tenant": "a"})
    [(message, _, _)] = bench.publisher.published
    assert message.headers == {
        "tenant": "a",
        "x-parked-reason": "attempts-exhausted",
        "x-parked-at": "2026-05-04T00:00:00.000+00:00",
        "x-attempts": 5,
        "x-exception-type": "pkg.E",
        "x-exception-message": "why",
        "x-original-exchange": "orders",
        "x-original-routing-key": "order.placed",
        "x-original-queue": "orders.work",
    }


async def test_what_was_not_executed_goes_back_to_its_queue() -> None:
    bench = Bench()
    await bench.settle(Return())
    assert bench.journal == ["reject requeue"]
    assert bench.publisher.published == []


@pytest.mark.parametrize(
    ("outcome", "name"),
    [
        (Ack(), "processed"),
        (Ack(duplicate=True), "duplicate"),
        (RETRY, "retried"),
        (PARK, "parked"),
        (Return(), "returned"),
    ],
)
async def test_every_outcome_is_counted_once_under_its_name(outcome: Outcome, name: str) -> None:
    bench = Bench()
    await bench.settle(outcome)
    counted = {
        (sample.labels["type"], sample.labels["outcome"]): sample.value
        for metric in bench.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "billing_deliveries_total"
    }
    assert counted == {("order.placed", name): 1}


async def test_no_body_and_no_header_is_logged() -> None:
    bench = Bench(Refused("full"))
    with capture_logs() as logs:
        for outcome in (Ack(), RETRY, PARK, Return()):
            await bench.settle(outcome, body=b"4111-1111", headers={"authorization": "4111-1111"})
    assert [entry["event"] for entry in logs] == [
        "delivery_settled",
        "successor_held",
        "message_retried",
        "message_parked",
        "delivery_settled",
    ]
    assert "4111" not in str(logs)


async def test_a_strangers_type_is_no_label_of_a_metric() -> None:
    bench = Bench()
    await bench.settle(PARK, message_type="something.invented")
    await bench.settle(Ack())
    assert bench.count("something.invented", "parked") is None
    assert bench.count("other", "parked") == 1
    assert bench.count("order.placed", "processed") == 1


async def test_a_copy_carries_identity_and_body_and_nothing_that_would_harm_it() -> None:
    bench = Bench()
    await bench.settle(
        PARK,
        body=b"\xff\x00",
        message_type="order.placed",
        correlation_id="c-1",
        content_type="text/odd",
        content_encoding="gzip",
        app_id="shop",
        timestamp=datetime(2026, 5, 4, tzinfo=UTC),
        expiration="5",
        user_id="guest",
        reply_to="somewhere",
        priority=9,
        delivery_mode=1,
    )
    [(message, _, _)] = bench.publisher.published
    assert message.body == b"\xff\x00"
    assert (message.message_id, message.correlation_id, message.type) == ("m-1", "c-1", "order.placed")
    assert (message.content_type, message.content_encoding, message.app_id) == ("text/odd", "gzip", "shop")
    assert message.timestamp == datetime(2026, 5, 4, tzinfo=UTC)
    assert (message.expiration, message.user_id, message.reply_to) == (None, None, None)
    assert not message.priority


@pytest.mark.parametrize("outcome", [RETRY, PARK])
async def test_a_copy_always_has_a_type_and_never_an_id_that_the_producer_did_not_set(outcome: Outcome) -> None:
    bench = Bench()
    await bench.settle(outcome, message_id=None, message_type=None)
    [(message, _, _)] = bench.publisher.published
    assert (message.type, message.message_id) == ("order.placed", None)


async def test_what_the_producer_left_out_stays_out() -> None:
    bench = Bench()
    await bench.settle(PARK)
    [(message, _, _)] = bench.publisher.published
    # The client's own "nothing": a priority of 0, an empty cluster id.
    told = {name for name, value in _on_the_wire(message).items() if value not in (None, "", 0)}
    assert told == {"message_id", "message_type", "delivery_mode", "headers"}


@pytest.mark.parametrize("mode", [None, 1, 2])
@pytest.mark.parametrize("outcome", [RETRY, PARK])
async def test_a_copy_is_persistent_whatever_the_original_was(outcome: Outcome, mode: int | None) -> None:
    bench = Bench()
    await bench.settle(outcome, delivery_mode=mode)
    [(message, _, _)] = bench.publisher.published
    assert _on_the_wire(message)["delivery_mode"] == 2


def _on_the_wire(message: Message) -> dict[str, Any]:
    """Return the properties as the client sends them."""
    return dict(message.properties)


@pytest.mark.parametrize("headers", [{"big": "x" * 70_000}, {"odd": object()}, {"huge": 2**70}])
def test_headers_that_cannot_be_sent_are_left_out_rather_than_the_message(headers: dict[str, Any]) -> None:
    message = delivery(headers=headers)
    envelope = read_envelope(message, 5)
    copy = successor(message, envelope, {**envelope.headers, "x-parked-reason": "invalid"})
    assert copy.headers == {"x-parked-reason": "invalid"}


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("odd", object(), None),
        ("huge", 2**70, None),
        ("beyond single precision", 1e300, 1e300),
        ("a mantissa that does not fit", Decimal(2**32 - 1), None),
        ("n" * 129, "x", None),
        ("in a table", {"n" * 129: "x"}, None),
        ("too big", "x" * 70_000, None),
        ("no text", b"\xff", bytearray(b"\xff")),
        ("no text, deeper", [{"a": b"\xff"}, b"\xfe"], [{"a": bytearray(b"\xff")}, bytearray(b"\xfe")]),
        ("n" * 128, "x", "x"),
    ],
)
def test_one_header_that_cannot_be_sent_does_not_take_the_others_with_it(name: str, value: Any, kept: Any) -> None:
    """Bytes that are no text arrive in any header's value; with them all headers were lost, tracing among them."""
    guard()  # as with every connection: what writes a header's value is ours, too
    message = delivery(headers={"before": 1, name: value, "traceparent": "00-abc"})
    envelope = read_envelope(message, 5)
    copy = successor(message, envelope, {**envelope.headers, "x-parked-reason": "invalid"})
    wanted = {"before": 1, "traceparent": "00-abc", "x-parked-reason": "invalid"}
    assert copy.headers == wanted | ({} if kept is None else {name: kept})
    assert len(encode.field_table(copy.headers)) <= HEADERS_LIMIT


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize(("more", "kept"), [(0, True), (1, False)])
def test_headers_are_kept_up_to_the_limit(more: int, kept: bool) -> None:
    ours = {"x-parked-reason": "invalid"}
    room = HEADERS_LIMIT - len(encode.field_table({**ours, "big": ""}))
    message = delivery(headers={"big": "x" * (room + more)})
    envelope = read_envelope(message, 5)
    assert ("big" in successor(message, envelope, {**envelope.headers, **ours}).headers) is kept
    assert successor(message, envelope, {**envelope.headers, **ours}).headers["x-parked-reason"] == "invalid"


async def test_a_message_whose_headers_cannot_be_sent_still_waits_for_its_next_attempt() -> None:
    bench = Bench()
    await bench.settle(RETRY, headers={"odd": object()}, body=b"kept")
    [(message, _, queue)] = bench.publisher.published
    assert (queue, message.body) == ("orders.wait.5s", b"kept")
    assert message.headers == {
        "x-attempt": 2,
        "x-original-exchange": "orders",
        "x-original-routing-key": "order.placed",
    }
    assert bench.journal[-1] == "ack"
