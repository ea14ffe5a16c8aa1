"""What is declared, by name and argument."""

from datetime import timedelta

import pytest

from service.reliability.retry import RetryPolicy
from service.reliability.topology import Binding, Exchange, Queue, QueueFamily, _mismatch, delay_name

FAMILY = QueueFamily(
    "orders",
    keys=("order.placed",),
    policy=RetryPolicy(5, (timedelta(seconds=5), timedelta(minutes=2), timedelta(seconds=5))),
)


@pytest.mark.parametrize(
    ("delay", "name"),
    [
        (timedelta(seconds=5), "5s"),
        (timedelta(seconds=90), "90s"),
        (timedelta(minutes=2), "2m"),
        (timedelta(hours=1), "1h"),
        (timedelta(days=1), "1d"),
        (timedelta(milliseconds=1500), "1500ms"),
    ],
)
def test_a_wait_queue_is_named_after_its_delay(delay: timedelta, name: str) -> None:
    assert delay_name(delay) == name
    assert FAMILY.wait(delay) == f"orders.wait.{name}"


def test_the_topology_is_the_contracts() -> None:
    assert FAMILY.topology.exchanges == (Exchange("orders", "direct"),)
    assert FAMILY.topology.bindings == (Binding("orders", "orders.work", "order.placed"),)
    back_to_work = {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "orders.work",
        "x-dead-letter-strategy": "at-least-once",
    }
    to_parking = back_to_work | {"x-dead-letter-routing-key": "orders.parking"}
    quorum = {"x-queue-type": "quorum", "x-overflow": "reject-publish"}
    assert FAMILY.topology.queues == (
        Queue("orders.parking", quorum | {"x-delivery-limit": 2147483647}),
        Queue("orders.wait.5s", quorum | back_to_work | {"x-message-ttl": 5000, "x-delivery-limit": 2147483647}),
        Queue("orders.wait.2m", quorum | back_to_work | {"x-message-ttl": 120000, "x-delivery-limit": 2147483647}),
        Queue("orders.work", quorum | to_parking | {"x-delivery-limit": 200}),
    )


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (
            (
                "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': "
                "received the value '5000' of type 'signedint' but current is the value '6000' of type 'signedint'"
            ),
            "queue q: x-message-ttl: found 6000, wanted 5000",
        ),
        (
            (
                "PRECONDITION_FAILED - inequivalent arg 'x-overflow' for queue 'q' in vhost '/': "
                "received the value 'reject-publish' of type 'longstr' but current is none"
            ),
            "queue q: x-overflow: found none, wanted reject-publish",
        ),
        (
            (
                "PRECONDITION_FAILED - inequivalent arg 'durable' for queue 'q' in vhost '/': "
                "received 'true' but current is 'false'"
            ),
            "queue q: durable: found false, wanted true",
        ),
        ("PRECONDITION_FAILED - something new", "queue q: PRECONDITION_FAILED - something new"),
    ],
)
def test_a_mismatch_is_told_in_one_line(reply: str, line: str) -> None:
    assert _mismatch(Queue("q", {}), reply) == line
