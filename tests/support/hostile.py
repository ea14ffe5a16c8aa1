"""Messages as no reasonable producer sends them, each with what has to become of it.

Every part of a message is drawn as the bytes that it has on the wire, with the reasons that it gives to park the
message. The rules are written down here once more, by hand, from the contract: they share no code with the service.
"""

import gzip
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.rabbit import BROKER
from tests.support.wire import content_header, short_string, table

TRAP = "test.full"
"""A queue that nothing must be sent to: messages name it in reply_to, CC and BCC."""

SECRET = "secret-"
"""In bodies and in values of headers only: no log line and no diagnosis may have it."""

AN_EXPIRED_HISTORY_IS_HARMLESS = (BROKER.version or "").startswith("4.")
"""RabbitMQ 3.10 reads a producer's own x-death when it dead-letters the message. A malformed one, an array of integers
for instance, ends the supervisor of at-least-once dead-lettering for the whole node, and queues of every virtual host
go down with it. So before 4.x no message that can expire has headers: the broker may be shared."""

LARGEST_BODY = 32 * 1024
"""Setting for the service: more is too large."""

DEEPEST = 20
"""Levels of tables and arrays that are read."""

_LAST_TIMESTAMP = 253_402_300_799
"""Seconds at the end of the year 9999; what has more than 32 bits counts milliseconds."""

