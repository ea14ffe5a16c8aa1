"""Money in messages: exact, as text, by currency.

An amount is a JSON string of a plain decimal. Which decimals it may have is decided by its currency: ISO 4217's minor
units (JPY 0, EUR 2, KWD 3), taken from the `iso4217` library. No error text quotes a value.
"""

import re
from decimal import Decimal
from typing import Annotated, Any

from iso4217 import Currency as Iso4217
from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema

from schemas.values import refused

AMOUNT_PATTERN = r"^[0-9]{1,16}(\.[0-9]{1,10})?$"
"""26 digits at most: within the 28 that Python's decimals compute with, so that nothing can be rounded unseen."""

LARGEST_TOTAL = 10**15
"""Minor units that a total may have at most: below 2^53, so exact even for a consumer that computes with doubles."""


def minor_units(currency: str) -> int:
    """Return the number of decimals of a currency.

    Raises:
        ValueError: it is not an ISO 4217 code, or of something without minor units (XXX, gold).
    """
    try:
        decimals = Iso4217(currency).exponent
    except ValueError:
        decimals = None
    if decimals is None:
        raise refused("must be the ISO 4217 code of a currency, in capital letters")
    return decimals


def in_minor_units(amount: Decimal, currency: str) -> int:
    """Return the amount as a whole number of minor units.

    Raises:
        ValueError: the amount has more decimals than the currency; nothing is rounded.
    """
    scaled = amount.scaleb(minor_units(currency))
    if scaled != scaled.to_integral_value():
        raise refused(f"has more decimals than the {minor_units(currency)} of its currency")
    return int(scaled)


def require_exact_decimals(amount: Decimal, currency: str) -> None:
    """Accept an amount that is written with exactly the currency's number of decimals, as the service writes them.

    Raises:
        ValueError: it has more or fewer.
    """
    if len(format(amount, "f").partition(".")[2]) != minor_units(currency):
        raise refused(f"must be written with exactly the {minor_units(currency)} decimals of its currency")


def from_minor_units(units: int, currency: str) -> Decimal:
    """Return the amount with exactly the currency's number of decimals."""
    return Decimal(units).scaleb(-minor_units(currency))


def _parse(value: Any) -> Decimal:
    if isinstance(value, Decimal):
        value = format(value, "f")
    if not isinstance(value, str):
        raise refused('money is a JSON string such as "19.90", never a number')
    if not re.fullmatch(AMOUNT_PATTERN, value):
        raise refused('must be a plain decimal such as "19.90": digits, then at most one point and digits')
    return Decimal(value)


def _check(code: str) -> str:
    minor_units(code)
    return code


Amount = Annotated[
    Decimal,
    PlainValidator(_parse),
    PlainSerializer(lambda amount: format(amount, "f"), return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": AMOUNT_PATTERN, "examples": ["19.90"]}),
]

Currency = Annotated[
    str,
    Field(description="ISO 4217 code, in capital letters; decides the number of decimals.", examples=["EUR"]),
    AfterValidator(_check),
    WithJsonSchema({"type": "string", "pattern": "^[A-Z]{3}$"}),
]
