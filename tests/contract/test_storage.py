"""One behaviour over PostgreSQL and over memory, so that the test kit cannot lie to those who write subscribers."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Protocol

import asyncpg
import pytest

from schemas import OrderPlaced
from service.app import BillingUnitOfWork
from service.billing.invoice import Line, Status, drawn_up
from service.billing.invoicing import BillingWork
from service.database import make_pool
from service.reliability.envelope import Envelope, read_envelope
from service.reliability.inbox import Claim
from service.reliability.outbox import Event
from service.reliability.unit_of_work import PostgresTransactions
from service.testing.memory import MemoryDatabase
from tests.support.doubles import delivery
from tests.support.orders import placed

ORDER = "5d2e1f0a-0000-4000-8000-000000000001"
INVOICE, LINES = drawn_up(OrderPlaced.model_validate_json(placed(ORDER)[1]))
NOW = datetime(2026, 5, 4, 10, tzinfo=UTC)


class Transactions(Protocol):
    """Either of the two."""

    def begin(self, cause: Envelope) -> AbstractAsyncContextManager[BillingWork]:
        """Open a transaction."""
        ...


@pytest.fixture(params=["postgresql", "memory"])
async def transactions(request: pytest.FixtureRequest, database_url: str) -> AsyncIterator[Transactions]:
    """Transactions on an empty database of either kind."""
    if request.param == "memory":
        yield MemoryDatabase(NOW)
        return
    pool = make_pool(database_url, 3)
    await pool
    yield PostgresTransactions(pool, BillingUnitOfWork, lambda: None)
    await pool.close()


CAUSE = read_envelope(delivery(), 5)


async def test_a_claim_is_new_once_then_a_duplicate_or_a_conflict(transactions: Transactions) -> None:
    async with transactions.begin(CAUSE) as work:
        assert await work.claim("c", "m-1", b"digest") is Claim.NEW
    async with transactions.begin(CAUSE) as work:
        assert await work.claim("c", "m-1", b"digest") is Claim.DUPLICATE
    async with transactions.begin(CAUSE) as work:
        assert await work.claim("c", "m-1", b"other") is Claim.CONFLICT
        assert await work.claim("d", "m-1", b"other") is Claim.NEW


async def test_what_was_rolled_back_never_happened(transactions: Transactions) -> None:
    async def fail() -> None:
        async with transactions.begin(CAUSE) as work:
            await work.claim("c", "m-1", b"digest")
            await work.invoices.issue_if_new(INVOICE, LINES)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    async with transactions.begin(CAUSE) as work:
        assert await work.claim("c", "m-1", b"digest") is Claim.NEW
        assert await work.invoices.lock(INVOICE.order_id) is None


async def test_an_invoice_is_stored_with_its_lines_once_for_an_order(transactions: Transactions) -> None:
    async with transactions.begin(CAUSE) as work:
        assert isinstance(await work.invoices.issue_if_new(INVOICE, LINES), datetime)
    async with transactions.begin(CAUSE) as work:
        assert await work.invoices.issue_if_new(INVOICE, LINES) is None
        assert await work.invoices.lock(INVOICE.order_id) == INVOICE
        assert await work.invoices.lines(INVOICE.id) == LINES


async def test_an_invoice_is_paid(transactions: Transactions) -> None:
    async with transactions.begin(CAUSE) as work:
        await work.invoices.issue_if_new(INVOICE, LINES)
        assert await work.invoices.mark_paid_if_issued(INVOICE.id, "payment-1", NOW) is True
    async with transactions.begin(CAUSE) as work:
        paid: Any = await work.invoices.lock(INVOICE.order_id)
    assert (paid.status, paid.payment_reference) == (Status.PAID, "payment-1")


async def test_an_invoice_is_voided(transactions: Transactions) -> None:
    async with transactions.begin(CAUSE) as work:
        await work.invoices.issue_if_new(INVOICE, LINES)
        assert await work.invoices.mark_void_if_issued(INVOICE.id, "out of stock", NOW) is True
    async with transactions.begin(CAUSE) as work:
        void: Any = await work.invoices.lock(INVOICE.order_id)
    assert (void.status, void.payment_reference) == (Status.VOID, None)


async def test_a_change_expects_an_issued_invoice_and_tells_whether_it_found_one(transactions: Transactions) -> None:
    async with transactions.begin(CAUSE) as work:
        assert await work.invoices.mark_paid_if_issued(INVOICE.id, "payment-1", NOW) is False
        assert await work.invoices.mark_void_if_issued(INVOICE.id, "out of stock", NOW) is False
        await work.invoices.issue_if_new(INVOICE, LINES)
        assert await work.invoices.mark_paid_if_issued(INVOICE.id, "payment-1", NOW) is True
        assert await work.invoices.mark_paid_if_issued(INVOICE.id, "payment-2", NOW) is False
        assert await work.invoices.mark_void_if_issued(INVOICE.id, "out of stock", NOW) is False
    async with transactions.begin(CAUSE) as work:
        paid: Any = await work.invoices.lock(INVOICE.order_id)
    assert (paid.status, paid.payment_reference) == (Status.PAID, "payment-1")


async def test_lines_keep_their_order_and_their_decimals(transactions: Transactions) -> None:
    lines = tuple(Line(f"sku-{1000 - number}", number + 1, Decimal("9.50")) for number in range(1000))
    async with transactions.begin(CAUSE) as work:
        await work.invoices.issue_if_new(INVOICE, lines)
    async with transactions.begin(CAUSE) as work:
        stored = await work.invoices.lines(INVOICE.id)
    assert stored == lines
    assert str(stored[0].unit_price) == "9.50"


async def test_an_order_without_an_invoice_has_nothing(transactions: Transactions) -> None:
    async with transactions.begin(CAUSE) as work:
        assert await work.invoices.lock(INVOICE.order_id) is None
        assert await work.invoices.lines(INVOICE.id) == ()


async def test_an_event_is_appended(transactions: Transactions, database_url: str) -> None:
    async with transactions.begin(CAUSE) as work:
        await work.append(Event("invoice.created", ORDER, b"{}"))
    if isinstance(transactions, MemoryDatabase):
        stored = [event.body for event in transactions.tables.events]
    else:
        connection = await asyncpg.connect(database_url)
        stored = [row["payload"] for row in await connection.fetch("select payload from outbox_messages")]
        await connection.close()
    assert stored == [b"{}"]