_PLAIN_ENCODINGS = {b"", b"identity", b"utf-8", b"utf8"}


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of a property or of a header, and the reasons it gives to park the message."""

    wire: bytes
    reasons: frozenset[str] = frozenset()
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Hostile:
    """A message and what may become of it.

    Attributes:
        reasons: for which it may be parked; none where it has to be processed.
        expires: the broker may park it first, since its time is over.
        copies: how often it is sent.
        sku, quantity: what it adds to the stock.
    """

    exchange: bytes
    routing_key: bytes
    properties: dict[str, bytes]
    content: bytes
    reasons: frozenset[str]
    expires: bool
    copies: int
    sku: str
    quantity: int
    more_flags: int

    @property
    def head(self) -> bytes:
        """Return its content header."""
        head = content_header(len(self.content), self.properties)
        return head[:12] + struct.pack(">H", int.from_bytes(head[12:14], "big") | self.more_flags) + head[14:]


def _part(wire: bytes, *reasons: str, depth: int = 0) -> Part:
    return Part(wire, frozenset(reasons), depth)


def _is_utf_8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _short(value: bytes, *reasons: str) -> Part:
    return _part(short_string(value), *reasons, *(() if _is_utf_8(value) else ("unreadable",)))


def _stored(value: bytes) -> Part:
    """Return a short string that the database has to take."""
    return _short(value, *(("invalid",) if b"\0" in value else ()))


def _is_timestamp(value: int) -> bool:
    return value < 2**32 or value / 1000 <= _LAST_TIMESTAMP


def _timestamp(value: int) -> Part:
    return _part(struct.pack(">Q", value), *(() if _is_timestamp(value) else ("unreadable",)))


_bytes = st.binary(max_size=40) | st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace"))
_strings = _bytes | st.sampled_from([b"x" * 255, b"\xff" * 255, "é".encode() * 127, b"\0", b"\x1b[2J", b"%s{}"])
_timestamps = st.integers(0, 2**64 - 1) | st.integers(0, 2**33) | st.just(2**64 - 1)


def _fixed(letter: str, size: int) -> st.SearchStrategy[Part]:
    return st.binary(min_size=size, max_size=size).map(lambda value: _part(letter.encode() + value))


def _long(letter: bytes, value: bytes) -> Part:
    return _part(letter + struct.pack(">I", len(value)) + value)


def _floats(letter: str, code: str, width: Any) -> st.SearchStrategy[Part]:
    numbers = st.floats(width=width, allow_nan=False, allow_infinity=False)  # the broker refuses others
    return numbers.map(lambda number: _part(letter.encode() + struct.pack(code, number)))


_scalars = st.one_of(
    *(_fixed(letter, size) for letter, size in {"t": 1, "b": 1, "B": 1, "s": 2, "u": 2, "I": 4, "i": 4}.items()),
    *(_fixed(letter, size) for letter, size in {"l": 8, "L": 8, "D": 5, "V": 0}.items()),
    _floats("f", ">f", 32),
    _floats("d", ">d", 64),
    _timestamps.map(_timestamp).map(lambda part: Part(b"T" + part.wire, part.reasons)),
    (_strings | st.just(SECRET.encode())).map(lambda value: _long(b"S", value)),
    _strings.map(lambda value: _long(b"x", value)),
)


def _array(parts: list[Part]) -> Part:
    content = b"".join(part.wire for part in parts)
    return _joined(b"A" + struct.pack(">I", len(content)) + content, parts)


def _table(entries: dict[bytes, Part]) -> Part:
    names = [_part(b"", *(() if _is_utf_8(name) else ("unreadable",))) for name in entries]
    wire = table(*((name, part.wire) for name, part in entries.items()))
    return _joined(b"F" + wire, [*names, *entries.values()])


def _joined(wire: bytes, parts: list[Part]) -> Part:
    depth = 1 + max((part.depth for part in parts), default=0)
    return Part(wire, frozenset().union(*(part.reasons for part in parts)), depth)


_names = st.binary(max_size=20) | st.text(max_size=10).map(lambda t: t.encode("utf-8", "replace"))
_long_names = st.sampled_from([b"n" * 255, b"n" * 129, b"n" * 128])
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4).map(_array) | st.dictionaries(_names, inner, max_size=4).map(_table),
    max_leaves=8,
)


def _nested(levels: int, wrap: Callable[[Part], Part]) -> Part:
    part = _part(b"V")
    for _ in range(levels):
        part = wrap(part)
    return part


_deep = st.builds(
    _nested,
    st.sampled_from([1, 18, 19, 20, 21, 1000]),
    st.sampled_from([lambda part: _array([part]), lambda part: _table({b"a": part})]),
)
_counts = st.sampled_from([b"l\x7f" + b"\xff" * 7, b"l" + b"\xff" * 8, b"I\0\0\0\3"])
_death = st.fixed_dictionaries(
    {},
    optional={
        b"queue": st.sampled_from([b"orders.work", b"orders.parking", b"elsewhere"]).map(lambda v: _long(b"S", v)),
        b"reason": st.sampled_from([b"rejected", b"expired", b"delivery_limit"]).map(lambda v: _long(b"S", v)),
        b"count": st.sampled_from([b"l" + b"\x7f" + b"\xff" * 7, b"l" + b"\xff" * 8, b"I\0\0\0\3"]).map(_part)
        | _scalars,
        b"exchange": _scalars,
        b"routing-keys": _values,
        b"time": _scalars,
    },
).map(_table)
_deaths = st.lists(_death | _scalars, max_size=4).map(_array) | _values
_copies_to = st.lists(st.just(_long(b"S", TRAP.encode())) | _scalars, max_size=3).map(_array)
_versions = st.sampled_from(
    [
        *(_part(b"b\1"), _long(b"S", b"1"), _part(b"V")),
        *(_part(b"b\2", "invalid"), _part(b"t\1", "invalid"), _part(_long(b"S", b"\xff").wire, "invalid")),
        _part(_array([]).wire, "invalid", depth=1),
    ]
)
_FORGED = (
    *("x-attempt", "x-attempts", "x-parked-reason", "x-parked-at", "x-exception-type", "x-exception-message"),
    *("x-original-exchange", "x-original-routing-key", "x-original-queue", "x-delivery-count", "x-acquired-count"),
    *("x-first-death-queue", "x-last-death-reason", "x-retry", "x-retries", "x-delay", "x-opt-delivery-count"),
    *("traceparent", "causation-id", "timestamp_in_ms", "x-stream-offset", "x-match"),
)
_SPECIAL: dict[bytes, st.SearchStrategy[Part]] = {
    **{name.encode(): _values for name in _FORGED},
    b"x-death": _deaths,
    b"CC": _copies_to,
    b"BCC": _copies_to,
    b"schema-version": _versions,
    b"deep": _deep,
    b"big": st.sampled_from([1000, 60_000, 70_000]).map(lambda size: _long(b"S", b"x" * size)),
}
_EXPECTED = [*[b"x-death", b"CC", b"BCC", b"x-attempt", b"schema-version"] * 4, *_SPECIAL]


@st.composite
def _any_headers(draw: st.DrawFn) -> dict[bytes, Part]:
    own = draw(st.dictionaries(_names | _long_names, _values, max_size=3))
    return own | {name: draw(_SPECIAL[name]) for name in sorted(draw(st.sets(st.sampled_from(_EXPECTED), max_size=5)))}


def _all_headers(entries: dict[bytes, Part]) -> Part:
    part = _table(entries)
    return Part(part.wire[1:], part.reasons | (frozenset({"unreadable"}) if part.depth > DEEPEST else frozenset()))


def _encoding(value: bytes) -> Part:
    plain = value.strip().lower() in _PLAIN_ENCODINGS
    return _short(value, *(() if plain else ("unreadable",)))


_encodings = st.sampled_from([b"", b"identity", b"UTF-8", b"utf8", b"gzip", b"br", b"deflate"]) | _strings
_properties = st.fixed_dictionaries(
    {},
    optional={
        "content_type": (st.just(b"application/json") | _strings).map(_short),
        "content_encoding": _encodings.map(_encoding),
        "headers": _any_headers().map(_all_headers),
        "delivery_mode": st.integers(0, 255).map(lambda n: _part(bytes([n]), *(("unreadable",) if n > 2 else ()))),
        "priority": st.integers(0, 255).map(lambda n: _part(bytes([n]))),
        "correlation_id": _strings.map(_stored),
        "reply_to": (st.just(TRAP.encode()) | _strings).map(_short),
        "expiration": st.sampled_from([b"0", b"1", b"100", b"+3000", b"0060000", b"4294967296"]).map(_short),
        "timestamp": _timestamps.map(_timestamp),
        "user_id": st.just(b"billing").map(_short),
        "app_id": _strings.map(_short),
        "cluster_id": _strings.map(_short),
    },
)
_types = st.sampled_from([None, None, b"order.placed", b"order.placed", b"", b"order.exploded"]) | _strings

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_WRONG = ("invalid", "unreadable")


@dataclass(frozen=True, slots=True)
class _Body:
    """Makes a body of a stock's key and a quantity, and says why that would be parked."""

    name: str
    make: Callable[[str, int], bytes]
    reasons: frozenset[str] = frozenset()


