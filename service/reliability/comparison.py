"""What the broker makes of a queue, compared with what it must be: arguments, policies and bindings together.

A queue argument does not win over every policy. Of a time to live, a limit and a length the lower value holds; of
`overflow` and `expires` the policy's; only what concerns dead-lettering is the argument's alone (seen on 3.10 and 4.3).
So a policy on ".*" can delete parked messages although every argument is right, and no declaration tells. This is pure:
`found` is what the management interface said.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.reliability.definitions import policy_of
from service.reliability.topology import APPLY, REMAKE, Exchange, Queue, Topology, missing

Told = Mapping[str, Any]
"""One object as the management interface tells it."""

LOWEST_WINS = ("message-ttl", "delivery-limit", "max-length", "max-length-bytes")
POLICY_WINS = ("overflow", "expires")
ARGUMENT_WINS = ("dead-letter-exchange", "dead-letter-routing-key", "dead-letter-strategy")

ALLOWED = ("max-length", "max-length-bytes")
"""Whoever bounds a queue may: where it refuses what is too much, producers and the service hold on to that."""

BY_IMPORT = "import `billing topology export`"

EFFECTS = {
    "message-ttl": "messages leave the queue, or vanish, at another time",
    "delivery-limit": "a message is dropped or parked after as many looks and lost connections (20 by default on 4.x)",
    "overflow": "what is too much is dropped without a word, and dead-lettering is at-most-once",
    "expires": "the queue is deleted with its messages when nobody uses it",
    "dead-letter-strategy": "messages are lost on the way where the target's leader dies or its queue is full",
    "dead-letter-exchange": "what leaves the queue goes elsewhere",
    "dead-letter-routing-key": "what leaves the queue goes elsewhere",
}


@dataclass(frozen=True, slots=True)
class Found:
    """What the management interface tells about one virtual host.

    Attributes:
        nodes: how many the cluster has; None where the user may not know.
    """

    exchanges: Sequence[Told] = ()
    queues: Sequence[Told] = ()
    bindings: Sequence[Told] = ()
    policies: Sequence[Told] = ()
    operator_policies: Sequence[Told] = ()
    nodes: int | None = None


@dataclass(slots=True)
class Differences:
    """One line each: `problems` break a guarantee or the start, `warnings` make it weaker."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def differences(wanted: Topology, found: Found, *, declared: bool) -> Differences:
    """Compare.

    Args:
        wanted: what the service needs.
        found: what there is.
        declared: the service declares its queues itself, so that their arguments must be as wanted, too; otherwise it
            does not matter whether a value is an argument's or a policy's.
    """
    queues = {queue["name"]: queue for queue in found.queues}
    exchanges = {exchange["name"]: exchange for exchange in found.exchanges}
    bound = {(b["source"], b["destination"], b["routing_key"]) for b in found.bindings}
    fed = {binding.exchange for binding in wanted.bindings}
    result = Differences()
    for exchange in wanted.exchanges:
        publishes = exchange.name not in fed
        result.problems += _exchange(exchange, exchanges.get(exchange.name), found, publishes=publishes)
    for queue in wanted.queues:
        result.problems += _queue(queue, queues.get(queue.name), found, declared=declared)
        result.warnings += _replicas(queue, queues.get(queue.name), found.nodes)
    result.problems += [
        f"binding of queue {b.queue} to exchange {b.exchange} with {b.routing_key}: missing; fix: {APPLY}"
        for b in wanted.bindings
        if (b.exchange, b.queue, b.routing_key) not in bound
    ]
    return result


def _exchange(wanted: Exchange, told: Told | None, found: Found, *, publishes: bool) -> Iterator[str]:
    if told is None:
        yield missing(wanted)
        return
    properties = {"type": wanted.kind, "durable": True, "auto_delete": False, "internal": False}
    for name, value in properties.items():
        if told.get(name) != value:
            yield (
                f"exchange {wanted.name}: {name}: found {_text(told.get(name))}, wanted {_text(value)}; "
                f"fix: {REMAKE[Exchange]}"
            )
    policies = (_named(told.get("policy"), found.policies),)
    other, owner = _effective("alternate-exchange", told["arguments"], policies)
    if publishes and other is not None:
        fix = "make the exchange anew" if owner is None else f"take alternate-exchange out of policy '{owner['name']}'"
        yield (
            f"exchange {wanted.name}: alternate-exchange: found {other}{_of(owner)}, wanted none: an event that nobody "
            f"is bound for is confirmed, and gone from the outbox; fix: {fix}"
        )


