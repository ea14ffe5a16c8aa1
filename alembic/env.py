"""Run migrations: asynchronous, in one transaction, one instance at a time.

The address comes from `service.database.migrate`, or from BILLING_DATABASE_URL where `alembic` is run by hand. Logging
is left alone: in-process, the application has set it up.
"""

import asyncio
import os

import asyncpg
from alembic import context
from alembic.util import CommandError
from sqlalchemy import Connection, pool, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlmodel import SQLModel

import service.billing.tables
import service.reliability.tables  # noqa: F401 - defines tables

LOCK_KEY = 0x62696C6C_6D696772
"""Advisory lock of migrations ("billmigr" in ASCII): instances that start at once wait for each other."""


def migrate(connection: Connection) -> None:
    """Take the lock, then read the revision and bring it up to date, all in one transaction."""
    connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
    context.configure(
        connection=connection,
        target_metadata=SQLModel.metadata,
        compare_type=True,
        compare_server_default=True,
        transactional_ddl=True,
    )
    context.run_migrations()


async def main() -> None:
    """Connect and migrate."""
    address = context.config.attributes.get("url") or os.environ.get("BILLING_DATABASE_URL")
    if address is None:
        raise CommandError("BILLING_DATABASE_URL is not set: the address of the database to migrate")

    async def connect() -> asyncpg.Connection:
        # The driver reads the address itself: it knows sslmode and the like, which SQLAlchemy would pass on unread.
        return await asyncpg.connect(address, timeout=10)

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=pool.NullPool)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(migrate)
    finally:
        await engine.dispose()


asyncio.run(main())
