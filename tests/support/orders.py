"""Order events as a producer writes them: routing key and body."""

import json
from typing import Any


def placed(order_id: str, /, **changes: Any) -> tuple[str, bytes]:
    """Return an order of 19.90 EUR."""
    content = {
        "order_id": order_id,
        "customer_id": "customer-1",
        "currency": "EUR",
        "lines": [{"sku": "nail", "quantity": 2, "unit_price": "9.95"}],
        "placed_at": "2026-05-04T10:00:00+02:00",
    }
    return "order.placed", json.dumps(content | changes).encode()


def paid(order_id: str, amount: str, /, **changes: Any) -> tuple[str, bytes]:
    """Return a payment in EUR."""
    content = {
        "order_id": order_id,
        "amount": amount,
        "currency": "EUR",
        "payment_reference": "payment-1",
        "paid_at": "2026-05-04T11:00:00Z",
    }
    return "order.paid", json.dumps(content | changes).encode()


def cancelled(order_id: str, /, **changes: Any) -> tuple[str, bytes]:
    """Return a cancellation."""
    content = {"order_id": order_id, "reason": "changed my mind", "cancelled_at": "2026-05-04T12:00:00Z"}
    return "order.cancelled", json.dumps(content | changes).encode()
