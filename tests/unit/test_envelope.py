"""What is believed of a stranger's message, and what its copies carry."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.reliability.envelope import (
    digest,
    identify,
    parked_headers,
    read_envelope,
    require_plain,
    require_size,
    waiting_headers,
)
from service.reliability.errors import PermanentError
from service.reliability.outcome import Diagnosis, Park, Reason, Retry
from tests.support.doubles import delivery

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.datetimes()
tables = st.dictionaries(
    st.text(max_size=20) | st.sampled_from(["x-attempt", "x-death", "x-original-exchange", "traceparent", "CC"]),
    st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5),
)
texts = st.none() | st.text(max_size=50)


@given(
    headers=st.none() | tables,
    message_id=texts,
    kind=texts,
    correlation=texts,
    exchange=st.sampled_from(["", "orders"]),
)
def test_reading_an_envelope_never_fails_and_the_attempt_is_within_its_range(
    headers: Any, message_id: str | None, kind: str | None, correlation: str | None, exchange: str
) -> None:
    message = delivery(
        headers=headers, message_id=message_id, message_type=kind, correlation_id=correlation, exchange=exchange
    )
    envelope = read_envelope(message, 5)
    assert 1 <= envelope.attempt <= 5
    assert not any(name.startswith(("x-death", "x-attempt", "x-parked-", "x-original-")) for name in envelope.headers)
    assert not {"CC", "BCC"} & envelope.headers.keys()


@pytest.mark.parametrize(
    ("exchange", "value", "attempt"),
    [
        ("", 3, 3),
        ("", 5, 5),
        ("", 6, 1),
        ("", 0, 1),
        ("", -1, 1),
        ("", True, 1),
        ("", 2.0, 1),
        ("", "3", 1),
        ("", None, 1),
        ("orders", 3, 1),
    ],
)
def test_an_attempt_is_believed_only_from_our_own_queues_and_within_its_range(
    exchange: str, value: object, attempt: int
) -> None:
    message = delivery(exchange=exchange, routing_key="orders.work", headers={"x-attempt": value})
    assert read_envelope(message, 5).attempt == attempt


def test_the_routing_key_serves_where_there_is_no_type() -> None:
    assert read_envelope(delivery(routing_key="order.paid"), 5).type == "order.paid"
    assert read_envelope(delivery(routing_key="order.paid", message_type="order.placed"), 5).type == "order.placed"


def test_where_a_message_came_from_is_remembered_over_a_wait() -> None:
    headers = {"x-original-exchange": "orders", "x-original-routing-key": "order.paid"}
    returned = read_envelope(delivery(exchange="", routing_key="orders.work", headers=headers), 5)
    assert (returned.exchange, returned.routing_key) == ("orders", "order.paid")
    forged = read_envelope(delivery(exchange="orders", routing_key="order.placed", headers=headers), 5)
    assert (forged.exchange, forged.routing_key) == ("orders", "order.placed")


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"message_id": None}, Reason.MISSING_MESSAGE_ID),
        ({"message_id": ""}, Reason.MISSING_MESSAGE_ID),
        ({"message_id": "a\0b"}, Reason.INVALID),
        ({"correlation_id": "a\0b"}, Reason.INVALID),
    ],
)
def test_an_identity_that_cannot_be_stored_is_refused(properties: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(PermanentError) as refused:
        identify(read_envelope(delivery(**properties), 5))
    assert refused.value.reason is reason


def test_an_identity_of_255_characters_is_kept_whole() -> None:
    assert identify(read_envelope(delivery(message_id="x" * 255), 5)) == "x" * 255


@pytest.mark.parametrize("encoding", [None, "", "utf-8", "UTF-8", "identity", " utf8 "])
def test_names_of_character_sets_are_no_compression(encoding: str | None) -> None:
    require_plain(encoding)


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "x"])
def test_compressed_bodies_are_unreadable(encoding: str) -> None:
    with pytest.raises(PermanentError) as refused:
        require_plain(encoding)
    assert refused.value.reason is Reason.UNREADABLE


def test_a_body_over_the_limit_is_too_large() -> None:
    require_size(b"x" * 10, 10)
    with pytest.raises(PermanentError) as refused:
        require_size(b"x" * 11, 10)
    assert refused.value.reason is Reason.TOO_LARGE


@pytest.mark.parametrize(
    "copy",
    [
        b'{"b": [1, 2.50], "a": "\xc3\xa9"}',
        b'{"a":"\\u00e9","b":[1,2.5]}',
        b'\n{\t"a" : "\xc3\xa9",\n"b":[ 1 ,2.5e0 ] }',
    ],
)
def test_a_reserialised_copy_has_the_same_digest(copy: bytes) -> None:
    original = digest("t", b'{"a": "\xc3\xa9", "b": [1, 2.5]}')
    assert digest("t", copy) == original


@pytest.mark.parametrize("other", [b'{"a": 2}', b'{"a": "1"}', b'{"a": 1, "b": null}', b'{"A": 1}', b"[1]"])
def test_another_content_or_type_has_another_digest(other: bytes) -> None:
    assert digest("t", other) != digest("t", b'{"a": 1}')
    assert digest("u", b'{"a": 1}') != digest("t", b'{"a": 1}')


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.booleans() | st.none()))
def test_a_digest_does_not_depend_on_the_order_of_keys(content: dict[str, Any]) -> None:
    backwards = dict(reversed(content.items()))
    assert digest("t", json.dumps(content).encode()) == digest("t", json.dumps(backwards).encode())


@pytest.mark.parametrize("body", [b"9" * 5000, b"[" * 100_000, b"{", b"\xff"])
def test_what_python_cannot_read_as_json_is_unreadable(body: bytes) -> None:
    with pytest.raises(PermanentError) as refused:
        digest("t", body)
    assert refused.value.reason is Reason.UNREADABLE


def test_a_waiting_copy_carries_the_producers_headers_and_the_next_attempt() -> None:
    headers = {"tenant": "a", "x-death": [{}], "x-attempt": 9, "CC": ["q"], "x-delivery-count": 3}
    envelope = read_envelope(delivery(headers=headers), 5)
    assert waiting_headers(envelope, Retry(timedelta(seconds=5), 2, Diagnosis("E", "why"))) == {
        "tenant": "a",
        "x-attempt": 2,
        "x-original-exchange": "orders",
        "x-original-routing-key": "order.placed",
    }


def test_a_parked_copy_carries_its_diagnosis() -> None:
    envelope = read_envelope(delivery(headers={"tenant": "a", "x-parked-reason": "forged"}), 5)
    park = Park(Reason.INVALID, 1, Diagnosis("pkg.Error", "why"))
    assert parked_headers(envelope, park, "orders.work", datetime(2026, 5, 4, 10, tzinfo=UTC)) == {
        "tenant": "a",
        "x-parked-reason": "invalid",
        "x-parked-at": "2026-05-04T10:00:00.000+00:00",
        "x-attempts": 1,
        "x-exception-type": "pkg.Error",
        "x-exception-message": "why",
        "x-original-exchange": "orders",
        "x-original-routing-key": "order.placed",
        "x-original-queue": "orders.work",
    }
