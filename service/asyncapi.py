"""The AsyncAPI document: what FastStream tells of the subscribers, and what it leaves out.

FastStream knows the handlers, their texts and their payloads. It tells neither the exchange and key that a producer
publishes to, nor the queue's arguments, nor headers, nor examples. Those are added from the same values that declare
the topology, so that they cannot drift. `asyncapi.yaml` in the repository is the output; the checks fail where it is
stale.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.resources import files
from inspect import cleandoc
from string import Template
from typing import Any

import yaml
from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange
from faststream.specification import AsyncAPI

from schemas import INCOMING, MESSAGES, OUTGOING, InvoiceEvent, OrderEvent, example
from service.contract import BILLING_EXCHANGE
from service.reliability.inbound import Inbound
from service.reliability.topology import Queue, QueueFamily, delay_name

Document = dict[str, Any]

SERVER = {
    "host": "localhost:5672",
    "pathname": "/billing",
    "protocol": "amqp",
    "protocolVersion": "0.9.1",
    "description": "As `make run` uses it. Elsewhere, ask those who operate the service for broker and virtual host.",
}

_TRACEPARENT = {
    "type": "string",
    "description": "W3C trace context; the events that a message causes carry it on.",
    "examples": ["00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"],
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What producers may rely on: no smaller value comes without a new version.

    Attributes:
        bodyBytes: the largest body that is read.
        totalMinorUnits: the largest total of an order.
        messageIdDays: how long a message id is known, so that its duplicates are.
        executions: of a message that fails.
    """

    bodyBytes: int  # noqa: N815 - as the document has it
    totalMinorUnits: int  # noqa: N815
    messageIdDays: int  # noqa: N815
    executions: int


