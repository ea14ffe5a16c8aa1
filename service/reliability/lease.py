"""The relay's lease: one row that says which relay is the active one, and until when. All its SQL.

A lease instead of a session lock: it ends by itself when its holder is stopped, hangs or is cut off, though its session
lives on; and it means the same behind a pooler that shares sessions. Whoever takes it over, the former holder can
complete nothing (`outbox.RECORD` asks for it) and starts no publish: it keeps count of the time by its own clock,
from before it asked.
"""

from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from service.reliability.connection import Connection

LEASE = timedelta(seconds=3)
"""How long a holder may be silent; with the pause of those who stand by, another has taken over within five seconds."""

RENEW_AFTER = LEASE / 2

STANDBY_INTERVAL = timedelta(seconds=0.75)
"""Between the attempts of those who stand by."""

HOLD = """
insert into relay_lease as lease (name, holder, instance, since, expires_at)
values ('outbox', $1, $2, now(), now() + $3)
on conflict (name) do update
set holder = excluded.holder, instance = excluded.instance, expires_at = excluded.expires_at,
    since = case when lease.holder = excluded.holder then lease.since else excluded.since end
where lease.holder = excluded.holder or lease.expires_at < now()
returning true
"""

RENEW = "update relay_lease set expires_at = now() + $2 where name = 'outbox' and holder = $1 returning true"

GIVE_UP = "delete from relay_lease where name = 'outbox' and holder = $1"

HOLDER = """
select instance, extract(epoch from now() - since)::float8 as seconds
from relay_lease
where name = 'outbox' and expires_at > now()
"""


@dataclass(frozen=True, slots=True)
class Holder:
    """The relay that is active.

    Attributes:
        instance: host name and process id.
        seconds: for how long it has been.
    """

    instance: str
    seconds: float


async def hold(connection: Connection, holder: UUID, instance: str) -> bool:
    """Take the lease or renew it, for `LEASE` from now on; return whether it is held."""
    return bool(await connection.fetchval(HOLD, holder, instance, LEASE))


async def renew(connection: Connection, holder: UUID) -> bool:
    """Renew the lease where nobody else has had it since it was taken; return whether it is held."""
    return bool(await connection.fetchval(RENEW, holder, LEASE))


async def give_up(connection: Connection, holder: UUID) -> None:
    """Let another have it at once."""
    await connection.execute(GIVE_UP, holder)


async def current_holder(connection: Connection) -> Holder | None:
    """Return who is active in this database."""
    rows = await connection.fetch(HOLDER)
    return Holder(**rows[0]) if rows else None
