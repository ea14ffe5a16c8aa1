"""The gate lets no change pass that would break a producer or a consumer, unless the version says so."""

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas import INCOMING
from service.testing import InMemoryService
from tools.contract_gate import Break, Contract, breaks, judge, last_release

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


def drop(name: str, field: str) -> Change:
    """Return what takes a field out of a schema, as the model without it would."""

    def change(document: dict[str, Any]) -> None:
        del schema(name)(document)["properties"][field]
        schema(name)(document)["required"].remove(field)

    return change


def with_field(name: str, described: Any) -> Change:
    """Return what gives a schema the optional field `extra`."""
    return lambda document: schema(name)(document)["properties"].update(extra=deepcopy(described))


def extra(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what finds the field `extra` of a schema."""
    return lambda document: schema(name)(document)["properties"]["extra"]


def both(*changes: Change) -> Change:
    """Return the changes as one."""
    return lambda document: [change(document) for change in changes]


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
    (
        lambda d: channel("order.placed")(d).update({"x-arguments": {"x-max-length": 9}}),
        'order.placed channel x-arguments: nothing became {"x-max-length": 9}',
    ),
    (
        lambda d: d["components"]["messages"]["invoice.paid"]["bindings"]["amqp"].update(messageType="paid"),
        'invoice.paid message messageType: "invoice.paid" became "paid"',
    ),
    (
        lambda d: d["components"]["messages"]["invoice.paid"].update(contentType="text/plain"),
        'invoice.paid contentType: "application/json" became "text/plain"',
    ),
    (
        lambda d: d["operations"]["invoice.paid"]["messages"].append({"$ref": "#/components/messages/invoice.voided"}),
        "invoice.paid message invoice.voided: added; consumers may get what they never saw",
    ),
    (lambda d: d["x-limits"].update(bodyBytes=1000), "x-limits bodyBytes: 16777216 became 1000"),
    (lambda d: d["x-limits"].pop("messageIdDays"), "x-limits messageIdDays: 30 became nothing"),
    (
        lambda d: d["operations"]["invoice.paid"]["bindings"]["amqp"].update({"x-confirms": False}),
        "invoice.paid operation x-confirms: true became false",
    ),
    (
        lambda d: d["operations"]["invoice.paid"]["bindings"]["amqp"].update(mandatory=False),
        "invoice.paid operation mandatory: true became false",
    ),
    # What arrives must not become narrower.
    (drop("OrderPlaced", "customer_id"), "order.placed payload.customer_id: removed"),
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
        lambda d: paid(d)["properties"]["payment_reference"].update(format="uri"),
        'order.paid payload.payment_reference: format: nothing became "uri"; producers may send more',
    ),
    (
        lambda d: line(d)["properties"]["quantity"].update(multipleOf=2),
        "order.placed payload.lines[].quantity: multipleOf: nothing became 2; producers may send more",
    ),
    (
        lambda d: paid(d)["properties"]["paid_at"].update(format="date"),
        'order.paid payload.paid_at: format: "date-time" became "date"',
    ),
    (
        lambda d: paid(d).update(additionalProperties=False),
        "order.paid payload: additionalProperties: nothing became false; producers may send more",
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
    (drop("InvoiceCreated", "total"), "invoice.created payload.total: removed"),
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
    (
        lambda d: created(d)["properties"].update(customer_id={"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (
            'invoice.created payload.customer_id: anyOf: nothing became [{"type": "string"}, {"type": "null"}]; '
            "consumers may get what they never saw"
        ),
    ),
    (
        lambda d: created(d)["properties"]["currency"].pop("pattern"),
        'invoice.created payload.currency: pattern: "^[A-Z]{3}$" became nothing; consumers may get what they never saw',
    ),
    # What is not understood.
    (lambda d: created(d).update({"if": {}}), "invoice.created payload: if: nothing became {}"),
]

COMPATIBLE: list[Change] = [
    lambda d: d["x-limits"].update(bodyBytes=10**9, more=1),
    lambda _: None,
    lambda d: d["info"].update(description="other words"),
    lambda d: placed(d)["properties"].update(channel={"type": "string"}),
    lambda d: placed(d)["required"].remove("customer_id"),
    lambda d: placed(d)["properties"]["customer_id"].update(description="other words", title="T", examples=["x"]),
    lambda d: placed(d)["properties"]["customer_id"].update(maxLength=100),
    lambda d: placed(d)["properties"]["lines"].update(minItems=0),
    lambda d: placed(d)["properties"]["currency"].pop("pattern"),
    lambda d: placed(d)["properties"].update(
        customer_id={"anyOf": [{"type": "string", "minLength": 1, "maxLength": 64}, {"type": "null"}]}
    ),
    lambda d: line(d)["properties"]["quantity"].update(type="number"),
    lambda d: placed(d)["properties"]["customer_id"].update(type=["string", "integer"]),
    lambda d: headers("order.placed")(d)["properties"]["schema-version"].update(enum=[1, 2]),
    lambda d: headers("order.placed")(d)["properties"].update(tenant={"type": "string"}),
    lambda d: created(d)["properties"].update(due_at={"type": "string"}),
    lambda d: created(d)["required"].append("due_at"),
    lambda d: created(d)["properties"]["customer_id"].update(minLength=0, pattern="^C-"),
    lambda d: created(d).update({"$defs": {"unused": {"type": "string"}}}),
    lambda d: d["operations"]["order.paid"].pop("messages"),
    lambda d: created(d)["properties"]["total"].update(maxLength=40),
    lambda d: d["operations"].update({"order.shipped": {"action": "receive"}}),
]


@pytest.mark.parametrize(("change", "line"), BREAKING, ids=[line for _, line in BREAKING])
def test_each_kind_of_breaking_change_is_told_in_one_line(change: Change, line: str) -> None:
    old, new = Contract(RELEASED), Contract(after(change))
    assert [str(each) for each in breaks(old, new)] == [line]
    assert judge(old, new)[0] == line


@pytest.mark.parametrize(("change", "line"), BREAKING, ids=[line for _, line in BREAKING])
def test_each_kind_passes_when_the_version_says_so(change: Change, line: str) -> None:
    left = judge(Contract(RELEASED), Contract(after(change, "9.0.0")))
    assert all(each.endswith("but not its schema-version") for each in left)


@pytest.mark.parametrize("change", COMPATIBLE)
def test_what_breaks_nobody_passes(change: Change) -> None:
    assert judge(Contract(RELEASED), Contract(after(change))) == []


NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/components/schemas/Node"}, {"type": "null"}]}}}
TITLED = {"anyOf": [{"type": "object", "properties": {"title": {"type": "string"}}}, {"type": "null"}]}


def refer_to_bindings(document: dict[str, Any]) -> None:
    """Keep the bindings of order.paid among the components."""
    document["components"]["channelBindings"] = {"paid": document["channels"]["order.paid"]["bindings"]}
    document["channels"]["order.paid"]["bindings"] = {"$ref": "#/components/channelBindings/paid"}


def refer_to_operation(document: dict[str, Any]) -> None:
    """Keep the operation order.paid among the components."""
    document["components"]["operations"] = {"paid": document["operations"]["order.paid"]}
    document["operations"]["order.paid"] = {"$ref": "#/components/operations/paid"}


def refer_to_headers(document: dict[str, Any]) -> None:
    """Keep the headers of order.paid among the schemas."""
    document["components"]["schemas"]["Headers"] = headers("order.paid")(document)
    document["components"]["messages"]["order.paid"]["headers"] = {"$ref": "#/components/schemas/Headers"}


# What the contract of today does not use, but a contract may: how it became so, the change, the lines.
OTHER_DOCUMENTS: list[tuple[Change, Change, list[str]]] = [
    (with_field("OrderPlaced", {"type": "string"}), lambda d: placed(d)["properties"].pop("extra"), []),
    (
        both(with_field("OrderPlaced", {"type": "string"}), lambda d: placed(d).update(additionalProperties=False)),
        lambda d: placed(d)["properties"].pop("extra"),
        ["order.placed payload.extra: removed"],
    ),
    (lambda d: placed(d).update(additionalProperties=False), lambda d: placed(d).pop("additionalProperties"), []),
    (
        with_field("InvoicePaid", {"type": "object", "additionalProperties": {"type": "integer"}}),
        lambda d: extra("InvoicePaid")(d)["additionalProperties"].update(type="number"),
        ["invoice.paid payload.extra.*: type: integer became number; consumers may get what they never saw"],
    ),
    (
        with_field("InvoicePaid", {"type": "number"}),
        lambda d: extra("InvoicePaid")(d).update(type="integer"),
        [],
    ),
    (
        lambda d: line(d)["properties"]["quantity"].update(multipleOf=10),
        lambda d: line(d)["properties"]["quantity"].update(multipleOf=5),
        [],
    ),
    (
        refer_to_bindings,
        lambda d: d["components"]["channelBindings"]["paid"]["amqp"]["exchange"].update(name="sales"),
        ['order.paid channel exchange.name: "orders" became "sales"'],
    ),
    (
        refer_to_operation,
        lambda d: d["components"]["operations"]["paid"].update(action="send"),
        ["order.paid: receive became send"],
    ),
    (
        lambda d: d["operations"]["order.placed"].pop("messages"),
        lambda d: line(d)["properties"]["quantity"].update(maximum=2),
        ["order.placed payload.lines[].quantity: maximum: 1000000 became 2; producers may send more"],
    ),
    (lambda d: d["components"]["messages"]["order.paid"].pop("payload"), lambda _: None, []),
    (with_field("OrderPlaced", True), lambda _: None, []),
    (
        with_field("OrderPlaced", {"$ref": "#/components/schemas/OrderLine", "maxProperties": 9}),
        lambda d: extra("OrderPlaced")(d).update(maxProperties=3),
        ["order.placed payload.extra: maxProperties: 9 became 3; producers may send more"],
    ),
    (
        both(
            lambda d: d["components"]["schemas"].update(Node=deepcopy(NODE)),
            with_field("InvoicePaid", {"$ref": "#/components/schemas/Node"}),
        ),
        lambda d: d["components"]["schemas"]["Node"]["properties"].pop("next"),
        ["invoice.paid payload.extra.next: removed"],
    ),
    (
        with_field("InvoicePaid", TITLED),
        lambda d: extra("InvoicePaid")(d)["anyOf"].reverse(),
        [],
    ),
    (
        with_field("InvoicePaid", {"oneOf": TITLED["anyOf"]}),
        lambda d: extra("InvoicePaid")(d)["oneOf"].reverse(),
        [],
    ),
    (
        with_field("InvoicePaid", {"oneOf": TITLED["anyOf"]}),
        lambda d: extra("InvoicePaid")(d)["oneOf"].pop(),
        [
            (
                'invoice.paid payload.extra: oneOf: [{"type": "object", "properties": {"title": {"type": "string"}}}, '
                '{"type": "null"}] became [{"type": "object", "properties": {"title": {"type": "string"}}}]'
            )
        ],
    ),
    (
        with_field("InvoicePaid", TITLED),
        lambda d: extra("InvoicePaid")(d)["anyOf"][0]["properties"].clear(),
        [
            (
                'invoice.paid payload.extra: anyOf: [{"type": "object", "properties": {"title": {"type": "string"}}}, '
                '{"type": "null"}] became [{"type": "object", "properties": {}}, {"type": "null"}]; '
                "consumers may get what they never saw"
            )
        ],
    ),
    (
        with_field("InvoicePaid", {"prefixItems": [{"type": "string"}, {"type": "null"}]}),
        lambda d: extra("InvoicePaid")(d)["prefixItems"].reverse(),
        [
            (
                'invoice.paid payload.extra: prefixItems: [{"type": "string"}, {"type": "null"}] '
                'became [{"type": "null"}, {"type": "string"}]'
            )
        ],
    ),
]


@pytest.mark.parametrize(("start", "change", "lines"), OTHER_DOCUMENTS)
def test_whatever_a_document_uses_is_compared(start: Change, change: Change, lines: list[str]) -> None:
    old = Contract(after(start))
    assert breaks(old, Contract(deepcopy(old.document))) == []
    assert [str(each) for each in breaks(old, Contract(after(both(start, change))))] == lines


def test_a_reference_instead_of_what_it_points_to_is_no_change() -> None:
    def inline(document: dict[str, Any]) -> None:
        document["components"]["messages"]["order.paid"]["payload"] = paid(document)

    assert breaks(Contract(RELEASED), Contract(after(inline))) == []


def test_a_break_passes_when_the_version_says_so() -> None:
    def move(document: dict[str, Any]) -> None:
        channel("order.paid")(document)["exchange"].update(name="sales")

    old = after(lambda _: None, "0.4.2")
    refused = judge(Contract(old), Contract(after(move, "0.4.3")))
    assert refused[-1] == (
        "restore what others rely on, or raise the version to at least 0.5.0, tell them in CHANGELOG.md, "
        "and add docs/contract/0.5.0.yaml at the release (make contract-release)"
    )
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
        "order.placed: its body changed (payload.lines[].quantity), but not its schema-version"
    ]
    assert judge(Contract(RELEASED), Contract(after(narrow_and_say_so, "9.0.0"))) == []


def test_a_schema_version_is_demanded_only_where_the_document_shows_one() -> None:
    def narrow(document: dict[str, Any]) -> None:
        paid(document)["properties"]["currency"].update(enum=["EUR"])

    def say_so(document: dict[str, Any]) -> None:
        document["components"]["schemas"]["Headers"]["properties"]["schema-version"].update(enum=[2])

    def hide(document: dict[str, Any]) -> None:
        del headers("order.paid")(document)["properties"]["schema-version"]

    without = Contract(after(hide))
    assert judge(without, Contract(after(both(hide, narrow), "9.0.0"))) == []
    referred = Contract(after(refer_to_headers))
    assert judge(referred, Contract(after(both(refer_to_headers, narrow, say_so), "9.0.0"))) == []
    assert judge(Contract(RELEASED), Contract(after(both(hide, narrow), "9.0.0"))) == [
        "order.paid: its body changed (payload.currency), but not its schema-version"
    ]


def test_a_version_does_not_go_back() -> None:
    assert judge(Contract(after(lambda _: None, "1.2.0")), Contract(after(lambda _: None, "1.1.9"))) == [
        "version 1.1.9 is lower than the last release"
    ]


NAMES = st.sampled_from(["a", "title", "$ref.", "required"])


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Draw an object, some of whose fields are required."""
    properties = draw(st.dictionaries(NAMES, inner, min_size=1, max_size=3))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    return {"type": "object", "properties": properties, "required": required}


def schemas(*, alternatives: bool) -> st.SearchStrategy[Any]:
    """Return schemas of any depth, with anyOf and oneOf or without."""
    leaves = st.sampled_from(
        [{"type": "string", "maxLength": 9}, {"type": "integer", "minimum": 1}, {"enum": [1, "1"]}]
    )
    lists = st.sampled_from(["anyOf", "oneOf"])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            objects(inner),
            st.builds(lambda items: {"type": "array", "items": items}, inner),
            *(
                [st.builds(lambda word, each: {word: each}, lists, st.lists(inner, min_size=1, max_size=3))]
                if alternatives
                else []
            ),
        ),
        max_leaves=8,
    )


