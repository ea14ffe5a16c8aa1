"""The order in which the broker is told, and what is done when it does not want to hear."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aio_pika import DeliveryMode

from service.reliability.envelope import read_envelope
from service.reliability.outcome import Ack, Diagnosis, Outcome, Park, Reason, Retry, Return
from service.reliability.publisher import Publication, Refused, Returned, Unconfirmed
from service.reliability.retry import RetryPolicy
from service.reliability.settlement import Settlement, successor
from service.reliability.topology import QueueFamily
from service.telemetry import Metrics
from tests.support.doubles import ScriptedPublisher, delivery

WHY = Diagnosis("E", "why")
RETRY = Retry(timedelta(seconds=5), 2, WHY)
PARK = Park(Reason.INVALID, 0, WHY)


class Bench:
    """A settlement with everything around it."""

    def __init__(self, *script: Publication) -> None:
        self.journal: list[str] = []
        self.publisher = ScriptedPublisher(list(script), journal=self.journal)
        self.metrics = Metrics()
        self.settlement = Settlement(
            family=QueueFamily("orders", ("order.placed",), RetryPolicy(5, (timedelta(seconds=5),))),
            publisher=self.publisher,
            metrics=self.metrics,
            now=lambda: datetime(2026, 5, 4, tzinfo=UTC),
            jitter=random.random,
            repair=self.repair,
            first_pause=timedelta(milliseconds=1),
            longest_pause=timedelta(milliseconds=2),
        )

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


@pytest.mark.parametrize("outcome", [Ack(), Ack(duplicate=True)])
async def test_what_is_processed_is_acked(outcome: Ack) -> None:
    bench = Bench()
    await bench.settle(outcome)
    assert bench.journal == ["ack"]


@pytest.mark.parametrize(("outcome", "queue"), [(RETRY, "orders.wait.5s"), (PARK, "orders.parking")])
async def test_a_successor_is_confirmed_before_the_original_is_acked(outcome: Outcome, queue: str) -> None:
    bench = Bench()
    await bench.settle(outcome)
    assert bench.journal == [f"confirmed {queue}", "ack"]
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
        "ack",
    ]


async def test_a_successor_whose_queue_is_gone_waits_for_the_topology_to_be_declared() -> None:
    bench = Bench(Returned("gone"))
    await bench.settle(PARK)
    assert bench.journal == ["returned orders.parking", "repair", "confirmed orders.parking", "ack"]


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
    assert bench.journal == ["refused orders.wait.5s", "confirmed orders.wait.5s", "ack"]


async def test_what_was_not_executed_goes_back_to_its_queue() -> None:
    bench = Bench()
    await bench.settle(Return())
    assert bench.journal == ["nack requeue"]


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


@pytest.mark.parametrize("headers", [{"big": "x" * 70_000}, {"odd": object()}, {"huge": 2**70}])
def test_headers_that_cannot_be_sent_are_left_out_rather_than_the_message(headers: dict[str, Any]) -> None:
    message = delivery(headers=headers)
    envelope = read_envelope(message, 5)
    copy = successor(message, envelope, {**envelope.headers, "x-parked-reason": "invalid"})
    assert copy.headers == {"x-parked-reason": "invalid"}
