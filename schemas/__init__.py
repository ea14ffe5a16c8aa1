"""The published contract: the messages that go in and out, for this service and for anybody who talks to it.

`orders` goes in, `invoices` comes out; `example` gives a JSON for each message and version. Money is a JSON string.
"""

from schemas.golden import example
from schemas.invoices import InvoiceCreated, InvoiceEvent, InvoicePaid, InvoiceVoided
from schemas.orders import (
    OrderCancelled,
    OrderEvent,
    OrderLine,
    OrderPaid,
    OrderPlaced,
)

INCOMING: tuple[type[OrderEvent], ...] = (
    OrderPlaced,
    OrderPaid,
    OrderCancelled,
)
OUTGOING: tuple[type[InvoiceEvent], ...] = (
    InvoiceCreated,
    InvoicePaid,
    InvoiceVoided,
)
MESSAGES: tuple[type[OrderEvent | InvoiceEvent], ...] = (*INCOMING, *OUTGOING)

__all__ = [
    "INCOMING",
    "MESSAGES",
    "OUTGOING",
    "InvoiceCreated",
    "InvoiceEvent",
    "InvoicePaid",
    "InvoiceVoided",
    "OrderCancelled",
    "OrderEvent",
    "OrderLine",
    "OrderPaid",
    "OrderPlaced",
    "example",
]
