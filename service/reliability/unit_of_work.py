"""One message, one transaction: what a handler may do in it, and how it ends.

Whoever opens the transaction commits it: `Transactions.begin` does, handlers and `append` never do. Leaving the block
by an exception rolls everything back: the claim, the business rows and the events together.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Generic, Protocol, TypeVar

import asyncpg

from service.reliability import inbox, outbox, starts
from service.reliability.connection import Connection
from service.reliability.envelope import SCHEMA_VERSION, Envelope
from service.reliability.errors import DatabaseUnavailableError, TransactionAbortedError
from service.reliability.inbox import Claim
from service.reliability.outbox import Event
from service.reliability.retry import is_outage, sqlstate

ANSWER_TIMEOUT = 10.0
"""Seconds to get a connection, to begin, to commit, to roll back. The pool has a connection for each handler, and none
of these waits for anybody's work: more means that the database is away."""


class UnitOfWork(Protocol):
    """What the middleware and every handler need of a transaction."""

    async def claim(self, consumer: str, message_id: str, digest: bytes) -> Claim:
        """Claim the message for `consumer`: the transaction's first statement."""
        ...

    async def append(self, event: Event) -> None:
        """Append an event that leaves if and only if the transaction commits."""
        ...


W = TypeVar("W", bound=UnitOfWork)
W_co = TypeVar("W_co", bound=UnitOfWork, covariant=True)


class Transactions(Protocol[W_co]):
    """Opens transactions."""

    def begin(self, cause: Envelope) -> AbstractAsyncContextManager[W_co]:
        """Open a transaction for the message `cause`; commit at the end of the block, roll back on an exception."""
        ...

    async def count_start(self, consumer: str, message_id: str) -> int:
        """Write down, at once, that an execution starts; return how many were since the last `clear_starts`."""
        ...

    async def clear_starts(self, consumer: str, message_id: str) -> None:
        """Forget the starts of a message."""
        ...


class PostgresUnitOfWork:
    """A transaction in PostgreSQL; applications derive from it and add their repositories.

    Attributes:
        connection: inside the transaction, one statement at a time. Handlers neither commit nor roll back; a part is
            taken back with SAVEPOINT statements, since the driver's `transaction()` refuses one that it did not begin.
            What outlives a transaction (SET without LOCAL, LISTEN, session locks, temporary tables) must not be used:
            the connection goes to the next message as it is.
    """

    def __init__(self, connection: Connection, cause: Envelope, exchange: str) -> None:
        """Bind to an open transaction.

        Args:
            connection: inside the transaction.
            cause: the message being processed; events carry its ids.
            exchange: where events are published.
        """
        self.connection = connection
        self.has_events = False
        self._cause = cause
        self._exchange = exchange

    async def claim(self, consumer: str, message_id: str, digest: bytes) -> Claim:
        """Claim the message for `consumer`."""
        return await inbox.claim(self.connection, consumer, message_id, digest)

    async def append(self, event: Event) -> None:
        """Append an event to the outbox."""
        await outbox.append(self.connection, event, self._exchange, identity_headers(self._cause, event))
        self.has_events = True


def identity_headers(cause: Envelope, event: Event) -> dict[str, str | int]:
    """Return what an event tells of the message that caused it; `correlation-id` leaves as a property."""
    headers: dict[str, str | int] = {SCHEMA_VERSION: event.schema_version}
    if cause.message_id is not None:
        headers["causation-id"] = cause.message_id
    if correlation_id := cause.correlation_id or cause.message_id:
        headers["correlation-id"] = correlation_id
    if cause.traceparent is not None:
        headers["traceparent"] = cause.traceparent
    return headers


P = TypeVar("P", bound=PostgresUnitOfWork)


