"""Exchanges, queues and bindings: what they are, making them, and telling where the broker has others.

A queue family is one value: another consumer with other delays is one more line. What a guarantee rests on is a queue
argument, which no policy replaces without being asked to; which ones a policy can still override, `comparison` knows
and tells. Whatever the broker itself dead-letters from the work
queue ends in parking, at-least-once; a wait queue returns to this family's work queue only, so that other services
bound to the exchange never see our retries.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import ChannelNotFoundEntity, ChannelPreconditionFailed
from aiormq.exceptions import ChannelAccessRefused

from service.reliability.errors import TopologyError
from service.reliability.link import BrokerLink
from service.reliability.retry import RetryPolicy

DELIVERY_LIMIT = 200
"""Redeliveries after which the broker itself parks a message: the last net, far above what restarts cost."""

NO_DELIVERY_LIMIT = 2_147_483_647
"""For queues that people look into: each look costs a delivery count, and 20 delete the message on 4.x."""

Kind = Literal["direct", "topic"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable exchange."""

    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable quorum queue with the arguments it needs."""

    name: str
    arguments: Mapping[str, Any]


APPLY = "`billing topology apply`"
"""What to do about what is missing."""

REMAKE = {
    Exchange: f"delete it, then {APPLY}, and have its consumers bind again",
    Queue: f"empty it, delete it, then {APPLY}",
}
"""What to do about what cannot be changed as it is."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Messages of `exchange` with `routing_key` go to `queue`."""

    exchange: str
    queue: str
    routing_key: str


@dataclass(frozen=True, slots=True)
class Topology:
    """All that must exist before anything is consumed or published."""

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()

    @property
    def items(self) -> tuple[Exchange | Queue, ...]:
        """Exchanges, then queues: what can be declared on its own."""
        return (*self.exchanges, *self.queues)

    def __add__(self, other: "Topology") -> "Topology":
        """Return both together."""
        return Topology(self.exchanges + other.exchanges, self.queues + other.queues, self.bindings + other.bindings)


@dataclass(frozen=True, slots=True)
class QueueFamily:
    """An exchange to receive from, its work queue, the wait queues of its delays and its parking queue.

    Attributes:
        name: names all of them: exchange `orders`, queues `orders.work`, `orders.wait.5s`, `orders.parking`.
        keys: routing keys the work queue is bound with: the event types.
        policy: how failures are treated; its delays decide which wait queues there are.
    """

    name: str
    keys: tuple[str, ...]
    policy: RetryPolicy

    @property
    def work(self) -> str:
        """Name of the queue that is consumed."""
        return f"{self.name}.work"

    @property
    def parking(self) -> str:
        """Name of the queue for people."""
        return f"{self.name}.parking"

    def wait(self, delay: timedelta) -> str:
        """Return the name of the wait queue of `delay`: new delays make new queues, and the old ones drain."""
        return f"{self.name}.wait.{delay_name(delay)}"

    @property
    def topology(self) -> Topology:
        """What this family needs on the broker."""
        waits = sorted(set(self.policy.delays))
        return Topology(
            exchanges=(Exchange(self.name, "direct"),),
            queues=(
                _quorum(self.parking, overflow_to=None, limit=NO_DELIVERY_LIMIT),
                *(_quorum(self.wait(d), overflow_to=self.work, ttl=d, limit=NO_DELIVERY_LIMIT) for d in waits),
                _quorum(self.work, overflow_to=self.parking, limit=DELIVERY_LIMIT),
            ),
            bindings=tuple(Binding(self.name, self.work, key) for key in self.keys),
        )


def delay_name(delay: timedelta) -> str:
    """Return the delay in its largest whole unit: 5s, 2m, 1h, 1500ms."""
    milliseconds = _milliseconds(delay)
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


async def declare(link: BrokerLink, topology: Topology) -> None:
    """Make what is missing; what exists must be as wanted.

    Raises:
        TopologyError: something exists with other properties; names each with what was found and what is wanted.
    """
    _raise([p for item in topology.items for p in await _attempt(link, item, passive=False)])
    for binding in topology.bindings:
        await _bind(link, binding)


async def verify(link: BrokerLink, topology: Topology) -> None:
    """Check that everything exists, with a user that may configure nothing.

    Raises:
        TopologyError: names everything that is missing.
    """
    _raise([p for item in topology.items for p in await _attempt(link, item, passive=True)])


