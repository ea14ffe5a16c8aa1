"""Invoices in PostgreSQL: what only a real server shows — rows, locks, constraints and plans.

What a handler can tell of them is held by tests/contract/test_storage.py, over memory too.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import asyncpg
import pytest

from schemas import OrderCancelled, OrderPaid, OrderPlaced
from service.app import BillingUnitOfWork
from service.billing import invoicing, repository
from service.billing.errors import RuleViolationError
from service.billing.invoice import drawn_up
from service.billing.repository import PostgresInvoices
from service.database import make_pool
from service.reliability.envelope import read_envelope
from service.reliability.unit_of_work import PostgresTransactions
from tests.support.doubles import delivery
from tests.support.orders import cancelled, paid, placed
from tests.support.waiting import eventually

ORDER = "5d2e1f0a-0000-4000-8000-000000000001"
CAUSE = read_envelope(delivery(), 5)

Transactions = PostgresTransactions[BillingUnitOfWork]


@pytest.fixture
async def transactions(database_url: str) -> AsyncIterator[Transactions]:
    """Transactions on an empty database, three at once."""
    pool = make_pool(database_url, 3)
    await pool
    yield PostgresTransactions(pool, BillingUnitOfWork, lambda: None)
    await pool.close()


def order(**changes: Any) -> OrderPlaced:
    """Return a placed order."""
    return OrderPlaced.model_validate_json(placed(ORDER, **changes)[1])


def payment(amount: str = "19.90", **changes: Any) -> OrderPaid:
    """Return a payment."""
    return OrderPaid.model_validate_json(paid(ORDER, amount, **changes)[1])


CANCELLATION = OrderCancelled.model_validate_json(cancelled(ORDER)[1])


async def test_a_paid_invoice_keeps_what_the_payment_said(
    transactions: Transactions, connection: asyncpg.Connection
) -> None:
    async with transactions.begin(CAUSE) as work:
        await invoicing.issue(work, order())
    async with transactions.begin(CAUSE) as work:
        await invoicing.pay(work, payment())
    row = await connection.fetchrow("select * from invoices")
    assert (row["status"], row["payment_reference"]) == ("paid", "payment-1")
    assert row["paid_at"] == datetime(2026, 5, 4, 11, tzinfo=UTC)
    assert (row["void_reason"], row["voided_at"]) == (None, None)


async def test_a_void_invoice_keeps_what_the_cancellation_said(
    transactions: Transactions, connection: asyncpg.Connection
) -> None:
    async with transactions.begin(CAUSE) as work:
        await invoicing.issue(work, order())
    async with transactions.begin(CAUSE) as work:
        await invoicing.void(work, CANCELLATION)
    row = await connection.fetchrow("select * from invoices")
    assert (row["status"], row["void_reason"]) == ("void", "changed my mind")
    assert row["voided_at"] == datetime(2026, 5, 4, 12, tzinfo=UTC)
    assert (row["payment_reference"], row["paid_at"]) == (None, None)


@pytest.mark.parametrize(
    ("currency", "unit_price", "total"),
    [
        ("JPY", "1000000000000000", "1000000000000000"),
        ("JPY", "10000", "10000"),
        ("EUR", "0", "0.00"),
        ("EUR", "10000000000000", "10000000000000.00"),
        ("KWD", "1000000000000.000", "1000000000000.000"),
    ],
)
async def test_a_total_is_stored_and_told_with_its_decimals(
    transactions: Transactions, connection: asyncpg.Connection, currency: str, unit_price: str, total: str
) -> None:
    """The driver reads 10000 back as 1E+4: equal, but not how money is written in a message."""
    lines = [{"sku": "nail", "quantity": 1, "unit_price": unit_price}]
    async with transactions.begin(CAUSE) as work:
        await invoicing.issue(work, order(currency=currency, lines=lines))
    async with transactions.begin(CAUSE) as work:
        await invoicing.pay(work, payment(total, currency=currency))
    assert await connection.fetchval("select total::text from invoices") == total
    payloads = await connection.fetch("select payload from outbox_messages order by sequence")
    assert [json.loads(row["payload"])["total"] for row in payloads] == [total, total]


async def test_what_was_created_carries_the_databases_time(
    transactions: Transactions, connection: asyncpg.Connection
) -> None:
    async with transactions.begin(CAUSE) as work:
        await invoicing.issue(work, order())
    stored = await connection.fetchval("select created_at from invoices")
    body = json.loads(await connection.fetchval("select payload from outbox_messages"))
    assert datetime.fromisoformat(body["created_at"]) == stored
    assert stored != order().placed_at


@pytest.mark.guarantee("G8")
async def test_a_locked_invoice_is_nobody_elses(transactions: Transactions, connection: asyncpg.Connection) -> None:
    """G8: the sequence of an order's events is their commit order only because of this lock."""
    free = "select count(*) from (select from invoices for update skip locked) as free"
    async with transactions.begin(CAUSE) as work:
        await invoicing.issue(work, order())
    async with transactions.begin(CAUSE) as work:
        await work.invoices.lock(order().order_id)
        assert await connection.fetchval(free) == 0
    assert await connection.fetchval(free) == 1


