"""Text and time in messages."""

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field
from pydantic_core import PydanticCustomError

_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def refused(why: str) -> PydanticCustomError:
    """Return the error of a value that breaks a rule. `why` is for people and quotes nothing of the value.

    It is a ValueError; its kind tells it from those whose text may quote anything.
    """
    return PydanticCustomError("rule_broken", why.replace("{", "{{").replace("}", "}}"))


def _storable(text: str) -> str:
    if "\0" in text:
        raise refused("must not contain U+0000")
    return text


def _is_calendar_date(value: Any) -> Any:
    """Refuse numbers, in a string or not: pydantic would read them as seconds since 1970."""
    if not isinstance(value, datetime) and (not isinstance(value, str) or value[4:5] != "-"):
        raise refused("must be a date and time in ISO 8601 with an offset")
    return value


def _in_utc(instant: datetime) -> datetime:
    """Return the instant in UTC.

    The first and the last instant that Python knows are refused: database drivers write them as infinity.
    """
    try:
        in_utc = instant.astimezone(UTC)
    except OverflowError:
        in_utc = _FIRST
    if not _FIRST < in_utc < _LAST:
        raise refused("must be within the years 1 to 9999 in UTC")
    return in_utc


STORABLE = AfterValidator(_storable)
"""Of a text, behind its limits: in front of them, pydantic would count "items after validation" in its messages."""

Text = Annotated[str, STORABLE]

Instant = Annotated[
    AwareDatetime,
    Field(strict=False),  # behind a validator of ours, a strict datetime would refuse every string
    BeforeValidator(_is_calendar_date),
    AfterValidator(_in_utc),
    Field(
        description="An instant in ISO 8601 with an offset from UTC, or `Z`; from the year 1 to 9999.",
        examples=["2026-05-04T10:00:00Z"],
        json_schema_extra={"pattern": r"T.*(Z|[+-][0-9]{2}:[0-9]{2})$"},
    ),
]
