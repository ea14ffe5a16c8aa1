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
    assert not {"CC", "BCC", "x-death", "x-attempt", "x-original-exchange"} & envelope.headers.keys()


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
        ("", b"3", 1),
        ("", [3], 1),
        ("", {"count": 3}, 1),
        ("", 2**63 - 1, 1),
        ("", 2**70, 1),
        ("", float("nan"), 1),
        ("orders", 3, 1),
        ("orders", 5, 1),
        ("amq.direct", 3, 1),
    ],
)
def test_an_attempt_is_believed_only_from_our_own_queues_and_within_its_range(
    exchange: str, value: object, attempt: int
) -> None:
    message = delivery(exchange=exchange, routing_key="orders.work", headers={"x-attempt": value})
    read = read_envelope(message, 5).attempt
    assert (read, type(read)) == (attempt, int)


@given(
    properties=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("message_id", "message_type", "correlation_id", "content_type", "content_encoding", "reply_to", "app_id"),
            st.text(st.characters(), max_size=255),  # lone surrogates among them
        ),
    ),
    headers=tables,
    routing_key=st.text(max_size=30),
)
def test_whatever_is_no_bookkeeping_is_carried_unchanged(
    properties: dict[str, Any], headers: dict[str, Any], routing_key: str
) -> None:
    envelope = read_envelope(delivery(headers=headers, routing_key=routing_key, **properties), 5)
    own = {name: value for name, value in headers.items() if not name.startswith("x-") and name not in {"CC", "BCC"}}
    assert envelope.headers.keys() & own.keys() == own.keys()
    assert all(envelope.headers[name] is value for name, value in own.items())


@pytest.mark.parametrize(
    "name",
    [
        "x-death",
        "x-first-death-exchange",
        "x-first-death-queue",
        "x-first-death-reason",
        "x-last-death-exchange",
        "x-last-death-queue",
        "x-last-death-reason",
        "x-delivery-count",
        "x-acquired-count",
        "CC",
        "BCC",
        "x-attempt",
        "x-attempts",
        "x-parked-reason",
        "x-parked-at",
        "x-parked-without-id",
        "x-exception-type",
        "x-exception-message",
        "x-original-exchange",
        "x-original-routing-key",
        "x-original-queue",
    ],
)
@pytest.mark.parametrize("exchange", ["", "orders"])
def test_bookkeeping_is_not_carried_on(name: str, exchange: str) -> None:
    message = delivery(exchange=exchange, headers={name: "forged", "tenant": "a"})
    assert read_envelope(message, 5).headers == {"tenant": "a"}


@pytest.mark.parametrize("name", ["x-original-url", "x-exception-policy", "x-attempted-by", "x-parked-car", "cc"])
def test_a_producers_header_that_only_looks_like_bookkeeping_is_carried_on(name: str) -> None:
    assert read_envelope(delivery(headers={name: "own"}), 5).headers == {name: "own"}


def test_the_routing_key_serves_where_there_is_no_type() -> None:
    assert read_envelope(delivery(routing_key="order.paid"), 5).type == "order.paid"
    assert read_envelope(delivery(routing_key="order.paid", message_type="order.placed"), 5).type == "order.placed"


def test_where_a_message_came_from_is_remembered_over_a_wait() -> None:
    headers = {"x-original-exchange": "orders", "x-original-routing-key": "order.paid"}
    returned = read_envelope(delivery(exchange="", routing_key="orders.work", headers=headers), 5)
    assert (returned.exchange, returned.routing_key) == ("orders", "order.paid")
    forged = read_envelope(delivery(exchange="elsewhere", routing_key="order.placed", headers=headers), 5)
    assert (forged.exchange, forged.routing_key) == ("elsewhere", "order.placed")


@pytest.mark.parametrize("value", [None, "", 1, True, b"orders", "a\0b", "x" * 256, "é" * 128, ["orders"], {}])
def test_an_origin_that_is_no_name_is_not_believed(value: object) -> None:
    headers = {"x-original-exchange": value, "x-original-routing-key": value}
    envelope = read_envelope(delivery(exchange="", routing_key="orders.work", headers=headers), 5)
    assert (envelope.exchange, envelope.routing_key) == ("", "orders.work")


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("00-abc-def-01", "00-abc-def-01"),
        ("x" * 255, "x" * 255),
        ("x" * 256, None),
        ("a\0", None),
        (7, None),
        ("", None),
    ],
)
def test_a_trace_is_carried_on_where_it_is_text_of_sensible_size(value: object, kept: str | None) -> None:
    assert read_envelope(delivery(headers={"traceparent": value}), 5).traceparent == kept


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


@pytest.mark.parametrize("size", [1, 36, 64, 65, 128, 255])
def test_an_identity_is_kept_whole(size: int) -> None:
    assert identify(read_envelope(delivery(message_id="x" * size), 5)) == "x" * size


@pytest.mark.parametrize("encoding", [None, "", "utf-8", "UTF-8", "identity", " utf8 "])
def test_names_of_character_sets_are_no_compression(encoding: str | None) -> None:
    require_plain(encoding)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "deflate", "zstd", "gzip, identity", "x"])
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
        b'{"a":"\\u00E9","b":[1,25e-1]}',
        b'{"\\u0061":"\\u00e9","\\u0062":[1,2.5]}',
    ],
)
def test_a_reserialised_copy_has_the_same_digest(copy: bytes) -> None:
    original = digest("t", b'{"a": "\xc3\xa9", "b": [1, 2.5]}')
    assert digest("t", copy) == original


