"""The command line as people and programs use it."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from tests.support.orders import placed
from tests.support.process import ServiceProcess
from tests.support.rabbit import Rabbit
from tests.support.waiting import eventually

PROJECT = Path(__file__).parents[2]
SECRET = "S3cr3t-pass"


def billing(*arguments: str, environment: dict[str, str], stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        env={"PATH": "/usr/bin:/bin"} | environment,
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
        cwd=PROJECT,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


async def test_published_samples_are_processed(
    service: ServiceProcess, environment: dict[str, str], rabbit: Rabbit
) -> None:
    """`publish` is confirmed and tells the message ids, one a line."""
    done = billing("publish", "order.placed", "--count", "3", environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    records = await service.logged("delivery_settled", times=3)
    assert {record["message_id"] for record in records} == set(done.stdout.split())
    order = "5d2e1f0a-0000-4000-8000-000000000001"
    for number, event_type in enumerate(("order.placed", "order.paid"), start=4):
        assert billing("publish", event_type, "--order-id", order, environment=environment).returncode == 0
        records = await service.logged("delivery_settled", times=number)
        assert records[-1]["type"] == event_type


async def test_a_body_from_a_file_is_sent_as_it_is(
    service: ServiceProcess, environment: dict[str, str], rabbit: Rabbit, tmp_path: Path
) -> None:
    """So that wrong ones can be tried, from a file and from standard input."""
    body = tmp_path / "body.json"
    body.write_bytes(b"{wrong")
    assert billing("publish", "order.placed", str(body), environment=environment).returncode == 0
    assert billing("publish", "order.placed", "-", environment=environment, stdin=placed("x")[1]).returncode == 0
    await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 2)

    listed = billing("parking", "list", "--json", environment=environment)
    assert listed.returncode == 0
    report = json.loads(listed.stdout)
    assert report["total"] == 2
    assert report["reasons"] == {"unreadable": 1, "invalid": 1}
    assert {message["attempts"] for message in report["messages"]} == {0}
    assert "2 parked (unreadable: 1, invalid: 1)" in billing("parking", "list", environment=environment).stdout


async def test_a_strangers_id_is_shown_whole_and_is_no_markup(
    service: ServiceProcess, environment: dict[str, str], rabbit: Rabbit
) -> None:
    """What a producer sent must not break the list, nor be cut where the terminal is narrow."""
    ids = {"[/x]", "[red]id", "11111111-2222-3333-4444-555555555555"}
    for message_id in ids:
        await rabbit.publish("order.placed", b"{", message_id=message_id)
    await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 3)
    done = billing("parking", "list", environment=environment)
    assert done.returncode == 0
    first_column = "".join(line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│"))
    assert all(message_id in first_column for message_id in ids)


async def test_publishing_where_nothing_is_declared_fails(environment: dict[str, str], rabbit: Rabbit) -> None:
    """Exit 1 and a line that says what the broker said."""
    done = billing("publish", "order.placed", environment=environment)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("billing: returned: NOT_FOUND - no exchange 'orders'")


async def test_topology_is_checked_applied_and_found_right(environment: dict[str, str], rabbit: Rabbit) -> None:
    """`check` says what is missing and changes nothing; `apply` makes it."""
    missing = billing("topology", "check", environment=environment)
    assert missing.returncode == 1
    assert "queue orders.work: missing" in missing.stderr
    assert await rabbit.count("orders.work") == -1
    assert billing("topology", "apply", environment=environment).returncode == 0
    done = billing("topology", "check", environment=environment)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "not compared: bindings, policies, replicas: BILLING_RABBITMQ_MANAGEMENT_URL is not set",
        "what was compared is as wanted",
    ]
    done = billing("topology", "check", environment=environment | {"BILLING_TOPOLOGY": "verify"})
    assert done.returncode == 0
    assert "not compared: arguments, with TOPOLOGY=verify: they may be policies as well" in done.stderr


def test_the_topology_is_exported_without_any_server_to_stdout_or_a_file(tmp_path: Path) -> None:
    """And a file that cannot be written is wrong usage."""
    environment = {"BILLING_RABBITMQ_URL": f"amqp://u:{SECRET}@127.0.0.1:1/their%2Fhost", "BILLING_RETRY_DELAYS": "7"}
    done = billing("topology", "export", environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    file = tmp_path / "definitions.json"
    assert billing("topology", "export", "--file", str(file), environment=environment).stdout == ""
    assert json.loads(file.read_text()) == json.loads(done.stdout)
    assert SECRET not in done.stdout
    queues = json.loads(done.stdout)["queues"]
    assert {(q["vhost"], q["name"]) for q in queues} == {
        ("their/host", f"orders.{name}") for name in ("work", "wait.7s", "parking")
    }
    assert billing("topology", "export", "--file", "/none/x", environment=environment).returncode == 2


async def test_a_topology_mismatch_stops_the_start(
    environment: dict[str, str], rabbit: Rabbit, database_url: str
) -> None:
    """G16: queue, argument, found, wanted; exit 1; nothing half-consumed."""
    await rabbit.channel.declare_queue("orders.parking", durable=True, arguments={"x-queue-type": "quorum"})
    done = billing("run", environment=environment | {"BILLING_HTTP_PORT": "0"})
    assert done.returncode == 1
    assert "queue orders.parking: x-overflow: found none, wanted reject-publish" in done.stderr
    assert await rabbit.consumers("orders.work") == 0


async def test_status_tells_queues_outbox_and_relay(
    service: ServiceProcess, environment: dict[str, str], rabbit: Rabbit
) -> None:
    """As JSON for programs, as a table for people."""
    done = billing("status", "--json", environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["queues"]["orders.work"] == {"ready": 0, "consumers": 1}
    assert report["queues"]["orders.parking"] == {"ready": 0, "consumers": 0}
    assert (report["ready"], report["waiting"], report["parked"], report["parked_alarm"]) == (0, 0, 0, 1)
    assert (report["unacknowledged"], report["held"], report["parked_oldest_seconds"]) == (None, None, None)
    assert report["outbox_unsent"] == 0
    assert report["relay_active"] is True
    assert re.fullmatch(r".+, process \d+", report["relay"]["instance"])
    table = billing("status", environment=environment).stdout
    assert "orders.parking" in table
    assert "unacknowledged" in table
    assert "not known: see BILLING_RABBITMQ_MANAGEMENT_URL" in table
    assert f"active: {report['relay']['instance']}, for " in table


async def test_status_fails_where_too_much_is_parked(
    service: ServiceProcess, environment: dict[str, str], rabbit: Rabbit
) -> None:
    """One line says how much, from which number on it is too much, and what to do; 0 is never."""
    for _ in range(2):
        await rabbit.publish("order.placed", b"{")
    await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 2)
    done = billing("status", "--oldest", "--json", environment=environment)
    assert (done.returncode, done.stderr) == (1, "billing: 2 parked, alarm from 1: see 'billing parking list'\n")
    report = json.loads(done.stdout)
    assert 0 <= report["parked_oldest_seconds"] < 60
    assert report["problems"] == ["2 parked, alarm from 1: see 'billing parking list'"]
    assert "2 (alarm from 1)" in billing("status", environment=environment).stdout
    for alarm in ("3", "0"):
        assert billing("status", environment=environment | {"BILLING_PARKED_ALARM": alarm}).returncode == 0


async def test_status_fails_where_nobody_works(
    environment: dict[str, str], rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """Nobody consumes, an event is old, and no relay is there to send it: a line for each, all at once."""
    assert billing("topology", "apply", environment=environment).returncode == 0
    await connection.execute(
        "insert into outbox_messages (id, exchange, routing_key, type, key, payload, headers, created_at)"
        " values (gen_random_uuid(), 'billing', 'x', 'x', 'x', '', '{}', now() - interval '400 s')"
    )
    done = billing("status", environment=environment)
    assert done.returncode == 1
    first, second, third = done.stderr.splitlines()
    assert first == "billing: queue orders.work has no consumer: no instance works"
    assert re.fullmatch(r"billing: the oldest unsent event is 4\d\d s old, alarm from 300 s", second)
    assert third == "billing: no relay is active, and 1 events wait to leave"


def test_status_without_servers_says_so_and_fails() -> None:
    """Exit 1, a line for each problem, no traceback."""
    environment = {
        "BILLING_DATABASE_URL": f"postgresql://u:{SECRET}@127.0.0.1:1/x",
        "BILLING_RABBITMQ_URL": f"amqp://u:{SECRET}@127.0.0.1:1/x",
    }
    done = billing("status", environment=environment)
    assert done.returncode == 1
    broker, database = done.stderr.splitlines()
    assert broker.startswith("billing: the broker cannot be asked: ")
    assert database.startswith("billing: the database cannot be asked: ")
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BILLING_DATABASE_URL", f"mysql://u:{SECRET}@h/x"),
        ("BILLING_DATABASE_URL", SECRET),
        ("BILLING_RABBITMQ_URL", f"http://u:{SECRET}@h"),
        ("BILLING_RABBITMQ_URL", f"amqp://u:{SECRET}@[broken/x"),
        ("BILLING_RABBITMQ_MANAGEMENT_URL", f"amqp://u:{SECRET}@h:15672"),
        ("BILLING_PARKED_ALARM", "-1"),
        ("BILLING_PREFETCH", "0"),
        ("BILLING_RETRY_DELAYS", "5,soon"),
        ("BILLING_RETRY_STRATEGY", "hope"),
        ("BILLING_HTTP_PORT", "99999"),
        ("BILLING_INBOX_RETENTION", "1"),
    ],
)
def test_a_wrong_setting_stops_the_start_with_one_line(name: str, value: str) -> None:
    """L01: the line names the setting and what is allowed, and no secret, not even another setting's."""
    urls = {
        "BILLING_DATABASE_URL": f"postgresql://u:{SECRET}@127.0.0.1:1/x",
        "BILLING_RABBITMQ_URL": f"amqp://u:{SECRET}@127.0.0.1:1/x",
    }
    done = billing("run", environment=urls | {name: value})
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert name in done.stderr
    assert SECRET not in done.stderr