@pytest.mark.parametrize("customer", ["customer-1", "customer-2"])
async def test_of_two_orders_at_once_one_is_issued_and_the_other_is_compared(
    transactions: Transactions, connection: asyncpg.Connection, customer: str
) -> None:
    """The second waits for the first to commit: the same order does nothing, another one is refused."""
    async with transactions.begin(CAUSE) as first:
        await invoicing.issue(first, order())
        second = asyncio.create_task(_issue(transactions, order(customer_id=customer)))
        await eventually(lambda: _waiting(connection), lambda n: n == 1)
    if customer == "customer-1":
        await second
    else:
        with pytest.raises(RuleViolationError):
            await second
    assert await connection.fetchval("select array_agg(customer_id) from invoices") == ["customer-1"]
    assert await connection.fetchval("select count(*) from invoice_lines") == 1
    assert await connection.fetchval("select count(*) from outbox_messages") == 1


async def test_an_order_takes_the_place_of_one_that_was_rolled_back(
    transactions: Transactions, connection: asyncpg.Connection
) -> None:
    async def fail() -> None:
        async with transactions.begin(CAUSE) as first:
            await invoicing.issue(first, order())
            tasks.append(asyncio.create_task(_issue(transactions, order(customer_id="customer-2"))))
            await eventually(lambda: _waiting(connection), lambda n: n == 1)
            raise RuntimeError

    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(RuntimeError):
        await fail()
    await tasks[0]
    assert await connection.fetchval("select array_agg(customer_id) from invoices") == ["customer-2"]
    assert await connection.fetchval("select count(*) from outbox_messages") == 1


async def test_a_payment_and_a_cancellation_at_once_do_not_both_count(
    transactions: Transactions, connection: asyncpg.Connection
) -> None:
    async with transactions.begin(CAUSE) as work:
        await invoicing.issue(work, order())
    async with transactions.begin(CAUSE) as first:
        await invoicing.pay(first, payment())
        second = asyncio.create_task(_void(transactions))
        await eventually(lambda: _waiting(connection), lambda n: n == 1)
    with pytest.raises(RuleViolationError):
        await second
    types = await connection.fetchval("select array_agg(type order by sequence) from outbox_messages")
    assert types == ["invoice.created", "invoice.paid"]


