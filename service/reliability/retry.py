"""What a failure leads to: pure rules, no clock and no chance of their own.

A family's policy says how often a message is executed, how long it waits in between, and which exceptions
make waiting pointless. SQL states are judged by class, never by exception type or text: texts depend on the
server's locale, and a driver raises the same type for a bad value and for a sick server.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import PurePath
from traceback import extract_tb

from service.reliability.errors import PermanentError, ReliabilityError
from service.reliability.outcome import Diagnosis, Park, Reason, Retry

EXPLANATION_LIMIT = 1000
"""Bytes of a diagnosis: it travels in a header, and all headers share one frame of 128 KiB."""

_PERMANENT_SQLSTATES = {
    "22": Reason.INVALID,  # data exception: U+0000, out of range, over-long; the same value fails for ever
    "23514": Reason.REJECTED_BY_RULE,  # check violation: an invariant that the tables carry
    "23502": Reason.REJECTED_BY_RULE,  # not-null violation
}

_OUTAGE_SQLSTATES = (
    "08",  # connection exception
    "53100",  # disk full
    "53300",  # too many connections
    "57P",  # operator intervention: shutdown, crash recovery, starting up
    "25006",  # read-only transaction: a standby, or a primary that is being failed over
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a family treats failures.

    Attributes:
        max_attempts: executions in all; the first counts.
        delays: attempt n waits `delays[n-1]` before the next one, the last repeating.
        permanent: exception types that are parked at once, with their reason.
        safe: exception types whose texts hold no payload, so that they may be logged and put into headers.
    """

    max_attempts: int
    delays: tuple[timedelta, ...]
    permanent: Mapping[type[Exception], Reason] = field(default_factory=dict)
    safe: tuple[type[Exception], ...] = ()

    def delay_after(self, attempt: int) -> timedelta:
        """Return how long a message waits after its `attempt`th execution failed."""
        return self.delays[min(attempt, len(self.delays)) - 1]

    def decide(self, error: Exception, attempt: int) -> Retry | Park:
        """Return what the failure of execution number `attempt` leads to."""
        diagnosis = diagnose(error, self.safe)
        if (reason := self._permanent_reason(error)) is not None:
            return Park(reason, attempt, diagnosis)
        if attempt >= self.max_attempts:
            return Park(Reason.ATTEMPTS_EXHAUSTED, attempt, diagnosis)
        return Retry(self.delay_after(attempt), attempt + 1, diagnosis)

    def _permanent_reason(self, error: Exception) -> Reason | None:
        if isinstance(error, PermanentError):
            return error.reason
        for kind, reason in self.permanent.items():
            if isinstance(error, kind):
                return reason
        state = sqlstate(error)
        return next((r for prefix, r in _PERMANENT_SQLSTATES.items() if state.startswith(prefix)), None)


def diagnose(error: Exception, safe: tuple[type[Exception], ...] = ()) -> Diagnosis:
    """Return class and explanation of `error`, without anything that it may quote from a payload.

    Texts of this package's errors and of the types in `safe` are kept, since they are written for people. Of all
    others only what cannot quote a value is told: SQL state and constraint, or the place where it was raised.
    """
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    if isinstance(error, (ReliabilityError, *safe)):
        text = str(error)
    elif state := sqlstate(error):
        constraint = getattr(error, "constraint_name", None)
        text = f"SQL state {state}" + (f", constraint {constraint}" if constraint else "") + _place(error)
    else:
        text = type(error).__name__ + _place(error)
    return Diagnosis(_bounded(kind), _bounded(text))


def short(error: BaseException) -> str:
    """Return an error's first line for a log or a person, never empty: time-outs have no text of their own."""
    return (str(error).partition("\n")[0] or type(error).__name__)[:300]


def sqlstate(error: BaseException) -> str:
    """Return PostgreSQL's five-character error code, or an empty string where there is none."""
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) else ""


def is_outage(error: BaseException) -> bool:
    """Tell whether the database as a whole is away, as opposed to this message being wrong."""
    return sqlstate(error).startswith(_OUTAGE_SQLSTATES)


def backoff(failures: int, jitter: float, *, first: timedelta, longest: timedelta) -> timedelta:
    """Return the pause after `failures` failures in a row: doubling, bounded, stretched by `jitter` in [0, 1)."""
    doublings = min(max(failures - 1, 0), 20)
    return min(first * (1 << doublings), longest) * (1 + jitter / 4)


def _bounded(text: str) -> str:
    """Return text that can be sent: at most `EXPLANATION_LIMIT` bytes of UTF-8, and half characters told."""
    return text.encode("utf-8", "backslashreplace")[:EXPLANATION_LIMIT].decode("utf-8", "ignore")


def _place(error: BaseException) -> str:
    frames = extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f" at {PurePath(last.filename).name}:{last.lineno} in {last.name}"
