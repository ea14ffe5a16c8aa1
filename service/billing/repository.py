"""Invoices in PostgreSQL: all SQL of the domain.

What changes an invoice locks it first, so that one decision is made at a time. Writes are guarded and tell whether they
won: the insert by the order's unique constraint, a change by the state that it expects.
"""

from datetime import datetime
from typing import Protocol
from uuid import UUID

from service.billing.invoice import Invoice, Line, Status
from service.reliability.connection import Connection

ISSUE = """
with issued as (
    insert into invoices (id, order_id, customer_id, currency, total, status, placed_at)
    values ($1, $2, $3, $4, $5, 'issued', $6)
    on conflict do nothing
    returning id, created_at
), kept as (
    insert into invoice_lines (invoice_id, line_number, sku, quantity, unit_price)
    select issued.id, line.number, line.sku, line.quantity, line.unit_price
    from issued, unnest($7::text[], $8::integer[], $9::numeric[]) with ordinality
        as line (sku, quantity, unit_price, number)
)
select created_at from issued
"""
"""One round trip for invoice and lines. Waits for a concurrent insert of the same order and loses to its commit.

The conflict has no target: both unique keys, id and order, come from the order, and either may be met first.
"""

LOCK = """
select id, order_id, customer_id, currency, total, status, placed_at, payment_reference
from invoices where order_id = $1 for update
"""

LINES = "select sku, quantity, unit_price from invoice_lines where invoice_id = $1 order by line_number"

PAY = """
update invoices set status = 'paid', payment_reference = $2, paid_at = $3
where id = $1 and status = 'issued'
returning true
"""

VOID = """
update invoices set status = 'void', void_reason = $2, voided_at = $3
where id = $1 and status = 'issued'
returning true
"""


class Invoices(Protocol):
    """The invoices, inside a transaction."""

    async def issue_if_new(self, invoice: Invoice, lines: tuple[Line, ...]) -> datetime | None:
        """Store the invoice with its lines; return when it was created, None where the order has one already."""
        ...

    async def lock(self, order_id: UUID) -> Invoice | None:
        """Return the order's invoice, locked until the transaction ends, so that its events keep their order."""
        ...

    async def lines(self, invoice_id: UUID) -> tuple[Line, ...]:
        """Return an invoice's lines in their order."""
        ...

    async def mark_paid_if_issued(self, invoice_id: UUID, reference: str, paid_at: datetime) -> bool:
        """Mark a locked invoice paid; return whether it was issued until now."""
        ...

    async def mark_void_if_issued(self, invoice_id: UUID, reason: str, voided_at: datetime) -> bool:
        """Mark a locked invoice void; return whether it was issued until now."""
        ...


class PostgresInvoices:
    """The invoices in PostgreSQL."""

    def __init__(self, connection: Connection) -> None:
        """Bind to a connection in a transaction."""
        self._connection = connection

    async def issue_if_new(self, invoice: Invoice, lines: tuple[Line, ...]) -> datetime | None:
        """Store the invoice with its lines, in one statement."""
        created_at: datetime | None = await self._connection.fetchval(
            ISSUE,
            invoice.id,
            invoice.order_id,
            invoice.customer_id,
            invoice.currency,
            invoice.total,
            invoice.placed_at,
            [line.sku for line in lines],
            [line.quantity for line in lines],
            [line.unit_price for line in lines],
        )
        return created_at

    async def lock(self, order_id: UUID) -> Invoice | None:
        """Return the order's invoice, locked."""
        row = await self._connection.fetchrow(LOCK, order_id)
        return None if row is None else Invoice(**{**row, "status": Status(row["status"])})

    async def lines(self, invoice_id: UUID) -> tuple[Line, ...]:
        """Return an invoice's lines in their order."""
        return tuple(Line(**row) for row in await self._connection.fetch(LINES, invoice_id))

    async def mark_paid_if_issued(self, invoice_id: UUID, reference: str, paid_at: datetime) -> bool:
        """Mark a locked invoice paid; return whether it was issued until now."""
        return bool(await self._connection.fetchval(PAY, invoice_id, reference, paid_at))

    async def mark_void_if_issued(self, invoice_id: UUID, reason: str, voided_at: datetime) -> bool:
        """Mark a locked invoice void; return whether it was issued until now."""
        return bool(await self._connection.fetchval(VOID, invoice_id, reason, voided_at))
