"""What can go wrong, by what the service does about it.

ReliabilityError
├── PermanentError           the message will never succeed: parked at once with its reason
│   └── EventError           the handler appended an event that no broker would take
├── HandlerTimeoutError      the handler took longer than HANDLER_TIMEOUT: an attempt is spent
├── HandlerCancelledError    the handler ran into a CancelledError of somebody else's: an attempt is spent
├── TransactionAbortedError  COMMIT answered ROLLBACK: an attempt is spent
├── ClaimContestedError      another copy is being processed for too long: held and run again, no attempt is spent
├── DatabaseUnavailableError an outage, not the message's fault: held and run again, no attempt is spent
│   └── SessionLostError     it met the execution in the middle: held likewise, unless that happens again and again
├── BrokerUnavailableError   no host of the broker takes a connection: tried again with pauses
├── TopologyError            the broker's queues are not what the contract says: the start stops
├── SchemaError              the database's tables are not those of this version
└── ParkingInUseError        another command is at work in the parking queue

Every other exception that leaves a handler is a failure of that attempt, unless the family's policy names its type.
Texts hold no payload: they are logged and travel in headers.
"""

from service.reliability.outcome import Reason


class ReliabilityError(Exception):
    """Root of this package's errors."""


class PermanentError(ReliabilityError):
    """The message can never succeed; `reason` is what it is parked with."""

    def __init__(self, reason: Reason, explanation: str) -> None:
        """Keep the reason beside the text that a person reads."""
        super().__init__(explanation)
        self.reason = reason


class EventError(PermanentError):
    """An event is larger than any broker would take; nothing of the handler's work is stored."""

    def __init__(self, explanation: str) -> None:
        """The same message would make the same event again: parked as `rejected-by-rule`."""
        super().__init__(Reason.REJECTED_BY_RULE, explanation)


class HandlerTimeoutError(ReliabilityError):
    """The handler was cancelled and rolled back because its time was over."""


class HandlerCancelledError(ReliabilityError):
    """The handler ended in a CancelledError although nobody had cancelled its task."""


class TransactionAbortedError(ReliabilityError):
    """The handler swallowed a statement's error: PostgreSQL had rolled back, nothing was stored."""


class ClaimContestedError(ReliabilityError):
    """Another transaction has claimed the message and neither commits nor rolls back."""


class DatabaseUnavailableError(ReliabilityError):
    """The database cannot be reached, refuses connections or takes no writes."""


class SessionLostError(DatabaseUnavailableError):
    """The database was lost after the handler had begun: the handler may be what loses it."""


class BrokerUnavailableError(ReliabilityError):
    """No host of the broker takes a connection; the text says what each answered, without credentials."""


class TopologyError(ReliabilityError):
    """Exchanges or queues are missing or other than the contract says; the text has one line for each."""


class SchemaError(ReliabilityError):
    """The database has no tables yet or those of another version."""


class ParkingInUseError(ReliabilityError):
    """Somebody else has the messages of the parking queue in their hands."""
