"""PostgreSQL: the pool, single connections, and the schema's version."""

from pathlib import Path
from typing import Any

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.exc import SQLAlchemyError

from service.reliability.errors import SchemaError
from service.reliability.retry import short
from service.reliability.sockets import watch

APPLICATION_NAME = "billing"

CONNECT_TIMEOUT = 5.0
"""Seconds for one attempt to connect."""

COMMAND_TIMEOUT = 10.0
"""Seconds for a statement of the relay, of a probe, of the command line: more means that the server is away."""

_KEEPALIVES = {
    "tcp_keepalives_idle": "3",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10000",  # milliseconds; where something was sent to the peer, a NOTIFY say, it is not probed
}
"""The server drops the session of a peer that vanished, with its claims and locks, after seconds instead of hours."""

_HERE = Path(__file__).resolve().parent


def make_pool(url: str, size: int) -> asyncpg.Pool:
    """Return a pool of at most `size` connections; it connects when it is used, so the server may be away."""
    return asyncpg.create_pool(
        url,
        min_size=0,
        max_size=size,
        timeout=CONNECT_TIMEOUT,
        init=_notice_silence,
        reset=_leave_as_is,
        server_settings={"application_name": APPLICATION_NAME} | _KEEPALIVES,
    )


async def connect(url: str, purpose: str) -> asyncpg.Connection:
    """Open a single connection, named after its purpose in `pg_stat_activity`."""
    connection = await asyncpg.connect(
        url,
        timeout=CONNECT_TIMEOUT,
        command_timeout=COMMAND_TIMEOUT,
        server_settings={"application_name": f"{APPLICATION_NAME}-{purpose}"} | _KEEPALIVES,
    )
    await _notice_silence(connection)
    return connection


async def takes_writes(connection: asyncpg.Connection | asyncpg.Pool) -> bool:
    """Tell whether the server takes writes: a standby does not, nor does a primary that is being failed over."""
    return bool(await connection.fetchval("select not current_setting('transaction_read_only')::bool"))


async def require_current_schema(connection: asyncpg.Connection | Any) -> None:
    """Check that the tables are those of this version, or of a later one.

    A revision that this version does not know is a later one: a rolling update migrates first, and instances of the
    old version must be able to restart meanwhile.

    Raises:
        SchemaError: they are missing or older; says which revision was found and which is wanted.
    """
    scripts = ScriptDirectory.from_config(_alembic_config())
    wanted = scripts.get_current_head()
    exists = await connection.fetchval("select to_regclass('alembic_version') is not null")
    found = await connection.fetchval("select version_num from alembic_version") if exists else None
    older = {script.revision for script in scripts.walk_revisions()} - {wanted}
    if found is None or found in older:
        raise SchemaError(f"database schema: found revision {found or 'none'}, wanted {wanted}: run 'billing migrate'")


def migrate(url: str) -> None:
    """Bring the schema to this version; instances that do so at once wait for each other. Runs its own event loop.

    Raises:
        SchemaError: the database cannot be reached, or refuses a statement; nothing was changed.
    """
    config = _alembic_config()
    config.attributes["url"] = url
    try:
        command.upgrade(config, "head")
    except (
        OSError,
        TimeoutError,
        SQLAlchemyError,
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        CommandError,
    ) as error:
        raise SchemaError(f"migration failed: {short(error)}") from error


def _alembic_config() -> Config:
    """Return the configuration beside the migrations: a wheel carries both in this package, a checkout at its root."""
    packed = _HERE / "migrations"
    return Config((packed if packed.is_dir() else _HERE.parent) / "alembic.ini")


async def _notice_silence(connection: Any) -> None:
    """Have the kernel end the connection when its server has vanished."""
    watch(connection._transport.get_extra_info("socket"))  # noqa: SLF001 - the driver hides it


async def _leave_as_is(connection: asyncpg.Connection) -> None:
    """Replace the pool's reset query, a round trip for each message: transactions leave nothing behind."""
