"""The demo, which judges the service from outside: it runs, it is careful, and it sees what is broken."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from tests.support import databases
from tests.support.databases import is_alive
from tests.support.rabbit import BROKER, USER, rabbitmqctl

PROJECT = Path(__file__).parents[2]
PREFIX = "billing-demo-test-"

CREDULOUS = """
from service.cli import main
from service.reliability.inbox import Claim
from service.reliability.unit_of_work import PostgresUnitOfWork

claim = PostgresUnitOfWork.claim

async def claim_and_take_for_new(*arguments):
    await claim(*arguments)
    return Claim.NEW

PostgresUnitOfWork.claim = claim_and_take_for_new
main()
"""

TRUSTING = """
from service.cli import main
from service.reliability.publisher import Confirmed, ConfirmingPublisher

publish = ConfirmingPublisher.publish

async def publish_and_take_for_confirmed(*arguments):
    await publish(*arguments)
    return Confirmed()

ConfirmingPublisher.publish = publish_and_take_for_confirmed
main()
"""


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end, with its logs in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "service", "demo", "--orders", "60", "--json", *arguments],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=PROJECT,
    )


def problems_seen(service: str, place: tuple[str, ...], folder: Path) -> list[str]:
    """Run the demo against a broken service, given as its program; return what it finds wrong with the guarantees."""
    script = folder / "broken.py"
    script.write_text(service)
    done = demo(folder, *place, f"--service-command={sys.executable} {script}")
    assert done.returncode == 1
    return [problem for check in json.loads(done.stdout)["guarantees"] for problem in check["problems"]]


@pytest.fixture
async def place() -> AsyncIterator[tuple[str, ...]]:
    """A virtual host and a database for this process: demos beside each other would refuse."""
    for name in rabbitmqctl("list_vhosts", "name").split():
        match = re.fullmatch(rf"{PREFIX}(\d+)", name)
        if match and (not is_alive(int(match[1])) or int(match[1]) == os.getpid()):
            rabbitmqctl("delete_vhost", name)
            await databases.execute(f'drop database if exists "{name}" with (force)')
    name = f"{PREFIX}{os.getpid()}"
    rabbitmqctl("add_vhost", name)
    rabbitmqctl("set_permissions", "-p", name, USER, ".*", ".*", ".*")
    yield (
        f"--database-url={databases.url_of(name)}",
        f"--rabbitmq-url={BROKER.url(name)}",
    )
    rabbitmqctl("delete_vhost", name)
    await databases.execute(f'drop database if exists "{name}" with (force)')


@pytest.mark.timeout(120)
def test_everything_holds(place: tuple[str, ...], tmp_path: Path) -> None:
    """With work really in flight at the kill, and events really held back."""
    done = demo(tmp_path, *place)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["ok"]
    assert not list(tmp_path.iterdir()), "the logs of a success are left"
    assert {row["kind"]: row["sent"] for row in result["sent"]}["orders"] == 60
    assert {check["guarantee"] for check in result["guarantees"]} == {"G1", "G2", "G3", "G5", "G6", "G8", "G9"}
    assert not [line for line in (*result["sent"], *result["guarantees"]) if line["problems"]]


@pytest.mark.timeout(120)
def test_a_missing_inbox_is_seen(place: tuple[str, ...], tmp_path: Path) -> None:
    """The service claims, and takes no notice of the answer: an order gets an invoice under another's message id."""
    problems = problems_seen(CREDULOUS, place, tmp_path)
    assert sum("an invoice that must not be" in problem for problem in problems) == 3
    assert "order-0: 2 events, not 1" in problems


@pytest.mark.timeout(120)
def test_a_relay_that_does_not_look_at_the_confirms_is_seen(place: tuple[str, ...], tmp_path: Path) -> None:
    """Events that nobody was bound for are marked as sent, and their late consumer never gets them."""
    problems = problems_seen(TRUSTING, place, tmp_path)
    assert any(re.fullmatch("invoice.voided of cancellation-.*: did not arrive", problem) for problem in problems)
    assert "no event was held as unroutable" in problems


@pytest.mark.parametrize("option", ["--database-url=postgresql://h/demographics", "--rabbitmq-url=amqp://h/billing"])
def test_what_is_no_demos_is_not_touched(option: str, tmp_path: Path) -> None:
    """Everything in it would be deleted: refused by the name, before anything is asked."""
    done = demo(tmp_path, option)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"billing: refuses to wipe the (database|virtual host) '(billing|demographics)': .*\n", done.stderr
    )


async def test_a_database_that_no_demo_made_is_not_wiped(place: tuple[str, ...], tmp_path: Path) -> None:
    """Its name says demo; it holds a table that somebody made."""
    async with databases.new_database() as name:
        await databases.execute(f'alter database "{name}" rename to "{name}_demo"')
        connection = await asyncpg.connect(databases.url_of(f"{name}_demo"))
        await connection.execute("create table people (name text)")
        done = await asyncio.to_thread(demo, tmp_path, f"--database-url={databases.url_of(f'{name}_demo')}", place[1])
        assert (done.returncode, done.stdout) == (1, "")
        assert "no demo made it, and it is not empty" in done.stderr
        assert await connection.fetchval("select count(*) from people") == 0
        assert "--database-url" in done.stderr
        await connection.close()
        await databases.execute(f'alter database "{name}_demo" rename to "{name}"')


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--database-url=postgresql://billing:S3cr3t@127.0.0.1:1/demo", r"PostgreSQL at 127.0.0.1:1: .*"),
        ("--rabbitmq-url=amqp://billing:S3cr3t@127.0.0.1:1/demo", r"RabbitMQ at 127.0.0.1:1: .*"),
        (
            f"--rabbitmq-url={BROKER.url('no-demo')}",
            r"RabbitMQ .* has no virtual host 'no-demo'.*",
        ),
    ],
)
def test_what_is_not_there_is_named(option: str, line: str, tmp_path: Path) -> None:
    """In one line, with what to do."""
    done = demo(tmp_path, "--database-url=postgresql://billing:billing@127.0.0.1:5432/demo_refused", option)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"billing: {line}: run scripts/servers, or .*\n", done.stderr)
    assert "S3cr3t" not in done.stderr
