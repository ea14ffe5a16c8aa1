"""What tests have at hand: a database and a virtual host of their own on real servers. A missing server is an error."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.support import databases
from tests.support import process as process_support
from tests.support import rabbit as broker
from tests.support.process import ServiceProcess
from tests.support.rabbit import Rabbit
from tests.support.stock import TABLES


def pytest_report_header() -> str:
    """Say which broker the tests run against, by its own word."""
    try:
        return f"RabbitMQ: {broker.version_that_answers()} on {broker.BROKER.address}"
    except broker.BrokerError as error:
        if broker.BROKER.version is None:
            return f"RabbitMQ: {error}"  # many tests need none; those that do will fail
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def template() -> Iterator[str]:
    """A migrated database to clone, made once for each test process."""
    with asyncio.Runner() as runner:
        manager = databases.migrated_template()
        yield runner.run(manager.__aenter__())
        runner.run(manager.__aexit__(None, None, None))


@pytest.fixture
async def database_url(template: str) -> AsyncIterator[str]:
    """An empty, migrated database."""
    async with databases.new_database(template) as name:
        yield databases.url_of(name)


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to the test's database."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


@pytest.fixture
async def stock_url(database_url: str) -> str:
    """A migrated database with the stock's tables beside the service's."""
    connection = await asyncpg.connect(database_url)
    await connection.execute(TABLES)
    await connection.close()
    return database_url


@pytest.fixture(scope="session")
def vhost_url() -> Iterator[str]:
    """A virtual host, made once for each test process."""
    with broker.virtual_host() as url:
        yield url


@pytest.fixture
async def rabbit(vhost_url: str) -> AsyncIterator[Rabbit]:
    """A client of an empty virtual host."""
    async with broker.rabbit_client(vhost_url) as client:
        yield client


@pytest.fixture
def environment(database_url: str, rabbit: Rabbit) -> dict[str, str]:
    """Settings for the service as a process: short delays, and few connections, since many tests run at once."""
    return {
        "BILLING_CONCURRENCY": "8",
        "BILLING_DATABASE_URL": database_url,
        "BILLING_RABBITMQ_URL": rabbit.url,
        "BILLING_RETRY_DELAYS": "0.2,0.4",
        "BILLING_MAX_ATTEMPTS": "3",
        "BILLING_SHUTDOWN_TIMEOUT": "10",
        "TZ": "Asia/Kolkata",
    }


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Kill what a failing test left running."""
    yield
    while process_support.STARTED:
        process_support.STARTED.pop().kill()


@pytest.fixture
async def service(environment: dict[str, str], tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    """The service as a process, ready; stopped at the end if the test has not done so."""
    process = ServiceProcess(environment, tmp_path / "service.log", ("-m", "service", "run", "--migrate")).start()
    try:
        yield await process.ready()
        if process.is_running():
            assert await process.stop() == 0
    finally:
        process.kill()