ANOTHER_OF_THE_ORDER = """
insert into invoices (id, order_id, customer_id, currency, total, status, placed_at)
select gen_random_uuid(), order_id, customer_id, currency, total, status, placed_at from invoices
"""


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("update invoices set status = 'paid'", "invoices_paid_check"),
        ("update invoices set status = 'paid', payment_reference = 'p'", "invoices_paid_check"),
        ("update invoices set status = 'paid', paid_at = now()", "invoices_paid_check"),
        ("update invoices set payment_reference = 'p', paid_at = now()", "invoices_paid_check"),
        ("update invoices set status = 'void'", "invoices_void_check"),
        ("update invoices set status = 'void', void_reason = 'r'", "invoices_void_check"),
        ("update invoices set status = 'void', voided_at = now()", "invoices_void_check"),
        ("update invoices set void_reason = 'r', voided_at = now()", "invoices_void_check"),
        ("update invoices set status = 'open'", "invoices_status_check"),
        ("update invoices set currency = 'eur'", "invoices_currency_check"),
        ("update invoices set total = -0.01", "invoices_total_check"),
        ("update invoices set total = 1000000000000000.01", "invoices_total_check"),
        ("update invoice_lines set line_number = 0", "invoice_lines_line_number_check"),
        ("update invoice_lines set quantity = 0", "invoice_lines_quantity_check"),
        ("update invoice_lines set quantity = 1000001", "invoice_lines_quantity_check"),
        ("update invoice_lines set unit_price = -0.01", "invoice_lines_unit_price_check"),
        ("update invoice_lines set invoice_id = gen_random_uuid()", "invoice_lines_invoice_id_fkey"),
        ("insert into invoice_lines select * from invoice_lines", "invoice_lines_pkey"),
        (ANOTHER_OF_THE_ORDER, "invoices_order_id_key"),
    ],
)
async def test_the_tables_refuse_what_no_invoice_can_be(
    connection: asyncpg.Connection, change: str, constraint: str
) -> None:
    """Whoever writes: a mistake in the code, or a person at the prompt."""
    await PostgresInvoices(connection).issue_if_new(*drawn_up(order()))
    with pytest.raises(asyncpg.IntegrityConstraintViolationError) as refused:
        await connection.execute(change)
    assert refused.value.constraint_name == constraint


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        (repository.LOCK, "invoices_order_id_key"),
        (repository.LINES, "invoice_lines_pkey"),
        (repository.PAY, "invoices_pkey"),
        (repository.VOID, "invoices_pkey"),
    ],
)
async def test_each_statement_has_an_index_to_go_by(connection: asyncpg.Connection, statement: str, index: str) -> None:
    await connection.execute("set enable_seqscan = off")
    await connection.execute("set plan_cache_mode = force_generic_plan")
    await connection.execute(f"prepare statement as {statement}")
    arguments = await connection.fetchval(
        "select array_to_string(array_fill('null'::text, array[cardinality(parameter_types)]), ', ')"
        " from pg_prepared_statements where name = 'statement'"
    )
    plan = await connection.fetch(f"explain execute statement ({arguments})")
    assert any(index in line[0] for line in plan), plan


async def test_the_largest_order_is_stored_as_it_came(
    transactions: Transactions, connection: asyncpg.Connection
) -> None:
    lines = [{"sku": f"sku-{number}", "quantity": 1_000_000, "unit_price": "0.01"} for number in range(1000)]
    async with transactions.begin(CAUSE) as work:
        await invoicing.issue(work, order(lines=lines))
    assert await connection.fetchval("select total from invoices") == Decimal("10000000.00")
    numbers = await connection.fetchrow("select count(*), min(line_number), max(line_number) from invoice_lines")
    assert tuple(numbers) == (1000, 1, 1000)


async def _issue(transactions: Transactions, placed_order: OrderPlaced) -> None:
    async with transactions.begin(CAUSE) as work:
        await invoicing.issue(work, placed_order)


async def _void(transactions: Transactions) -> None:
    async with transactions.begin(CAUSE) as work:
        await invoicing.void(work, CANCELLATION)


async def _waiting(connection: asyncpg.Connection) -> int:
    return await connection.fetchval(
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    )
