"""One suite over the service in memory and the service on real servers: what the test kit shows is true."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from schemas import OrderPlaced
from service.billing.invoice import Status
from service.reliability.inbound import Inbound
from service.reliability.outcome import Reason
from service.testing import InMemoryService, Settled
from tests.support.orders import cancelled, paid, placed
from tests.support.rabbit import Rabbit
from tests.support.servers import service_on_servers
from tests.support.stock import settings

ORDER = "5d2e1f0a-0000-4000-8000-000000000001"
OTHER = "5d2e1f0a-0000-4000-8000-000000000002"


class Billing(Protocol):
    """What the suite needs of either."""

    async def publish(self, event_type: str, body: bytes, **properties: Any) -> Settled:
        """Publish and return how the delivery ended."""
        ...

    async def after_wait(self, settled: Settled) -> Settled:
        """Return how the next delivery of a retried message ended."""
        ...


CHANGES: dict[str, Any] = {"retry_delays": "1,2", "max_attempts": 3, "max_body_bytes": 20_000}


@pytest.fixture
async def memory() -> AsyncIterator[Billing]:
    """The service in memory."""
    async with InMemoryService(settings=settings("postgresql://unused", "amqp://unused", **CHANGES)) as billing:
        yield billing


@pytest.fixture
async def servers(database_url: str, rabbit: Rabbit) -> AsyncIterator[Billing]:
    """The service on real servers."""
    async with service_on_servers(settings(database_url, rabbit.url, **CHANGES), rabbit) as billing:
        yield billing


@pytest.fixture(params=["memory", "servers"])
def billing(request: pytest.FixtureRequest) -> Billing:
    """The service of either kind, with the same settings."""
    return request.getfixturevalue(request.param)


def told(settled: Settled) -> list[tuple[str, str]]:
    """Return the types and keys of the events."""
    return [(event.type, event.key) for event in settled.events]


async def test_an_order_is_processed_and_told(billing: Billing) -> None:
    settled = await billing.publish(
        *placed(ORDER), message_id="m-1", correlation_id="c-1", headers={"traceparent": "00-ab-cd-01", "x": 1}
    )
    assert (settled.acked, settled.processed, settled.duplicate, settled.successor) == (True, True, False, None)
    assert told(settled) == [("invoice.created", ORDER)]
    [event] = settled.events
    assert event.headers == {
        "schema-version": 1,
        "causation-id": "m-1",
        "correlation-id": "c-1",
        "traceparent": "00-ab-cd-01",
    }
    assert json.loads(event.body)["total"] == "19.90"


async def test_each_event_changes_the_invoice_once(billing: Billing) -> None:
    assert told(await billing.publish(*placed(ORDER))) == [("invoice.created", ORDER)]
    assert told(await billing.publish(*paid(ORDER, "19.90"))) == [("invoice.paid", ORDER)]
    again = await billing.publish(*paid(ORDER, "19.90"))
    assert (again.processed, told(again)) == (True, [])
    assert told(await billing.publish(*placed(OTHER))) == [("invoice.created", OTHER)]
    assert told(await billing.publish(*cancelled(OTHER))) == [("invoice.voided", OTHER)]


async def test_a_duplicate_does_nothing(billing: Billing) -> None:
    await billing.publish(*placed(ORDER), message_id="m-1")
    settled = await billing.publish(*placed(ORDER), message_id="m-1")
    assert (settled.acked, settled.processed, settled.duplicate, settled.events) == (True, False, True, ())


async def test_one_id_for_another_event_type_is_another_message(billing: Billing) -> None:
    """The inbox is each handler's own: a consumer's name is part of the key."""
    await billing.publish(*placed(ORDER), message_id="m-1")
    assert (await billing.publish(*cancelled(ORDER), message_id="m-1")).processed


async def test_one_id_with_other_content_is_parked(billing: Billing) -> None:
    await billing.publish(*placed(ORDER), message_id="m-1")
    settled = await billing.publish(*placed(OTHER), message_id="m-1")
    assert (settled.acked, settled.processed, settled.duplicate) == (True, False, False)
    assert settled.parked is Reason.MESSAGE_ID_CONFLICT
    assert settled.explanation == "the message id was used before, for other content"


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(
    ("event_type", "body", "properties", "reason", "explanation"),
    [
        ("order.placed", b"{", {}, "unreadable", "the body is not JSON in UTF-8"),
        ("order.placed", b"\xff", {}, "unreadable", "the body is not JSON in UTF-8"),
        ("order.placed", b"{}", {}, "invalid", "order_id: Field required"),
        ("order.placed", placed(ORDER)[1], {"message_id": None}, "missing-message-id", "message_id is not set"),
        ("order.placed", placed(ORDER)[1], {"message_id": ""}, "missing-message-id", "message_id is not set"),
        ("order.placed", placed(ORDER)[1], {"message_type": "order.lost"}, "unknown-type", "nobody handles this type"),
        ("order.placed", placed(ORDER)[1], {"content_encoding": "gzip"}, "unreadable", "content_encoding"),
        ("order.placed", placed(ORDER, customer_id="x" * 20_000)[1], {}, "too-large", "more than 20000"),
        ("order.placed", placed(ORDER)[1], {"headers": {"schema-version": 2}}, "invalid", "schema-version 2 is not kn"),
        ("order.placed", placed(ORDER)[1], {"headers": {"schema-version": "x"}}, "invalid", "known is 1"),
    ],
)
async def test_what_can_never_succeed_is_parked_at_once(
    billing: Billing, event_type: str, body: bytes, properties: dict[str, Any], reason: str, explanation: str
) -> None:
    settled = await billing.publish(event_type, body, **properties)
    assert (settled.acked, settled.processed, settled.events) == (True, False, ())
    assert settled.parked == reason
    assert explanation in settled.explanation
    assert settled.successor.message.headers["x-attempts"] == 0
    assert settled.successor.message.body == body


@pytest.mark.parametrize("version", [1, "1"])
async def test_a_known_version_of_the_schema_is_read(billing: Billing, version: object) -> None:
    assert (await billing.publish(*placed(ORDER), headers={"schema-version": version})).processed


async def test_a_rule_that_is_broken_parks_at_once(billing: Billing) -> None:
    await billing.publish(*placed(ORDER))
    settled = await billing.publish(*paid(ORDER, "1.00"))
    assert (settled.parked, settled.successor.message.headers["x-attempts"]) == (Reason.REJECTED_BY_RULE, 1)


async def test_a_payment_that_overtook_its_order_waits_and_succeeds(billing: Billing) -> None:
    first = await billing.publish(*paid(ORDER, "19.90"), correlation_id="c-1", headers={"tenant": "t-1"})
    assert (first.acked, first.processed, first.next_attempt, first.parked) == (True, False, 2, None)
    assert first.successor.queue == "orders.wait.1s"
    copy = first.successor.message
    assert (copy.type, copy.correlation_id, copy.body) == ("order.paid", "c-1", paid(ORDER, "19.90")[1])
    assert {k: v for k, v in copy.headers.items() if k != "x-delivery-count"} == {
        "tenant": "t-1",
        "x-attempt": 2,
        "x-original-exchange": "orders",
        "x-original-routing-key": "order.paid",
    }


async def test_a_message_that_came_back_is_processed(billing: Billing) -> None:
    waiting = await billing.publish(*paid(ORDER, "19.90"), message_id="m-2", correlation_id="c-2")
    await billing.publish(*placed(ORDER))
    back = await billing.after_wait(waiting)
    assert (back.processed, back.successor) == (True, None)
    assert [event.headers["causation-id"] for event in back.events] == ["m-2"]
    assert told(back) == [("invoice.paid", ORDER)]


async def test_a_payment_whose_order_never_comes_is_parked_after_the_last_attempt(billing: Billing) -> None:
    first = await billing.publish(*paid(ORDER, "19.90"))
    second = await billing.after_wait(first)
    assert (second.next_attempt, second.successor.queue) == (3, "orders.wait.2s")
    third = await billing.after_wait(second)
    assert third.parked is Reason.ATTEMPTS_EXHAUSTED
    headers = third.successor.message.headers
    assert (headers["x-attempts"], headers["x-original-queue"]) == (3, "orders.work")
    assert headers["x-exception-type"] == "service.billing.errors.OrderUnknownError"


@pytest.mark.parametrize("attempt", [3, 99, -1, "3", True])
async def test_a_producer_cannot_say_which_attempt_it_is(billing: Billing, attempt: object) -> None:
    assert (await billing.publish(*paid(ORDER, "19.90"), headers={"x-attempt": attempt})).next_attempt == 2


async def test_what_a_producer_wants_done_with_the_copy_is_not_done(billing: Billing) -> None:
    settled = await billing.publish(
        "order.placed",
        b"{",
        reply_to="orders.work",
        expiration="60000",
        headers={"x-parked-reason": "because", "x-death": [], "CC": ["orders.work"], "x-mine": "kept"},
    )
    copy = settled.successor.message
    assert (copy.reply_to, copy.expiration) == (None, None)
    assert copy.headers["x-parked-reason"] == "unreadable"
    assert copy.headers["x-mine"] == "kept"
    assert {"x-death", "CC"}.isdisjoint(copy.headers)


async def test_the_kits_broker_is_a_test_broker_too() -> None:
    async with InMemoryService() as billing:
        await billing.broker.publish(placed(ORDER)[1], "order.placed", "orders", message_id="m-1")
    [invoice] = billing.database.tables.invoices.values()
    assert invoice.status is Status.ISSUED


async def test_what_does_not_wait_does_not_come_back() -> None:
    async with InMemoryService() as billing:
        settled = await billing.publish(*placed(ORDER))
        with pytest.raises(ValueError, match="waits nowhere"):
            await billing.after_wait(settled)


async def test_a_key_that_nothing_is_bound_with_is_refused_as_a_broker_would_return_it() -> None:
    async with InMemoryService() as billing:
        with pytest.raises(ValueError, match=r"'order\.plcaed' is bound to no queue"):
            await billing.publish("order.plcaed", b"{}")


async def test_nothing_is_delivered_outside_of_async_with() -> None:
    billing = InMemoryService()
    with pytest.raises(RuntimeError, match="inside `async with`"):
        await billing.publish(*placed(ORDER))


async def test_deliveries_at_once_are_told_apart() -> None:
    async with InMemoryService() as billing:
        settled = await asyncio.gather(*(billing.publish(*placed(order)) for order in (ORDER, OTHER)))
    assert [told(each) for each in settled] == [[("invoice.created", ORDER)], [("invoice.created", OTHER)]]


async def test_a_handler_that_publishes_is_told_to_append() -> None:
    """It would wait for itself."""
    billing: InMemoryService

    def subscribe(orders: Inbound) -> None:
        @orders.subscriber("order.placed", OrderPlaced, consumer="test")
        async def publish(order: OrderPlaced) -> None:
            with pytest.raises(RuntimeError, match="appends events to the outbox"):
                await billing.publish(*paid(str(order.order_id), "19.90"))

    async with InMemoryService(subscribe) as billing:
        assert (await billing.publish(*placed(ORDER))).processed
