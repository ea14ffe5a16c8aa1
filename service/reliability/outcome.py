"""How a delivery can end: four values, decided by pure code, acted on in `settlement` only."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum


class Reason(StrEnum):
    """Why a message is in the parking queue: the closed vocabulary of the header `x-parked-reason`."""

    UNREADABLE = "unreadable"
    INVALID = "invalid"
    MISSING_MESSAGE_ID = "missing-message-id"
    UNKNOWN_TYPE = "unknown-type"
    MESSAGE_ID_CONFLICT = "message-id-conflict"
    REJECTED_BY_RULE = "rejected-by-rule"
    ATTEMPTS_EXHAUSTED = "attempts-exhausted"
    CRASHED_CONSUMER = "crashed-consumer"
    TOO_LARGE = "too-large"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a person needs to know of a failure: never the payload, never a secret.

    Attributes:
        exception_type: qualified name of the exception's class.
        explanation: at most 1000 bytes in UTF-8.
    """

    exception_type: str
    explanation: str


@dataclass(frozen=True, slots=True)
class Ack:
    """The message is processed: in this delivery, or in an earlier one (`duplicate`)."""

    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    """This execution failed; the message comes back after `delay` as attempt `next_attempt`."""

    delay: timedelta
    next_attempt: int
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class Park:
    """The message is put aside for a person after `attempts` executions."""

    reason: Reason
    attempts: int
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class Return:
    """The message was not executed and goes back to its queue: the service is stopping."""


Outcome = Ack | Retry | Park | Return
