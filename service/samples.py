"""Order events to try the service with."""

import json
from datetime import UTC, datetime
from uuid import uuid4

from schemas import OrderCancelled, OrderPaid, OrderPlaced


def body(event_type: str) -> bytes:
    """Return a valid body of the event type, for an order of its own.

    Raises:
        ValueError: nobody publishes such an event to this service.
    """
    order_id, now = str(uuid4()), datetime.now(UTC).isoformat()  # noqa: TID251 - what a producer would write
    match event_type:
        case OrderPlaced.TYPE:
            line = {"sku": "SAMPLE-1", "quantity": 2, "unit_price": "9.95"}
            content = {"customer_id": "sample", "currency": "EUR", "lines": [line], "placed_at": now}
        case OrderPaid.TYPE:
            content = {"amount": "19.90", "currency": "EUR", "payment_reference": f"sample-{order_id}", "paid_at": now}
        case OrderCancelled.TYPE:
            content = {"reason": "a sample", "cancelled_at": now}
        case _:
            raise ValueError(f"no sample for {event_type!r}")
    return json.dumps({"order_id": order_id, **content}).encode()


def new_message_id() -> str:
    """Return a message id that nobody used."""
    return str(uuid4())
