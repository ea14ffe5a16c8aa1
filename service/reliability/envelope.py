"""What is known of an arrived message apart from its body: identity, type, attempt, where it came from.

Pure: nothing here talks to a broker. Headers are a stranger's input. What the service itself wrote into them is
believed only where no producer's publish to the exchange can forge it: on a delivery that came through the default
exchange, as every return from a wait queue does.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Never, Protocol

from service.reliability.errors import PermanentError
from service.reliability.outcome import Park, Reason, Retry

ATTEMPT = "x-attempt"
ORIGINAL_EXCHANGE = "x-original-exchange"
ORIGINAL_ROUTING_KEY = "x-original-routing-key"
WITHOUT_ID = "x-parked-without-id"
PARKED_REASON = "x-parked-reason"
PARKED_AT = "x-parked-at"
REPLAYED_FROM = "x-replayed-from"
SCHEMA_VERSION = "schema-version"

SHORT_STRING = 255
"""Bytes that AMQP's short strings hold: names of exchanges, routing keys, ids."""

COUNTS = frozenset({"x-delivery-count", "x-acquired-count"})
"""The broker's counts of deliveries; on the first one 4.3 writes none, and leaves what a producer wrote."""

BOOKKEEPING = frozenset(
    {
        # Would make the broker copy the successor to whatever queues the producer named.
        *("CC", "BCC"),
        # The broker's bookkeeping: 3.10 counts on from a forged x-death, and all of it would grow at each cycle.
        "x-death",
        *(f"x-{which}-death-{what}" for which in ("first", "last") for what in ("exchange", "queue", "reason")),
        # Our own.
        *(ATTEMPT, ORIGINAL_EXCHANGE, ORIGINAL_ROUTING_KEY, "x-original-queue"),
        *(WITHOUT_ID, PARKED_REASON, PARKED_AT, "x-attempts", "x-exception-type", "x-exception-message"),
    }
)
"""Headers that no copy carries on, COUNTS neither: by name, so that a producer's own, as x-original-url, are kept."""

_PLAIN_ENCODINGS = frozenset({"", "identity", "utf-8", "utf8"})
"""Content encodings of a body that is not compressed; Spring and Celery send the name of the character set here."""


class Arrived(Protocol):
    """The part of `aio_pika.IncomingMessage` that an envelope is read from."""

    body: bytes
    headers: Any
    message_id: str | None
    correlation_id: str | None
    type: str | None
    content_encoding: str | None
    exchange: str | None
    routing_key: str | None
    redelivered: bool | None


@dataclass(frozen=True, slots=True)
class Envelope:
    """Identity and history of one delivery.

    Attributes:
        message_id: as the producer set it; None where there is none. Clients and frameworks invent one, a new one at
            each delivery, which no inbox could recognise: so it is read from the wire only. A parked copy has the one
            that our client invented, and a header saying so: published again as it is, it still has none.
        type: the event type; the routing key serves where the producer set none.
        attempt: 1 for the first execution.
        redelivered: the broker's hint that this delivery, of this attempt, may have been started before.
        exchange, routing_key: where the producer published it.
        headers: the producer's own, without the broker's and our bookkeeping.
    """

    message_id: str | None
    type: str
    correlation_id: str | None
    traceparent: str | None
    attempt: int
    redelivered: bool
    exchange: str
    routing_key: str
    headers: Mapping[str, Any]


def read_envelope(message: Arrived, max_attempts: int) -> Envelope:
    """Return the envelope of an arrived message; never raises, whatever the producer sent."""
    headers = message.headers or {}
    exchange, routing_key = message.exchange or "", message.routing_key or ""
    came_back = exchange == ""
    return Envelope(
        message_id=None if came_back and headers.get(WITHOUT_ID) is True else message.message_id or None,
        type=message.type or routing_key,
        correlation_id=message.correlation_id or None,
        traceparent=short_text(headers.get("traceparent")),
        attempt=_attempt(headers.get(ATTEMPT), max_attempts) if came_back else 1,
        redelivered=bool(message.redelivered),
        exchange=(came_back and short_text(headers.get(ORIGINAL_EXCHANGE))) or exchange,
        routing_key=(came_back and short_text(headers.get(ORIGINAL_ROUTING_KEY))) or routing_key,
        headers={name: value for name, value in headers.items() if name not in BOOKKEEPING | COUNTS},
    )


