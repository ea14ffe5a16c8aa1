"""Exchanges, queues and bindings: what they are, making them, and telling where the broker has others.

A queue family is one value: another consumer with other delays is one more line. How its failing messages come back,
and the queues for that, are its strategy's: `strategies` has them. What a guarantee rests on is a queue argument, which
no policy replaces without being asked to; which ones a policy can still override, `comparison` knows and tells.
Whatever the broker itself dead-letters goes at-least-once.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol

from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import ChannelNotFoundEntity, ChannelPreconditionFailed
from aiormq.exceptions import ChannelAccessRefused

from service.reliability.envelope import Arrived, Envelope
from service.reliability.errors import TopologyError
from service.reliability.link import BrokerLink
from service.reliability.outcome import Retry
from service.reliability.retry import RetryPolicy

DELIVERY_LIMIT = 200
"""Redeliveries after which the broker itself parks a message: the last net, far above what restarts cost."""

NO_DELIVERY_LIMIT = 2_147_483_647
"""For queues that people look into: each look costs a delivery count, and 20 delete the message on 4.x."""

Kind = Literal["direct", "topic", "fanout", "headers"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable exchange, with the arguments it needs."""

    name: str
    kind: Kind
    arguments: Mapping[str, Any] = field(default_factory=dict)


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
    """Messages of `exchange` with `routing_key`, or with the headers in `arguments`, go to `queue`."""

    exchange: str
    queue: str
    routing_key: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Topology:
    """All that must exist before anything is consumed or published.

    Attributes:
        since: the first version of RabbitMQ, major and minor, that does with it what is meant.
    """

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()
    since: tuple[int, ...] = ()

    @property
    def items(self) -> tuple[Exchange | Queue, ...]:
        """Exchanges, then queues: what can be declared on its own."""
        return (*self.exchanges, *self.queues)

    def __add__(self, other: "Topology") -> "Topology":
        """Return both together."""
        return Topology(
            self.exchanges + other.exchanges,
            self.queues + other.queues,
            self.bindings + other.bindings,
            max(self.since, other.since),
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """A failing message comes back as a copy in `queue`, published before the original is acked."""

    queue: str


@dataclass(frozen=True, slots=True)
class Nack:
    """A failing message comes back by what the broker does with a nack: it dead-letters it, or requeues it later."""

    requeue: bool


class Strategy(Protocol):
    """How the failing messages of a family come back after a delay."""

    def topology(self, family: "QueueFamily") -> Topology:
        """Return what must exist beside the family's exchange and its parking queue, the work queue among it."""
        ...

    def read(self, family: "QueueFamily", message: Arrived) -> Envelope:
        """Return the envelope of an arrived message, with its attempt; never raises."""
        ...

    def way_back(self, family: "QueueFamily", message: Arrived, retry: Retry) -> Copy | Nack:
        """Return how the message of a failed execution comes back."""
        ...


@dataclass(frozen=True, slots=True)
class QueueFamily:
    """An exchange to receive from, its work queue, what brings failing messages back, and its parking queue.

    Attributes:
        name: names all of them: exchange `orders`, queues `orders.work`, `orders.wait.5s`, `orders.parking`.
        keys: routing keys the work queue is bound with: the event types.
        policy: how failures are treated: how often, after which delays, and what is never tried again.
        strategy: how what failed comes back; it decides which queues there are beside work and parking.
    """

    name: str
    keys: tuple[str, ...]
    policy: RetryPolicy
    strategy: Strategy

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
        """What this family needs on the broker; a queue stands before those that dead-letter into it."""
        own = Topology(
            exchanges=(Exchange(self.name, "direct"),),
            queues=(quorum(self.parking, limit=NO_DELIVERY_LIMIT),),
        )
        bindings = Topology(bindings=tuple(Binding(self.name, self.work, key) for key in self.keys))
        return own + self.strategy.topology(self) + bindings

    def read(self, message: Arrived) -> Envelope:
        """Return the envelope of an arrived message; never raises, whatever the producer sent."""
        return self.strategy.read(self, message)


def quorum(
    name: str, *, limit: int, dead_letter: tuple[str, str] | None = None, ttl: timedelta | None = None, **more: Any
) -> Queue:
    """Return a queue that loses nothing: what is dead-lettered is kept until its target has it.

    Args:
        name: of the queue.
        limit: redeliveries after which the broker dead-letters a message.
        dead_letter: exchange and routing key for what is dead-lettered; an empty key keeps the message's own.
        ttl: how long a message stays.
        more: further arguments, with `_` for `-` and without `x-`.
    """
    arguments: dict[str, Any] = {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-delivery-limit": limit,
    }
    if ttl is not None:
        arguments["x-message-ttl"] = milliseconds(ttl)
    if dead_letter is not None:
        exchange, key = dead_letter
        arguments |= {"x-dead-letter-exchange": exchange}
        arguments |= {"x-dead-letter-routing-key": key} if key else {}
        arguments |= {"x-dead-letter-strategy": "at-least-once"}
    return Queue(name, arguments | {f"x-{argument.replace('_', '-')}": value for argument, value in more.items()})


def delay_name(delay: timedelta) -> str:
    """Return the delay in its largest whole unit: 5s, 2m, 1h, 1500ms."""
    number = milliseconds(delay)
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if number % size == 0:
            return f"{number // size}{unit}"
    return f"{number}ms"


def milliseconds(delay: timedelta) -> int:
    """Return a delay as the broker counts it."""
    return round(delay / timedelta(milliseconds=1))


async def declare(link: BrokerLink, topology: Topology) -> None:
    """Make what is missing; what exists must be as wanted.

    Raises:
        TopologyError: something exists with other properties; names each with what was found and what is wanted.
            Or the broker is too old.
    """
    await _require_version(link, topology)
    _raise([p for item in topology.items for p in await _attempt(link, item, passive=False)])
    for binding in topology.bindings:
        await _bind(link, binding)


async def verify(link: BrokerLink, topology: Topology) -> None:
    """Check that everything exists, with a user that may configure nothing.

    Raises:
        TopologyError: names everything that is missing. Or the broker is too old.
    """
    await _require_version(link, topology)
    _raise([p for item in topology.items for p in await _attempt(link, item, passive=True)])


async def check(link: BrokerLink, topology: Topology) -> list[str]:
    """Compare without changing: what exists is compared, what is missing is reported and not made.

    Bindings and policies cannot be read over AMQP; `comparison` compares them. Returns what exists and could not be
    compared, since the user may not configure it.

    Raises:
        TopologyError: names everything that is missing or other than wanted. Or the broker is too old.
    """
    await _require_version(link, topology)
    problems: list[str] = []
    uncompared: list[str] = []
    for item in topology.items:
        missing = await _attempt(link, item, passive=True)
        # Declaring what exists changes nothing: the broker compares and answers.
        found = missing or await _attempt(link, item, passive=False)
        (uncompared if found == [_no_right_to_configure(item)] else problems).extend(found)
    _raise(problems)
    return uncompared


async def _require_version(link: BrokerLink, topology: Topology) -> None:
    """Refuse a broker that would take the arguments and not do what they mean."""
    version = await link.version()
    if topology.since > tuple(int(part) for part in re.findall(r"\d+", version)[:2]):
        needed = ".".join(map(str, topology.since))
        raise TopologyError(
            f"the retry strategy needs RabbitMQ {needed} or later, and this is {version}: "
            "set BILLING_RETRY_STRATEGY to another"
        )


async def _attempt(link: BrokerLink, item: Exchange | Queue, *, passive: bool) -> list[str]:
    """Declare one item on a channel of its own, since a refusal closes the channel; return what is wrong."""
    channel = await link.channel()
    try:
        match item:
            case Exchange(name, kind, arguments):
                await channel.declare_exchange(name, kind, durable=True, arguments=dict(arguments), passive=passive)
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
        await queue.bind(binding.exchange, binding.routing_key, arguments=dict(binding.arguments))
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


def _raise(problems: Iterable[str]) -> None:
    if lines := list(problems):
        raise TopologyError("\n".join(lines))
