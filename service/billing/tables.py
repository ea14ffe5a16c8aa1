"""The tables of the domain; constraints carry the invariants. The SQL that runs is in `repository`."""

from datetime import datetime
from decimal import Decimal
from uuid import UUID

from sqlalchemy import CheckConstraint, Numeric, SmallInteger, Text
from sqlmodel import Field, SQLModel

from service.reliability.tables import timestamp


class InvoiceRow(SQLModel, table=True):
    """An invoice; one for each order."""

    __tablename__ = "invoices"
    __table_args__ = (
        CheckConstraint("status IN ('issued', 'paid', 'void')", name="status"),
        CheckConstraint("currency ~ '^[A-Z]{3}$'", name="currency"),
        CheckConstraint("total >= 0 AND total <= 1000000000000000", name="total"),
        CheckConstraint(
            "(status = 'paid') = (payment_reference IS NOT NULL) AND (status = 'paid') = (paid_at IS NOT NULL)",
            name="paid",
        ),
        CheckConstraint(
            "(status = 'void') = (void_reason IS NOT NULL) AND (status = 'void') = (voided_at IS NOT NULL)", name="void"
        ),
    )

    id: UUID = Field(primary_key=True)
    order_id: UUID = Field(unique=True)
    customer_id: str = Field(sa_type=Text)
    currency: str = Field(sa_type=Text)
    total: Decimal = Field(sa_type=Numeric)
    status: str = Field(sa_type=Text)
    placed_at: datetime = Field(sa_column=timestamp())
    created_at: datetime = Field(sa_column=timestamp(default_now=True))
    payment_reference: str | None = Field(default=None, sa_type=Text)
    paid_at: datetime | None = Field(default=None, sa_column=timestamp(nullable=True))
    void_reason: str | None = Field(default=None, sa_type=Text)
    voided_at: datetime | None = Field(default=None, sa_column=timestamp(nullable=True))


class InvoiceLineRow(SQLModel, table=True):
    """A line of an invoice, numbered from 1 in the order's order."""

    __tablename__ = "invoice_lines"
    __table_args__ = (
        CheckConstraint("line_number >= 1", name="line_number"),
        CheckConstraint("quantity >= 1 AND quantity <= 1000000", name="quantity"),
        CheckConstraint("unit_price >= 0", name="unit_price"),
    )

    invoice_id: UUID = Field(primary_key=True, foreign_key="invoices.id", ondelete="CASCADE")
    line_number: int = Field(primary_key=True, sa_type=SmallInteger)
    sku: str = Field(sa_type=Text)
    quantity: int
    unit_price: Decimal = Field(sa_type=Numeric)
