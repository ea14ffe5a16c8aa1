"""Messages: money is exact or refused, time is an instant or refused, texts fit, unknown fields are ignored."""

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas import MESSAGES, InvoiceCreated, InvoicePaid, OrderCancelled, OrderPaid, OrderPlaced
from schemas.money import from_minor_units, in_minor_units, minor_units
from tests.support.orders import cancelled, paid, placed

ORDER = "5d2e1f0a-0000-4000-8000-000000000001"


Incoming = type[OrderPlaced | OrderPaid | OrderCancelled]

INCOMING_BY_TYPE: dict[str, Incoming] = {
    "order.placed": OrderPlaced,
    "order.paid": OrderPaid,
    "order.cancelled": OrderCancelled,
}

CREATED = {
    "invoice_id": ORDER,
    "order_id": ORDER,
    "customer_id": "c",
    "currency": "EUR",
    "total": "1.00",
    "created_at": "2026-05-04T10:00:00Z",
}


def refusal(event: tuple[str, bytes], model: Incoming = OrderPlaced) -> list[str]:
    """Return where and why a body is refused."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate_json(event[1])
    errors = refused.value.errors(include_input=False, include_url=False)
    return [f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}" for error in errors]


@pytest.mark.parametrize(
    ("currency", "decimals"), [("JPY", 0), ("EUR", 2), ("USD", 2), ("KWD", 3), ("BHD", 3), ("CLF", 4)]
)
def test_a_currency_has_its_minor_units(currency: str, decimals: int) -> None:
    assert minor_units(currency) == decimals


@pytest.mark.parametrize("code", ["XXX", "XAU", "usd", " USD", "USD ", "US", "EURO", "€", "", "AAA"])
def test_what_is_no_currency_with_minor_units_is_refused(code: str) -> None:
    assert refusal(placed(ORDER, currency=code)) == [
        "currency: must be the ISO 4217 code of a currency, in capital letters"
    ]


@pytest.mark.parametrize(
    ("currency", "price"),
    [("EUR", "9.95"), ("EUR", "10.500"), ("EUR", "0"), ("JPY", "10"), ("JPY", "10.00"), ("BHD", "1.234")],
)
def test_a_price_that_the_currency_can_express_is_kept(currency: str, price: str) -> None:
    lines = [{"sku": "nail", "quantity": 1, "unit_price": price}]
    order = OrderPlaced.model_validate_json(placed(ORDER, currency=currency, lines=lines)[1])
    assert order.lines[0].unit_price == Decimal(price)


@pytest.mark.parametrize(("currency", "price"), [("EUR", "10.505"), ("JPY", "10.5"), ("BHD", "1.2345")])
def test_a_price_with_too_many_decimals_is_refused(currency: str, price: str) -> None:
    lines = [{"sku": "nail", "quantity": 1, "unit_price": price}]
    [why] = refusal(placed(ORDER, currency=currency, lines=lines))
    assert why.endswith("decimals than the " + str(minor_units(currency)) + " of its currency")


@pytest.mark.parametrize("price", [9.95, 10, True, None])
def test_money_as_a_number_is_refused(price: object) -> None:
    [why] = refusal(placed(ORDER, lines=[{"sku": "nail", "quantity": 1, "unit_price": price}]))
    assert why == 'lines.0.unit_price: money is a JSON string such as "19.90", never a number'


@pytest.mark.parametrize(
    "price",
    ["1e2", "-1", "+1", " 1", "1 ", "1_0", "1,0", ".5", "5.", "", "NaN", "Infinity", "\uff11", "0x1", "9" * 17, "1\n"],
)
def test_money_that_is_no_plain_decimal_is_refused(price: str) -> None:
    [why] = refusal(placed(ORDER, lines=[{"sku": "nail", "quantity": 1, "unit_price": price}]))
    assert why.startswith("lines.0.unit_price: must be a plain decimal")


def test_an_amount_has_sixteen_digits_and_ten_decimals_at_most() -> None:
    """26 digits: what Python's decimals compute with, so that no sum is rounded unseen."""
    amount = "9999999999999999.0000000000"
    assert OrderPaid.model_validate_json(paid(ORDER, amount)[1]).amount == 9999999999999999
    assert refusal(paid(ORDER, "1.00000000000"), OrderPaid)
    assert refusal(paid(ORDER, "10000000000000000"), OrderPaid)


@given(units=st.integers(0, 10**15), currency=st.sampled_from(["JPY", "EUR", "BHD", "CLF"]))
def test_minor_units_and_amounts_are_the_same_money(units: int, currency: str) -> None:
    amount = from_minor_units(units, currency)
    assert Fraction(amount) * 10 ** minor_units(currency) == units
    assert in_minor_units(amount, currency) == units
    assert len(format(amount, "f").partition(".")[2]) == minor_units(currency)


