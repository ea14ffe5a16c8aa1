"""The subscribers with `TestRabbitBroker`: no server, the same middleware, a database in memory."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from faststream.exceptions import SubscriberNotFound
from faststream.rabbit import RabbitBroker, TestRabbitBroker

from schemas import OrderCancelled, OrderPaid, OrderPlaced
from service.billing.errors import BillingError, RuleViolationError
from service.billing.handlers import subscribe
from service.billing.invoice import Status
from service.contract import ORDER_EVENTS
from service.reliability.inbound import Inbound
from service.reliability.middleware import Reliability
from service.reliability.outcome import Reason
from service.reliability.retry import RetryPolicy
from service.reliability.settlement import Settlement
from service.reliability.topology import QueueFamily
from service.telemetry import Metrics
from service.testing.memory import MemoryDatabase
from tests.support.doubles import ScriptedPublisher, delivery
from tests.support.orders import cancelled, paid, placed

ORDER = "5d2e1f0a-0000-4000-8000-000000000001"
NOW = datetime(2026, 5, 4, 10, tzinfo=UTC)


class Bench:
    """The application without servers."""

    def __init__(self) -> None:
        policy = RetryPolicy(
            max_attempts=3,
            delays=(timedelta(seconds=5), timedelta(seconds=30)),
            permanent={RuleViolationError: Reason.REJECTED_BY_RULE},
            safe=(BillingError,),
        )
        family = QueueFamily("orders", ORDER_EVENTS, policy)
        self.database = MemoryDatabase(NOW)
        self.publisher = ScriptedPublisher()
        self.broker = RabbitBroker(logger=None)
        self.inbound = Inbound(self.broker, family)
        subscribe(self.inbound)
        metrics = Metrics()
        self.reliability = Reliability(
            inbound=self.inbound,
            transactions=self.database,
            settlement=Settlement(
                family, self.publisher, metrics, now=lambda: NOW, jitter=random.random, is_lost=lambda _: False
            ),
            metrics=metrics,
            handler_timeout=timedelta(seconds=5),
            max_body_bytes=10_000,
            slots=asyncio.Semaphore(5),
            jitter=random.random,
        )
        self.broker.add_middleware(self.reliability)

    async def publish(self, event: tuple[str, bytes], *, message_id: str = "m-1", **properties: Any) -> None:
        """Publish through the test broker."""
        event_type, body = event
        properties = {"content_type": "application/json"} | properties
        await self.broker.publish(body, exchange="orders", routing_key=event_type, message_id=message_id, **properties)

    @property
    def successors(self) -> list[tuple[str, Any]]:
        """The copies handed over, with their queues: the reason of a parked one, the attempt of a waiting one."""
        return [
            (queue, message.headers.get("x-parked-reason") or message.headers["x-attempt"])
            for message, _, queue in self.publisher.published
        ]


@pytest.fixture
def bench() -> Bench:
    """The application without servers."""
    return Bench()


async def test_each_event_reaches_its_own_handler(bench: Bench) -> None:
    async with TestRabbitBroker(bench.broker):
        await bench.publish(placed(ORDER), message_id="m-1")
        await bench.publish(paid(ORDER, "19.90"), message_id="m-2")
    [invoice] = bench.database.tables.invoices.values()
    assert invoice.status is Status.PAID
    assert [event.type for event in bench.database.tables.events] == ["invoice.created", "invoice.paid"]
    assert {event.key for event in bench.database.tables.events} == {ORDER}
    assert bench.successors == []


async def test_a_cancelled_order_is_void(bench: Bench) -> None:
    async with TestRabbitBroker(bench.broker):
        await bench.publish(placed(ORDER), message_id="m-1")
        await bench.publish(cancelled(ORDER), message_id="m-2")
    [invoice] = bench.database.tables.invoices.values()
    assert invoice.status is Status.VOID


async def test_a_duplicate_does_not_run_the_handler(bench: Bench) -> None:
    async with TestRabbitBroker(bench.broker):
        for _ in range(3):
            await bench.publish(placed(ORDER))
    assert len(bench.database.tables.events) == 1
    assert len(bench.database.tables.processed) == 1
    assert bench.successors == []


async def test_the_same_id_with_other_content_is_parked(bench: Bench) -> None:
    async with TestRabbitBroker(bench.broker):
        await bench.publish(placed(ORDER))
        await bench.publish(placed(ORDER, customer_id="customer-2"))
    assert bench.successors == [("orders.parking", "message-id-conflict")]


@pytest.mark.parametrize(
    ("body", "properties", "reason"),
    [
        (b"{", {}, "unreadable"),
        (b"", {}, "unreadable"),
        (b"null", {}, "invalid"),
        (b"{}", {}, "invalid"),
        (placed(ORDER)[1], {"content_encoding": "gzip"}, "unreadable"),
        (placed(ORDER, customer_id="x" * 20_000)[1], {}, "too-large"),
        (placed(ORDER, lines=[])[1], {}, "invalid"),
        (placed(ORDER, currency="XXX")[1], {}, "invalid"),
    ],
)
async def test_what_can_never_succeed_is_parked_at_once(
    bench: Bench, body: bytes, properties: dict[str, Any], reason: str
) -> None:
    async with TestRabbitBroker(bench.broker):
        await bench.publish(("order.placed", body), **properties)
    assert bench.successors == [("orders.parking", reason)]
    assert bench.database.tables.processed == {}


@pytest.mark.parametrize(
    "content_type", ["", "application/json;charset=utf-8", "APPLICATION/JSON", "text/plain", "junk"]
)
async def test_the_content_type_decides_nothing(bench: Bench, content_type: str) -> None:
    async with TestRabbitBroker(bench.broker):
        await bench.publish(placed(ORDER), content_type=content_type)
    assert len(bench.database.tables.events) == 1


async def test_a_message_without_an_id_is_parked(bench: Bench) -> None:
    """The framework invents an id, a new one at each delivery: only the wire counts."""
    subscriber = bench.inbound.find("order.placed")
    assert subscriber is not None
    async with TestRabbitBroker(bench.broker):
        await subscriber.process_message(delivery(placed(ORDER)[1], message_id=None))
    assert bench.successors == [("orders.parking", "missing-message-id")]


async def test_an_overtaking_payment_waits_and_its_last_attempt_is_parked(bench: Bench) -> None:
    subscriber = bench.inbound.find("order.paid")
    assert subscriber is not None
    async with TestRabbitBroker(bench.broker):
        await bench.publish(paid(ORDER, "19.90"))
        for attempt in (2, 3):
            returned = delivery(
                paid(ORDER, "19.90")[1],
                exchange="",
                routing_key="orders.work",
                headers={"x-attempt": attempt},
                message_type="order.paid",
            )
            await subscriber.process_message(returned)
    assert bench.successors == [
        ("orders.wait.5s", 2),
        ("orders.wait.30s", 3),
        ("orders.parking", "attempts-exhausted"),
    ]
    assert bench.database.tables.processed == {}


async def test_a_payment_of_another_amount_is_parked_by_rule(bench: Bench) -> None:
    async with TestRabbitBroker(bench.broker):
        await bench.publish(placed(ORDER), message_id="m-1")
        await bench.publish(paid(ORDER, "19.91"), message_id="m-2")
    assert bench.successors == [("orders.parking", "rejected-by-rule")]
    assert len(bench.database.tables.processed) == 1


async def test_a_strangers_reply_address_is_not_answered(bench: Bench) -> None:
    async with TestRabbitBroker(bench.broker):
        await bench.publish(placed(ORDER), reply_to="orders.work")
    assert len(bench.database.tables.events) == 1


async def test_an_event_that_nobody_subscribed_to_has_no_subscriber(bench: Bench) -> None:
    """The consumer parks it as `unknown-type`."""
    assert bench.inbound.find("order.exploded") is None
    async with TestRabbitBroker(bench.broker):
        with pytest.raises(SubscriberNotFound):
            await bench.publish(("order.exploded", b"{}"))


async def test_prepared_subscribers_process_without_being_started(bench: Bench) -> None:
    """Pins the framework's private steps: an upgrade that moves them fails here."""
    subscriber = bench.inbound.find("order.placed")
    assert subscriber is not None
    assert not subscriber.running
    bench.inbound.prepare()
    assert subscriber.running
    journal: list[str] = []
    await subscriber.process_message(delivery(placed(ORDER)[1], journal=journal))
    assert len(bench.database.tables.events) == 1
    assert journal == ["ack"]


@pytest.mark.parametrize("event_type", ["order.placed", "order.exploded"])
def test_a_subscriber_is_declared_once_and_for_a_bound_key_only(bench: Bench, event_type: str) -> None:
    with pytest.raises(ValueError, match=event_type):
        bench.inbound.subscriber(event_type, OrderPlaced, consumer="another")


def test_the_keys_are_the_types_of_the_messages() -> None:
    assert ORDER_EVENTS == (OrderPlaced.TYPE, OrderPaid.TYPE, OrderCancelled.TYPE)
    assert ORDER_EVENTS == ("order.placed", "order.paid", "order.cancelled")