def _object(**changes: Any) -> Callable[[str, int], bytes]:
    return lambda sku, quantity: json.dumps({"sku": sku, "quantity": quantity} | changes).encode()


def _wrong(name: str, make: Callable[[str, int], bytes], *reasons: str) -> _Body:
    return _Body(name, make, frozenset(reasons or _WRONG))


def _text(literal: str) -> Callable[[str, int], bytes]:
    """Return what makes a body with this literal in a field that nobody reads."""
    return lambda sku, quantity: f'{{"sku": "{sku}", "quantity": {quantity}, "more": {literal}}}'.encode()


_right = _object()
_NO_QUANTITIES: tuple[Any, ...] = (2**31, 2**63, 10**30, -(10**30), 1.5, "many", None, [], {}, "9" * 40)
_GOOD = (
    _Body("plain", _right),
    _Body("spread out", lambda sku, quantity: b"\r\n\t " + _right(sku, quantity).replace(b",", b" ,\n") + b"\n"),
    _Body("twice", lambda sku, quantity: f'{{"quantity": "x", "sku": "{sku}", "quantity": {quantity}}}'.encode()),
    _Body("beyond every float", _text("1e400")),
)
_BAD = (
    _wrong("empty", lambda *_: b"", "unreadable"),
    _wrong("cut off", lambda sku, quantity: _right(sku, quantity)[:-1], "unreadable"),
    _wrong("gzip", lambda sku, quantity: gzip.compress(_right(sku, quantity), mtime=0), "unreadable"),
    _wrong("UTF-16", lambda sku, quantity: _right(sku, quantity).decode().encode("utf-16"), "unreadable"),
    _wrong("BOM", lambda sku, quantity: b"\xef\xbb\xbf" + _right(sku, quantity), "unreadable"),
    _wrong("in a string", lambda sku, quantity: json.dumps(_right(sku, quantity).decode()).encode(), "invalid"),
    _wrong("in a list", lambda sku, quantity: b"[" + _right(sku, quantity) + b"]", "invalid"),
    _wrong("deep", _text("[" * 5000 + "]" * 5000), "unreadable"),
    _wrong("an integer of 5000 digits", _text("9" * 5000), "unreadable"),
    _wrong("half a character", _text('"\\ud800"')),
    _wrong("NaN", _text("NaN")),
    _wrong("U+0000", lambda sku, quantity: _object(sku=f"{sku}\0")(sku, quantity), "invalid"),
    _wrong("too large", lambda sku, quantity: _right(sku, quantity) + b" " * LARGEST_BODY, "too-large"),
    *(_wrong(f"a quantity of {str(value)[:9]}", _object(quantity=value), "invalid") for value in _NO_QUANTITIES),
)
_bodies = st.one_of(
    st.sampled_from(_GOOD),
    st.sampled_from(_GOOD),
    st.dictionaries(st.text().map(lambda name: f"_{name}"), _json, max_size=3).map(
        lambda more: _Body("with more", _object(**more))
    ),
    st.sampled_from(_BAD),
    st.binary(max_size=60).filter(lambda b: b"{" not in b).map(lambda b: _wrong("bytes", lambda *_: b)),
    _json.filter(lambda value: not isinstance(value, dict)).map(
        lambda value: _wrong("no object", lambda *_: json.dumps(value).encode())
    ),
)
_routes = st.sampled_from(
    [(b"orders", b"order.placed")] * 4 + [(b"orders", b"order.paid"), (b"", b"orders.work")],
)


