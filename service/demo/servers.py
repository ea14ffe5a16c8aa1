"""The demo's own database and virtual host: whose they are, that nobody else uses them, and that they are empty.

Everything in them is deleted. So a name that does not say "demo" as a word of its own is refused before anything is
touched, and so is a database that holds anything and is not marked as a demo's.
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import aio_pika
import asyncpg
from aio_pika.abc import AbstractConnection
from aio_pika.exceptions import AMQPError, ChannelNotFoundEntity

from service.demo.errors import DemoError

DATABASE, VHOST = "billing_demo", "billing-demo"

WORK, PARKING, WAITS = "orders.work", "orders.parking", ("orders.wait.500ms", "orders.wait.1s")
AUDIT, SLOW = "demo.audit", "demo.slow"
ORDERS_EXCHANGE, BILLING_EXCHANGE = "orders", "billing"

MARK = "made by billing demo, which wipes it"
"""Comment on the database."""

_LOCK_CLASS = 0x64656D6F
"""Advisory lock "demo"; the second key is the name of what is locked."""

KNOWN_PASSWORD = "billing"  # noqa: S105 - the local servers', in the README

CONNECT_TIMEOUT = 10.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the demo takes place: addresses with the database and the virtual host in them."""

    database_url: str
    rabbitmq_url: str

    def __post_init__(self) -> None:
        """Refuse what does not look like a demo's.

        Raises:
            DemoError: a name does not have the word "demo" in it.
        """
        for what, name in (("database", self.database), ("virtual host", self.vhost)):
            if "demo" not in re.split(r"[^a-z]+", name.lower()):
                raise DemoError(
                    f"refuses to wipe the {what} {name!r}: a demo's has the word 'demo' in its name, like {DATABASE!r}"
                )

    @property
    def database(self) -> str:
        """Name of the database."""
        return _name(self.database_url)

    @property
    def vhost(self) -> str:
        """Name of the virtual host."""
        return _name(self.rabbitmq_url)


def beside(url: str, name: str) -> str:
    """Return the address of another database or virtual host on the same server."""
    return urlunsplit(urlsplit(url)._replace(path="/" + quote(name, safe="")))


@asynccontextmanager
async def emptied(servers: Servers) -> AsyncIterator[None]:
    """Keep others away until the block ends; make the database anew and empty the virtual host at its start.

    Raises:
        DemoError: a server or the virtual host is not there, or another demo is running.
    """
    admin = await _administrator(servers)
    try:
        for name in (servers.database, servers.vhost):
            if not await admin.fetchval("select pg_try_advisory_lock($1, hashtext($2))", _LOCK_CLASS, name):
                raise DemoError(f"another demo is using {name!r}: wait for its end, or stop it with Ctrl-C")
        await _empty(servers, admin)
        yield
    finally:
        await admin.close()


async def _empty(servers: Servers, admin: asyncpg.Connection) -> None:
    connection = await connect_rabbitmq(servers.rabbitmq_url, "billing-demo-setup")
    async with connection:
        await _require_a_demos(servers, admin)
        await _require_a_demos_vhost(servers, connection)
        async with connection.channel() as channel:
            for queue in (WORK, PARKING, *WAITS, AUDIT, SLOW):
                await channel.queue_delete(queue)
            for exchange in (ORDERS_EXCHANGE, BILLING_EXCHANGE):
                await channel.exchange_delete(exchange)
    quoted = '"' + servers.database.replace('"', '""') + '"'
    try:
        await admin.execute(f"drop database if exists {quoted} with (force)")
        await admin.execute(f"create database {quoted}")
        await admin.execute(f"comment on database {quoted} is '{MARK}'")
    except asyncpg.InsufficientPrivilegeError as error:
        raise DemoError(f"PostgreSQL: {error}: the role needs CREATEDB: run scripts/servers") from None


async def _require_a_demos(servers: Servers, admin: asyncpg.Connection) -> None:
    """Refuse a database that is neither marked nor empty.

    Raises:
        DemoError: somebody else's data may be in it.
    """
    found = "select shobj_description(oid, 'pg_database') as mark from pg_database where datname = $1"
    database = await admin.fetchrow(found, servers.database)
    if database is None or database["mark"] == MARK:
        return
    connection = await asyncpg.connect(servers.database_url, timeout=CONNECT_TIMEOUT)
    try:
        tables = await connection.fetchval(
            "select count(*) from pg_class where relnamespace not in"
            " (select oid from pg_namespace where nspname like 'pg\\_%' or nspname = 'information_schema')"
        )
    finally:
        await connection.close()
    if tables:
        raise DemoError(
            f"refuses to wipe the database {servers.database!r}: no demo made it, and it is not empty:"
            f" drop it yourself (dropdb {servers.database}), or name another one with --database-url"
        )


async def _require_a_demos_vhost(servers: Servers, connection: AbstractConnection) -> None:
    """Refuse a virtual host with messages in it that is not marked by the audit queue of an earlier demo.

    Raises:
        DemoError: somebody else's messages may be in it.
    """
    if await _messages(connection, AUDIT) is not None:
        return
    for queue in (WORK, PARKING, *WAITS):
        if await _messages(connection, queue):
            raise DemoError(
                f"refuses to wipe the virtual host {servers.vhost!r}: no demo was here, and {queue} holds messages:"
                " empty it yourself, or name another one with --rabbitmq-url"
            )


async def _messages(connection: AbstractConnection, queue: str) -> int | None:
    """Return how many messages a queue holds, None where there is none of that name."""
    channel = await connection.channel()
    try:
        found = await channel.declare_queue(queue, passive=True)
    except ChannelNotFoundEntity:
        return None
    await channel.close()
    return found.declaration_result.message_count or 0


async def connect_rabbitmq(url: str, name: str) -> AbstractConnection:
    """Connect under a name.

    Raises:
        DemoError: in one line, with the command that helps.
    """
    vhost, user = _name(url), urlsplit(url).username
    try:
        return await aio_pika.connect(url, timeout=CONNECT_TIMEOUT, client_properties={"connection_name": name})
    except (OSError, TimeoutError) as error:
        text = str(error) or type(error).__name__
        raise DemoError(
            f"RabbitMQ at {_place(url)}: {text}: run scripts/servers, or set BILLING_RABBITMQ_URL"
        ) from None
    except AMQPError:  # the broker closes the connection instead of opening the virtual host
        raise DemoError(
            f"RabbitMQ at {_place(url)} has no virtual host {vhost!r} for {user!r}: run scripts/servers, or"
            f" rabbitmqctl add_vhost {vhost}; rabbitmqctl set_permissions -p {vhost} {user} '.*' '.*' '.*'"
        ) from None


async def _administrator(servers: Servers) -> asyncpg.Connection:
    url = beside(servers.database_url, "postgres")
    try:
        return await asyncpg.connect(url, timeout=CONNECT_TIMEOUT)
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        text = str(error) or type(error).__name__
        raise DemoError(
            f"PostgreSQL at {_place(url)}: {text}: run scripts/servers, or set BILLING_DATABASE_URL"
        ) from None


def shown(url: str) -> str:
    """Return an address for people to use: with its password only where that is the local servers' known one."""
    parts = urlsplit(url)
    known = parts.password in {None, KNOWN_PASSWORD}
    return url if known else url.replace(f":{parts.password}@", ":***@")


def _name(url: str) -> str:
    return unquote(urlsplit(url).path.removeprefix("/"))


def _place(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
