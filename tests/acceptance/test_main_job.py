"""The main job by the service's public face: order events in, invoices kept, invoice events out."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from tests.support.orders import cancelled, paid, placed
from tests.support.process import ServiceProcess
from tests.support.rabbit import EVENTS, Rabbit
from tests.support.waiting import eventually

ORDER = "5d2e1f0a-0000-4000-8000-000000000001"
OTHER = "5d2e1f0a-0000-4000-8000-000000000002"


async def _parked(rabbit: Rabbit, number: int) -> list[Any]:
    await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == number)
    return await rabbit.take("orders.parking")


async def test_an_order_becomes_an_invoice_and_an_event(
    service: ServiceProcess, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """With its lines, its exact total, and the identity chain of the order message."""
    await rabbit.collect_events()
    message_id = await rabbit.publish(
        *placed(ORDER), correlation_id="journey-1", headers={"traceparent": "00-ab-cd-01"}
    )
    await eventually(lambda: rabbit.count(EVENTS), lambda n: n == 1)
    invoice = await connection.fetchrow("select * from invoices")
    assert str(invoice["order_id"]) == ORDER
    assert (invoice["customer_id"], invoice["currency"], invoice["status"]) == ("customer-1", "EUR", "issued")
    assert str(invoice["total"]) == "19.90"
    lines = await connection.fetch("select sku, quantity, unit_price from invoice_lines")
    assert [tuple(line) for line in lines] == [("nail", 2, Decimal("9.95"))]

    [event] = await rabbit.events()
    assert (event.type, event.routing_key, event.app_id) == ("invoice.created", "invoice.created", "billing")
    assert event.correlation_id == "journey-1"
    assert event.headers == {"causation-id": message_id, "schema-version": 1, "traceparent": "00-ab-cd-01"}
    body = json.loads(event.body)
    assert body["order_id"] == ORDER
    assert body["invoice_id"] == str(invoice["id"])
    assert (body["customer_id"], body["currency"], body["total"]) == ("customer-1", "EUR", "19.90")
    assert datetime.fromisoformat(body["created_at"]).utcoffset() is not None


async def test_an_order_is_paid_and_another_is_cancelled(
    service: ServiceProcess, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """Every state change has its event, with the incoming message id as correlation where there is no other."""
    await rabbit.collect_events()
    await rabbit.publish(*placed(ORDER))
    await rabbit.publish(*placed(OTHER))
    await eventually(lambda: rabbit.count(EVENTS), lambda n: n == 2)
    payment = await rabbit.publish(*paid(ORDER, "19.9"))
    cancellation = await rabbit.publish(*cancelled(OTHER))
    await eventually(lambda: rabbit.count(EVENTS), lambda n: n == 4)
    states = await connection.fetch("select order_id::text, status from invoices order by order_id")
    assert [tuple(row) for row in states] == [(ORDER, "paid"), (OTHER, "void")]
    events = {event.type: event for event in await rabbit.events()}
    assert events["invoice.paid"].correlation_id == payment
    assert events["invoice.voided"].correlation_id == cancellation
    assert json.loads(events["invoice.paid"].body)["payment_reference"] == "payment-1"


async def test_a_payment_that_overtakes_its_order_waits_for_it(
    service: ServiceProcess, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """Retried, since the order may be on its way."""
    await rabbit.publish(*paid(ORDER, "19.90"))
    await service.logged("message_retried")
    await rabbit.publish(*placed(ORDER))
    await eventually(lambda: connection.fetchval("select status from invoices"), lambda status: status == "paid")
    assert await rabbit.count("orders.parking") == 0


async def test_a_payment_for_an_order_that_never_comes_is_parked(service: ServiceProcess, rabbit: Rabbit) -> None:
    """After its attempts, with the reason in words."""
    await rabbit.publish(*paid(ORDER, "19.90"))
    [parked] = await _parked(rabbit, 1)
    assert parked.headers["x-parked-reason"] == "attempts-exhausted"
    assert parked.headers["x-exception-type"] == "service.billing.errors.OrderUnknownError"
    assert parked.headers["x-attempts"] == 3


async def test_what_contradicts_the_invoice_is_parked_by_rule(
    service: ServiceProcess, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """At the first attempt: waiting would not help."""
    await rabbit.publish(*placed(ORDER))
    await eventually(lambda: connection.fetchval("select count(*) from invoices"), lambda n: n == 1)
    await rabbit.publish(*placed(ORDER, customer_id="customer-2"))
    await rabbit.publish(*paid(ORDER, "19.91"))
    await rabbit.publish(*paid(ORDER, "19.90", currency="USD"))
    parked = await _parked(rabbit, 3)
    assert {(m.headers["x-parked-reason"], m.headers["x-attempts"]) for m in parked} == {("rejected-by-rule", 1)}
    assert await connection.fetchval("select status from invoices") == "issued"


async def test_the_same_order_under_another_id_does_nothing(
    service: ServiceProcess, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """The domain's own constraint holds beyond the inbox."""
    await rabbit.publish(*placed(ORDER))
    await rabbit.publish(*placed(ORDER))
    await service.logged("delivery_settled", times=2)
    assert await connection.fetchval("select count(*) from invoices") == 1
    assert await connection.fetchval("select count(*) from outbox_messages") == 1
    assert await rabbit.count("orders.parking") == 0