@st.composite
def hostile_messages(draw: st.DrawFn, number: str) -> Hostile:
    """Draw a message whose id and whose key in the stock are made of a number that no other message has."""
    exchange, routing_key = draw(_routes)
    parts = dict(draw(_properties))
    if exchange == b"" and "headers" in parts:
        # On the default exchange a name in CC is a queue's: the producer's own publish would fill the trap.
        headers = parts["headers"]
        parts["headers"] = Part(headers.wire.replace(TRAP.encode(), b"x" * len(TRAP)), headers.reasons)
    match draw(st.sampled_from(["id"] * 6 + ["none", "empty"])):
        case "none":
            parts["message_id"] = _part(b"", "missing-message-id")
        case "empty":
            parts["message_id"] = _short(b"", "missing-message-id")
        case _:
            parts["message_id"] = _stored(draw(_strings)[: 255 - len(number)] + number.encode())
    kind = draw(_types)
    if kind is not None:
        parts["type"] = _short(kind)
    kind = kind or routing_key
    if kind != b"order.placed":
        told = parts.get("type", _part(b""))
        parts["type"] = Part(told.wire, told.reasons | {"unknown-type"})
    body = draw(_bodies)
    if draw(st.booleans()):  # drawn with all its parts, few messages would be right
        parts = {name: part for name, part in parts.items() if not part.reasons} | {
            "message_id": _short(number.encode()),
            "type": _short(b"order.placed"),
        }
        body = body if not body.reasons else _GOOD[0]
    if "headers" in parts and "expiration" in parts and not AN_EXPIRED_HISTORY_IS_HARMLESS:
        del parts["expiration"]
    quantity = draw(st.integers(1, 1000))
    sku = SECRET + number
    return Hostile(
        exchange=exchange,
        routing_key=routing_key,
        properties={name: part.wire for name, part in parts.items() if part.wire},
        content=body.make(sku, quantity),
        reasons=body.reasons.union(*(part.reasons for part in parts.values())),
        expires="expiration" in parts,
        copies=draw(st.sampled_from([1, 1, 1, 2, 3])),
        sku=sku,
        quantity=quantity,
        more_flags=draw(st.sampled_from([0, 0, 0, 2])),
    )


def draw_batches(number: int, size: int) -> list[list[Hostile]]:
    """Draw so many batches, at other random numbers each time; the seed is printed, and comes with `--randomly-seed`.

    All before the service runs: it draws random numbers, too, and Hypothesis wants them for itself. Nothing is shrunk:
    what is wrong is told of each message, so a smaller batch would tell no more.
    """
    messages: list[Hostile] = []
    chosen = random.getrandbits(32)
    print(f"hostile messages of seed {chosen}")  # noqa: T201 - shown where the test fails

    @seed(chosen)
    @settings(
        max_examples=number * size,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        messages.append(data.draw(hostile_messages(f"{len(messages):08}")))

    draw()
    return [messages[start : start + size] for start in range(0, len(messages), size)]