@given(
    whole=st.integers(0, 10**16 - 1),
    decimals=st.text("0123456789", max_size=10),
    currency=st.sampled_from(["JPY", "EUR", "BHD", "CLF"]),
)
def test_an_amount_is_never_rounded(whole: int, decimals: str, currency: str) -> None:
    text = f"{whole}.{decimals}" if decimals else str(whole)
    exact = Fraction(text) * 10 ** minor_units(currency)
    try:
        payment = OrderPaid.model_validate_json(paid(ORDER, text, currency=currency)[1])
    except ValidationError:
        assert exact.denominator != 1
    else:
        assert exact.denominator == 1
        assert Fraction(payment.amount) == Fraction(text)


def test_a_total_is_bounded_in_minor_units() -> None:
    line = {"sku": "nail", "quantity": 1_000_000, "unit_price": "10000000.00"}
    assert OrderPlaced.model_validate_json(placed(ORDER, lines=[line])[1])
    one_more = {"sku": "nail", "quantity": 1, "unit_price": "0.01"}
    [why] = refusal(placed(ORDER, lines=[line, one_more]))
    assert why == ": the total must be at most 1000000000000000 minor units"


@pytest.mark.parametrize(
    "changes",
    [
        {"customer_id": ""},
        {"customer_id": "x" * 65},
        {"customer_id": "a\0b"},
        {"customer_id": 7},
        {"order_id": "not-a-uuid"},
        {"order_id": None},
        {"lines": []},
        {"lines": [{"sku": "n", "quantity": 1, "unit_price": "1"}] * 1001},
        {"lines": [{"sku": "n", "quantity": 0, "unit_price": "1"}]},
        {"lines": [{"sku": "n", "quantity": 1_000_001, "unit_price": "1"}]},
        {"lines": [{"sku": "n", "quantity": 2**63, "unit_price": "1"}]},
        {"lines": [{"sku": "n", "quantity": 10**30, "unit_price": "1"}]},
        {"lines": [{"sku": "n", "quantity": 1.0, "unit_price": "1"}]},
        {"lines": [{"sku": "n", "quantity": "1", "unit_price": "1"}]},
        {"lines": [{"sku": "n", "quantity": True, "unit_price": "1"}]},
        {"lines": {"sku": "n"}},
    ],
)
def test_a_field_out_of_its_range_is_refused(changes: dict[str, Any]) -> None:
    assert refusal(placed(ORDER, **changes))


def _one_line(sku: str) -> dict[str, Any]:
    return {"lines": [{"sku": sku, "quantity": 1, "unit_price": "1"}]}


@pytest.mark.parametrize(
    ("event", "field", "longest"),
    [
        (lambda text: placed(ORDER, customer_id=text), "customer_id", 64),
        (lambda text: placed(ORDER, **_one_line(text)), "lines.0.sku", 64),
        (lambda text: paid(ORDER, "1", payment_reference=text), "payment_reference", 128),
        (lambda text: cancelled(ORDER, reason=text), "reason", 256),
    ],
)
def test_a_text_has_one_character_to_its_longest_and_no_nul(
    event: Callable[[str], tuple[str, bytes]], field: str, longest: int
) -> None:
    """C08: PostgreSQL cannot store U+0000, so it is refused here. Lengths count characters, as the database's do."""
    event_type, _ = event("x")
    model = INCOMING_BY_TYPE[event_type]
    assert model.model_validate_json(event("x")[1])
    assert model.model_validate_json(event("\U0001f600" * longest)[1])
    assert refusal(event(""), model) == [f"{field}: String should have at least 1 character"]
    assert refusal(event("x" * (longest + 1)), model) == [f"{field}: String should have at most {longest} characters"]
    assert refusal(event("a\0b"), model) == [f"{field}: must not contain U+0000"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"1",
        b"NaN",
        b"{}",
        b"\xff",
        json.dumps(placed(ORDER)[1].decode()).encode(),
        b'{"more": ' + b"9" * 5000 + b"}",
        b'{"more": "\\ud800"}',
        b"[" * 5000,
        placed(ORDER)[1].replace(b'"quantity": 2', b'"quantity": 1e400'),
        placed(ORDER)[1].replace(b'"quantity": 2', b'"quantity": ' + b"9" * 5000),
    ],
)
def test_what_is_no_message_is_refused_like_any_other(body: bytes) -> None:
    """C06, C10: one kind of error whatever is wrong, so that one place parks it at its first delivery."""
    with pytest.raises(ValidationError):
        OrderPlaced.model_validate_json(body)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.from_regex(r"\d{4}-.{0,20}"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(field=st.sampled_from(sorted(json.loads(placed(ORDER)[1]))), value=VALUES)
def test_any_value_in_any_field_is_read_or_refused(field: str, value: Any) -> None:
    body = json.dumps(json.loads(placed(ORDER)[1]) | {field: value})
    with suppress(ValidationError):
        OrderPlaced.model_validate_json(body)


@pytest.mark.parametrize("field", ["order_id", "customer_id", "currency", "lines", "placed_at"])
def test_a_refusal_quotes_nothing_of_the_value(field: str) -> None:
    """G11: its text is logged and travels in headers."""
    marker = "very-private"
    assert marker not in str(refusal(placed(ORDER, **{field: marker + "\0" + "x" * 100})))


def test_an_instant_is_kept_and_written_in_utc() -> None:
    body = cancelled(ORDER, cancelled_at="2026-05-04T10:00:00.123456+05:30")[1]
    cancellation = OrderCancelled.model_validate_json(body)
    assert cancellation.cancelled_at.tzinfo is UTC
    assert json.loads(cancellation.model_dump_json())["cancelled_at"] == "2026-05-04T04:30:00.123456Z"


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2026-05-04T10:00:00Z", datetime(2026, 5, 4, 10, tzinfo=UTC)),
        ("2026-05-04T10:00:00.123456+05:30", datetime(2026, 5, 4, 4, 30, 0, 123456, tzinfo=UTC)),
        ("2026-05-04T23:00:00-03:00", datetime(2026, 5, 5, 2, tzinfo=UTC)),
    ],
)
def test_an_instant_is_read_with_its_offset(text: str, instant: datetime) -> None:
    assert OrderPlaced.model_validate_json(placed(ORDER, placed_at=text)[1]).placed_at == instant


