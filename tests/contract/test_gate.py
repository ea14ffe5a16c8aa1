"""The gate lets no change pass that would break a producer or a consumer, unless the version says so."""

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from schemas import INCOMING
from service.testing import InMemoryService
from tools.contract_gate import Contract, breaks, judge, last_release

ROOT = Path(__file__).parents[2]
RELEASED = last_release(ROOT / "docs" / "contract").document

Change = Callable[[dict[str, Any]], Any]


def schema(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what finds a schema in a document."""
    return lambda document: document["components"]["schemas"][name]


placed, paid, created, line = (schema(n) for n in ("OrderPlaced", "OrderPaid", "InvoiceCreated", "OrderLine"))


def channel(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what finds the AMQP binding of a channel."""
    return lambda document: document["channels"][name]["bindings"]["amqp"]


def headers(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what finds the headers of a message."""
    return lambda document: document["components"]["messages"][name]["headers"]


def after(change: Change, version: str = RELEASED["info"]["version"]) -> dict[str, Any]:
    """Return the released document with a change."""
    document = deepcopy(RELEASED)
    change(document)
    document["info"]["version"] = version
    return document


BREAKING: list[tuple[Change, str]] = [
    # What is where.
    (lambda d: d["operations"].pop("order.paid"), "order.paid: removed"),
    (lambda d: d["operations"]["order.paid"].update(action="send"), "order.paid: receive became send"),
    (lambda d: d["operations"]["order.paid"].update(messages=[]), "order.paid message order.paid: removed"),
    (
        lambda d: channel("order.paid")(d)["exchange"].update(name="sales"),
        'order.paid channel exchange.name: "orders" became "sales"',
    ),
    (
        lambda d: channel("invoice.paid")(d)["exchange"].update(type="fanout"),
        'invoice.paid channel exchange.type: "topic" became "fanout"',
    ),
    (
        lambda d: d["channels"]["invoice.paid"].update(address="invoice.settled"),
        'invoice.paid address: "invoice.paid" became "invoice.settled"',
    ),
    (
        lambda d: d["operations"]["order.paid"]["bindings"]["amqp"].update(cc=["order.settled"]),
        'order.paid operation cc: ["order.paid"] became ["order.settled"]',
    ),
    (
        lambda d: channel("order.placed")(d)["x-queue"].update(name="orders.other"),
        'order.placed channel x-queue.name: "orders.work" became "orders.other"',
    ),
    (
        lambda d: channel("order.placed")(d)["x-queue"]["arguments"].update({"x-delivery-limit": 20}),
        "order.placed channel x-queue.arguments.x-delivery-limit: 200 became 20",
    ),
    (
        lambda d: d["operations"]["invoice.paid"]["bindings"]["amqp"].update(deliveryMode=1),
        "invoice.paid operation deliveryMode: 2 became 1",
    ),
    # What arrives must not become narrower.
    (lambda d: placed(d)["properties"].pop("customer_id"), "order.placed payload.customer_id: removed"),
    (
        lambda d: placed(d)["required"].append("channel"),
        "order.placed payload.channel: became required; producers may not send it",
    ),
    (
        lambda d: line(d)["properties"]["quantity"].update(maximum=1000),
        "order.placed payload.lines[].quantity: maximum: 1000000 became 1000; producers may send more",
    ),
    (
        lambda d: line(d)["properties"]["quantity"].update(minimum=2),
        "order.placed payload.lines[].quantity: minimum: 1 became 2; producers may send more",
    ),
    (
        lambda d: placed(d)["properties"]["customer_id"].update(maxLength=10),
        "order.placed payload.customer_id: maxLength: 64 became 10; producers may send more",
    ),
    (
        lambda d: placed(d)["properties"]["lines"].update(minItems=2),
        "order.placed payload.lines: minItems: 1 became 2; producers may send more",
    ),
    (
        lambda d: placed(d)["properties"]["customer_id"].update(type="integer"),
        "order.placed payload.customer_id: type: string became integer; producers may send more",
    ),
    (
        lambda d: paid(d)["properties"]["currency"].update(enum=["EUR"]),
        'order.paid payload.currency: enum: nothing became "EUR"; producers may send more',
    ),
    (
        lambda d: paid(d)["properties"]["currency"].update(pattern="^EUR$"),
        'order.paid payload.currency: pattern: "^[A-Z]{3}$" became "^EUR$"',
    ),
    (
        lambda d: paid(d)["properties"]["paid_at"].update(format="date"),
        'order.paid payload.paid_at: format: "date-time" became "date"',
    ),
    (
        lambda d: paid(d).update(additionalProperties=False),
        "order.paid payload: additionalProperties: nothing became false",
    ),
    (
        lambda d: headers("order.paid")(d).update(required=["traceparent"]),
        "order.paid headers.traceparent: became required; producers may not send it",
    ),
    (
        lambda d: headers("order.paid")(d)["properties"]["schema-version"].update(enum=[2]),
        "order.paid headers.schema-version: enum: 1 became 2; producers may send more",
    ),
    # What leaves must not become wider.
    (lambda d: created(d)["properties"].pop("total"), "invoice.created payload.total: removed"),
    (lambda d: created(d)["required"].remove("total"), "invoice.created payload.total: is no longer always there"),
    (
        lambda d: created(d)["properties"]["total"].update(type=["string", "null"]),
        "invoice.created payload.total: type: string became null, string; consumers may get what they never saw",
    ),
    (
        lambda d: headers("invoice.created")(d)["required"].remove("causation-id"),
        "invoice.created headers.causation-id: is no longer always there",
    ),
    (
        lambda d: headers("invoice.created")(d)["properties"]["schema-version"].update(enum=[1, 2]),
        "invoice.created headers.schema-version: enum: 1 became 1, 2; consumers may get what they never saw",
    ),
    # What is not understood.
    (lambda d: created(d).update({"if": {}}), "invoice.created payload: if: nothing became {}"),
]

COMPATIBLE: list[Change] = [
    lambda _: None,
    lambda d: d["info"].update(description="other words"),
    lambda d: placed(d)["properties"].update(channel={"type": "string"}),
    lambda d: placed(d)["required"].remove("customer_id"),
    lambda d: placed(d)["properties"]["customer_id"].update(description="other words", title="T", examples=["x"]),
    lambda d: placed(d)["properties"]["customer_id"].update(maxLength=100),
    lambda d: placed(d)["properties"]["lines"].update(minItems=0),
    lambda d: placed(d)["properties"]["customer_id"].update(type=["string", "integer"]),
    lambda d: headers("order.placed")(d)["properties"]["schema-version"].update(enum=[1, 2]),
    lambda d: headers("order.placed")(d)["properties"].update(tenant={"type": "string"}),
    lambda d: created(d)["properties"].update(due_at={"type": "string"}),
    lambda d: created(d)["required"].append("due_at"),
    lambda d: created(d)["properties"]["total"].update(maxLength=40),
    lambda d: d["operations"].update({"order.shipped": {"action": "receive"}}),
]


@pytest.mark.parametrize(("change", "line"), BREAKING, ids=[line for _, line in BREAKING])
def test_each_kind_of_breaking_change_is_told_in_one_line(change: Change, line: str) -> None:
    found = [str(each) for each in breaks(Contract(RELEASED), Contract(after(change)))]
    assert found == [line]


@pytest.mark.parametrize("change", COMPATIBLE)
def test_what_breaks_nobody_passes(change: Change) -> None:
    assert judge(Contract(RELEASED), Contract(after(change))) == []


def test_a_reference_instead_of_what_it_points_to_is_no_change() -> None:
    def inline(document: dict[str, Any]) -> None:
        document["components"]["messages"]["order.paid"]["payload"] = paid(document)

    assert breaks(Contract(RELEASED), Contract(after(inline))) == []


def test_a_break_passes_when_the_version_says_so() -> None:
    def move(document: dict[str, Any]) -> None:
        channel("order.paid")(document)["exchange"].update(name="sales")

    old = after(lambda _: None, "0.4.2")
    refused = judge(Contract(old), Contract(after(move, "0.4.3")))
    assert refused[-1] == "restore what others rely on, or raise the version to 0.5.0 and tell them in CHANGELOG.md"
    assert judge(Contract(old), Contract(after(move, "0.5.0"))) == []
    old = after(lambda _: None, "1.4.2")
    assert "2.0.0" in judge(Contract(old), Contract(after(move, "1.5.0")))[-1]
    assert judge(Contract(old), Contract(after(move, "2.0.0"))) == []


def test_a_changed_body_needs_another_schema_version_too() -> None:
    def narrow(document: dict[str, Any]) -> None:
        line(document)["properties"]["quantity"].update(maximum=10)

    def narrow_and_say_so(document: dict[str, Any]) -> None:
        narrow(document)
        headers("order.placed")(document)["properties"]["schema-version"].update(enum=[2])

    assert judge(Contract(RELEASED), Contract(after(narrow, "9.0.0"))) == [
        "order.placed: its body changed (.lines[].quantity), but not its schema-version"
    ]
    assert judge(Contract(RELEASED), Contract(after(narrow_and_say_so, "9.0.0"))) == []


def test_a_version_does_not_go_back() -> None:
    assert judge(Contract(after(lambda _: None, "1.2.0")), Contract(after(lambda _: None, "1.1.9"))) == [
        "version 1.1.9 is lower than the last release"
    ]


NAMES = st.sampled_from(["a", "b", "c"])
SCHEMAS = st.recursive(
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["string", "integer"])),
    lambda inner: (
        st.builds(
            lambda properties: {"type": "object", "properties": properties, "required": sorted(properties)},
            st.dictionaries(NAMES, inner, min_size=1, max_size=3),
        )
        | st.builds(lambda items: {"type": "array", "items": items}, inner)
    ),
    max_leaves=8,
)


def fields(schema: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return every field at any depth, with the schema that has it."""
    inner = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
    return [(schema, name) for name in schema.get("properties", {})] + [f for each in inner for f in fields(each)]


@given(schema=SCHEMAS, leaves=st.booleans(), chosen=st.data())
def test_a_field_removed_at_any_depth_is_found(schema: dict[str, Any], leaves: bool, chosen: st.DataObject) -> None:
    name = "invoice.paid" if leaves else "order.paid"
    old = after(lambda d: d["components"]["messages"][name].update(payload=schema))
    assert breaks(Contract(old), Contract(deepcopy(old))) == []
    new = deepcopy(old)
    found = fields(new["components"]["messages"][name]["payload"])
    if found:
        owner, field = chosen.draw(st.sampled_from(found))
        del owner["properties"][field]
        assert any(
            each.what == "removed" and each.place.endswith(f".{field}") for each in breaks(Contract(old), Contract(new))
        )


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the gate as make check does."""
    return subprocess.run(
        [sys.executable, "-m", "tools.contract_gate", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_gate_as_a_command(tmp_path: Path) -> None:
    current, released = tmp_path / "asyncapi.yaml", tmp_path / "released"
    released.mkdir()
    assert run(str(ROOT / "asyncapi.yaml"), str(ROOT / "docs" / "contract")).returncode == 0
    current.write_text(yaml.safe_dump(RELEASED))
    assert run(str(current), str(released), "--release").returncode == 0
    assert run(str(current), str(released), "--release").returncode == 0
    current.write_text(yaml.safe_dump(after(lambda d: created(d)["properties"].pop("total"))))
    refused = run(str(current), str(released))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.splitlines() == [
        "contract: invoice.created payload.total: removed",
        "contract: invoice.created: its body changed (.total), but not its schema-version",
        "contract: restore what others rely on, or raise the version to 0.2.0 and tell them in CHANGELOG.md",
    ]
    again = run(str(current), str(released), "--release")
    assert again.returncode == 1
    assert "is released already" in again.stderr


EVERY_RELEASE = [Contract(yaml.safe_load(path.read_text())) for path in (ROOT / "docs" / "contract").glob("*.yaml")]


@pytest.mark.parametrize("released", EVERY_RELEASE)
async def test_what_any_release_showed_as_an_example_is_still_read(released: Contract) -> None:
    for operation in released.operations.values():
        for name, message in released.messages(operation).items():
            for shown in message["examples"] if operation["action"] == "receive" else ():
                async with InMemoryService() as billing:
                    settled = await billing.publish(name, shown["payload"], headers=shown["headers"])
                assert settled.parked is None, f"{name}: {settled.explanation}"
    assert {message.TYPE for message in INCOMING} >= {
        name for name, operation in released.operations.items() if operation["action"] == "receive"
    }
