"""What each strategy reads from a delivery, and which way it sends a failing message."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.reliability.definitions import definitions
from service.reliability.outcome import Diagnosis, Retry
from service.reliability.retry import RetryPolicy
from service.reliability.strategies import STRATEGIES
from service.reliability.topology import Copy, Nack, QueueFamily
from tests.support.doubles import delivery

SECOND = timedelta(seconds=1)
FAMILIES = {
    name: QueueFamily("orders", ("order.placed",), RetryPolicy(5, (SECOND,)), strategy)
    for name, strategy in STRATEGIES.items()
}
RETRY = Retry(SECOND, 2, Diagnosis("E", "why"))


def death(queue: str = "orders.work", reason: str = "rejected", count: object = 1, **more: Any) -> dict[str, Any]:
    """Return an entry of x-death as the broker writes it."""
    return {
        "queue": queue,
        "reason": reason,
        "count": count,
        "exchange": "orders",
        "routing-keys": ["order.paid"],
    } | more


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
anything = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
deaths = st.builds(
    death,
    queue=st.sampled_from(["orders.work", "orders.wait", "elsewhere"]) | anything,
    reason=st.sampled_from(["rejected", "expired"]) | anything,
    count=anything,
    exchange=anything,
    **{"routing-keys": st.lists(anything) | anything},
)


@given(
    name=st.sampled_from(sorted(STRATEGIES)),
    headers=st.fixed_dictionaries(
        {},
        optional={
            "x-death": st.lists(deaths) | anything,
            "x-attempt": anything,
            "x-delivery-count": anything,
            "x-acquired-count": anything,
        },
    ),
    exchange=st.sampled_from(["", "orders"]),
    redelivered=st.booleans(),
)
def test_whatever_stands_in_the_headers_the_attempt_is_within_its_range(
    name: str, headers: dict[str, Any], exchange: str, redelivered: bool
) -> None:
    family = FAMILIES[name]
    message = delivery(headers=headers, exchange=exchange)
    message.redelivered = redelivered
    assert 1 <= family.read(message).attempt <= 5
    assert isinstance(family.strategy.way_back(family, message, RETRY), Copy | Nack)


@pytest.mark.parametrize(
    ("exchange", "headers", "attempt"),
    [
        ("", {"x-death": [death("orders.wait", "expired", 2), death(count=2)]}, 3),
        ("", {"x-death": [death(count=1)], "x-attempt": 2}, 3),
        ("", {"x-death": [death(count=99)]}, 5),
        ("", {"x-death": [death(count=2**63 - 1)]}, 1),
        ("", {"x-death": [death(count=-1)]}, 1),
        ("", {"x-death": [death(count=True)]}, 1),
        ("", {"x-death": [death("orders.work", "expired", 3)]}, 1),
        ("", {"x-death": [death("elsewhere", "rejected", 3)]}, 1),
        ("orders", {"x-death": [death(count=2)]}, 1),
    ],
)
def test_rejections_are_counted_on_what_came_back(exchange: str, headers: dict[str, Any], attempt: int) -> None:
    family = FAMILIES["dead-letter"]
    assert family.read(delivery(exchange=exchange, routing_key="orders.work", headers=headers)).attempt == attempt


@pytest.mark.parametrize(
    ("counts", "redelivered"),
    [
        ({}, True),  # 3.10 counts anew after each way round
        ({"x-last-death-queue": "orders.wait", "x-delivery-count": 2}, False),  # 4.0 has counted the rejections
        ({"x-last-death-queue": "orders.wait", "x-delivery-count": 3}, True),
        ({"x-last-death-queue": "orders.wait", "x-delivery-count": 1, "x-acquired-count": 1}, True),  # 4.3 has not
    ],
)
def test_a_rejection_is_not_taken_for_a_crash(counts: dict[str, Any], redelivered: bool) -> None:
    message = delivery(exchange="", headers={"x-death": [death(count=2)]} | counts)
    message.redelivered = True
    assert FAMILIES["dead-letter"].read(message).redelivered is redelivered


def test_where_a_rejected_message_was_published_first_is_known() -> None:
    family = FAMILIES["dead-letter"]
    back = {"exchange": "", "routing_key": "orders.work"}
    read = family.read(delivery(headers={"x-death": [death()]}, **back))
    assert (read.exchange, read.routing_key, read.type) == ("orders", "order.paid", "order.paid")
    ours = {"x-original-exchange": "first", "x-original-routing-key": "key"}
    read = family.read(delivery(headers={"x-death": [death()]} | ours, message_type="order.placed", **back))
    assert (read.exchange, read.routing_key, read.type) == ("first", "key", "order.placed")
    endless = death(**{"routing-keys": ["x" * 300], "exchange": "x" * 300})
    read = family.read(delivery(headers={"x-death": [endless]}, **back))
    assert (read.exchange, read.routing_key, read.type) == ("", "orders.work", "orders.work")


@pytest.mark.parametrize(
    ("exchange", "headers", "way"),
    [
        ("orders", {"tenant": "a"}, Nack(requeue=False)),
        ("orders", {"x-delivery-count": 0}, Nack(requeue=False)),
        ("", {"x-death": [death("orders.wait", "expired"), death()], "x-attempt": 2}, Nack(requeue=False)),
        ("orders", {"x-death": []}, Copy("orders.wait")),
        ("orders", {"x-death": [death()]}, Copy("orders.wait")),
        ("orders", {"x-attempt": 2}, Copy("orders.wait")),
        ("orders", {"x-first-death-reason": "expired"}, Copy("orders.wait")),
        ("", {"x-death": "junk"}, Copy("orders.wait")),
        ("", {"x-death": [death(), death("elsewhere")]}, Copy("orders.wait")),
        ("", {"x-death": [death(count=2**62)]}, Copy("orders.wait")),
    ],
)
def test_only_a_past_that_is_our_loops_own_is_left_to_the_broker(
    exchange: str, headers: dict[str, Any], way: Copy | Nack
) -> None:
    family = FAMILIES["dead-letter"]
    assert family.strategy.way_back(family, delivery(exchange=exchange, headers=headers), RETRY) == way


@pytest.mark.parametrize(
    ("counts", "attempt", "redelivered"),
    [
        ({"x-acquired-count": 2}, 3, False),
        ({"x-acquired-count": 5, "x-delivery-count": 3}, 3, True),
        ({"x-acquired-count": 25, "x-delivery-count": 25}, 1, True),
        ({"x-acquired-count": 99}, 5, False),
        ({"x-acquired-count": 1, "x-delivery-count": 3}, 1, True),
    ],
)
def test_nacks_are_attempts_and_what_was_lost_is_a_crash(
    counts: dict[str, int], attempt: int, redelivered: bool
) -> None:
    message = delivery(headers=counts)
    message.redelivered = True
    read = FAMILIES["broker"].read(message)
    assert (read.attempt, read.redelivered) == (attempt, redelivered)


def test_counts_that_a_producer_wrote_are_not_left_beside_the_brokers() -> None:
    family = FAMILIES["broker"]
    forged = delivery(headers={"x-delivery-count": 3})
    assert family.read(forged).attempt == 1
    assert family.strategy.way_back(family, forged, RETRY) == Copy("orders.work")
    assert family.strategy.way_back(family, delivery(headers={}), RETRY) == Nack(requeue=True)


@pytest.mark.parametrize("name", ["dead-letter", "broker"])
def test_a_policy_with_delays_that_the_strategy_cannot_keep_is_refused(name: str) -> None:
    family = QueueFamily("orders", ("order.placed",), RetryPolicy(5, (SECOND, 2 * SECOND)), STRATEGIES[name])
    with pytest.raises(ValueError, match="its strategy has one delay"):
        _ = family.topology


def test_what_tells_the_expired_from_the_rejected_is_exported_too() -> None:
    exported = definitions(FAMILIES["dead-letter"].topology, "/")
    [dead] = [exchange for exchange in exported["exchanges"] if exchange["name"] == "orders.dead"]
    assert dead["arguments"] == {"alternate-exchange": "orders.retry"}
    told = [binding["arguments"] for binding in exported["bindings"] if binding["source"] == "orders.dead"]
    assert [arguments["x-match"] for arguments in told] == ["all-with-x", "all-with-x"]


def test_nothing_gets_into_the_loop_but_what_was_rejected() -> None:
    """A delivery limit would: the broker drops what comes back without a rejection, or it stops all behind it."""
    queues = {queue.name: queue.arguments for queue in FAMILIES["dead-letter"].topology.queues}
    assert queues["orders.work"]["x-delivery-limit"] == 2_147_483_647
    assert queues["orders.work"]["x-dead-letter-exchange"] == "orders.dead"
    assert queues["orders.wait"]["x-dead-letter-routing-key"] == "orders.work"
