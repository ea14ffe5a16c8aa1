"""An invoice and what each event does to it, as pure functions.

|            | placed          | paid                                | cancelled |
|------------|-----------------|-------------------------------------|-----------|
| no invoice | issue           | unknown order                       | unknown order |
| issued     | same: nothing   | equal amount and currency: pay      | void      |
| paid       | same: nothing   | same reference: nothing             | violation |
| void       | same: nothing   | violation                           | nothing   |

Whatever is not "same" or "equal" is a violation. `is_paid_by` and `is_voided_by` return whether the invoice changes.
"""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from uuid import UUID, uuid5

from schemas import OrderCancelled, OrderPaid, OrderPlaced
from schemas.money import from_minor_units, in_minor_units
from service.billing.errors import OrderUnknownError, RuleViolationError

_INVOICE_NAMESPACE = UUID("5c1de5a4-5f5b-4a52-9a3a-0f4ed7f2f9c6")


class Status(StrEnum):
    """Where an invoice stands."""

    ISSUED = "issued"
    PAID = "paid"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an invoice, as the order had it."""

    sku: str
    quantity: int
    unit_price: Decimal


@dataclass(frozen=True, slots=True)
class Invoice:
    """An invoice as it is stored.

    Attributes:
        total: exactly the decimals of the currency.
        payment_reference: set if and only if it is paid.
    """

    id: UUID
    order_id: UUID
    customer_id: str
    currency: str
    total: Decimal
    status: Status
    placed_at: datetime
    payment_reference: str | None = None


def drawn_up(order: OrderPlaced) -> tuple[Invoice, tuple[Line, ...]]:
    """Return the invoice for an order, with its lines; the same order has the same invoice id always."""
    lines = tuple(Line(line.sku, line.quantity, line.unit_price) for line in order.lines)
    total = sum(line.quantity * in_minor_units(line.unit_price, order.currency) for line in lines)
    invoice = Invoice(
        id=uuid5(_INVOICE_NAMESPACE, str(order.order_id)),
        order_id=order.order_id,
        customer_id=order.customer_id,
        currency=order.currency,
        total=from_minor_units(total, order.currency),
        status=Status.ISSUED,
        placed_at=order.placed_at,
    )
    return invoice, lines


def require_same_order(order: OrderPlaced, invoice: Invoice, lines: tuple[Line, ...]) -> None:
    """Accept the same order again.

    Raises:
        RuleViolationError: the order was placed before with other content.
    """
    wanted, wanted_lines = drawn_up(order)
    content = (invoice.customer_id, invoice.currency, invoice.total, invoice.placed_at, lines)
    if content != (wanted.customer_id, wanted.currency, wanted.total, wanted.placed_at, wanted_lines):
        raise RuleViolationError(f"order {order.order_id} was placed before with other content")


def require_invoice(invoice: Invoice | None, order_id: UUID) -> Invoice:
    """Return the order's invoice.

    Raises:
        OrderUnknownError: there is none.
    """
    if invoice is None:
        raise OrderUnknownError(f"no invoice was issued for order {order_id} so far")
    return invoice


def is_paid_by(invoice: Invoice, payment: OrderPaid) -> bool:
    """Tell whether the payment changes the invoice: False where this payment was counted before.

    Raises:
        RuleViolationError: another amount or currency, another payment, or a void invoice.
    """
    match invoice.status:
        case Status.ISSUED if (invoice.currency, invoice.total) == (payment.currency, payment.amount):
            return True
        case Status.ISSUED:
            raise RuleViolationError(
                f"the payment of order {payment.order_id} is not over its invoice's amount and currency"
            )
        case Status.PAID if invoice.payment_reference == payment.payment_reference:
            return False
        case Status.PAID:
            raise RuleViolationError(f"order {payment.order_id} is paid already, by another payment")
        case Status.VOID:
            raise RuleViolationError(f"the invoice of order {payment.order_id} is void")


def is_voided_by(invoice: Invoice, cancellation: OrderCancelled) -> bool:
    """Tell whether the cancellation changes the invoice: False where it is void already.

    Raises:
        RuleViolationError: it is paid.
    """
    if invoice.status is Status.PAID:
        raise RuleViolationError(f"the invoice of order {cancellation.order_id} is paid and cannot be voided")
    return invoice.status is Status.ISSUED
