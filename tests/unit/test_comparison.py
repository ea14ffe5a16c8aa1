"""Replicas, and whose value holds: what a real broker is asked in tests/longer/test_policies.py, without one."""

from datetime import timedelta
from typing import Any

import pytest

from service.reliability.comparison import Found, differences
from service.reliability.definitions import definitions
from service.reliability.retry import RetryPolicy
from service.reliability.strategies import Staged
from service.reliability.topology import QueueFamily

WANTED = QueueFamily("orders", ("order.placed",), RetryPolicy(5, (timedelta(seconds=5),)), Staged()).topology


def told(**changes: Any) -> dict[str, Any]:
    """Return what the interface tells of a queue that is as wanted, changed."""
    work = next(queue for queue in WANTED.queues if queue.name == "orders.work")
    return {"name": work.name, "type": "quorum", "arguments": dict(work.arguments)} | changes


def work_only(queue: dict[str, Any], **found: Any) -> list[str]:
    """Return what is told of the work queue."""
    result = differences(WANTED, Found(queues=[queue], **found), declared=True)
    return [line for line in (*result.problems, *result.warnings) if line.startswith("queue orders.work")]


def test_a_queue_as_wanted_is_no_difference() -> None:
    assert work_only(told()) == []


@pytest.mark.parametrize(
    ("members", "online", "nodes", "said"),
    [
        (["a"], ["a"], 1, None),
        (["a"], ["a"], None, None),  # the user may not know
        (["a", "b", "c"], ["a", "b", "c"], 3, None),
        (["a"], ["a"], 3, "one replica on a cluster of 3"),
        (["a", "b", "c"], ["a", "b"], 3, "2 of 3 replicas are online"),
        (["a", "b", "c"], ["a"], None, "1 of 3 replicas are online"),
    ],
)
def test_replicas_that_are_few_or_away_are_told(
    members: list[str], online: list[str], nodes: int | None, said: str | None
) -> None:
    lines = work_only(told(members=members, online=online), nodes=nodes)
    assert len(lines) == (said is not None)
    assert all(said in line and "; fix: " in line for line in lines)


@pytest.mark.parametrize(
    ("pattern", "apply_to", "matches"),
    [
        (".*", "all", True),
        ("work", "queues", True),
        ("work", "quorum_queues", True),
        ("work", "classic_queues", False),
        ("work", "exchanges", False),
        ("parking", "queues", False),
        ("[[:alpha:", "queues", True),  # told once too often rather than never
    ],
)
def test_an_operator_policy_that_the_queue_does_not_name_is_found_by_its_pattern(
    pattern: str, apply_to: str, matches: bool
) -> None:
    """RabbitMQ 3.10 tells the names of the others only."""
    policy = {"name": "o", "pattern": pattern, "apply-to": apply_to, "priority": 0, "definition": {"message-ttl": 9}}
    lines = work_only(told(), operator_policies=[policy])
    assert len(lines) == matches
    assert all(line.startswith("queue orders.work: message-ttl: found 9 by policy 'o', wanted none") for line in lines)


def test_dead_lettering_is_the_arguments_and_a_higher_limit_does_nothing() -> None:
    definition = {"dead-letter-exchange": "x", "dead-letter-strategy": "at-most-once", "delivery-limit": 1000}
    policy = {"name": "p", "pattern": ".*", "apply-to": "all", "priority": 0, "definition": definition}
    assert work_only(told(policy="p"), policies=[policy]) == []


def test_only_the_type_is_an_argument_in_the_definitions() -> None:
    """And every policy is for one queue alone."""
    exported = definitions(WANTED, "v")
    assert {"vhost", "users", "vhosts", "permissions"}.isdisjoint(exported)
    assert all(queue["arguments"] == {"x-queue-type": "quorum"} for queue in exported["queues"])
    assert {policy["pattern"] for policy in exported["policies"]} == {
        r"^orders\.work$",
        r"^orders\.wait\.5s$",
        r"^orders\.parking$",
    }
    [parking] = [policy for policy in exported["policies"] if policy["name"] == "orders.parking"]
    assert parking["definition"] == {"overflow": "reject-publish", "delivery-limit": 2147483647}
    assert {item["vhost"] for items in exported.values() for item in items} == {"v"}
