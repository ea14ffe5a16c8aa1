"""What people did to parked messages: who, when, what and why, one row for each message, in the database.

A row is written before the deed and completed after it: one without `finished_at` is a deed that was interrupted, or
is going on.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from service.reliability.connection import Connection
from service.reliability.errors import ParkingInUseError
from service.reliability.parking import Parked
from service.reliability.stopping import Stopping

LOCK_KEY = 0x62696C6C_7061726B
"""Session advisory lock of whoever visits the parking queue, one per database ("billpark" in ASCII)."""

PATIENCE = 50, timedelta(milliseconds=100)
"""How often to ask for the lock, and the pause between: most visits are short."""

BEGIN = """
insert into parking_actions (action, actor, why, message_id, type, reason, parked_at, key, new_message_id)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
returning id
"""

FINISH = "update parking_actions set finished_at = now() where id = $1"

UNFINISHED_REPLAY = """
select id from parking_actions where key = $1 and action = 'replay' and finished_at is null order by id desc limit 1
"""

PROCESSED = "select exists (select from processed_messages where consumer = $1 and message_id = $2)"


@dataclass(frozen=True, slots=True)
class Deed:
    """What somebody does, and why.

    Attributes:
        actor: a person's name.
        why: in that person's words; may be empty.
    """

    action: Literal["replay", "discard"]
    actor: str
    why: str


@asynccontextmanager
async def lock(connection: Connection) -> AsyncIterator[None]:
    """Be the only one who visits the parking queue, as long as the connection lives.

    Raises:
        ParkingInUseError: somebody else does, and goes on.
    """
    tries, pause = PATIENCE
    for _ in range(tries):
        if await connection.fetchval("select pg_try_advisory_lock($1)", LOCK_KEY):
            break
        await Stopping().pause(pause)
    else:
        raise ParkingInUseError("another 'billing parking' command is at work in the parking queue: try again later")
    try:
        yield
    finally:
        await connection.execute("select pg_advisory_unlock($1)", LOCK_KEY)


async def begin(connection: Connection, deed: Deed, parked: Parked, new_message_id: str | None = None) -> int:
    """Write down what is about to be done; return the number of the row."""
    return int(
        await connection.fetchval(
            BEGIN,
            deed.action,
            deed.actor,
            deed.why,
            storable(parked.message_id),
            storable(parked.type),
            parked.reason,
            parked.parked_at,
            storable(parked.key),
            new_message_id,
        )
    )


async def finish(connection: Connection, row: int) -> None:
    """Write down that it is done."""
    await connection.execute(FINISH, row)


async def unfinished_replay(connection: Connection, parked: Parked) -> int | None:
    """Return the row of a replay of this very message that was interrupted."""
    found = await connection.fetchval(UNFINISHED_REPLAY, storable(parked.key))
    return None if found is None else int(found)


async def is_processed(connection: Connection, consumer: str, message_id: str) -> bool:
    """Tell whether a consumer has processed a message."""
    return bool(await connection.fetchval(PROCESSED, consumer, storable(message_id)))


def storable(text: str | None) -> str | None:
    r"""Return text that PostgreSQL can store: a stranger's U+0000 is told as `\0`."""
    return None if text is None else text.replace("\0", r"\0")
