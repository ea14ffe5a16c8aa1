"""Frames and properties that the client library cannot take, made into deliveries that can be parked.

Bytes that are no UTF-8 in a short string or in a header's name, a timestamp out of range, a table nested too deep: the
library raises while it parses, below everything that could settle the delivery. The connection dies, the broker
delivers the message again, and so on for ever, with all that was prefetched beside it. `guard` replaces the four
decoders concerned by ones that mark what they cannot read; `build` then tells what is marked.

Some entries of the library's tables are replaced: what it decodes is decoded as before. A test holds them to the pinned
version; with another one that has moved them, `guard` warns and leaves everything as it is. What writes a header's
value is replaced as well, so that a copy has the numbers of the original.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import Any

import structlog
from aio_pika import IncomingMessage
from aiormq.abc import DeliveredMessage
from pamqp import decode, encode
from pamqp.commands import Basic

from service.reliability.envelope import SHORT_STRING
from service.reliability.outcome import Diagnosis

Decoder = Callable[..., tuple[int, Any]]

UNREADABLE = "\udcff"
"""Stands for what could not be decoded, and cannot be taken for anything else: no UTF-8 text has a lone surrogate."""

UNREADABLE_TIMESTAMP = datetime.min.replace(tzinfo=UTC)
"""Stands for a timestamp property out of range: the library takes nothing but a datetime there."""

DEEPEST = 20
"""Levels of tables in tables that are read: a frame has room for thousands, Python's stack has not."""

_DECODERS: tuple[tuple[dict[Any, Decoder], Any, str], ...] = (
    (decode.METHODS, "shortstr", "short_str"),
    (decode.METHODS, "timestamp", "timestamp"),
    (decode.METHODS, "table", "field_table"),
    (decode.TABLE_MAPPING, b"T", "timestamp"),
    (decode.TABLE_MAPPING, b"F", "field_table"),
    (decode.TABLE_MAPPING, b"A", "field_array"),
)
"""Where the library looks a decoder up, under which key, and the name of the one that must be there."""

_encode_value = encode.encode_table_value

_level = 0

log = structlog.get_logger(__name__)


def guard() -> bool:
    """Replace the decoders that raise; tell whether they are replaced. Doing it again changes nothing."""
    ours = {"shortstr": _short_str, "timestamp": _timestamp, "table": _table, b"T": _header_timestamp}
    ours |= {b"F": _table, b"A": _array}
    if all(table.get(key) is ours[key] for table, key, _ in _DECODERS):
        return True
    moved = [
        name
        for table, key, name in _DECODERS
        if table.get(key) is not ours[key] and table.get(key) is not getattr(decode, name, None)
    ]
    if moved:
        _warn(tuple(sorted(set(moved))))
        return False
    for table, key, _ in _DECODERS:
        table[key] = ours[key]
    encode.encode_table_value = _value_with_doubles
    return True


@cache
def _warn(moved: tuple[str, ...]) -> None:
    """Warn, once in a process: every connection is guarded."""
    log.warning(
        "frames_not_guarded",
        client=f"pamqp {version('pamqp')}",
        decoders=list(moved),
        explanation="a frame that cannot be decoded will stop the consumer: install the pinned version",
    )


def build(delivered: DeliveredMessage) -> tuple[IncomingMessage, Diagnosis | None]:
    """Return the message; where a part of it cannot be read, with what can be told of that part, and the diagnosis.

    So whatever is built can be stored, logged and sent again. RabbitMQ 4.x delivers properties that aio-pika refuses,
    such as delivery_mode 3.
    """
    delivery, properties = delivered.delivery, delivered.header.properties
    if isinstance(delivery, Basic.Deliver | Basic.GetOk):
        delivery.exchange, delivery.routing_key = _told(delivery.exchange or ""), _told(delivery.routing_key or "")
    marked = [name for name in properties.attributes() if _is_marked(getattr(properties, name))]
    for name in marked:
        setattr(properties, name, _readable(getattr(properties, name)))
    try:
        message = IncomingMessage(delivered)
    except Exception:  # whatever a hostile property makes the client raise
        marked.append("delivery_mode, priority or expiration")
        properties.delivery_mode = properties.expiration = properties.priority = None
        message = IncomingMessage(delivered)
    if not marked:
        return message, None
    return message, Diagnosis("UnreadableProperty", f"cannot be read: {', '.join(marked)}")