def test_wrong_usage_exits_2() -> None:
    """And says what is allowed."""
    done = billing("publish", "order.exploded", environment={})
    assert done.returncode == 2
    assert "order.placed" in done.stderr


def test_the_asyncapi_document_is_printed_without_any_server_or_setting() -> None:
    """It is the same everywhere, so that it can be compared with what is committed."""
    done = billing("asyncapi", environment={"BILLING_MAX_ATTEMPTS": "7"})
    assert done.returncode == 0
    assert done.stdout == (PROJECT / "asyncapi.yaml").read_text()
    for message in (
        "order.placed",
        "order.paid",
        "order.cancelled",
        "invoice.created",
        "invoice.paid",
        "invoice.voided",
    ):
        assert message in done.stdout


async def test_a_misspelled_setting_is_told_with_the_one_that_may_be_meant(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """It would be ignored without a word otherwise."""
    service = ServiceProcess(environment | {"BILLING_PREFETC": "10"}, tmp_path / "log").start()
    [record] = await service.logged("setting_unknown")
    assert (record["name"], record["meant"]) == ("BILLING_PREFETC", "BILLING_PREFETCH")
    assert await service.stop() == 0


async def test_a_port_that_is_taken_is_named_with_its_settings(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = billing("run", environment=environment | {"BILLING_HTTP_PORT": str(port)})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"billing: cannot listen on 127.0.0.1:{port} (BILLING_HTTP_HOST, BILLING_HTTP_PORT): Address already in use"
    )


async def test_parked_messages_are_listed_shown_replayed_and_discarded(
    service: ServiceProcess, environment: dict[str, str], rabbit: Rabbit, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    """The operator's way through: what is there, what is wrong with one, mend it and send it again, drop the rest."""
    event_type, wrong = placed("5d2e1f0a-0000-4000-8000-000000000001", currency="EURO")
    await rabbit.publish(event_type, wrong, message_id="wrong")
    for number in range(3):
        await rabbit.publish("order.eaten", b"{}", routing_key="order.placed", message_id=f"eaten-{number}")
    await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 4)

    listed = json.loads(billing("parking", "list", "--reason", "invalid", "--json", environment=environment).stdout)
    assert (listed["total"], listed["matching"], listed["reasons"]) == (4, 1, {"invalid": 1})
    assert "currency" in listed["messages"][0]["explanation"]
    assert "3 of 4 parked" in billing("parking", "list", "--type", "order.eaten", environment=environment).stdout

    shown = billing("parking", "show", "wrong", environment=environment)
    assert json.loads(shown.stdout)["body"]["currency"] == "EURO"
    assert json.loads(shown.stdout)["body"]["customer_id"] == "[redacted]"
    assert json.loads(shown.stdout)["headers"]["x-parked-reason"] == "invalid"
    assert "customer-1" not in shown.stdout
    raw = billing("parking", "show", "wrong", "--raw", environment=environment)
    assert raw.stdout.encode() == wrong

    mended = raw.stdout.replace("EURO", "EUR").encode()
    done = billing("parking", "replay", "wrong", "--body", "-", "--why", "typo", environment=environment, stdin=mended)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("wrong: replayed as ")
    await eventually(lambda: connection.fetchval("select count(*) from invoices"), lambda n: n == 1)

    for nobody in (("replay", "nobody"), ("show", "nobody")):
        done = billing("parking", *nobody, environment=environment)
        assert (done.returncode, done.stdout) == (1, "")
        assert "no parked message" in done.stderr

    done = billing("parking", "discard", "--reason", "unknown-type", "--why", "not ours", environment=environment)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "discarded: 3")
    assert billing("parking", "list", environment=environment).stdout == "0 parked\n"
    rows = await connection.fetch("select action, why, actor, finished_at from parking_actions order by id")
    assert [(row["action"], row["why"]) for row in rows] == [("replay", "typo"), *[("discard", "not ours")] * 3]
    assert all("@" in row["actor"] and row["finished_at"] for row in rows)


async def test_parking_is_listed_without_a_database_but_not_replayed(
    environment: dict[str, str], rabbit: Rabbit
) -> None:
    """Looking must work at night, when the database is the trouble; a replay without an audit must not."""
    assert billing("topology", "apply", environment=environment).returncode == 0
    away = environment | {"BILLING_DATABASE_URL": "postgresql://billing@127.0.0.1:1/billing"}
    done = billing("parking", "list", environment=away)
    assert (done.returncode, done.stdout) == (0, "0 parked\n")
    assert "the database is away" in done.stderr
    done = billing("parking", "replay", "--all", environment=away)
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing was done" in done.stderr
