"""G9 and the start: servers that are not there yet, SIGTERM in the middle of work, several instances."""

import asyncio
import json
import signal
from pathlib import Path

import asyncpg
import pytest

from tests.support.databases import admin_url
from tests.support.orders import placed
from tests.support.process import ServiceProcess
from tests.support.rabbit import EVENTS, USER, Rabbit, rabbitmqctl
from tests.support.waiting import eventually


def order(number: int) -> str:
    """Return an order id."""
    return f"5d2e1f0a-0000-4000-8000-{number:012d}"


async def test_the_service_waits_for_servers_that_are_not_there_yet(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, unused_tcp_port: int
) -> None:
    """It answers that it is alive and not ready, and comes up by itself: database, schema, virtual host."""
    name = f"billing_test_late_{unused_tcp_port}"
    url = environment["BILLING_DATABASE_URL"].rsplit("/", 1)[0] + f"/{name}"
    vhost = f"{rabbit.url.rsplit('/', 1)[1]}-late"
    late = environment | {"BILLING_DATABASE_URL": url, "BILLING_RABBITMQ_URL": f"{rabbit.url}-late"}
    service = ServiceProcess(late, tmp_path / "late.log").start()
    try:
        await service.logged("server_not_available")
        assert (await service.get("/livez")).status_code == 200
        answer = await service.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["parts"] == {"consumer": False, "database": False, "publisher": False, "relay": False}

        admin = await asyncpg.connect(admin_url())
        await admin.execute(f"create database {name}")
        await eventually(_last(service, "server_not_available"), lambda text: "run 'billing migrate'" in text)
        migrate = ServiceProcess(late, tmp_path / "migrate.log", ("-m", "service", "migrate")).start()
        assert await migrate.wait() == 0
        await eventually(_last(service, "server_not_available", "server"), lambda server: server == "broker")
        rabbitmqctl("add_vhost", vhost)
        rabbitmqctl("set_permissions", "-p", vhost, USER, ".*", ".*", ".*")
        await service.ready()
        assert await service.stop() == 0
    finally:
        service.kill()
        rabbitmqctl("delete_vhost", vhost)
        await admin.execute(f"drop database {name} with (force)")
        await admin.close()


async def test_sigterm_while_waiting_ends_at_once(environment: dict[str, str], tmp_path: Path) -> None:
    """A service that never got to work stops like any other."""
    nowhere = environment | {"BILLING_DATABASE_URL": "postgresql://billing:billing@127.0.0.1:1/none"}
    service = ServiceProcess(nowhere, tmp_path / "waiting.log").start()
    await service.logged("server_not_available")
    assert await service.stop(within=5) == 0


async def test_sigterm_while_a_migration_waits_for_its_turn_ends_at_once(
    environment: dict[str, str], tmp_path: Path, connection: asyncpg.Connection
) -> None:
    """Another instance migrates, for as long as it takes."""
    other = await asyncpg.connect(environment["BILLING_DATABASE_URL"])
    migrating = other.transaction()
    await migrating.start()
    await other.execute("select pg_advisory_xact_lock(7091318301219448690)")
    service = ServiceProcess(environment, tmp_path / "service.log", ("-m", "service", "run", "--migrate")).start()
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    await eventually(lambda: connection.fetchval(waiting), lambda n: n == 1)
    assert await service.stop(within=5) == 0
    assert "Traceback" not in service.log
    await migrating.rollback()
    await other.close()


async def test_sigterm_while_the_schema_cannot_be_read_ends_at_once(
    environment: dict[str, str], tmp_path: Path, connection: asyncpg.Connection
) -> None:
    """A query that waits for a lock is left where it is."""
    other = await asyncpg.connect(environment["BILLING_DATABASE_URL"])
    altering = other.transaction()
    await altering.start()
    await other.execute("lock table alembic_version in access exclusive mode")
    service = ServiceProcess(environment, tmp_path / "service.log").start()
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    await eventually(lambda: connection.fetchval(waiting), lambda n: n == 1)
    assert await service.stop(within=5) == 0
    await altering.rollback()
    await other.close()