def required_fields(schema: dict[str, Any], place: str) -> list[tuple[dict[str, Any], str, str]]:
    """Return every required field at any depth: the schema that has it, its name, its place."""
    found = [(schema, name, f"{place}.{name}") for name in schema.get("required", ())]
    for name, inner in schema.get("properties", {}).items():
        found += required_fields(inner, f"{place}.{name}")
    return found + (required_fields(schema["items"], f"{place}[]") if "items" in schema else [])


def carrying(message: str, payload: Any) -> Contract:
    """Return the released contract with another payload of a message."""
    return Contract(after(lambda d: d["components"]["messages"][message].update(payload=deepcopy(payload))))


MESSAGES = st.sampled_from(["order.paid", "invoice.paid"])


@given(message=MESSAGES, payload=schemas(alternatives=True))
def test_a_contract_does_not_break_itself(message: str, payload: Any) -> None:
    assert judge(carrying(message, payload), carrying(message, payload)) == []


@given(message=MESSAGES, payload=objects(schemas(alternatives=False)), chosen=st.data())
def test_a_required_field_removed_at_any_depth_is_told_in_one_line(
    message: str, payload: Any, chosen: st.DataObject
) -> None:
    old = carrying(message, payload)
    found = required_fields(payload, f"{message} payload")
    assume(found)
    owner, field, place = chosen.draw(st.sampled_from(found))
    del owner["properties"][field]
    owner["required"].remove(field)
    assert breaks(old, carrying(message, payload)) == [Break(place, "removed")]


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
    current.write_text(yaml.safe_dump(after(drop("InvoiceCreated", "total"))))
    refused = run(str(current), str(released))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.splitlines() == [
        "contract: invoice.created payload.total: removed",
        "contract: invoice.created: its body changed (payload.total), but not its schema-version",
        (
            "contract: restore what others rely on, or raise the version to at least 0.2.0, tell them in CHANGELOG.md, "
            "and add docs/contract/0.2.0.yaml at the release (make contract-release)"
        ),
    ]
    again = run(str(current), str(released), "--release")
    assert again.returncode == 1
    assert "is released already" in again.stderr


