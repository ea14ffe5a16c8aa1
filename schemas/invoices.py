"""The events this service publishes, written with exactly these fields, in exactly this form.

Those who read them with these models ignore fields that are not known here: new ones may appear at any time.
Amounts are JSON strings with exactly the decimals of their currency; timestamps are in UTC.
"""

from typing import Annotated, ClassVar, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.money import Amount, Currency, require_exact_decimals
from schemas.values import Instant, Text


class InvoiceEvent(BaseModel):
    """What all invoice events have in common."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    TYPE: ClassVar[str]
    VERSION: ClassVar[int] = 1

    invoice_id: Annotated[UUID, Field(description="The invoice.")]
    order_id: Annotated[UUID, Field(description="Its order; events of one order arrive in commit order.")]
    customer_id: Annotated[Text, Field(description="Who ordered.", examples=["C-1042"])]


class InvoiceCreated(InvoiceEvent):
    """An invoice was issued for an order."""

    TYPE: ClassVar[str] = "invoice.created"

    currency: Currency
    total: Annotated[Amount, Field(description="The sum of the lines, as a JSON string.", examples=["19.90"])]
    created_at: Instant

    @model_validator(mode="after")
    def _is_exact(self) -> Self:
        require_exact_decimals(self.total, self.currency)
        return self


class InvoicePaid(InvoiceEvent):
    """An invoice was paid in full."""

    TYPE: ClassVar[str] = "invoice.paid"

    currency: Currency
    total: Annotated[Amount, Field(description="What was paid, as a JSON string.", examples=["19.90"])]
    payment_reference: Annotated[Text, Field(description="As `order.paid` named it.", examples=["PAY-77"])]
    paid_at: Annotated[Instant, Field(description="As `order.paid` named it, in UTC.")]

    @model_validator(mode="after")
    def _is_exact(self) -> Self:
        require_exact_decimals(self.total, self.currency)
        return self


class InvoiceVoided(InvoiceEvent):
    """An invoice was voided because its order was cancelled."""

    TYPE: ClassVar[str] = "invoice.voided"

    reason: Annotated[Text, Field(description="As `order.cancelled` named it.", examples=["out of stock"])]
    voided_at: Annotated[Instant, Field(description="When the order was cancelled, in UTC.")]