PRICES: list[tuple[str, object, str | None]] = [
    ("JPY", "1990", "3980"),
    ("BHD", "1.234", "2.468"),
    ("USD", "10.05", "20.10"),
    ("EUR", "1.005", None),
    ("USD", "10.505", None),
    ("JPY", "10.5", None),
    ("usd", "1", None),
    (" USD", "1", None),
    ("US", "1", None),
    ("XXX", "1", None),
    ("€", "1", None),
    ("EUR", 9.95, None),
    ("EUR", "1e2", None),
    ("EUR", "-1", None),
]


async def test_money_is_exact_or_refused(
    service: ServiceProcess, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """D02: stored is what was sent; nothing is rounded."""
    orders = [str(uuid4()) for _ in PRICES]
    for order, (currency, unit_price, _) in zip(orders, PRICES, strict=True):
        lines = [{"sku": "nail", "quantity": 2, "unit_price": unit_price}]
        await rabbit.publish(*placed(order, currency=currency, lines=lines), message_id=order)
    stored = {order: total for order, (_, _, total) in zip(orders, PRICES, strict=True) if total is not None}
    await _all_but_these_are_parked_as_invalid(rabbit, connection, orders, stored, "total::text")


INSTANTS: list[tuple[object, datetime | None]] = [
    ("2026-05-04T10:00:00Z", datetime(2026, 5, 4, 10, tzinfo=UTC)),
    ("2026-05-04T10:00:00+05:30", datetime(2026, 5, 4, 4, 30, tzinfo=UTC)),
    ("0001-01-01T00:00:01Z", datetime(1, 1, 1, 0, 0, 1, tzinfo=UTC)),
    ("0001-01-01T00:00:00Z", None),
    ("9999-12-31T23:59:59.999999Z", None),
    ("9999-12-31T23:59:59Z", datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ("2026-05-04T10:00:00", None),
    ("2026-05-04", None),
    ("2026-05-04T10:00:60Z", None),
    ("0001-01-01T00:00:00+05:30", None),
    (1777888800, None),
]


async def test_a_timestamp_is_an_instant_or_refused(
    service: ServiceProcess, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """D04: right whatever the time zone of the process (it runs in Asia/Kolkata)."""
    orders = [str(uuid4()) for _ in INSTANTS]
    for order, (placed_at, _) in zip(orders, INSTANTS, strict=True):
        await rabbit.publish(*placed(order, placed_at=placed_at), message_id=order)
    stored = {order: instant for order, (_, instant) in zip(orders, INSTANTS, strict=True) if instant is not None}
    await _all_but_these_are_parked_as_invalid(rabbit, connection, orders, stored, "placed_at")


async def _all_but_these_are_parked_as_invalid(
    rabbit: Rabbit, connection: asyncpg.Connection, orders: list[str], stored: dict[str, Any], column: str
) -> None:
    """Check what became of orders whose message ids are their own: a stored value, or parked unexecuted."""
    parked = await _parked(rabbit, len(orders) - len(stored))
    assert {message.message_id for message in parked} == set(orders) - stored.keys()
    assert {(m.headers["x-parked-reason"], m.headers["x-attempts"]) for m in parked} == {("invalid", 0)}
    await eventually(lambda: connection.fetchval("select count(*) from invoices"), lambda n: n == len(stored))
    rows = await connection.fetch(f"select order_id::text, {column} as value from invoices")
    assert {row["order_id"]: row["value"] for row in rows} == stored


async def test_fields_that_a_producer_added_are_ignored(
    service: ServiceProcess, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """D06: at the top and nested."""
    lines = [{"sku": "nail", "quantity": 2, "unit_price": "9.95", "colour": "grey"}]
    await rabbit.publish(*placed(ORDER, lines=lines, channel={"name": "web"}))
    await eventually(lambda: connection.fetchval("select count(*) from invoices"), lambda n: n == 1)


async def test_text_that_cannot_be_stored_is_parked_at_once(service: ServiceProcess, rabbit: Rabbit) -> None:
    """C08: not after so many attempts against the database."""
    for text in ("a\u0000b", "\u0000"):
        await rabbit.publish(*placed(ORDER, customer_id=text))
    parked = await _parked(rabbit, 2)
    assert {(m.headers["x-parked-reason"], m.headers["x-attempts"]) for m in parked} == {("invalid", 0)}


async def test_the_same_id_on_two_event_types_is_two_messages(
    service: ServiceProcess, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """B06: each event type has a consumer of its own."""
    await rabbit.publish(*placed(ORDER), message_id="m-1")
    await eventually(lambda: connection.fetchval("select count(*) from invoices"), lambda n: n == 1)
    await rabbit.publish(*paid(ORDER, "19.90"), message_id="m-1")
    await eventually(lambda: connection.fetchval("select status from invoices"), lambda status: status == "paid")


@pytest.mark.guarantee("G11")
async def test_logs_name_ids_and_never_payloads_or_secrets(
    service: ServiceProcess, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """L06 too: the log of a processed message is there although the migrations ran in the process before."""
    marker = "very-private-customer"
    message_id = await rabbit.publish(*placed(ORDER, customer_id=marker))
    records = await service.logged("delivery_settled")
    await rabbit.publish(*placed(OTHER, customer_id=marker, currency=marker))
    await rabbit.publish(*placed(ORDER, customer_id=marker + "2"))
    await rabbit.publish("order.placed", b'{"order_id": "' + marker.encode())
    parked = await _parked(rabbit, 3)
    assert records[0]["message_id"] == message_id
    assert marker not in service.log
    assert ":billing@" not in service.log
    assert not any(marker in str(message.headers) for message in parked)


async def test_health_and_metrics_tell_what_works(service: ServiceProcess, rabbit: Rabbit) -> None:
    """Alive, ready part by part, and counted."""
    await rabbit.publish(*placed(ORDER))
    await service.logged("delivery_settled")
    assert (await service.get("/livez")).json() == {"status": "alive"}
    ready = await service.get("/readyz")
    assert ready.json() == {
        "ready": True,
        "parts": {"consumer": True, "database": True, "publisher": True, "relay": True},
    }
    metrics = (await service.get("/metrics")).text
    assert 'billing_deliveries_total{outcome="processed",type="order.placed"} 1.0' in metrics
    assert 'billing_messages_parked_total{reason="unreadable"} 0.0' in metrics
    assert 'billing_successors_refused_total{queue="orders.parking"} 0.0' in metrics
    assert "billing_outbox_oldest_seconds" in metrics
    assert 'billing_ready{part="consumer"} 1.0' in metrics


async def test_a_service_whose_queue_comes_back_with_other_arguments_ends(
    service: ServiceProcess, rabbit: Rabbit
) -> None:
    """It cannot consume what the contract says: exit 1 and the difference in words, for the supervisor to see."""
    await rabbit.delete("orders.work")
    await rabbit.channel.declare_queue("orders.work", durable=True)
    code = await service.wait()
    assert code == 1
    assert "queue orders.work: " in service.log


async def test_the_contract_is_served_as_it_is_published(service: ServiceProcess) -> None:
    """The page takes nothing from elsewhere, and nothing can be published through it."""
    published = (Path(__file__).parents[2] / "asyncapi.yaml").read_text()
    assert (await service.get("/asyncapi.yaml")).text == published
    page = await service.get("/asyncapi")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http" not in page.text
    for part in ("asyncapi.js", "asyncapi.css", "page.js", "page.css"):
        assert f'"asyncapi/{part}"' in page.text
        assert (await service.get(f"/asyncapi/{part}")).status_code == 200
    assert (await service.get("/asyncapi/../settings.py")).status_code == 404
