"""An in-memory database with the transactions of the real one: what a handler stores is seen only after its commit.

One behaviour suite runs over this and over PostgreSQL. Not emulated: concurrency (transactions run one at a time, so
nothing is ever waited for), constraints other than those named here, and everything that is SQL.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from service.billing.invoice import Invoice, Line, Status
from service.reliability.envelope import Envelope
from service.reliability.inbox import Claim
from service.reliability.outbox import Event
from service.reliability.unit_of_work import identity_headers


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """An appended event, with the headers it leaves with and `correlation-id`, which leaves as a property."""

    type: str
    key: str
    body: bytes
    headers: Mapping[str, str | int]


@dataclass(slots=True)
class MemoryTables:
    """What is stored."""

    processed: dict[tuple[str, str], bytes] = field(default_factory=dict)
    events: list[MemoryEvent] = field(default_factory=list)
    invoices: dict[UUID, Invoice] = field(default_factory=dict)
    lines: dict[UUID, tuple[Line, ...]] = field(default_factory=dict)


class MemoryInvoices:
    """The invoices, in memory."""

    def __init__(self, tables: MemoryTables, now: datetime) -> None:
        """Bind to a transaction's tables."""
        self._tables = tables
        self._now = now

    async def issue_if_new(self, invoice: Invoice, lines: tuple[Line, ...]) -> datetime | None:
        """Store the invoice with its lines, once for each order."""
        if await self.lock(invoice.order_id) is not None:
            return None
        self._tables.invoices[invoice.id] = invoice
        self._tables.lines[invoice.id] = lines
        return self._now

    async def lock(self, order_id: UUID) -> Invoice | None:
        """Return the order's invoice."""
        return next((i for i in self._tables.invoices.values() if i.order_id == order_id), None)

    async def lines(self, invoice_id: UUID) -> tuple[Line, ...]:
        """Return an invoice's lines in their order."""
        return self._tables.lines.get(invoice_id, ())

    async def mark_paid_if_issued(self, invoice_id: UUID, reference: str, paid_at: datetime) -> bool:  # noqa: ARG002 - the real one stores it
        """Mark an invoice paid; return whether it was issued until now."""
        return self._change_if_issued(invoice_id, status=Status.PAID, payment_reference=reference)

    async def mark_void_if_issued(self, invoice_id: UUID, reason: str, voided_at: datetime) -> bool:  # noqa: ARG002 - the real one stores them
        """Mark an invoice void; return whether it was issued until now."""
        return self._change_if_issued(invoice_id, status=Status.VOID)

    def _change_if_issued(self, invoice_id: UUID, **changes: Any) -> bool:
        invoice = self._tables.invoices.get(invoice_id)
        if invoice is None or invoice.status is not Status.ISSUED:
            return False
        self._tables.invoices[invoice_id] = replace(invoice, **changes)
        return True


class MemoryUnitOfWork:
    """One transaction."""

    def __init__(self, tables: MemoryTables, now: datetime, cause: Envelope) -> None:
        """Bind to a transaction's tables."""
        self._tables = tables
        self._cause = cause
        self.invoices = MemoryInvoices(tables, now)

    async def claim(self, consumer: str, message_id: str, digest: bytes) -> Claim:
        """Claim the message for `consumer`."""
        stored = self._tables.processed.setdefault((consumer, message_id), b"")
        if not stored:
            self._tables.processed[consumer, message_id] = digest
            return Claim.NEW
        return Claim.DUPLICATE if stored == digest else Claim.CONFLICT

    async def append(self, event: Event) -> None:
        """Append an event."""
        headers = identity_headers(self._cause, event)
        self._tables.events.append(MemoryEvent(event.type, event.key, event.body, headers))


@dataclass(slots=True)
class MemoryDatabase:
    """Opens transactions.

    Attributes:
        now: the database's clock.
        tables: what was committed.
        starts: of messages that came again, by consumer and message id.
    """

    now: datetime
    tables: MemoryTables = field(default_factory=MemoryTables)
    starts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def begin(self, cause: Envelope) -> AsyncIterator[MemoryUnitOfWork]:
        """Open a transaction; commit at the end of the block, roll back on an exception."""
        async with self._turn:
            tables = deepcopy(self.tables)
            yield MemoryUnitOfWork(tables, self.now, cause)
            self.tables = tables

    async def count_start(self, consumer: str, message_id: str) -> int:
        """Write down that an execution starts; return how many were since the last `clear_starts`."""
        self.starts[consumer, message_id] += 1
        return self.starts[consumer, message_id]

    async def clear_starts(self, consumer: str, message_id: str) -> None:
        """Forget the starts of a message."""
        self.starts.pop((consumer, message_id), None)
