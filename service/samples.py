"""Order events to try the service with: the golden examples, each for an order of its own."""

import json
from uuid import uuid4

from schemas import example


def body(event_type: str, order_id: str | None = None) -> bytes:
    """Return a valid body of the event type, for the order that is named or for one of its own.

    Raises:
        FileNotFoundError: there is no such event type.
    """
    return json.dumps(json.loads(example(event_type)) | {"order_id": order_id or str(uuid4())}).encode()


def new_message_id() -> str:
    """Return a message id that nobody used."""
    return str(uuid4())