def test_a_digest_is_over_type_and_canonical_content() -> None:
    """Stored digests outlive versions: in another form every redelivery would be a conflict.

    printf 'order.paid\\n{"a":"\\\\u00e9","b":[1,2.5,true,null]}' | sha256sum
    """
    expected = "421a8b2c2f3f916ce1aedce80a7993bda7ac69fc7412130f1ad1a78ed9ad612a"
    assert digest("order.paid", b'{"b": [1, 2.50, true, null], "a": "\xc3\xa9"}').hex() == expected


def test_characters_beyond_the_basic_plane_are_the_same_escaped_or_not() -> None:
    assert digest("t", b'"\\ud83d\\ude00"') == digest("t", '"\U0001f600"'.encode())
    assert digest("t", b'"\\ud83d"') != digest("t", b'"\\\\ud83d"')


def test_the_order_of_keys_inside_does_not_matter_and_that_of_a_list_does() -> None:
    assert digest("t", b'[{"a": {"b": 1, "c": 2}}]') == digest("t", b'[{"a": {"c": 2, "b": 1}}]')
    assert digest("t", b"[1, 2]") != digest("t", b"[2, 1]")


def test_a_type_and_a_body_cannot_be_told_apart_differently() -> None:
    assert digest("a", b'"b"') != digest('a\n"b"', b'""')


@pytest.mark.parametrize(
    "other", [b'{"a": 2}', b'{"a": "1"}', b'{"a": 1, "b": null}', b'{"A": 1}', b"[1]", b'{"a": true}', b'{"a": 1.5}']
)
def test_another_content_or_type_has_another_digest(other: bytes) -> None:
    assert digest("t", other) != digest("t", b'{"a": 1}')
    assert digest("u", b'{"a": 1}') != digest("t", b'{"a": 1}')


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.booleans() | st.none()))
def test_a_digest_does_not_depend_on_the_order_of_keys(content: dict[str, Any]) -> None:
    backwards = dict(reversed(content.items()))
    assert digest("t", json.dumps(content).encode()) == digest("t", json.dumps(backwards).encode())


@pytest.mark.parametrize("body", [b"9" * 5000, b"[" * 100_000, b"{", b"\xff", b"[NaN]", b"-Infinity"])
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


def test_a_message_knows_its_past_after_any_number_of_waits_and_does_not_grow() -> None:
    headers = {"tenant": "a", "x-death": [{"queue": "q"}], "traceparent": "00-abc"}
    envelope = read_envelope(delivery(headers=headers, routing_key="order.paid"), 300)
    for attempt in range(2, 202):
        copy = waiting_headers(envelope, Retry(timedelta(seconds=5), attempt, Diagnosis("E", "why")))
        broker = {"x-death": [{"queue": "orders.wait.5s"}], "x-first-death-queue": "orders.wait.5s"}
        returned = delivery(
            exchange="", routing_key="orders.work", headers=copy | broker, message_type="order.paid", message_id="m-1"
        )
        envelope = read_envelope(returned, 300)
        assert (envelope.attempt, envelope.type) == (attempt, "order.paid")
        assert (envelope.exchange, envelope.routing_key) == ("orders", "order.paid")
    assert envelope.headers == {"tenant": "a", "traceparent": "00-abc"}


def test_a_parked_copy_that_comes_again_keeps_the_producers_headers_only() -> None:
    envelope = read_envelope(delivery(headers={"tenant": "a"}), 5)
    park = Park(Reason.INVALID, 1, Diagnosis("pkg.Error", "why"))
    parked = parked_headers(envelope, park, "orders.work", datetime(2026, 5, 4, 10, tzinfo=UTC))
    assert read_envelope(delivery(headers=parked), 5).headers == {"tenant": "a"}


def test_a_parked_copy_of_a_message_without_an_id_still_has_none_when_it_comes_again() -> None:
    """The client invents one for the copy. Executed under that, each copy of one message would have an effect."""
    envelope = read_envelope(delivery(message_id=None), 5)
    park = Park(Reason.UNREADABLE, 0, Diagnosis("pkg.Error", "why"))
    parked = parked_headers(envelope, park, "orders.work", datetime(2026, 5, 4, 10, tzinfo=UTC))
    assert parked["x-parked-without-id"] is True
    copy = delivery(message_id="invented", headers=parked, exchange="", routing_key="orders.work")
    assert read_envelope(copy, 5).message_id is None
    del parked["x-parked-without-id"]
    copy = delivery(message_id="given", headers=parked, exchange="", routing_key="orders.work")
    assert read_envelope(copy, 5).message_id == "given"


@pytest.mark.parametrize(("exchange", "value"), [("orders", True), ("", 1), ("", "true"), ("", None), ("", False)])
def test_a_producer_cannot_take_its_own_id_away(exchange: str, value: object) -> None:
    message = delivery(message_id="m-1", headers={"x-parked-without-id": value}, exchange=exchange)
    assert read_envelope(message, 5).message_id == "m-1"


def test_a_reason_is_sent_as_a_plain_string() -> None:
    """The client's encoder looks at the type and knows no enumerations."""
    envelope = read_envelope(delivery(), 5)
    park = Park(Reason.TOO_LARGE, 0, Diagnosis("pkg.Error", "why"))
    reason = parked_headers(envelope, park, "q", datetime(2026, 5, 4, tzinfo=UTC))["x-parked-reason"]
    assert type(reason) is str
    assert reason == "too-large"


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
