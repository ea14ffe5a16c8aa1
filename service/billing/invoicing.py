"""The use cases: load under lock, decide, store, append the event. They never commit.

The event is appended last, while the invoice is locked: so the outbox's sequence is the commit order of an order.
"""

from typing import Protocol

from schemas import InvoiceCreated, InvoiceEvent, InvoicePaid, InvoiceVoided, OrderCancelled, OrderPaid, OrderPlaced
from service.billing.errors import InvoiceChangedError
from service.billing.invoice import drawn_up, is_paid_by, is_voided_by, require_invoice, require_same_order
from service.billing.repository import Invoices
from service.reliability.outbox import Event
from service.reliability.unit_of_work import UnitOfWork


class BillingWork(UnitOfWork, Protocol):
    """A transaction with the invoices in it."""

    @property
    def invoices(self) -> Invoices:
        """The invoices."""
        ...


async def issue(work: BillingWork, order: OrderPlaced) -> None:
    """Issue the order's invoice; the same order again does nothing.

    Raises:
        RuleViolationError: the order was placed before with other content.
    """
    invoice, lines = drawn_up(order)
    created_at = await work.invoices.issue_if_new(invoice, lines)
    if created_at is None:
        existing = require_invoice(await work.invoices.lock(order.order_id), order.order_id)
        require_same_order(order, existing, await work.invoices.lines(existing.id))
        return
    await work.append(
        _event(
            InvoiceCreated(
                invoice_id=invoice.id,
                order_id=invoice.order_id,
                customer_id=invoice.customer_id,
                currency=invoice.currency,
                total=invoice.total,
                created_at=created_at,
            )
        )
    )


async def pay(work: BillingWork, payment: OrderPaid) -> None:
    """Mark the order's invoice paid; the same payment again does nothing.

    Raises:
        OrderUnknownError: there is no invoice, so far.
        RuleViolationError: the payment contradicts the invoice.
        InvoiceChangedError: another transaction changed it without the lock.
    """
    invoice = require_invoice(await work.invoices.lock(payment.order_id), payment.order_id)
    if not is_paid_by(invoice, payment):
        return
    if not await work.invoices.mark_paid_if_issued(invoice.id, payment.payment_reference, payment.paid_at):
        raise InvoiceChangedError(f"the invoice of order {payment.order_id} is no longer issued")
    await work.append(
        _event(
            InvoicePaid(
                invoice_id=invoice.id,
                order_id=invoice.order_id,
                customer_id=invoice.customer_id,
                currency=invoice.currency,
                total=invoice.total,
                payment_reference=payment.payment_reference,
                paid_at=payment.paid_at,
            )
        )
    )


async def void(work: BillingWork, cancellation: OrderCancelled) -> None:
    """Void the order's invoice; a void one stays as it is.

    Raises:
        OrderUnknownError: there is no invoice, so far.
        RuleViolationError: the invoice is paid.
        InvoiceChangedError: another transaction changed it without the lock.
    """
    invoice = require_invoice(await work.invoices.lock(cancellation.order_id), cancellation.order_id)
    if not is_voided_by(invoice, cancellation):
        return
    if not await work.invoices.mark_void_if_issued(invoice.id, cancellation.reason, cancellation.cancelled_at):
        raise InvoiceChangedError(f"the invoice of order {cancellation.order_id} is no longer issued")
    await work.append(
        _event(
            InvoiceVoided(
                invoice_id=invoice.id,
                order_id=invoice.order_id,
                customer_id=invoice.customer_id,
                reason=cancellation.reason,
                voided_at=cancellation.cancelled_at,
            )
        )
    )


def _event(event: InvoiceEvent) -> Event:
    return Event(event.TYPE, str(event.order_id), event.model_dump_json().encode(), event.VERSION)
