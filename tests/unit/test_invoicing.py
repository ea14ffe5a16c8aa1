"""The use cases over a database in memory: what they store, which events leave, and what a refusal leaves behind."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import OrderCancelled, OrderPaid, OrderPlaced
from service.billing import invoicing
from service.billing.errors import InvoiceChangedError, OrderUnknownError, RuleViolationError
from service.billing.invoice import Invoice, Status, drawn_up
from service.billing.invoicing import BillingWork
from service.reliability.envelope import read_envelope
from service.testing.memory import MemoryDatabase, MemoryInvoices
from tests.support.doubles import delivery
from tests.support.orders import cancelled, paid, placed

ORDER = "5d2e1f0a-0000-4000-8000-000000000001"
INVOICE = "7bb0dc82-5f11-5445-9bcd-9ed99f04a8b6"  # the order's, for ever: consumers have stored it
NOW = datetime(2026, 5, 4, 12, 34, 56, tzinfo=UTC)
CAUSE = read_envelope(delivery(), 5)

UseCase = Callable[[BillingWork], Awaitable[None]]


def issue(**changes: Any) -> UseCase:
    """Return the use case of a placed order."""
    order = OrderPlaced.model_validate_json(placed(ORDER, **changes)[1])
    return lambda work: invoicing.issue(work, order)


def pay(amount: str = "19.90", **changes: Any) -> UseCase:
    """Return the use case of a payment."""
    payment = OrderPaid.model_validate_json(paid(ORDER, amount, **changes)[1])
    return lambda work: invoicing.pay(work, payment)


def void(**changes: Any) -> UseCase:
    """Return the use case of a cancellation."""
    cancellation = OrderCancelled.model_validate_json(cancelled(ORDER, **changes)[1])
    return lambda work: invoicing.void(work, cancellation)


async def run(database: MemoryDatabase, *steps: UseCase) -> None:
    """Run each in a transaction of its own."""
    for step in steps:
        async with database.begin(CAUSE) as work:
            await step(work)


def bodies(database: MemoryDatabase) -> list[dict[str, Any]]:
    """Return what the appended events say."""
    return [json.loads(event.body) for event in database.tables.events]


async def test_an_issued_invoice_is_told_with_its_exact_total_and_the_databases_time() -> None:
    database = MemoryDatabase(NOW)
    await run(database, issue())
    [event] = database.tables.events
    assert (event.type, event.key, event.headers["schema-version"]) == ("invoice.created", ORDER, 1)
    assert json.loads(event.body) == {
        "invoice_id": INVOICE,
        "order_id": ORDER,
        "customer_id": "customer-1",
        "currency": "EUR",
        "total": "19.90",
        "created_at": "2026-05-04T12:34:56Z",
    }


async def test_a_payment_is_told_as_the_invoice_has_its_amount() -> None:
    """The producer wrote 19.9 and another offset; what leaves has the currency's decimals and is in UTC."""
    database = MemoryDatabase(NOW)
    await run(database, issue(), pay("19.9", paid_at="2026-05-04T11:00:00.250+02:00"))
    event = database.tables.events[-1]
    assert (event.type, event.key, event.headers["schema-version"]) == ("invoice.paid", ORDER, 1)
    assert json.loads(event.body) == {
        "invoice_id": INVOICE,
        "order_id": ORDER,
        "customer_id": "customer-1",
        "currency": "EUR",
        "total": "19.90",
        "payment_reference": "payment-1",
        "paid_at": "2026-05-04T09:00:00.250000Z",
    }


async def test_a_voided_invoice_is_told_with_the_reason() -> None:
    database = MemoryDatabase(NOW)
    await run(database, issue(), void(reason="out of stock"))
    event = database.tables.events[-1]
    assert (event.type, event.key, event.headers["schema-version"]) == ("invoice.voided", ORDER, 1)
    assert json.loads(event.body) == {
        "invoice_id": INVOICE,
        "order_id": ORDER,
        "customer_id": "customer-1",
        "reason": "out of stock",
        "voided_at": "2026-05-04T12:00:00Z",
    }


@pytest.mark.parametrize(
    ("currency", "unit_price", "total"),
    [
        ("JPY", "5000", "10000"),
        ("JPY", "995.00", "1990"),
        ("EUR", "0", "0.00"),
        ("USD", "10.500", "21.00"),
        ("BHD", "1.234", "2.468"),
        ("CLF", "1", "2.0000"),
    ],
)
async def test_a_total_leaves_with_exactly_its_currencys_decimals(currency: str, unit_price: str, total: str) -> None:
    database = MemoryDatabase(NOW)
    lines = [{"sku": "nail", "quantity": 2, "unit_price": unit_price}]
    await run(database, issue(currency=currency, lines=lines), pay(total, currency=currency))
    assert [body["total"] for body in bodies(database)] == [total, total]


NONE, ISSUED, PAID, VOID = None, Status.ISSUED, Status.PAID, Status.VOID

TO_REACH: dict[Status | None, tuple[UseCase, ...]] = {
    NONE: (),
    ISSUED: (issue(),),
    PAID: (issue(), pay()),
    VOID: (issue(), void()),
}

