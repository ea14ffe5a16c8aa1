"""The subscribers with `TestRabbitBroker`: no server, the same middleware, a database in memory.

How deliveries end is held by tests/contract/test_behaviour.py, over real servers too.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from faststream.exceptions import SubscriberNotFound
from faststream.rabbit import RabbitBroker

from schemas import OrderCancelled, OrderPaid, OrderPlaced
from service.app import orders_family
from service.billing.handlers import subscribe
from service.billing.invoice import Status
from service.contract import ORDER_EVENTS
from service.reliability.inbound import Inbound
from service.reliability.outcome import Reason
from service.settings import default_settings
from service.testing import InMemoryService
from tests.support.doubles import delivery
from tests.support.orders import cancelled, paid, placed

ORDER = "5d2e1f0a-0000-4000-8000-000000000001"


@pytest.fixture
async def billing() -> AsyncIterator[InMemoryService]:
    """The application without servers."""
    async with InMemoryService() as service:
        yield service


async def send(billing: InMemoryService, event: tuple[str, bytes], message_id: str, **properties: Any) -> None:
    """Publish through FastStream's test broker."""
    properties = {"content_type": "application/json"} | properties
    await billing.broker.publish(event[1], event[0], "orders", message_id=message_id, **properties)


async def test_the_test_broker_routes_each_key_to_its_own_handler(billing: InMemoryService) -> None:
    await send(billing, placed(ORDER), "m-1")
    await send(billing, paid(ORDER, "19.90"), "m-2")
    await send(billing, paid(ORDER, "19.90"), "m-2")
    await send(billing, cancelled(ORDER), "m-3")
    [invoice] = billing.database.tables.invoices.values()
    assert invoice.status is Status.PAID
    assert [event.type for event in billing.database.tables.events] == ["invoice.created", "invoice.paid"]
    assert len(billing.database.tables.processed) == 2


async def test_an_event_that_nobody_subscribed_to_has_no_subscriber(billing: InMemoryService) -> None:
    """The consumer parks it as `unknown-type`."""
    with pytest.raises(SubscriberNotFound):
        await send(billing, ("order.exploded", b"{}"), "m-1")
    assert (await billing.publish("order.placed", b"{}", message_type="order.exploded")).parked is Reason.UNKNOWN_TYPE


async def test_a_strangers_reply_address_is_not_answered(billing: InMemoryService) -> None:
    await send(billing, placed(ORDER), "m-1", reply_to="orders.work")
    assert len(billing.database.tables.events) == 1


@pytest.mark.parametrize(
    "content_type", ["", "application/json;charset=utf-8", "APPLICATION/JSON", "text/plain", "junk", None]
)
async def test_the_content_type_decides_nothing(billing: InMemoryService, content_type: str | None) -> None:
    assert (await billing.publish(*placed(ORDER), content_type=content_type)).processed


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "unreadable"),
        (b"null", "invalid"),
        (placed(ORDER, lines=[])[1], "invalid"),
        (placed(ORDER, currency="XXX")[1], "invalid"),
    ],
)
async def test_a_body_that_is_no_order_is_parked(billing: InMemoryService, body: bytes, reason: str) -> None:
    assert (await billing.publish("order.placed", body)).parked == reason
    assert billing.database.tables.processed == {}


async def test_the_kit_writes_models_and_mappings_as_json(billing: InMemoryService) -> None:
    order = OrderPlaced.model_validate_json(placed(ORDER)[1])
    assert (await billing.publish("order.placed", order)).processed
    content = {"order_id": ORDER, "reason": "late", "cancelled_at": "2026-05-04T12:00:00Z"}
    assert (await billing.publish("order.cancelled", content)).processed


async def test_prepared_subscribers_process_without_being_started() -> None:
    """Pins the framework's private steps: an upgrade that moves them fails here."""
    ran: list[OrderPlaced] = []
    inbound = Inbound(RabbitBroker(logger=None), orders_family(default_settings()))

    @inbound.subscriber("order.placed", OrderPlaced, consumer="test")
    async def keep(order: OrderPlaced) -> None:
        ran.append(order)

    subscriber = inbound.find("order.placed")
    assert subscriber is not None
    assert not subscriber.running
    inbound.prepare()
    assert subscriber.running
    await subscriber.process_message(delivery(placed(ORDER)[1]))
    assert [str(order.order_id) for order in ran] == [ORDER]


@pytest.mark.parametrize("event_type", ["order.placed", "order.exploded"])
def test_a_subscriber_is_declared_once_and_for_a_bound_key_only(event_type: str) -> None:
    inbound = Inbound(RabbitBroker(logger=None), orders_family(default_settings()))
    subscribe(inbound)
    with pytest.raises(ValueError, match=event_type):
        inbound.subscriber(event_type, OrderPlaced, consumer="another")


def test_the_keys_are_the_types_of_the_messages() -> None:
    assert (OrderPlaced.TYPE, OrderPaid.TYPE, OrderCancelled.TYPE) == ("order.placed", "order.paid", "order.cancelled")
    assert {"order.placed", "order.paid", "order.cancelled"} <= set(ORDER_EVENTS)
