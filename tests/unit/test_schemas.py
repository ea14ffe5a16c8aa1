"""Messages: money is exact or refused, time is an instant or refused, texts fit, unknown fields are ignored."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas import MESSAGES, InvoiceCreated, OrderPaid, OrderPlaced
from schemas.money import from_minor_units, in_minor_units, minor_units
from tests.support.orders import paid, placed

ORDER = "5d2e1f0a-0000-4000-8000-000000000001"


def refusal(event: tuple[str, bytes], model: type[OrderPlaced | OrderPaid] = OrderPlaced) -> list[str]:
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


def test_unknown_fields_are_ignored_on_the_way_in_and_refused_on_the_way_out() -> None:
    line = {"sku": "n", "quantity": 1, "unit_price": "1", "colour": "grey"}
    assert OrderPlaced.model_validate_json(placed(ORDER, lines=[line], more={"a": 1})[1])
    example = {
        "invoice_id": ORDER,
        "order_id": ORDER,
        "customer_id": "c",
        "currency": "EUR",
        "total": "1.00",
        "created_at": "2026-05-04T10:00:00Z",
    }
    assert InvoiceCreated.model_validate_json(json.dumps(example))
    with pytest.raises(ValidationError):
        InvoiceCreated.model_validate_json(json.dumps(example | {"more": 1}))


def test_money_is_a_string_in_every_schema() -> None:
    for message in MESSAGES:
        text = json.dumps(message.model_json_schema())
        assert '"number"' not in text