def test_a_break_cannot_be_released_under_a_version_that_does_not_say_so(tmp_path: Path) -> None:
    current, released = tmp_path / "asyncapi.yaml", tmp_path / "released"
    released.mkdir()
    (released / "0.1.0.yaml").write_text(yaml.safe_dump(RELEASED))
    current.write_text(yaml.safe_dump(after(lambda d: d["operations"].pop("order.paid"), "0.1.1")))
    refused = run(str(current), str(released), "--release")
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (1, "contract: order.paid: removed")
    current.write_text(yaml.safe_dump(after(lambda d: d["operations"].pop("order.paid"), "0.2.0")))
    assert run(str(current), str(released), "--release").returncode == 0
    assert (released / "0.2.0.yaml").read_text() == current.read_text()


@pytest.mark.parametrize(
    ("version", "releases", "line"),
    [
        ("0.2.0-rc.1", ["0.1.0"], "contract: the version 0.2.0-rc.1 is not like 1.2.3"),
        ("0.1.0", [], "contract: released holds no released contract"),
    ],
)
def test_what_cannot_be_compared_is_told_in_one_line(
    tmp_path: Path, version: str, releases: list[str], line: str
) -> None:
    (tmp_path / "released").mkdir()
    for release in releases:
        (tmp_path / "released" / f"{release}.yaml").write_text(yaml.safe_dump(RELEASED))
    (tmp_path / "asyncapi.yaml").write_text(yaml.safe_dump(after(lambda _: None, version)))
    refused = run(str(tmp_path / "asyncapi.yaml"), str(tmp_path / "released"))
    assert (refused.returncode, refused.stderr.splitlines()) == (
        1,
        [line.replace("released h", f"{tmp_path}/released h")],
    )


def test_a_reference_to_nothing_is_named() -> None:
    broken = after(lambda d: d["components"]["schemas"].pop("OrderLine"))
    with pytest.raises(ValueError, match="#/components/schemas/OrderLine points to nothing"):
        judge(Contract(RELEASED), Contract(broken))


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
