"""What others rely on: the names on the broker, and the AsyncAPI document that tells them.

The document is generated from the subscribers themselves and from the events declared here; `asyncapi.yaml` in the
repository is its output, and the checks fail where it is stale.
"""

from importlib.metadata import version
from inspect import cleandoc
from typing import Any

import yaml
from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange
from faststream.specification import AsyncAPI

from schemas import INCOMING, MESSAGES, OUTGOING

ORDERS_EXCHANGE = "orders"
ORDER_EVENTS = tuple(message.TYPE for message in INCOMING)
BILLING_EXCHANGE = "billing"

DESCRIPTION = """\
Order events in, invoices kept, invoice events out.

Publish order events to the direct exchange `orders`, routing key = event type: JSON in UTF-8, persistent, with a
`message_id` (1 to 255 bytes) that stays the same on every re-publish. A message id is processed once; the same id with
other content is parked. Bind your queue to the topic exchange `billing` for invoice events: they arrive at least once,
always with the same `message_id`, in commit order for each order as long as none has to be published again.

**Money is a JSON string of a decimal (`"19.90"`), never a JSON number.** Currencies are ISO 4217 codes and decide the
number of decimals; timestamps carry an offset. Readers ignore unknown fields.
"""


def declare_events(broker: RabbitBroker) -> None:
    """Declare the events that leave through the outbox, for the document only: nothing publishes through these."""
    exchange = RabbitExchange(BILLING_EXCHANGE, type=ExchangeType.TOPIC, durable=True, declare=False)
    for event in OUTGOING:
        broker.publisher(
            routing_key=event.TYPE,
            exchange=exchange,
            schema=event,
            title=event.TYPE,
            description=event.__doc__,
            persist=True,
            mandatory=True,
        )


def asyncapi_yaml(broker: RabbitBroker) -> str:
    """Return the AsyncAPI 3.0 document of a broker with its subscribers and events declared; the same at every call."""
    specification = AsyncAPI(
        broker, title="Billing", version=version("billing-service"), description=DESCRIPTION, schema_version="3.0.0"
    ).to_specification()
    document = {"asyncapi": "3.0.0"} | _tidy(specification.to_jsonable())
    for part in (document, document["components"]):
        for name in {"channels", "operations", "messages", "schemas"} & part.keys():
            part[name] = dict(sorted(part[name].items(), key=_reading_order))
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _reading_order(entry: tuple[str, object]) -> tuple[int, str]:
    """Put what belongs to the messages into their order; the framework keeps its subscribers in a set."""
    name = entry[0].split(":", maxsplit=1)[0]
    types = [message.TYPE for message in MESSAGES]
    return (types.index(name) if name in types else len(types), entry[0])


def _tidy(value: Any) -> Any:
    """Return the document with the indentation of docstrings taken out of its texts."""
    match value:
        case dict():
            return {key: _tidy(item) for key, item in value.items()}
        case list():
            return [_tidy(item) for item in value]
        case str():
            return cleandoc(value)
        case _:
            return value


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, to be read and compared by people."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
