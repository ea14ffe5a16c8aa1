"""Destinations that take nothing for now: nobody is bound, a queue refuses, nothing answers. Times are arguments.

It is the destination that waits, not each of its events: one event probes it from time to time, and the first confirm
lets all others go. Thousands of events to a full queue cost one publish every few seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from service.reliability.retry import backoff

FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=0.5), timedelta(seconds=5)
"""Between two probes, doubling: what is well again is used within seconds."""

ENOUGH = 2
"""Failures in a row after which it is the destination's fault; a single one may be the event's own."""


class Destination(NamedTuple):
    """Where an event is published."""

    exchange: str
    routing_key: str


@dataclass(slots=True)
class _Trouble:
    holds_keys: bool
    failures: int = 0
    until: float = 0.0

    @property
    def waits(self) -> bool:
        return self.failures >= (ENOUGH if self.holds_keys else 1)


@dataclass(slots=True)
class Destinations:
    """What the active relay knows of its destinations; a new one finds out anew."""

    _troubles: dict[Destination, _Trouble] = field(default_factory=dict)

    def confirmed(self, destination: Destination) -> bool:
        """Forget its troubles; return whether events waited for it."""
        trouble = self._troubles.pop(destination, None)
        return trouble is not None and trouble.waits

    def failed(self, destination: Destination, now: float, jitter: float, *, holds_keys: bool) -> None:
        """Take note of a failure.

        Args:
            destination: that took nothing.
            now: seconds.
            jitter: in [0, 1).
            holds_keys: what comes later of the same key must wait too; not where nobody is bound, since nobody waits
                for the event then.
        """
        trouble = self._troubles.setdefault(destination, _Trouble(holds_keys))
        trouble.holds_keys = holds_keys
        if trouble.waits and now < trouble.until:
            return  # of those that were on their way together, the first has told it
        trouble.failures += 1
        doublings = trouble.failures - (ENOUGH - 1 if holds_keys else 0)
        pause = backoff(doublings, jitter, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
        trouble.until = now + pause.total_seconds()

    def forget(self, destination: Destination) -> None:
        """Forget a destination that nothing waits for any more."""
        self._troubles.pop(destination, None)

    def waits(self, destination: Destination) -> bool:
        """Tell whether only a probe may be published to it."""
        trouble = self._troubles.get(destination)
        return trouble is not None and trouble.waits

    def waiting(self) -> Iterator[Destination]:
        """Yield those to which only a probe may be published."""
        return (destination for destination, trouble in self._troubles.items() if trouble.waits)

    def holding(self) -> Iterator[Destination]:
        """Yield those of `waiting` that hold up what comes later of a key."""
        return (d for d, trouble in self._troubles.items() if trouble.waits and trouble.holds_keys)

    def to_probe(self, now: float) -> list[Destination]:
        """Return those of `waiting` whose pause is over."""
        return [d for d, trouble in self._troubles.items() if trouble.waits and trouble.until <= now]

    def next_probe(self) -> float | None:
        """Return when the next pause is over; None where nothing waits."""
        return min((trouble.until for trouble in self._troubles.values() if trouble.waits), default=None)
