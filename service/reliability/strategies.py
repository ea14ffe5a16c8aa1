"""How failing messages come back: three strategies behind one interface, chosen at installation.

`staged` publishes a copy to the wait queue of its delay and counts in a header of its own. `dead-letter` is the classic
loop: what is rejected waits in one queue and returns, and `x-death` counts. `broker` leaves it to RabbitMQ 4.3, which
requeues after a delay and counts. docs/strategies.md has what each promises, and how to change from one to another.

Each counts in what only the broker or the service can have written. Where a producer has written there, the message
comes back as a clean copy instead, with its attempt in our header.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from service.reliability.envelope import BOOKKEEPING, COUNTS, Arrived, Envelope, read_envelope, short_text
from service.reliability.outcome import Retry
from service.reliability.topology import (
    DELIVERY_LIMIT,
    NO_DELIVERY_LIMIT,
    Binding,
    Copy,
    Exchange,
    Nack,
    QueueFamily,
    Strategy,
    Topology,
    milliseconds,
    quorum,
)


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy in the wait queue of its delay; what the broker itself dead-letters is parked."""

    def topology(self, family: QueueFamily) -> Topology:
        """Return a wait queue for each delay, and the work queue."""
        delays = sorted(set(family.policy.delays))
        back = ("", family.work)  # to this queue only: other services bound to the exchange never see our retries
        waits = (quorum(family.wait(d), ttl=d, limit=NO_DELIVERY_LIMIT, dead_letter=back) for d in delays)
        return Topology(queues=(*waits, quorum(family.work, limit=DELIVERY_LIMIT, dead_letter=("", family.parking))))

    def read(self, family: QueueFamily, message: Arrived) -> Envelope:
        """Return the envelope, with the attempt that our own copy tells."""
        return read_envelope(message, family.policy.max_attempts)

    def way_back(self, family: QueueFamily, message: Arrived, retry: Retry) -> Copy:  # noqa: ARG002 - the interface's
        """Return the wait queue of the delay."""
        return Copy(family.wait(retry.delay))


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The classic loop: work, rejected, `.dead`, `.retry`, `.wait`, expired, work. One delay for all attempts.

    A message that left the work queue for another reason than a rejection is never given back to it by the broker: it
    takes that for a cycle, and 32 of them stop whatever waits behind. So none may get into the loop: there is no
    delivery limit, and what expired there, by its producer's `expiration`, is told by the exchange `.dead` and parked;
    everything else goes on to `.retry`, its alternate.
    """

    def topology(self, family: QueueFamily) -> Topology:
        """Return the loop."""
        work, parking, wait = family.work, family.parking, _wait(family)
        dead, retry = f"{family.name}.dead", f"{family.name}.retry"
        return Topology(
            exchanges=(
                Exchange(retry, "fanout"),
                Exchange(dead, "headers", {"alternate-exchange": retry}),
            ),
            queues=(
                quorum(wait, ttl=_only_delay(family), limit=NO_DELIVERY_LIMIT, dead_letter=("", work)),
                quorum(work, limit=NO_DELIVERY_LIMIT, dead_letter=(dead, "")),
            ),
            bindings=(
                Binding(retry, wait, ""),
                # RabbitMQ 3.10 tells of the first death only, which is enough: the broker takes `expiration` off then.
                *(Binding(dead, parking, "", _expired_in(work, which)) for which in ("first", "last")),
            ),
        )

    def read(self, family: QueueFamily, message: Arrived) -> Envelope:
        """Return the envelope; rejections are added to the attempt, and tell where the message was published."""
        most = family.policy.max_attempts
        envelope = read_envelope(message, most)
        rejections = [death for death in _deaths(message) if _is_death(death, family.work, "rejected")]
        if message.exchange or not rejections:  # straight from a producer, who may have written anything
            return envelope
        death = rejections[0]
        envelope = replace(envelope, attempt=min(envelope.attempt + death["count"], most))
        if "x-last-death-queue" in message.headers and "x-acquired-count" not in message.headers:
            # 4.0 counts rejections as losses too, and carries the count along: it would make each retry run alone.
            envelope = replace(envelope, redelivered=_count(message, "x-delivery-count") > death["count"])
        if envelope.exchange:
            return envelope
        key = short_text(death["routing-keys"][0]) or envelope.routing_key
        exchange = short_text(death["exchange"]) or ""
        return replace(envelope, exchange=exchange, routing_key=key, type=message.type or key)

    def way_back(self, family: QueueFamily, message: Arrived, retry: Retry) -> Copy | Nack:  # noqa: ARG002 - the interface's
        """Return a rejection; a copy where the message has a past that the broker must not count on from.

        3.10 does, whatever a producer wrote there, and what is no list of deaths kills what dead-letters. A nack, not a
        reject: the latter makes 4.3 deliver what comes back as if it had been taken from a consumer that died.
        """
        if message.exchange:
            is_ours = BOOKKEEPING.isdisjoint(message.headers or ())
        else:
            loop = ((family.work, "rejected"), (_wait(family), "expired"))
            is_ours = all(any(_is_death(death, *known) for known in loop) for death in _deaths(message))
        return Nack(requeue=False) if is_ours else Copy(_wait(family))


@dataclass(frozen=True, slots=True)
class Broker:
    """RabbitMQ 4.3's delayed retry: what is nacked is requeued after a delay. One delay for all attempts.

    The broker counts what was returned, by nack, and what failed, by reject or by the loss of a connection, apart. So
    attempts are nacks and crashes are failures, which are neither delayed nor counted as attempts.
    """

    def topology(self, family: QueueFamily) -> Topology:
        """Return the work queue."""
        delay = milliseconds(_only_delay(family))
        delayed: dict[str, Any] = {
            "delayed_retry_type": "returned",
            "delayed_retry_min": delay,
            "delayed_retry_max": delay,
        }
        work = quorum(family.work, limit=DELIVERY_LIMIT, dead_letter=("", family.parking), **delayed)
        return Topology(queues=(work,), since=(4, 3))

    def read(self, family: QueueFamily, message: Arrived) -> Envelope:
        """Return the envelope; nacks are added to the attempt, and only a failure means that somebody may have died."""
        envelope = read_envelope(message, family.policy.max_attempts)
        if not message.redelivered:  # the broker has counted nothing: what stands there is a producer's
            return envelope
        failed, acquired = (_count(message, name) for name in ("x-delivery-count", "x-acquired-count"))
        attempt = min(envelope.attempt + max(acquired - failed, 0), family.policy.max_attempts)
        return replace(envelope, attempt=attempt, redelivered=failed > 0)

    def way_back(self, family: QueueFamily, message: Arrived, retry: Retry) -> Copy | Nack:  # noqa: ARG002 - the interface's
        """Return a nack; a copy, without a delay, where a producer's own counts would stay beside the broker's."""
        is_forged = not message.redelivered and not COUNTS.isdisjoint(message.headers or ())
        return Copy(family.work) if is_forged else Nack(requeue=True)


STRATEGIES: Mapping[str, Strategy] = {"staged": Staged(), "dead-letter": DeadLetter(), "broker": Broker()}
"""By the names of the setting."""

_MOST = 2**31
"""Rejections that are believed: 3.10 counts on from what it finds, and wraps around at 2^63."""


def _wait(family: QueueFamily) -> str:
    return f"{family.name}.wait"


def _only_delay(family: QueueFamily) -> timedelta:
    if len(family.policy.delays) != 1:
        raise ValueError(f"family {family.name!r}: its strategy has one delay, and its policy {family.policy.delays}")
    return family.policy.delays[0]


def _expired_in(queue: str, which: str) -> dict[str, str]:
    return {"x-match": "all-with-x", f"x-{which}-death-queue": queue, f"x-{which}-death-reason": "expired"}


def _deaths(message: Arrived) -> Iterable[Any]:
    deaths = (message.headers or {}).get("x-death", [])
    return deaths if isinstance(deaths, list) else [deaths]


def _is_death(death: Any, queue: str, reason: str) -> bool:
    """Tell whether this is an entry as the broker writes it, for this queue and reason."""
    match death:
        case {
            "queue": str(where),
            "reason": str(why),
            "count": int(count),
            "exchange": str(),
            "routing-keys": list(keys),
        }:
            counted = not isinstance(count, bool) and 0 < count < _MOST
            return (where, why) == (queue, reason) and counted and bool(keys) and all(isinstance(k, str) for k in keys)
    return False


def _count(message: Arrived, name: str) -> int:
    count = (message.headers or {}).get(name)
    return count if isinstance(count, int) and count > 0 else 0
