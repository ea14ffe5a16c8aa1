"""Text and time in messages."""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, Field


def _storable(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain U+0000")
    return text


def _in_utc(instant: datetime) -> datetime:
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        raise ValueError("must be within the years 1 to 9999 in UTC") from None


Text = Annotated[str, AfterValidator(_storable)]

Instant = Annotated[
    AwareDatetime,
    AfterValidator(_in_utc),
    Field(description="An instant in ISO 8601 with an offset from UTC.", examples=["2026-05-04T10:00:00Z"]),
]