async def check(link: BrokerLink, topology: Topology) -> list[str]:
    """Compare without changing: what exists is compared, what is missing is reported and not made.

    Bindings and policies cannot be read over AMQP; `comparison` compares them. Returns what exists and could not be
    compared, since the user may not configure it.

    Raises:
        TopologyError: names everything that is missing or other than wanted.
    """
    problems: list[str] = []
    uncompared: list[str] = []
    for item in topology.items:
        missing = await _attempt(link, item, passive=True)
        # Declaring what exists changes nothing: the broker compares and answers.
        found = missing or await _attempt(link, item, passive=False)
        (uncompared if found == [_no_right_to_configure(item)] else problems).extend(found)
    _raise(problems)
    return uncompared


def _quorum(name: str, *, overflow_to: str | None, limit: int, ttl: timedelta | None = None) -> Queue:
    arguments: dict[str, Any] = {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-delivery-limit": limit,
    }
    if ttl is not None:
        arguments["x-message-ttl"] = _milliseconds(ttl)
    if overflow_to is not None:
        arguments |= {
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": overflow_to,
            "x-dead-letter-strategy": "at-least-once",
        }
    return Queue(name, arguments)


async def _attempt(link: BrokerLink, item: Exchange | Queue, *, passive: bool) -> list[str]:
    """Declare one item on a channel of its own, since a refusal closes the channel; return what is wrong."""
    channel = await link.channel()
    try:
        match item:
            case Exchange(name, kind):
                await channel.declare_exchange(name, kind, durable=True, passive=passive)
            case Queue(name, arguments):
                await channel.declare_queue(name, durable=True, arguments=dict(arguments), passive=passive)
    except ChannelPreconditionFailed as error:
        return [_mismatch(item, str(error))]
    except ChannelNotFoundEntity:
        return [missing(item)]
    except ChannelAccessRefused:
        return [f"{_label(item)}: the user has no right to see it" if passive else _no_right_to_configure(item)]
    finally:
        await _close(channel)
    return []


async def _bind(link: BrokerLink, binding: Binding) -> None:
    channel = await link.channel()
    try:
        queue = await channel.get_queue(binding.queue, ensure=False)
        await queue.bind(binding.exchange, binding.routing_key)
    except ChannelAccessRefused:
        raise TopologyError(
            f"binding of queue {binding.queue} to exchange {binding.exchange}: the user has no right to make it: "
            "it takes the rights to write to the queue and to read from the exchange (TOPOLOGY=verify makes none)"
        ) from None
    finally:
        await _close(channel)


def missing(item: Exchange | Queue) -> str:
    """Say that something is not there."""
    return f"{_label(item)}: missing; fix: {APPLY}"


def _no_right_to_configure(item: Exchange | Queue) -> str:
    return f"{_label(item)}: the user has no right to configure it (TOPOLOGY=verify needs none)"


async def _close(channel: AbstractChannel) -> None:
    if not channel.is_closed:
        await channel.close()


_INEQUIVALENT = re.compile(
    r"inequivalent arg '(?P<argument>[^']+)' for .*?: received (?P<wanted>.+?) but current is (?P<found>.+)$", re.DOTALL
)


def _mismatch(item: Exchange | Queue, reply: str) -> str:
    """Return one line with what was found and what is wanted, from the broker's own comparison."""
    match = _INEQUIVALENT.search(reply.strip())
    if match is None:
        return f"{_label(item)}: {reply.strip()}; fix: {REMAKE[type(item)]}"
    found, wanted = (_value(match[group]) for group in ("found", "wanted"))
    return f"{_label(item)}: {match['argument']}: found {found}, wanted {wanted}; fix: {REMAKE[type(item)]}"


def _value(text: str) -> str:
    """Return the bare value of the broker's "the value '5000' of type 'signedint'"."""
    quoted = re.search(r"'([^']*)'", text)
    return quoted[1] if quoted else text.strip()


def _label(item: Exchange | Queue) -> str:
    return f"{type(item).__name__.lower()} {item.name}"


def _milliseconds(delay: timedelta) -> int:
    return round(delay / timedelta(milliseconds=1))


def _raise(problems: Iterable[str]) -> None:
    if lines := list(problems):
        raise TopologyError("\n".join(lines))
