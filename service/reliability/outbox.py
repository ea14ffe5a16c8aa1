"""The outbox: events that leave because their transaction committed. All its SQL.

`append` runs in the handler's transaction; `read` and `record` belong to the relay that holds the lease: whoever has
lost it cannot complete a row.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID, uuid4

import asyncpg

from service.reliability.connection import Connection
from service.reliability.destinations import Destination
from service.reliability.errors import EventError

CHANNEL = "billing_outbox"
"""NOTIFY channel that tells the active relay of another process that something was committed."""

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""The largest body that every supported broker takes as it is installed; 4.x closes the channel over a larger one."""

MAX_TYPE_BYTES = 255
"""AMQP's limit for the type and for the routing key, which are the same."""

APPEND = """
insert into outbox_messages (id, exchange, routing_key, type, key, payload, headers)
values ($1, $2, $3, $4, $5, $6, $7)
"""

_READ = """
select id, exchange, routing_key, type, key, payload, headers, created_at, publish_attempts, sequence
from outbox_messages as row
where sent_at is null and quarantined_at is null and available_at <= now()
    and (exchange, routing_key) {chosen} (select * from unnest($2::text[], $3::text[]))
    and not exists (
        select from outbox_messages as earlier
        where earlier.key = row.key and earlier.sequence < row.sequence
            and coalesce(earlier.sent_at, earlier.quarantined_at) is null
            and (
                earlier.available_at > now()
                or (earlier.exchange, earlier.routing_key) in (select * from unnest($4::text[], $5::text[]))
            )
        offset 0
    )
order by sequence
limit $1
"""

READ = _READ.format(chosen="not in")
"""Unsent events that are due, without those of destinations that wait ($2, $3), and without those of a key of which
something earlier waits: by itself, or with its destination ($4, $5). Needs both partial indexes; `offset 0` keeps the
planner from reading all that is unsent for the second one."""

PROBE = _READ.format(chosen="in")
"""Likewise, of the destinations that wait."""

RECORD = """
update outbox_messages as row
set publish_attempts = row.publish_attempts + 1,
    attempted_at = now(),
    sent_at = case when result.error is null then now() end,
    last_error = result.error,
    available_at = case when result.error is null then row.available_at else now() + result.pause end,
    quarantined_at = case when result.quarantined then now() end
from unnest($1::uuid[], $2::text[], $3::interval[], $4::boolean[]) as result (id, error, pause, quarantined)
where row.id = result.id and row.sent_at is null and row.quarantined_at is null
    and exists (select from relay_lease where name = 'outbox' and holder = $5)
"""

RELEASE = """
update outbox_messages set available_at = now()
where sent_at is null and quarantined_at is null and available_at > now() and exchange = $1 and routing_key = $2
"""

TELL = """
update outbox_messages set last_error = $3
where id in (
    select id from outbox_messages
    where sent_at is null and quarantined_at is null and last_error is null and exchange = $1 and routing_key = $2
    order by sequence
    limit $4
)
"""

TOLD_AT_ONCE = 5000
"""Rows; at the next failed probe the next ones follow."""

BACKLOG = """
select count(*) as unsent, coalesce(extract(epoch from now() - min(created_at)), 0)::float8 as oldest_seconds
from outbox_messages
where sent_at is null and quarantined_at is null
"""


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
        sequence: ascending in commit order within a key.
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
    sequence: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is written down of one publish: sent where `error` is None, else tried again after `pause`.

    Attributes:
        quarantined: left to people instead.
    """

    id: UUID
    error: str | None = None
    pause: timedelta = timedelta()
    quarantined: bool = False


async def append(connection: Connection, event: Event, exchange: str, headers: Mapping[str, str | int]) -> None:
    """Store an event in the caller's transaction; the caller commits.

    Raises:
        EventError: no broker would take it, so it must not be committed.
    """
    require_sendable(event)
    await connection.execute(
        APPEND, uuid4(), exchange, event.type, event.type, event.key, event.body, json.dumps(dict(headers))
    )


def require_sendable(event: Event) -> None:
    """Refuse what no broker would take.

    Raises:
        EventError: says what is too long, how long it is, and what is allowed.
    """
    for what, size, most in (
        ("body", len(event.body), MAX_EVENT_BYTES),
        ("type", len(event.type.encode()), MAX_TYPE_BYTES),
    ):
        if size > most:
            raise EventError(
                f"the {what} of an event of type {event.type[:50]!r} has {size} bytes; at most {most} are allowed"
            )


async def read(
    connection: Connection, limit: int, waiting: Iterable[Destination] = (), holding: Iterable[Destination] = ()
) -> list[OutboxRow]:
    """Return the unsent events that may be published now, in sequence order.

    Args:
        connection: to the database.
        limit: how many at most.
        waiting: destinations whose events are left out.
        holding: those of `waiting` that hold up what comes later of a key.
    """
    return _rows(await connection.fetch(READ, limit, *_columns(waiting), *_columns(holding)))


async def probe(connection: Connection, destination: Destination, holding: Iterable[Destination]) -> list[OutboxRow]:
    """Return the first event that may be published to a destination that waits, if there is one."""
    others = (other for other in holding if other != destination)
    return _rows(await connection.fetch(PROBE, 1, *_columns([destination]), *_columns(others)))


async def record(connection: Connection, results: Sequence[Recorded], holder: UUID) -> None:
    """Write down what became of each row, in one statement.

    A row that is sent or quarantined already stays as it is, and all do where `holder` no longer holds the lease.
    """
    await connection.execute(
        RECORD,
        [r.id for r in results],
        [r.error for r in results],
        [r.pause for r in results],
        [r.quarantined for r in results],
        holder,
    )


async def release(connection: Connection, destination: Destination) -> None:
    """Let the events go that wait for a destination: it takes them again."""
    await connection.execute(RELEASE, *destination)


async def tell(connection: Connection, destination: Destination, error: str) -> None:
    """Write down why events wait that were not tried, since their destination takes none; `TOLD_AT_ONCE` of them."""
    await connection.execute(TELL, *destination, error, TOLD_AT_ONCE)


async def backlog(connection: Connection) -> tuple[int, float]:
    """Return how many events wait to leave and the age of the oldest in seconds."""
    [row] = await connection.fetch(BACKLOG)
    return row["unsent"], row["oldest_seconds"]


async def notify(connection: Connection, payload: str = "") -> None:
    """Tell the active relay of another process that there is something to send."""
    await connection.execute("select pg_notify($1, $2)", CHANNEL, payload)


def _rows(records: Iterable[asyncpg.Record]) -> list[OutboxRow]:
    return [OutboxRow(**{**record, "headers": json.loads(record["headers"])}) for record in records]


def _columns(destinations: Iterable[Destination]) -> tuple[list[str], list[str]]:
    """Return exchanges and routing keys, beside each other."""
    pairs = list(destinations)
    return [d.exchange for d in pairs], [d.routing_key for d in pairs]
