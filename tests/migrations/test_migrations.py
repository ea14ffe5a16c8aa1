"""The schema: migrations and models agree, there is a way back, and instances wait for each other."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlmodel import SQLModel

import service.billing.tables
import service.reliability.tables  # noqa: F401 - defines tables
from service.database import migrate, require_current_schema
from service.reliability.errors import SchemaError
from tests.support import databases
from tests.support.waiting import eventually


@pytest.fixture
async def empty_url() -> AsyncIterator[str]:
    """A database without any table."""
    async with databases.new_database() as name:
        yield databases.url_of(name)


async def differences(url: str) -> list[Any]:
    """Return what autogenerate would still change."""

    def compare(connection: Connection) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return compare_metadata(context, SQLModel.metadata)

    engine = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"))
    async with engine.connect() as connection:
        found = await connection.run_sync(compare)
    await engine.dispose()
    return found


async def tables(url: str) -> set[str]:
    """Return the names of all tables."""
    connection = await asyncpg.connect(url)
    rows = await connection.fetch("select table_name from information_schema.tables where table_schema = 'public'")
    await connection.close()
    return {row["table_name"] for row in rows}


async def test_migrations_lead_to_what_the_models_say(empty_url: str) -> None:
    """L08: types, defaults, nullability, indexes."""
    await asyncio.to_thread(migrate, empty_url)
    assert await differences(empty_url) == []
    assert await tables(empty_url) == {
        "alembic_version",
        "invoice_lines",
        "invoices",
        "outbox_actions",
        "outbox_messages",
        "parking_actions",
        "processed_messages",
        "relay_lease",
        "started_messages",
    }


# Autogenerate compares neither checks nor names nor the condition of an index; the catalogue tells them all.
CATALOGUE = """
select table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable || ' ' || is_identity || ' '
    || coalesce(identity_generation, '') || ' ' || coalesce(column_default, '')
from information_schema.columns where table_schema = 'public'
union all
select conrelid::regclass || ' ' || conname || ' ' || pg_get_constraintdef(oid)
from pg_constraint where connamespace = 'public'::regnamespace
union all
select indexdef from pg_indexes where schemaname = 'public'
"""


async def catalogue(url: str) -> set[str]:
    """Return columns, constraints and indexes as the server describes them, without those of alembic itself."""
    connection = await asyncpg.connect(url)
    found = {row[0] for row in await connection.fetch(CATALOGUE) if "alembic_version" not in row[0]}
    await connection.close()
    return found


async def create_all(url: str) -> None:
    """Make the tables from the models, without any migration."""
    engine = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"))
    async with engine.begin() as connection:
        await connection.run_sync(SQLModel.metadata.create_all)
    await engine.dispose()


async def test_the_server_describes_migrated_tables_as_those_of_the_models(empty_url: str, database_url: str) -> None:
    """L08: with every check, every constraint's name and the condition of every index."""
    await create_all(empty_url)
    assert await catalogue(database_url) == await catalogue(empty_url)
    assert len(await catalogue(empty_url)) > 50


async def test_alembic_by_hand_says_which_setting_it_misses() -> None:
    environment = {"PATH": _path()}
    process = await asyncio.create_subprocess_exec(
        "alembic", "current", env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode != 0
    assert b"BILLING_DATABASE_URL is not set" in output
    assert b"Traceback" not in output


MIGRATION_LOCK = 0x62696C6C_6D696772  # "billmigr", as alembic/env.py has it: instances of two versions must agree


async def test_instances_that_migrate_at_once_wait_for_each_other(empty_url: str) -> None:
    """The lock is held until all four wait for it, so that none is through before the others have begun."""
    gate = await asyncpg.connect(empty_url)
    await gate.fetchval("select pg_advisory_lock($1)", MIGRATION_LOCK)
    migrations = [
        await asyncio.create_subprocess_exec(
            "python", "-m", "service", "migrate", env={"BILLING_DATABASE_URL": empty_url, "PATH": _path()}
        )
        for _ in range(4)
    ]
    waiting = (
        "select count(*) from pg_locks join pg_database on pg_database.oid = pg_locks.database"
        " where datname = current_database() and locktype = 'advisory' and not granted"
    )
    await eventually(lambda: gate.fetchval(waiting), lambda n: n == 4, within=60)
    assert await tables(empty_url) == set()
    await gate.close()
    assert [await migration.wait() for migration in migrations] == [0, 0, 0, 0]
    assert await differences(empty_url) == []


async def test_there_is_a_way_down_and_up_again(empty_url: str) -> None:
    await asyncio.to_thread(migrate, empty_url)
    config = Config("alembic.ini")
    config.attributes["url"] = empty_url
    await asyncio.to_thread(command.downgrade, config, "base")
    assert await tables(empty_url) == {"alembic_version"}
    await asyncio.to_thread(migrate, empty_url)
    assert await differences(empty_url) == []


async def test_a_migration_in_the_process_leaves_the_loggers_alone(empty_url: str) -> None:
    """L06: a log configuration in alembic.ini would disable every logger that exists."""
    logger = logging.getLogger("service.reliability.settlement")
    await asyncio.to_thread(migrate, empty_url)
    assert not logger.disabled
    assert not logging.getLogger("service").disabled


async def test_a_service_refuses_tables_that_are_missing_and_accepts_later_ones(empty_url: str) -> None:
    connection = await asyncpg.connect(empty_url)
    with pytest.raises(SchemaError, match="found revision none, wanted 0004: run 'billing migrate'"):
        await require_current_schema(connection)
    await asyncio.to_thread(migrate, empty_url)
    await require_current_schema(connection)
    await connection.execute("update alembic_version set version_num = '9999'")
    await require_current_schema(connection)
    await connection.close()


async def test_a_migration_that_cannot_connect_says_so_in_one_line() -> None:
    with pytest.raises(SchemaError) as refused:
        await asyncio.to_thread(migrate, "postgresql://billing:S3cr3t@127.0.0.1:1/none")
    assert "\n" not in str(refused.value)
    assert "S3cr3t" not in str(refused.value)


def _path() -> str:
    import sys
    from pathlib import Path

    return str(Path(sys.executable).parent)