def is_unreadable(value: object) -> bool:
    """Tell whether a property or a header has a part that could not be decoded, in a name or in a value."""
    match value:
        case str():
            return not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value)
        case Mapping():
            return any(is_unreadable(name) or is_unreadable(inner) for name, inner in value.items())
        case list():
            return any(is_unreadable(inner) for inner in value)
        case _:
            return False


def _is_marked(value: Any) -> bool:
    return value == UNREADABLE_TIMESTAMP if isinstance(value, datetime) else is_unreadable(value)


def _readable(value: Any) -> Any:
    """Return what can be told of a marked property: of headers those that can be read, of a text its bytes."""
    match value:
        case str():
            return _told(value)
        case Mapping():
            return {n: inner for n, inner in value.items() if not is_unreadable(n) and not is_unreadable(inner)}
        case _:
            return None


def _told(text: str) -> str:
    r"""Return a short string that can be sent: as it is, or with its bytes told, like `\xff`."""
    if not is_unreadable(text):
        return text
    told = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return told.encode()[:SHORT_STRING].decode("utf-8", "ignore")


def _short_str(value: bytes) -> tuple[int, str]:
    """Decode; bytes that are no UTF-8 become lone surrogates, which no UTF-8 text has."""
    end = value[0] + 1
    return end, value[1:end].decode("utf-8", "surrogateescape")


def _timestamp(value: bytes) -> tuple[int, datetime]:
    try:
        return decode.timestamp(value)
    except (ValueError, OverflowError, OSError):  # what a datetime raises, depending on how far off it is
        return 8, UNREADABLE_TIMESTAMP


def _header_timestamp(value: bytes) -> tuple[int, datetime | str]:
    consumed, instant = _timestamp(value)
    return consumed, UNREADABLE if instant == UNREADABLE_TIMESTAMP else instant


def _table(value: bytes) -> tuple[int, Any]:
    return _one_level_deeper(_read_table, value)


def _array(value: bytes) -> tuple[int, Any]:
    return _one_level_deeper(decode.field_array, value)


def _one_level_deeper(read: Decoder, value: bytes) -> tuple[int, Any]:
    """Read what stands behind its own length; skip it where it is too deep, or where it cannot be read at all."""
    global _level  # noqa: PLW0603 - decoders are called by the library, one frame at a time, and get nothing else
    whole = 4 + int.from_bytes(value[:4], "big")
    _level += 1
    try:
        return read(value) if _level <= DEEPEST else (whole, UNREADABLE)
    except (ValueError, IndexError):  # an unknown type, a length that is none
        return whole, {UNREADABLE: UNREADABLE} if _level == 1 else UNREADABLE
    finally:
        _level -= 1


def _read_table(value: bytes) -> tuple[int, dict[str, Any]]:
    """Decode a table as the library does, but for the names, which are decoded like short strings."""
    end = 4 + int.from_bytes(value[:4], "big")
    if end > len(value):
        raise ValueError("the table is longer than its frame")
    offset, table = 4, {}
    while offset < end:
        consumed, name = _short_str(value[offset:])
        offset += consumed
        consumed, table[name] = decode.embedded_value(value[offset:])
        offset += consumed
    return end, table


def _value_with_doubles(value: Any) -> bytes:
    """Encode a header's value: the library writes floats in single precision, and fails for what is beyond it."""
    return b"d" + encode.double(value) if isinstance(value, float) else _encode_value(value)
