"""The outbox: events that leave because their transaction committed. All its SQL.

`append` runs in the handler's transaction; `read` and `record` belong to the relay, which holds the session lock of
`try_lock` on the very connection it records with: whoever has lost the lock cannot complete a row.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from service.reliability.connection import Connection

CHANNEL = "billing_outbox"
"""NOTIFY channel that tells the active relay of another process that something was committed."""

LOCK_KEY = 0x62696C6C_6F757462
"""Session advisory lock of the active relay, one per database ("billoutb" in ASCII)."""

APPEND = """
insert into outbox_messages (id, exchange, routing_key, type, key, payload, headers)
values ($1, $2, $3, $4, $5, $6, $7)
"""

READ = """
select id, exchange, routing_key, type, key, payload, headers, created_at, publish_attempts
from outbox_messages
where sent_at is null and quarantined_at is null and available_at <= now()
order by sequence
limit $1
"""
"""Needs the partial index on (sequence) over what is unsent and not quarantined."""

RECORD = """
update outbox_messages as row
set publish_attempts = row.publish_attempts + 1,
    sent_at = case when result.error is null then now() end,
    last_error = result.error,
    available_at = case when result.error is null then row.available_at else now() + result.pause end
from unnest($1::uuid[], $2::text[], $3::interval[]) as result (id, error, pause)
where row.id = result.id and row.sent_at is null
"""

BACKLOG = """
select count(*) as unsent, coalesce(extract(epoch from now() - min(created_at)), 0)::float8 as oldest_seconds
from outbox_messages
where sent_at is null and quarantined_at is null
"""

HOLDER = """
select pid, application_name as application, host(client_addr) as address, state,
    extract(epoch from now() - backend_start)::float8 as seconds
from pg_locks join pg_stat_activity using (pid)
where locktype = 'advisory' and granted
    and pg_locks.database = (select oid from pg_database where datname = current_database())
    and classid = ($1::bigint >> 32)::oid and objid = ($1::bigint & 4294967295)::oid
"""


@dataclass(frozen=True, slots=True)
class Holder:
    """The session that holds the relay's lock.

    Attributes:
        pid: of its server process, for `pg_terminate_backend`.
        application: the name that the session gave itself.
        address: the client's; None for a local one, and where the user has no right to see it.
        state: `idle` between two statements; None likewise.
        seconds: for how long the session has existed; None likewise.
    """

    pid: int
    application: str
    address: str | None
    state: str | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, to be published because the transaction commits.

    Attributes:
        type: event type, and the routing key it is published with.
        key: events of one key leave in commit order; lock what the key names before appending.
        body: JSON, UTF-8.
        schema_version: of the body, sent as the header `schema-version`.
    """

    type: str
    key: str
    body: bytes
    schema_version: int = 1


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """One stored event, as the relay reads it.

    Attributes:
        id: becomes the message id, the same at every publish.
        key: rows of one key are published one after another, in commit order.
        headers: AMQP headers, and `correlation-id`, which leaves as a property.
        publish_attempts: how often it was tried before.
    """

    id: UUID
    exchange: str
    routing_key: str
    type: str
    key: str
    payload: bytes
    headers: Mapping[str, str | int]
    created_at: datetime
    publish_attempts: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is written down of one publish: sent where `error` is None, else tried again after `pause`."""

    id: UUID
    error: str | None = None
    pause: timedelta = timedelta()


async def append(connection: Connection, event: Event, exchange: str, headers: Mapping[str, str | int]) -> None:
    """Store an event in the caller's transaction; the caller commits."""
    await connection.execute(
        APPEND, uuid4(), exchange, event.type, event.type, event.key, event.body, json.dumps(dict(headers))
    )


async def read(connection: Connection, limit: int) -> list[OutboxRow]:
    """Return the unsent events that are due, in sequence order."""
    rows = await connection.fetch(READ, limit)
    return [OutboxRow(**{**row, "headers": json.loads(row["headers"])}) for row in rows]


async def record(connection: Connection, results: Sequence[Recorded]) -> None:
    """Write down what became of each row, in one statement; a row that is sent already stays as it is."""
    await connection.execute(RECORD, [r.id for r in results], [r.error for r in results], [r.pause for r in results])


async def backlog(connection: Connection) -> tuple[int, float]:
    """Return how many events wait to leave and the age of the oldest in seconds."""
    [row] = await connection.fetch(BACKLOG)
    return row["unsent"], row["oldest_seconds"]


async def try_lock(connection: Connection) -> bool:
    """Try to become the active relay; the lock lives as long as the connection."""
    return bool(await connection.fetchval("select pg_try_advisory_lock($1)", LOCK_KEY))


async def lock_holder(connection: Connection) -> Holder | None:
    """Return who holds the relay's lock in this database: the active relay, unless somebody took it by hand."""
    rows = await connection.fetch(HOLDER, LOCK_KEY)
    return Holder(**rows[0]) if rows else None


async def notify(connection: Connection) -> None:
    """Tell the active relay of another process that there is something to send."""
    await connection.execute("select pg_notify($1, '')", CHANNEL)