def _queue(wanted: Queue, told: Told | None, found: Found, *, declared: bool) -> Iterator[str]:
    if told is None:
        yield missing(wanted)
        return
    kind, label = told.get("type", "classic"), f"queue {wanted.name}"
    if kind != wanted.arguments["x-queue-type"]:
        yield f"{label}: type: found {kind}, wanted {wanted.arguments['x-queue-type']}; fix: {REMAKE[Queue]}"
        return  # the rest means something else in another type
    arguments = policy_of(told["arguments"])
    values = policy_of(wanted.arguments)
    keys = (*LOWEST_WINS, *POLICY_WINS, *ARGUMENT_WINS, *(key for key in values if key not in EFFECTS))
    for key in keys if declared else ():
        if arguments.get(key) != values.get(key):
            found_text, wanted_text = _text(arguments.get(key)), _text(values.get(key))
            yield f"{label}: x-{key}: found {found_text}, wanted {wanted_text}; fix: {REMAKE[Queue]}"
    policies = (_named(told.get("policy"), found.policies), _operators(told, kind, found.operator_policies))
    for key in keys:
        value, owner = _effective(key, arguments, policies)
        if key in ALLOWED or value == values.get(key) or (declared and owner is None):
            continue
        yield (
            f"{label}: {key}: found {_text(value)}{_of(owner)}, wanted {_text(values.get(key))}"
            f"{_effect(key)}; fix: {_fix(key, value, owner)}"
        )


def _replicas(wanted: Queue, told: Told | None, nodes: int | None) -> Iterator[str]:
    members, online = ((told or {}).get(name) or [] for name in ("members", "online"))
    if nodes is not None and nodes > 1 and len(members) == 1:
        yield (
            f"queue {wanted.name}: one replica on a cluster of {nodes}: it is away, or lost, with its node; "
            f"fix: rabbitmq-queues grow NODE all --queue-pattern '^{re.escape(wanted.name)}$'"
        )
    if len(online) < len(members):
        yield (
            f"queue {wanted.name}: {len(online)} of {len(members)} replicas are online; fix: start the other nodes, or "
            "take those that are gone for good out with rabbitmq-queues shrink"
        )


def _effective(key: str, arguments: Told, policies: Iterable[Told | None]) -> tuple[Any, Told | None]:
    """Return the value that holds, and the policy it is of; None where it is the queue's own, or nobody's."""
    of_policies = [(_value(policy, key), policy) for policy in policies if _value(policy, key) is not None]
    of_queue = [(arguments[key], None)] if key in arguments else []
    if key in LOWEST_WINS and (candidates := of_queue + of_policies):
        return min(candidates, key=lambda candidate: candidate[0])
    # The operator's policy stands last, and wins over the other.
    candidates = [*of_queue, *reversed(of_policies)] if key not in POLICY_WINS else [*reversed(of_policies), *of_queue]
    return candidates[0] if candidates else (None, None)


def _named(name: str | None, policies: Iterable[Told]) -> Told | None:
    return next((policy for policy in policies if policy["name"] == name), None) if name else None


def _operators(told: Told, kind: str, policies: Sequence[Told]) -> Told | None:
    """Return the operator policy of a queue: RabbitMQ 4 tells its name, 3.10 does not."""
    if "operator_policy" in told:
        return _named(told["operator_policy"], policies)
    matching = [
        policy
        for policy in policies
        if policy["apply-to"] in {"all", "queues", f"{kind}_queues"} and _matches(policy["pattern"], told["name"])
    ]
    return max(matching, key=lambda policy: policy["priority"], default=None)


def _matches(pattern: str, name: str) -> bool:
    try:
        with warnings.catch_warnings(action="error"):
            return re.search(pattern, name) is not None
    except (re.error, FutureWarning):
        return True  # a pattern that means something to the broker only: rather told once too often


def _value(policy: Told | None, key: str) -> Any:
    return None if policy is None else policy["definition"].get(key)


def _fix(key: str, value: Any, owner: Told | None) -> str:
    if owner is not None:
        return f"take {key} out of policy '{owner['name']}', or keep the policy from this queue by its pattern"
    if value is None:
        return f"{BY_IMPORT}, and see that no other policy takes the place of its"
    return f"empty the queue, delete it, then {BY_IMPORT}"


def _effect(key: str) -> str:
    return f": {EFFECTS[key]}" if key in EFFECTS else ""


def _of(owner: Told | None) -> str:
    return "" if owner is None else f" by policy '{owner['name']}'"


def _text(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}" or "''"