EVENTS: dict[str, UseCase] = {
    "the order": issue(),
    "the order with other content": issue(customer_id="customer-2"),
    "its payment": pay(),
    "another payment of its amount": pay(payment_reference="payment-2"),
    "its payment over another amount": pay("19.91"),
    "its payment in another currency": pay(currency="USD"),
    "another payment over another amount": pay("19.91", payment_reference="payment-2"),
    "its cancellation": void(),
}

# What the design says: the event that leaves, None for "nothing", or how it is refused.
UNKNOWN, VIOLATION = OrderUnknownError, RuleViolationError
TABLE: dict[str, dict[Status | None, str | type[Exception] | None]] = {
    "the order": {NONE: "invoice.created", ISSUED: None, PAID: None, VOID: None},
    "the order with other content": {
        NONE: "invoice.created",
        ISSUED: VIOLATION,
        PAID: VIOLATION,
        VOID: VIOLATION,
    },
    "its payment": {NONE: UNKNOWN, ISSUED: "invoice.paid", PAID: None, VOID: VIOLATION},
    "another payment of its amount": {NONE: UNKNOWN, ISSUED: "invoice.paid", PAID: VIOLATION, VOID: VIOLATION},
    "its payment over another amount": {NONE: UNKNOWN, ISSUED: VIOLATION, PAID: None, VOID: VIOLATION},
    "its payment in another currency": {NONE: UNKNOWN, ISSUED: VIOLATION, PAID: None, VOID: VIOLATION},
    "another payment over another amount": {NONE: UNKNOWN, ISSUED: VIOLATION, PAID: VIOLATION, VOID: VIOLATION},
    "its cancellation": {NONE: UNKNOWN, ISSUED: "invoice.voided", PAID: VIOLATION, VOID: None},
}

BECOMES = {"invoice.created": ISSUED, "invoice.paid": PAID, "invoice.voided": VOID}


@pytest.mark.parametrize("state", [NONE, ISSUED, PAID, VOID])
@pytest.mark.parametrize("event", EVENTS)
async def test_each_event_does_to_each_state_what_the_table_says(event: str, state: Status | None) -> None:
    """A refusal and a "nothing" leave everything as it was."""
    database = MemoryDatabase(NOW)
    await run(database, *TO_REACH[state])
    before, told = dict(database.tables.invoices), len(database.tables.events)
    match TABLE[event][state]:
        case None:
            await run(database, EVENTS[event])
            assert (database.tables.invoices, len(database.tables.events)) == (before, told)
        case str() as leaving:
            await run(database, EVENTS[event])
            assert [e.type for e in database.tables.events[told:]] == [leaving]
            assert [i.status for i in database.tables.invoices.values()] == [BECOMES[leaving]]
        case error:
            with pytest.raises(error):
                await run(database, EVENTS[event])
            assert (database.tables.invoices, len(database.tables.events)) == (before, told)


@given(st.lists(st.sampled_from(["the order", "its payment", "another payment of its amount", "its cancellation"])))
def test_whatever_comes_in_whatever_order_an_order_has_one_story(arrivals: list[str]) -> None:
    """Created at most once and first; then paid or voided, never both."""

    async def story() -> list[str]:
        database = MemoryDatabase(NOW)
        for arrival in arrivals:
            try:
                await run(database, EVENTS[arrival])
            except (OrderUnknownError, RuleViolationError):
                continue
        return [event.type for event in database.tables.events]

    assert asyncio.run(story()) in (
        [],
        ["invoice.created"],
        ["invoice.created", "invoice.paid"],
        ["invoice.created", "invoice.voided"],
    )


REFUSED = [(event, state) for event, row in TABLE.items() for state in row if row[state] in (UNKNOWN, VIOLATION)]


@pytest.mark.parametrize(("event", "state"), REFUSED)
async def test_a_refusal_names_the_order_and_nothing_of_the_customer(event: str, state: Status | None) -> None:
    """G11: its text is logged and travels in headers."""
    database = MemoryDatabase(NOW)
    await run(database, *TO_REACH[state])
    with pytest.raises((OrderUnknownError, RuleViolationError)) as refused:
        await run(database, EVENTS[event])
    assert ORDER in str(refused.value)
    for private in ("customer-", "payment-", "19.9", "changed my mind"):
        assert private not in str(refused.value)


class OutdatedInvoices(MemoryInvoices):
    """Invoices whose lock does not lock: it shows the invoice as it was issued."""

    async def lock(self, order_id: Any) -> Invoice:
        """Return what is no longer true."""
        return drawn_up(OrderPlaced.model_validate_json(placed(str(order_id))[1]))[0]


@pytest.mark.parametrize("late", [pay(payment_reference="payment-2"), void()])
async def test_a_decision_on_an_outdated_invoice_is_not_stored(late: UseCase) -> None:
    """Were the lock ever lost, the guard of the write would still hold: nothing is told that was not stored."""
    database = MemoryDatabase(NOW)
    await run(database, issue(), pay())

    async def decide_without_a_lock(work: Any) -> None:
        work.invoices = OutdatedInvoices(database.tables, NOW)
        await late(work)

    with pytest.raises(InvoiceChangedError):
        await run(database, decide_without_a_lock)
    assert [event.type for event in database.tables.events] == ["invoice.created", "invoice.paid"]
