"""PostgreSQL for tests: a template migrated once per worker, and a clone of it for each test.

Databases are named after the process that made them, so that runs beside each other do not meet and the leftovers of a
killed run are found by its dead process.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import asyncpg

from service.database import migrate

PREFIX = "billing_test_"

_numbers = count(1)


def admin_url() -> str:
    """Return the address of a database whose role may create others."""
    return os.environ.get("BILLING_TEST_DATABASE_URL", "postgresql://billing:billing@127.0.0.1:5432/billing")


def url_of(database: str) -> str:
    """Return the address of a database on the test server."""
    return admin_url().rsplit("/", 1)[0] + f"/{database}"


@asynccontextmanager
async def new_database(template: str | None = None) -> AsyncIterator[str]:
    """Make a database, empty or as a clone of `template`; yield its name; drop it at the end.

    One of that name is a dead process's whose id is ours now: in a fresh container each run has about the same ids.
    """
    name = f"{PREFIX}{os.getpid()}_{next(_numbers)}"
    await execute(f"drop database if exists {name} with (force)")
    await execute(f"create database {name}" + (f" template {template}" if template else ""))
    try:
        yield name
    finally:
        await execute(f"drop database {name} with (force)")


@asynccontextmanager
async def migrated_template() -> AsyncIterator[str]:
    """Make a database at the newest revision, to be cloned."""
    await remove_leftovers()
    async with new_database() as name:
        await asyncio.to_thread(migrate, url_of(name))
        yield name


async def execute(statement: str) -> None:
    """Execute a statement as the administrator."""
    connection = await asyncpg.connect(admin_url())
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def is_alive(process: int) -> bool:
    """Tell whether there is such a process."""
    return Path(f"/proc/{process}").exists()


async def remove_leftovers() -> None:
    """Drop the databases of test processes that are no more."""
    connection = await asyncpg.connect(admin_url())
    try:
        for row in await connection.fetch("select datname from pg_database"):
            match = re.fullmatch(rf"{PREFIX}(\d+)_\d+", row["datname"])
            if match and not is_alive(int(match[1])):
                await connection.execute(f"drop database if exists {match[0]} with (force)")
    finally:
        await connection.close()
