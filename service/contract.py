"""What others rely on: the names on the broker, and the AsyncAPI document that tells them.

The document is generated from the subscribers themselves and from the events declared here; `asyncapi.yaml` in the
repository is its output, and the checks fail where it is stale.
"""

from importlib.metadata import version

import yaml
from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange
from faststream.specification import AsyncAPI
from pydantic import BaseModel
from schemas import INCOMING, InvoiceCreated, InvoicePaid, InvoiceVoided

ORDERS_EXCHANGE = "orders"
ORDER_EVENTS = tuple(message.TYPE for message in INCOMING)
BILLING_EXCHANGE = "billing"

DESCRIPTION = """\
Order events in, invoices kept, invoice events out.

Publish order events to the direct exchange `orders`, routing key = event type: JSON in UTF-8, persistent, with a
`message_id` (1 to 255 bytes) that stays the same on every re-publish. A message id is processed once; the same id with
other content is parked. Bind your queue to the topic exchange `billing` for invoice events: they arrive at least once,
always with the same `message_id`, in commit order for each order.

**Money is a JSON string of a decimal (`"19.90"`), never a JSON number.** Currencies are ISO 4217 codes and decide the
number of decimals; timestamps carry an offset. Readers ignore unknown fields.
"""

_EVENTS: tuple[tuple[type[BaseModel], str], ...] = (
    (InvoiceCreated, "An invoice was issued for an order."),
    (InvoicePaid, "An invoice was paid."),
    (InvoiceVoided, "An invoice was voided because its order was cancelled."),
)


def declare_events(broker: RabbitBroker) -> None:
    """Declare the events that leave through the outbox, for the document only: nothing publishes through these."""
    exchange = RabbitExchange(BILLING_EXCHANGE, type=ExchangeType.TOPIC, durable=True, declare=False)
    for model, description in _EVENTS:
        event_type: str = model.TYPE  # type: ignore[attr-defined]  # every schema has one
        broker.publisher(
            routing_key=event_type,
            exchange=exchange,
            schema=model,
            title=event_type,
            description=description,
            persist=True,
            mandatory=True,
        )


def asyncapi_yaml(broker: RabbitBroker) -> str:
    """Return the AsyncAPI 3.0 document of a broker with its subscribers and events declared."""
    specification = AsyncAPI(
        broker, title="Billing", version=version("billing-service"), description=DESCRIPTION, schema_version="3.0.0"
    ).to_specification()
    return yaml.safe_dump(specification.to_jsonable(), sort_keys=False, allow_unicode=True, width=110)