class PostgresTransactions(Generic[P]):
    """Opens READ COMMITTED transactions on a pool."""

    def __init__(
        self, pool: asyncpg.Pool, work: Callable[[Connection, Envelope], P], committed: Callable[[], None]
    ) -> None:
        """Bind to a pool.

        Args:
            pool: one connection for each handler that may run at once.
            work: makes the unit of work from an open transaction and the message it processes.
            committed: called after a commit that stored events: wakes the relay.
        """
        self._pool = pool
        self._work = work
        self._committed = committed

    @asynccontextmanager
    async def begin(self, cause: Envelope) -> AsyncIterator[P]:
        """Open a transaction for the message `cause`; commit at the end of the block, roll back on an exception.

        Raises:
            DatabaseUnavailableError: the database is away. Where that happened during COMMIT the outcome is unknown,
                and the inbox tells at the next execution.
            TransactionAbortedError: the handler swallowed a statement's error; nothing was stored.
        """
        async with self._connection() as connection:
            work = self._work(connection, cause)
            try:
                # "begin" without a level would take the role's default, under which a claim may not see the winner.
                await _answer(connection, "begin isolation level read committed")
                yield work
                # COMMIT of an aborted transaction succeeds and answers ROLLBACK.
                _require_committed(await _answer(connection, "commit"))
            except BaseException as error:
                lost = await _is_lost_after_rollback(connection)
                if isinstance(error, Exception) and (lost or is_outage(error)):
                    # A session may keep what is wrong, such as being read-only, when the server is well again.
                    with suppress(asyncpg.InterfaceError):
                        connection.terminate()
                    raise DatabaseUnavailableError(_outage(error)) from error
                raise
        if work.has_events:
            self._committed()

    async def count_start(self, consumer: str, message_id: str) -> int:
        """Write down, at once, that an execution starts; return how many were since the last `clear_starts`.

        Raises:
            DatabaseUnavailableError: the database is away.
        """
        async with self._connection() as connection:
            with _outages_told(connection):
                return await starts.count(connection, consumer, message_id, ANSWER_TIMEOUT)

    async def clear_starts(self, consumer: str, message_id: str) -> None:
        """Forget the starts of a message.

        Raises:
            DatabaseUnavailableError: the database is away.
        """
        async with self._connection() as connection:
            with _outages_told(connection):
                await starts.clear(connection, consumer, message_id, ANSWER_TIMEOUT)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        try:
            connection = await self._pool.acquire(timeout=ANSWER_TIMEOUT)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise DatabaseUnavailableError(_outage(error)) from error
        try:
            yield connection
        finally:
            with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._pool.release(connection)


@contextmanager
def _outages_told(connection: Connection) -> Iterator[None]:
    """Turn what a single statement raises while the database is away into a DatabaseUnavailableError."""
    try:
        yield
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        if isinstance(error, asyncpg.PostgresError) and not is_outage(error):
            raise
        with suppress(asyncpg.InterfaceError):
            connection.terminate()
        raise DatabaseUnavailableError(_outage(error)) from error


async def _answer(connection: Connection, statement: str) -> str:
    """Execute a statement that waits for nobody's work; return the server's answer.

    Raises:
        DatabaseUnavailableError: there was none in time. After COMMIT the outcome is unknown.
    """
    try:
        return await connection.execute(statement, timeout=ANSWER_TIMEOUT)
    except TimeoutError as error:
        raise DatabaseUnavailableError(f"no answer to {statement.split(maxsplit=1)[0].upper()} in time") from error


async def _is_lost_after_rollback(connection: Connection) -> bool:
    """Roll back; tell whether the connection to the server is lost.

    A handler that left it in use (two statements at once) has not lost it: that connection is given up, and the failure
    is the handler's. The pool takes a connection that died away from its stand-in, which then raises at every call.
    """
    try:
        if connection.is_closed():
            return True
    except asyncpg.InterfaceError:
        return True
    try:
        if connection.is_in_transaction():
            await connection.execute("rollback", timeout=ANSWER_TIMEOUT)
        return connection.is_closed()
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        with suppress(asyncpg.InterfaceError):
            connection.terminate()
        return not isinstance(error, asyncpg.InterfaceError)


def _require_committed(answer: str) -> None:
    if answer != "COMMIT":
        raise TransactionAbortedError(f"COMMIT answered {answer}: a statement's error was swallowed")


def _outage(error: BaseException) -> str:
    state = sqlstate(error)
    return f"the database is not available ({type(error).__name__}{f', SQL state {state}' if state else ''})"
