"""The alarm on the parking queue: since when something is in it, and when to say that it is too much.

Pure: counts and times are arguments. What is less is believed only when it has lasted: while a person looks at the
queue, or replays from it, everything is in that person's hands and the queue looks empty.
"""

from dataclasses import dataclass, field

SETTLED = 30.0
"""Seconds for which a condition has to be gone to be over: a look at 10 000 messages takes two."""

GROWN = 10
"""Times what was told last, after which it is told again before the hour is over."""

REPEAT = 3600.0
"""Seconds after which it is told again."""


@dataclass(slots=True)
class Spell:
    """A condition that lasts, with interruptions shorter than `SETTLED`.

    Attributes:
        began: when it was first seen; None while it does not hold.
    """

    began: float | None = None
    _seen: float = 0.0

    def look(self, now: float, *, holds: bool) -> None:
        """Take note of whether the condition holds now."""
        if holds:
            self.began = now if self.began is None else self.began
            self._seen = now
        elif now - self._seen >= SETTLED:
            self.began = None


@dataclass(slots=True)
class ParkingAlarm:
    """Watches a count, from one look to the next.

    Attributes:
        threshold: messages from which on it rings; 0: never.
    """

    threshold: int
    _filled: Spell = field(default_factory=Spell)
    _ringing: Spell = field(default_factory=Spell)
    _told: int = 0
    _told_at: float = 0.0

    def look(self, count: int, now: float) -> bool:
        """Take note of the count; return whether to tell: at a rise, when it has grown much, after an hour.

        Args:
            count: messages in the queue.
            now: seconds of a clock that never goes back.
        """
        too_many = 0 < self.threshold <= count
        self._filled.look(now, holds=count > 0)
        rises = self._ringing.began is None
        self._ringing.look(now, holds=too_many)
        if not too_many or not (rises or count >= GROWN * self._told or now - self._told_at >= REPEAT):
            return False
        self._told, self._told_at = count, now
        return True

    def filled_seconds(self, now: float) -> float:
        """Return for how long the queue has held something, as far as was seen."""
        return 0.0 if self._filled.began is None else now - self._filled.began
