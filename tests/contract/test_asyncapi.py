"""The AsyncAPI document: valid by the official schema, current, and complete where the framework is not."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from schemas import INCOMING, MESSAGES, OUTGOING, InvoiceEvent, OrderEvent
from schemas.__main__ import json_schema
from service.app import published_contract
from service.reliability.outcome import Reason

ROOT = Path(__file__).parents[2]
Message = type[OrderEvent | InvoiceEvent]


@cache
def text() -> str:
    """Return the document as it is generated."""
    return published_contract()


def document() -> dict[str, Any]:
    """Return the document, parsed."""
    return yaml.safe_load(text())


def test_the_document_in_the_repository_is_the_generated_one() -> None:
    assert (ROOT / "asyncapi.yaml").read_text() == text()


def test_it_is_valid_by_the_official_schema() -> None:
    official = json.loads((Path(__file__).parent / "official" / "asyncapi-3.0.0.json").read_text())
    validator = jsonschema.Draft7Validator(official)
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document())] == []
    broken = document()
    broken["channels"]["order.placed"]["bindings"]["amqp"]["is"] = "exchange"
    assert not validator.is_valid(broken)


@pytest.mark.parametrize("message", INCOMING)
def test_what_arrives_names_exchange_key_queue_and_its_arguments(message: Message) -> None:
    channel = document()["channels"][message.TYPE]
    assert channel["address"] == message.TYPE
    binding = channel["bindings"]["amqp"]
    assert binding["is"] == "routingKey"
    assert binding["exchange"] == {"name": "orders", "type": "direct", "durable": True, "autoDelete": False}
    assert binding["x-queue"] == {
        "name": "orders.work",
        "durable": True,
        "exclusive": False,
        "autoDelete": False,
        "arguments": {
            "x-queue-type": "quorum",
            "x-overflow": "reject-publish",
            "x-delivery-limit": 200,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "orders.parking",
            "x-dead-letter-strategy": "at-least-once",
        },
    }
    operation = document()["operations"][message.TYPE]
    assert operation["action"] == "receive"
    assert operation["bindings"]["amqp"]["x-acknowledgement"] == "manual, after the transaction is committed"


@pytest.mark.parametrize("message", OUTGOING)
def test_what_leaves_names_exchange_and_key_and_is_persistent_mandatory_and_confirmed(message: Message) -> None:
    channel = document()["channels"][message.TYPE]
    assert channel["address"] == message.TYPE
    assert channel["bindings"]["amqp"]["exchange"] == {
        "name": "billing",
        "type": "topic",
        "durable": True,
        "autoDelete": False,
    }
    operation = document()["operations"][message.TYPE]
    assert operation["action"] == "send"
    assert operation["bindings"]["amqp"] == {
        "cc": [message.TYPE],
        "deliveryMode": 2,
        "mandatory": True,
        "timestamp": True,
        "x-confirms": True,
        "bindingVersion": "0.3.0",
    }


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_has_headers_with_their_meaning_and_a_valid_example(message: Message) -> None:
    components = document()["components"]
    described = components["messages"][message.TYPE]
    assert all(header["description"] for header in described["headers"]["properties"].values())
    [example] = described["examples"]
    jsonschema.validate(example["headers"], described["headers"])
    payload = {"$ref": described["payload"]["$ref"], "components": components}
    jsonschema.Draft202012Validator(payload).validate(example["payload"])
    assert message.model_validate_json(json.dumps(example["payload"]))
    assert described["summary"]


@pytest.mark.parametrize("message", MESSAGES)
def test_every_field_says_what_it_is(message: Message) -> None:
    properties = document()["components"]["schemas"][message.__name__]["properties"]
    assert [name for name, field in properties.items() if not field.get("description")] == []


def test_money_is_a_string_and_the_rule_is_in_bold() -> None:
    schemas = document()["components"]["schemas"]
    money = [
        field
        for schema in schemas.values()
        for name, field in schema["properties"].items()
        if name in {"amount", "total", "unit_price"}
    ]
    assert {field["type"] for field in money} == {"string"}
    assert len(money) >= len(("amount", "total", "total", "unit_price"))
    assert '**Money is a JSON string of a decimal (`"19.90"`), never a JSON number.**' in text()


def test_a_reader_is_not_told_that_there_will_never_be_another_field() -> None:
    assert "additionalProperties" not in text()


def test_it_says_what_becomes_of_every_message() -> None:
    description = document()["info"]["description"]
    for reason in Reason:
        assert f"| `{reason}` |" in description
    assert "executed up to 5 times, with waits of 5s, 30s, 2m, 10m between" in description
    assert "at most 16 MiB" in description
    assert "at most 1 000 000 000 000 000 minor units" in description
    assert "for 30 days at least" in description
    assert document()["x-limits"] == {
        "bodyBytes": 16_777_216,
        "totalMinorUnits": 10**15,
        "messageIdDays": 30,
        "executions": 5,
    }


@pytest.mark.parametrize("message", MESSAGES)
def test_the_exported_json_schema_is_current(message: Message) -> None:
    """`make asyncapi` writes it."""
    exported = ROOT / "schemas" / "json" / f"{message.TYPE}.v{message.VERSION}.json"
    assert exported.read_text() == json_schema(message)