def identify(envelope: Envelope) -> str:
    """Return the message id that the inbox keys on.

    Raises:
        PermanentError: there is none, or one that PostgreSQL cannot store.
    """
    if envelope.message_id is None:
        raise PermanentError(Reason.MISSING_MESSAGE_ID, "the property message_id is not set")
    for name, value in (("message_id", envelope.message_id), ("correlation_id", envelope.correlation_id or "")):
        if "\0" in value:
            raise PermanentError(Reason.INVALID, f"the property {name} contains U+0000, which cannot be stored")
    return envelope.message_id


def require_size(body: bytes, limit: int) -> None:
    """Refuse a body that would take too much memory to parse.

    Raises:
        PermanentError: it has more than `limit` bytes.
    """
    if len(body) > limit:
        raise PermanentError(Reason.TOO_LARGE, f"the body has {len(body)} bytes, more than {limit}")


def require_plain(content_encoding: str | None) -> None:
    """Refuse a body that is said to be compressed.

    Raises:
        PermanentError: `content_encoding` names anything but plain bytes. A body is never decompressed: 10 kB of gzip
            can hold gigabytes.
    """
    if (content_encoding or "").strip().lower() not in _PLAIN_ENCODINGS:
        raise PermanentError(Reason.UNREADABLE, "the property content_encoding is set: send plain, uncompressed JSON")


def require_schema_version(version: object, known: Collection[int]) -> None:
    """Refuse a body written in a version of the schema that its reader does not know.

    Args:
        version: the header `schema-version`; a message without one is of version 1.
        known: the versions that the reader reads.

    Raises:
        PermanentError: names the version and those that are known.
    """
    if version is None or (isinstance(version, (int, str)) and str(version) in map(str, known)):
        return
    told = version if isinstance(version, int) else "that is no number"
    expected = ", ".join(map(str, sorted(known)))
    raise PermanentError(Reason.INVALID, f"the schema-version {told} is not known here: known is {expected}")


def digest(event_type: str, body: bytes) -> bytes:
    """Return the SHA-256 over type and content: equal for a re-serialised copy, other for a changed one.

    The content is the parsed JSON in canonical form: sorted keys, no insignificant white space.

    Raises:
        PermanentError: the body is not JSON that Python can read (an integer of thousands of digits, say), or has one
            of the constants that only Python takes for JSON.
    """
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant)
        content = json.dumps(parsed, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise PermanentError(Reason.UNREADABLE, f"the body cannot be read as JSON ({type(error).__name__})") from None
    return hashlib.sha256(f"{event_type}\n{content}".encode("ascii", "backslashreplace")).digest()


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is no JSON")


def waiting_headers(envelope: Envelope, retry: Retry) -> dict[str, Any]:
    """Return the headers of the copy that goes to a wait queue."""
    return {
        **envelope.headers,
        ATTEMPT: retry.next_attempt,
        ORIGINAL_EXCHANGE: envelope.exchange,
        ORIGINAL_ROUTING_KEY: envelope.routing_key,
    }


def parked_headers(envelope: Envelope, park: Park, queue: str, now: datetime) -> dict[str, Any]:
    """Return the headers of the copy that goes to the parking queue: the producer's own and the diagnosis."""
    return {
        **envelope.headers,
        **({WITHOUT_ID: True} if envelope.message_id is None else {}),
        PARKED_REASON: str(park.reason),
        PARKED_AT: now.isoformat(timespec="milliseconds"),
        "x-attempts": park.attempts,
        "x-exception-type": park.diagnosis.exception_type,
        "x-exception-message": park.diagnosis.explanation,
        ORIGINAL_EXCHANGE: envelope.exchange,
        ORIGINAL_ROUTING_KEY: envelope.routing_key,
        "x-original-queue": queue,
    }


def _attempt(value: object, max_attempts: int) -> int:
    believable = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= max_attempts
    return value if believable else 1  # type: ignore[return-value]  # narrowed above, through a variable


def short_text(value: object) -> str | None:
    """Return a header's value where it is text that can be stored and sent on, else None."""
    if isinstance(value, str) and 0 < len(value.encode("utf-8", "replace")) <= SHORT_STRING and "\0" not in value:
        return value
    return None