async def test_sigterm_before_a_database_that_is_not_there_ends_at_once(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """With --migrate, nothing was ever opened that could be closed."""
    nowhere = environment | {"BILLING_DATABASE_URL": "postgresql://billing:billing@127.0.0.1:1/none"}
    service = ServiceProcess(nowhere, tmp_path / "waiting.log", ("-m", "service", "run", "--migrate")).start()
    await service.logged("server_not_available")
    assert await service.stop(within=5) == 0
    assert "Traceback" not in service.log


@pytest.mark.guarantee("G9")
async def test_sigterm_finishes_what_is_in_flight(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """K01: the consumer is cancelled first; started handlers commit and ack; the rest is back in the queue, ready."""
    await rabbit.collect_events()
    service = await ServiceProcess(environment | {"BILLING_CONCURRENCY": "5"}, tmp_path / "service.log").start().ready()
    await connection.execute(
        """
        create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(1.5); return new; end $$;
        create trigger slow before insert on invoices for each row execute function slow();
        """
    )
    for number in range(20):
        await rabbit.publish(*placed(order(number)))
    sleeping = "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'"
    await eventually(lambda: connection.fetchval(sleeping), lambda n: n == 5)
    assert await service.stop(within=12) == 0
    assert await connection.fetchval("select count(*) from invoices") == 5
    assert await rabbit.count("orders.work") == 15
    assert await connection.fetchval("select count(*) from outbox_messages where sent_at is null") == 0
    assert await rabbit.count(EVENTS) == 5
    assert service.records("service_stopped")
    assert not service.records("deliveries_cut_off")

    await connection.execute("drop trigger slow on invoices")
    second = await ServiceProcess(environment, tmp_path / "second.log").start().ready()
    await eventually(lambda: rabbit.count(EVENTS), lambda n: n == 20)
    assert await second.stop() == 0


@pytest.mark.guarantee("G9")
async def test_a_handler_that_outlives_the_budget_is_rolled_back(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """Exit 0 within SHUTDOWN_TIMEOUT, whatever a handler does; its message is back in the queue."""
    service = ServiceProcess(environment | {"BILLING_SHUTDOWN_TIMEOUT": "6"}, tmp_path / "service.log").start()
    await service.ready()
    blocker = connection.transaction()
    await blocker.start()
    await connection.execute("lock table invoices in exclusive mode")
    await rabbit.publish(*placed(order(1)))
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    await eventually(lambda: connection.fetchval(waiting), lambda n: n == 1)
    loop = asyncio.get_running_loop()
    asked = loop.time()
    assert await service.stop(within=10) == 0
    assert loop.time() - asked < 6
    await blocker.rollback()
    assert await connection.fetchval("select count(*) from processed_messages") == 0
    await eventually(lambda: rabbit.count("orders.work"), lambda n: n == 1)


async def test_two_hundred_messages_in_four_copies_on_three_instances_have_one_effect_each(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """E01, and a rolling restart in the middle: invisible to producers and consumers."""
    await rabbit.collect_events()
    instances = [
        ServiceProcess(environment | {"BILLING_PREFETCH": "20"}, tmp_path / f"instance-{n}.log").start()
        for n in range(3)
    ]
    for instance in instances:
        await instance.ready()
    copies = [order(number) for number in range(200)]
    for half in (copies[:100], copies[100:]):
        for _ in range(4):
            await asyncio.gather(*(rabbit.publish(*placed(o), message_id=f"message-{o}") for o in half))
        instance = instances.pop(0)
        assert await instance.stop() == 0
        instances.append(await instance.start().ready())
    await eventually(lambda: rabbit.count(EVENTS), lambda n: n >= 200, within=30)
    await eventually(lambda: rabbit.count("orders.work"), lambda n: n == 0)
    for instance in instances:
        assert await instance.stop() == 0
    assert await connection.fetchval("select count(*) from invoices") == 200
    assert await connection.fetchval("select count(*) from outbox_messages") == 200
    assert await rabbit.count("orders.work") == 0
    assert await rabbit.count("orders.parking") == 0
    events = await rabbit.events()
    assert sorted({json.loads(event.body)["order_id"] for event in events}) == copies
    assert len(events) == 200


@pytest.mark.guarantee("G1")
async def test_a_killed_instance_hands_its_work_to_the_other(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """SIGKILL in the middle of a stream: the other consumes and relays on."""
    await rabbit.collect_events()
    first, second = (ServiceProcess(environment, tmp_path / f"{n}.log").start() for n in ("first", "second"))
    await first.ready()
    await second.ready()
    for number in range(300):
        await rabbit.publish(*placed(order(number)))
        if number == 150:
            active = first if await _is_active(first) else second
            active.signal(signal.SIGKILL)
    survivor = second if active is first else first
    await eventually(lambda: connection.fetchval("select count(*) from invoices"), lambda n: n == 300, within=30)
    await eventually(
        lambda: connection.fetchval("select count(*) from outbox_messages where sent_at is null"), lambda n: n == 0
    )
    assert await survivor.stop() == 0
    active.kill()
    assert len({event.message_id for event in await rabbit.events()}) == 300
    assert await connection.fetchval("select count(*) from outbox_messages") == 300


def _last(service: ServiceProcess, event: str, field: str = "explanation"):
    async def read() -> str:
        return str(service.records(event)[-1][field])

    return read


async def _is_active(service: ServiceProcess) -> bool:
    return "billing_relay_active 1.0" in (await service.get("/metrics")).text
