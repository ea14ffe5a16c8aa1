"""What is declared, by name and argument."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import INCOMING
from service.app import orders_family, whole_topology
from service.reliability.retry import RetryPolicy
from service.reliability.strategies import Staged
from service.reliability.topology import Binding, Exchange, Queue, QueueFamily, _mismatch, delay_name
from service.settings import Settings

MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

FAMILY = QueueFamily(
    "orders",
    keys=("order.placed",),
    policy=RetryPolicy(5, (timedelta(seconds=5), timedelta(minutes=2), timedelta(seconds=5))),
    strategy=Staged(),
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
        (timedelta(milliseconds=10), "10ms"),
        (timedelta(hours=36), "36h"),
        (timedelta(minutes=61), "61m"),
    ],
)
def test_a_wait_queue_is_named_after_its_delay(delay: timedelta, name: str) -> None:
    assert delay_name(delay) == name
    assert FAMILY.wait(delay) == f"orders.wait.{name}"


@given(st.integers(1, 10**9))
def test_a_name_tells_its_delay_exactly_so_that_no_two_delays_share_a_queue(milliseconds: int) -> None:
    name = delay_name(timedelta(milliseconds=milliseconds))
    number, unit = name.rstrip("msdh"), name.lstrip("0123456789")
    assert int(number) * MILLISECONDS[unit] == milliseconds


@given(st.lists(st.integers(10, 10**8), min_size=1, max_size=8))
def test_every_delay_has_a_queue_that_holds_a_message_just_as_long(delays: list[int]) -> None:
    family = QueueFamily("o", ("k",), RetryPolicy(5, tuple(timedelta(milliseconds=d) for d in delays)), Staged())
    queues = {queue.name: queue.arguments for queue in family.topology.queues}
    assert len(queues) == len(family.topology.queues) == len(set(delays)) + 2
    for attempt, delay in enumerate(delays, start=1):
        assert queues[family.wait(family.policy.delay_after(attempt))]["x-message-ttl"] == delay


def test_what_is_dead_lettered_is_never_lost_on_the_way() -> None:
    for queue in FAMILY.topology.queues:
        assert queue.arguments["x-queue-type"] == "quorum"
        assert queue.arguments["x-overflow"] == "reject-publish"
        if "x-dead-letter-exchange" in queue.arguments:
            assert queue.arguments["x-dead-letter-strategy"] == "at-least-once"


def test_a_queue_exists_before_what_dead_letters_into_it() -> None:
    """A work queue without its parking queue would drop what it dead-letters in between."""
    names = [queue.name for queue in FAMILY.topology.queues]
    assert names.index("orders.parking") < names.index("orders.work")


def test_the_service_needs_the_queues_of_the_contract() -> None:
    topology = whole_topology(orders_family(Settings.model_construct()))
    assert topology.exchanges == (Exchange("orders", "direct"), Exchange("billing", "topic"))
    assert [queue.name for queue in topology.queues] == [
        "orders.parking",
        "orders.wait.5s",
        "orders.wait.30s",
        "orders.wait.2m",
        "orders.wait.10m",
        "orders.work",
    ]
    assert topology.bindings == tuple(Binding("orders", "orders.work", message.TYPE) for message in INCOMING)
    assert {"order.placed", "order.paid", "order.cancelled"} <= {binding.routing_key for binding in topology.bindings}


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
        (
            (
                "PRECONDITION_FAILED - inequivalent arg 'x-dead-letter-exchange' for queue 'q' in vhost 'a/b': "
                "received none but current is the value '' of type 'longstr'"
            ),
            "queue q: x-dead-letter-exchange: found , wanted none",
        ),
        (
            (
                "PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'q' in vhost '/': "
                "received the value 'quorum' of type 'longstr' but current is none\n"
            ),
            "queue q: x-queue-type: found none, wanted quorum",
        ),
        ("PRECONDITION_FAILED - something new", "queue q: PRECONDITION_FAILED - something new"),
    ],
)
def test_a_mismatch_is_told_in_one_line(reply: str, line: str) -> None:
    assert _mismatch(Queue("q", {}), reply) == f"{line}; fix: empty it, delete it, then `billing topology apply`"


def test_an_exchange_of_another_type_is_told_in_one_line() -> None:
    reply = (
        "PRECONDITION_FAILED - inequivalent arg 'type' for exchange 'billing' in vhost '/': "
        "received 'topic' but current is 'direct'"
    )
    assert _mismatch(Exchange("billing", "topic"), reply) == (
        "exchange billing: type: found direct, wanted topic; "
        "fix: delete it, then `billing topology apply`, and have its consumers bind again"
    )