def asyncapi_yaml(subscribe: Callable[[Inbound], None], family: QueueFamily, limits: Limits) -> str:
    """Return the AsyncAPI 3.0 document, the same at every call.

    Args:
        subscribe: declares the subscribers.
        family: what they consume.
        limits: in words and numbers in the document.
    """
    broker = RabbitBroker(logger=None)
    subscribe(Inbound(broker, family))
    _declare_events(broker)
    document = _tidy(AsyncAPI(broker, title="Billing", schema_version="3.0.0").to_specification().to_jsonable())
    messages = [message for message in MESSAGES if message.TYPE in document["channels"]]
    complete = {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Billing",
            "version": version("billing-service"),
            "description": _description(family, limits),
        },
        "defaultContentType": "application/json",
        "x-limits": asdict(limits),
        "servers": {"development": SERVER},
        "channels": {m.TYPE: _channel(m, document["channels"][m.TYPE], family) for m in messages},
        "operations": {m.TYPE: _operation(m, family) for m in messages},
        "components": {
            "messages": {m.TYPE: _message(m) for m in messages},
            "schemas": dict(sorted(document["components"]["schemas"].items())),
        },
    }
    return yaml.dump(complete, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _declare_events(broker: RabbitBroker) -> None:
    """Declare the events that leave through the outbox, for the document only: nothing publishes through these."""
    exchange = RabbitExchange(BILLING_EXCHANGE, type=ExchangeType.TOPIC, durable=True, declare=False)
    for event in OUTGOING:
        broker.publisher(routing_key=event.TYPE, exchange=exchange, schema=event, title=event.TYPE)


def _description(family: QueueFamily, limits: Limits) -> str:
    policy = family.policy
    delays = ", ".join(delay_name(policy.delay_after(attempt)) for attempt in range(1, policy.max_attempts))
    return Template(files("service").joinpath("asyncapi.md").read_text()).substitute(
        executions=limits.executions,
        delays=delays,
        body=f"{limits.bodyBytes / 2**20:g} MiB",
        total=f"{limits.totalMinorUnits:,}".replace(",", " "),
        days=limits.messageIdDays,
    )


def _channel(message: type[OrderEvent | InvoiceEvent], told: Document, family: QueueFamily) -> Document:
    """Return where a message is published: exchange and key; for what arrives, also the queue it is consumed from."""
    arrives = message in INCOMING
    exchange = family.name if arrives else BILLING_EXCHANGE
    binding: Document = {
        "is": "routingKey",
        "exchange": {
            "name": exchange,
            "type": "direct" if arrives else "topic",
            "durable": True,
            "autoDelete": False,
        },
    }
    if arrives:
        work = next(item for item in family.topology.queues if item.name == family.work)
        binding["x-queue"] = _queue(work)
    binding["bindingVersion"] = "0.3.0"
    return {
        "address": message.TYPE,
        "title": message.TYPE,
        "description": told["description"] if arrives else cleandoc(message.__doc__ or ""),
        "servers": [{"$ref": "#/servers/development"}],
        "messages": {message.TYPE: {"$ref": f"#/components/messages/{message.TYPE}"}},
        "bindings": {"amqp": binding},
    }


def _queue(queue: Queue) -> Document:
    return {
        "name": queue.name,
        "durable": True,
        "exclusive": False,
        "autoDelete": False,
        "arguments": dict(queue.arguments),
    }


def _operation(message: type[OrderEvent | InvoiceEvent], family: QueueFamily) -> Document:
    """Return what the service does with a message: receive it, acked by hand, or send it, confirmed."""
    arrives = message in INCOMING
    binding: Document = (
        {"ack": True, "x-acknowledgement": "manual, after the transaction is committed"}
        if arrives
        else {"deliveryMode": 2, "mandatory": True, "timestamp": True, "x-confirms": True}
    )
    return {
        "action": "receive" if arrives else "send",
        "title": message.TYPE,
        "summary": (
            f"Publish to the direct exchange {family.name} with the routing key {message.TYPE}."
            if arrives
            else f"Bind your queue to the topic exchange {BILLING_EXCHANGE} with the routing key {message.TYPE}."
        ),
        "channel": {"$ref": f"#/channels/{message.TYPE}"},
        "messages": [{"$ref": f"#/channels/{message.TYPE}/messages/{message.TYPE}"}],
        "bindings": {"amqp": {"cc": [message.TYPE], **binding, "bindingVersion": "0.3.0"}},
    }


def _message(message: type[OrderEvent | InvoiceEvent]) -> Document:
    arrives = message in INCOMING
    headers = _headers_in(message) if arrives else _headers_out(message)
    return {
        "name": message.TYPE,
        "title": message.TYPE,
        "summary": cleandoc(message.__doc__ or ""),
        "contentType": "application/json",
        "headers": headers,
        "payload": {"$ref": f"#/components/schemas/{message.__name__}"},
        "bindings": {"amqp": {"messageType": message.TYPE, "bindingVersion": "0.3.0"}},
        "examples": [
            {
                "name": f"{message.TYPE}.v{message.VERSION}",
                "headers": {name: header["examples"][0] for name, header in headers["properties"].items()},
                "payload": json.loads(example(message.TYPE, message.VERSION)),
            }
        ],
    }


def _headers_in(message: type[OrderEvent | InvoiceEvent]) -> Document:
    return {
        "type": "object",
        "description": "None is required. Others are kept on every copy, without a meaning here.",
        "properties": {
            "schema-version": {
                "type": "integer",
                "enum": [message.VERSION],
                "default": 1,
                "description": "Of the body; a version that is not known here is parked as `invalid`.",
                "examples": [message.VERSION],
            },
            "traceparent": _TRACEPARENT,
        },
    }


def _headers_out(message: type[OrderEvent | InvoiceEvent]) -> Document:
    return {
        "type": "object",
        "properties": {
            "schema-version": {
                "type": "integer",
                "enum": [message.VERSION],
                "description": "Of the body. Another one comes only with changes that a tolerant reader cannot read.",
                "examples": [message.VERSION],
            },
            "causation-id": {
                "type": "string",
                "description": "The `message_id` of the order event that caused this one.",
                "examples": ["1f0c7a52-7d5f-4f57-8a0e-3b0a2f1c9d10"],
            },
            "traceparent": _TRACEPARENT,
        },
        "required": ["schema-version", "causation-id"],
    }


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
    """Writes texts of several lines as blocks, to be read and compared by people; repeats instead of anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class's signature
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
