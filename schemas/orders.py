"""The events this service consumes. Tolerant readers: unknown fields are ignored, known ones are checked strictly.

Strict means that a string is no number and a number no string; UUIDs and timestamps are strings, as JSON has them.
"""

from typing import Annotated, ClassVar, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.money import LARGEST_TOTAL, Amount, Currency, in_minor_units
from schemas.values import STORABLE, Instant, refused


class OrderEvent(BaseModel):
    """What all order events have in common."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    TYPE: ClassVar[str]
    VERSION: ClassVar[int] = 1

    order_id: Annotated[UUID, Field(description="The order; events of one order belong to one invoice.")]


class OrderLine(BaseModel):
    """One line of an order."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    sku: Annotated[
        str, Field(min_length=1, max_length=64, description="What was ordered.", examples=["NAIL-40"]), STORABLE
    ]
    quantity: Annotated[int, Field(ge=1, le=1_000_000, description="How many.", examples=[2])]
    unit_price: Annotated[Amount, Field(description="Price of one, as a JSON string.", examples=["9.95"])]


class OrderPlaced(OrderEvent):
    """An order was placed: its invoice is to be issued."""

    TYPE: ClassVar[str] = "order.placed"

    customer_id: Annotated[
        str, Field(min_length=1, max_length=64, description="Who ordered.", examples=["C-1042"]), STORABLE
    ]
    currency: Currency
    lines: Annotated[list[OrderLine], Field(min_length=1, max_length=1000, description="What was ordered.")]
    placed_at: Instant

    @model_validator(mode="after")
    def _sums_up(self) -> Self:
        total = sum(line.quantity * in_minor_units(line.unit_price, self.currency) for line in self.lines)
        if total > LARGEST_TOTAL:
            raise refused(f"the total must be at most {LARGEST_TOTAL} minor units")
        return self


class OrderPaid(OrderEvent):
    """An order was paid: amount and currency must be those of its invoice."""

    TYPE: ClassVar[str] = "order.paid"

    amount: Annotated[Amount, Field(description="What was paid, as a JSON string.", examples=["19.90"])]
    currency: Currency
    payment_reference: Annotated[
        str,
        Field(min_length=1, max_length=128, description="The payment, for those who ask.", examples=["PAY-77"]),
        STORABLE,
    ]
    paid_at: Instant

    @model_validator(mode="after")
    def _is_exact(self) -> Self:
        in_minor_units(self.amount, self.currency)
        return self


class OrderCancelled(OrderEvent):
    """An order was cancelled: its invoice is to be voided."""

    TYPE: ClassVar[str] = "order.cancelled"

    reason: Annotated[str, Field(min_length=1, max_length=256, description="Why.", examples=["out of stock"]), STORABLE]
    cancelled_at: Instant
