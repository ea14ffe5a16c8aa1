"""Every cell of the table of states and events."""

import json
from dataclasses import replace
from decimal import Decimal
from uuid import UUID

import pytest

from schemas import OrderCancelled, OrderPaid, OrderPlaced
from service.billing.errors import OrderUnknownError, RuleViolationError
from service.billing.invoice import (
    Invoice,
    Line,
    Status,
    drawn_up,
    is_paid_by,
    is_voided_by,
    require_invoice,
    require_same_order,
)
from tests.support.orders import cancelled, paid, placed

ORDER = "5d2e1f0a-0000-4000-8000-000000000001"
PLACED = OrderPlaced.model_validate_json(placed(ORDER)[1])
ISSUED, LINES = drawn_up(PLACED)
PAID = replace(ISSUED, status=Status.PAID, payment_reference="payment-1")
VOID = replace(ISSUED, status=Status.VOID)


def payment(amount: str = "19.90", **changes: str) -> OrderPaid:
    """Return a payment."""
    return OrderPaid.model_validate_json(paid(ORDER, amount, **changes)[1])


CANCELLATION = OrderCancelled.model_validate_json(cancelled(ORDER)[1])


def test_an_invoice_is_drawn_up_with_its_exact_total_and_lines() -> None:
    assert ISSUED.total == Decimal("19.90")
    assert str(ISSUED.total) == "19.90"
    assert ISSUED.status is Status.ISSUED
    assert (Line("nail", 2, Decimal("9.95")),) == LINES
    assert drawn_up(PLACED)[0].id == ISSUED.id


@pytest.mark.parametrize("invoice", [ISSUED, PAID, VOID])
def test_the_same_order_again_is_accepted_in_every_state(invoice: Invoice) -> None:
    require_same_order(PLACED, invoice, LINES)


@pytest.mark.parametrize("invoice", [ISSUED, PAID, VOID])
@pytest.mark.parametrize(
    "changes",
    [
        {"customer_id": "customer-2"},
        {"currency": "USD"},
        {"placed_at": "2026-05-04T10:00:01+02:00"},
        {"lines": [{"sku": "nail", "quantity": 1, "unit_price": "19.90"}]},
        {"lines": [{"sku": "screw", "quantity": 2, "unit_price": "9.95"}]},
    ],
)
def test_the_same_order_with_other_content_is_a_violation(invoice: Invoice, changes: dict[str, object]) -> None:
    other = OrderPlaced.model_validate_json(json.dumps(json.loads(placed(ORDER)[1]) | changes))
    with pytest.raises(RuleViolationError):
        require_same_order(other, invoice, LINES)


def test_an_order_without_an_invoice_is_unknown() -> None:
    with pytest.raises(OrderUnknownError):
        require_invoice(None, UUID(ORDER))
    assert require_invoice(ISSUED, UUID(ORDER)) is ISSUED


def test_an_issued_invoice_is_paid_by_its_amount_and_currency() -> None:
    assert is_paid_by(ISSUED, payment("19.90")) is True
    assert is_paid_by(ISSUED, payment("19.9")) is True


@pytest.mark.parametrize("wrong", [payment("19.91"), payment("19.89"), payment(currency="USD")])
@pytest.mark.parametrize("invoice", [ISSUED, VOID])
def test_another_amount_or_currency_is_a_violation(invoice: Invoice, wrong: OrderPaid) -> None:
    with pytest.raises(RuleViolationError):
        is_paid_by(invoice, wrong)


def test_the_same_payment_again_does_nothing_and_another_is_a_violation() -> None:
    assert is_paid_by(PAID, payment()) is False
    assert is_paid_by(PAID, payment("19.91")) is False
    with pytest.raises(RuleViolationError):
        is_paid_by(PAID, payment(payment_reference="payment-2"))


def test_a_void_invoice_is_not_paid() -> None:
    with pytest.raises(RuleViolationError):
        is_paid_by(VOID, payment())


def test_a_cancellation_voids_what_is_issued_and_nothing_else() -> None:
    assert is_voided_by(ISSUED, CANCELLATION) is True
    assert is_voided_by(VOID, CANCELLATION) is False
    with pytest.raises(RuleViolationError):
        is_voided_by(PAID, CANCELLATION)