@pytest.mark.parametrize(
    "value",
    [
        "2026-05-04T10:00:00",
        "2026-05-04",
        "2026-05-04T10:00:60Z",
        "0001-01-01T00:00:00+05:30",
        "0001-01-01T00:00:00Z",
        "9999-12-31T23:59:59-01:00",
        "9999-12-31T23:59:59.999999Z",
        1777888800,
        "1777888800",
        "",
    ],
)
def test_what_is_no_instant_is_refused(value: object) -> None:
    [why] = refusal(placed(ORDER, placed_at=value))
    assert why.startswith("placed_at: ")


def test_unknown_fields_are_ignored_by_readers_of_either() -> None:
    line = {"sku": "n", "quantity": 1, "unit_price": "1", "colour": "grey"}
    assert OrderPlaced.model_validate_json(placed(ORDER, lines=[line], more={"a": 1})[1])
    assert InvoiceCreated.model_validate_json(json.dumps(CREATED))
    assert "more" not in InvoiceCreated.model_validate_json(json.dumps(CREATED | {"more": 1})).model_dump()


@pytest.mark.parametrize(
    ("currency", "total"), [("EUR", "1"), ("EUR", "1.0"), ("EUR", "1.000"), ("JPY", "1.0"), ("KWD", "1.00")]
)
def test_a_total_that_is_not_written_with_its_currencys_decimals_does_not_leave(currency: str, total: str) -> None:
    money = {"currency": currency, "total": total}
    with pytest.raises(ValidationError, match="must be written with exactly the"):
        InvoiceCreated.model_validate_json(json.dumps(CREATED | money))
    payment = {"payment_reference": "p", "paid_at": CREATED["created_at"]}
    paid_invoice = {name: CREATED[name] for name in ("invoice_id", "order_id", "customer_id")} | payment
    assert InvoicePaid.model_validate_json(json.dumps(paid_invoice | {"currency": "EUR", "total": "1.00"}))
    with pytest.raises(ValidationError, match="must be written with exactly the"):
        InvoicePaid.model_validate_json(json.dumps(paid_invoice | money))


def test_a_writer_takes_an_amount_as_the_driver_reads_it() -> None:
    """PostgreSQL's 10000 comes back as 1E+4: it has no decimals either."""
    content = {
        "invoice_id": UUID(ORDER),
        "order_id": UUID(ORDER),
        "customer_id": "c",
        "currency": "JPY",
        "total": Decimal("1E+4"),
        "created_at": datetime(2026, 5, 4, tzinfo=UTC),
    }
    assert json.loads(InvoiceCreated.model_validate(content).model_dump_json())["total"] == "10000"
    with pytest.raises(ValidationError, match="instance of UUID"):
        InvoiceCreated.model_validate(content | {"order_id": ORDER})


def test_money_is_a_string_in_every_schema() -> None:
    for message in MESSAGES:
        text = json.dumps(message.model_json_schema())
        assert '"number"' not in text
