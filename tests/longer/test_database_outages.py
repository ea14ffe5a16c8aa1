"""G7: the database is stopped, crashes, refuses, is full or takes no writes, in earnest, under a stream of messages.

Each server here is a test's own. `resumed` is written into the test report: seconds from the return to the first
settled message, and to readiness.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import TypeVar
from urllib.parse import urlsplit

import asyncpg
import pytest

from service import database
from service.app import BillingUnitOfWork
from tests.support.outages import stock_postgres, stream, through
from tests.support.own_postgres import OwnPostgres, StopMode, standby_of
from tests.support.proxy import CutError, proxy_to
from tests.support.rabbit import EVENTS, Rabbit, close_connections
from tests.support.stock import TYPE, Received, add, settings, stock_service
from tests.support.waiting import eventually

T = TypeVar("T")
Record = Callable[[str, object], None]

PORTAL_SUSPENDED = b"s\0\0\0\4"
"""What the server says after the one row that was asked for."""

CUT_OFF = "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'billing'"


@pytest.fixture
async def postgres() -> AsyncIterator[OwnPostgres]:
    """A server of the test's own, with the stock's tables."""
    async with stock_postgres() as server:
        yield server


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_database_that_is_stopped_costs_nothing(
    mode: StopMode, postgres: OwnPostgres, rabbit: Rabbit, record_property: Record
) -> None:
    """Away for several probes, with everything prefetched that may be."""
    async with stream(postgres, rabbit) as seen:
        await postgres.stop(mode)
        await seen.is_told()
        await eventually(lambda: rabbit.count("orders.work"), lambda ready: ready > 40)
        await postgres.start()
        record_property("resumed", await seen.resumes())
        await seen.flows()
        seen.opened_gradually()
        assert max(seen.values("gate_opened", "probes")) >= 3
        await seen.ends_well(postgres)


@pytest.mark.guarantee("G7")
async def test_a_database_that_restarts_again_and_again_costs_nothing(
    postgres: OwnPostgres, rabbit: Rabbit, record_property: Record
) -> None:
    """F01: the pool is full of dead connections each time."""
    modes: tuple[StopMode, ...] = ("fast", "immediate", "fast")
    async with stream(postgres, rabbit) as seen:
        for mode in modes:
            await postgres.restart(mode)
            record_property(f"resumed {mode}", await seen.resumes())
            await seen.flows()
        assert seen.values("gate_opened", "probes")
        await seen.ends_well(postgres)


@pytest.mark.guarantee("G7")
async def test_a_database_that_gives_us_no_connection_costs_nothing(
    postgres: OwnPostgres, rabbit: Rabbit, record_property: Record
) -> None:
    """Connections are refused to us alone."""
    async with stream(postgres, rabbit) as seen:
        await postgres.sql("alter role billing connection limit 0")
        await postgres.sql(CUT_OFF)
        await seen.is_told()
        await postgres.sql("alter role billing connection limit -1")
        record_property("resumed", await seen.resumes())
        await seen.flows()
        seen.opened_gradually()
        await seen.ends_well(postgres)


@pytest.mark.guarantee("G7")
async def test_a_database_that_trusts_nobody_costs_nothing(
    postgres: OwnPostgres, rabbit: Rabbit, record_property: Record
) -> None:
    """A wrong pg_hba.conf, put right again."""
    rules = postgres.data / "pg_hba.conf"
    text = rules.read_text()
    async with stream(postgres, rabbit) as seen:
        rules.write_text("host all billing all reject\n" + text)
        await postgres.sql("select pg_reload_conf()")
        await postgres.sql(CUT_OFF)
        await seen.is_told()
        rules.write_text(text)
        await postgres.sql("select pg_reload_conf()")
        record_property("resumed", await seen.resumes())
        await seen.flows()
        seen.opened_gradually()
        await seen.ends_well(postgres)


@pytest.mark.guarantee("G7")
async def test_connections_that_others_have_taken_cost_nothing(
    postgres: OwnPostgres, rabbit: Rabbit, record_property: Record
) -> None:
    """All but a superuser's are taken: "sorry, too many clients already"."""
    postgres.settings["max_connections"] = "20"
    await postgres.restart()
    await postgres.sql("create role other login")
    others: list[asyncpg.Connection] = []

    async def take_all() -> None:
        try:
            while True:
                others.append(await asyncpg.connect(postgres.url.replace("billing@", "other@")))
        except asyncpg.TooManyConnectionsError:
            return

    async with stream(postgres, rabbit) as seen:
        await take_all()

        async def starve() -> bool:
            await postgres.sql(CUT_OFF)
            await take_all()
            return bool(seen.values("gate_closed", "explanation")) and not await postgres.sql(
                "select 1 from pg_stat_activity where usename = 'billing'"
            )

        await eventually(starve, bool)
        await seen.is_told()
        for other in others:
            await other.close()
        record_property("resumed", await seen.resumes())
        await seen.flows()
        seen.opened_gradually()
        await seen.ends_well(postgres)


@pytest.mark.guarantee("G7")
async def test_a_database_that_takes_no_writes_costs_nothing(
    postgres: OwnPostgres, rabbit: Rabbit, record_property: Record
) -> None:
    """Sessions stay as they are and read on: only what is written is refused."""
    async with stream(postgres, rabbit) as seen:
        await postgres.set("default_transaction_read_only", "on")
        await seen.is_told()
        await postgres.set("default_transaction_read_only", "off")
        record_property("resumed", await seen.resumes())
        await seen.flows()
        seen.opened_gradually()
        await seen.ends_well(postgres)


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "left open"])
async def test_a_failover_costs_nothing(
    cut: bool, postgres: OwnPostgres, rabbit: Rabbit, record_property: Record
) -> None:
    """The old primary takes no writes, its copy is promoted, the address leads there; old connections may stay."""
    async with (
        standby_of(postgres) as standby,
        proxy_to("127.0.0.1", postgres.port) as proxy,
        stream(postgres, rabbit, database_url=through(proxy, postgres.url)) as seen,
    ):
        await postgres.set("default_transaction_read_only", "on")
        await seen.is_told()

        async def behind() -> bool:
            [row] = await postgres.sql("select pg_current_wal_lsn() <> replay_lsn from pg_stat_replication")
            return row[0]

        await eventually(behind, lambda lags: not lags)
        await standby.sql("select pg_promote()")
        proxy.port = standby.port
        if cut:
            await proxy.cut()
        record_property("resumed", await seen.resumes())
        await seen.flows()
        seen.opened_gradually()
        await seen.ends_well(standby)
        assert (await postgres.sql("select count(*) from processed_messages"))[0][0] < seen.sent


@pytest.mark.guarantee("G7")
async def test_database_and_broker_lost_at_once_lose_and_double_nothing(
    postgres: OwnPostgres, rabbit: Rabbit, record_property: Record
) -> None:
    """The deliveries in hand are lost with their channel and come again, each alone."""
    async with (
        proxy_to("127.0.0.1", postgres.port) as to_database,
        proxy_to("127.0.0.1", urlsplit(rabbit.url).port or 0) as to_broker,
        stream(
            postgres,
            rabbit,
            database_url=through(to_database, postgres.url),
            broker_url=through(to_broker, rabbit.url),
        ) as seen,
    ):
        await asyncio.gather(to_database.go_away(), to_broker.go_away())
        await seen.is_told()
        to_database.accepting = to_broker.accepting = True
        record_property("resumed", await seen.resumes())
        await seen.flows()
        await seen.ends_well(postgres, redelivered=True)


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("applied", [False, True], ids=["not applied", "applied"])
async def test_a_commit_whose_answer_is_lost_is_neither_doubled_nor_lost(
    applied: bool, postgres: OwnPostgres, rabbit: Rabbit
) -> None:
    """The connection is cut just before COMMIT reaches the server, or just before its answer comes back."""
    lost = 0
    async with proxy_to("127.0.0.1", postgres.port) as proxy:

        def lose(data: bytes) -> None:
            nonlocal lost
            if (b"COMMIT\0" if applied else b"commit\0") in data and seen.sent % 5 == 0 and lost < 20:
                lost += 1
                raise CutError

        async with stream(postgres, rabbit, database_url=through(proxy, postgres.url)) as seen:
            if applied:
                proxy.on_answer = lose
            else:
                proxy.on_request = lose
            await eventually(lambda: _value(lost), lambda n: n == 20, within=40)
            await seen.flows()
            await seen.ends_well(postgres)
            assert (seen.outcomes().get("duplicate", 0) > 0) == applied


async def _value(value: T) -> T:
    return value


@pytest.mark.guarantee("G7")
async def test_nothing_stays_at_the_old_primary_after_a_failover_while_nothing_happens(
    postgres: OwnPostgres, rabbit: Rabbit
) -> None:
    """No message meets the change, and no connection is cut: readiness notices, and the relay moves, too."""
    await rabbit.collect_events()
    async with (
        standby_of(postgres) as standby,
        proxy_to("127.0.0.1", postgres.port) as proxy,
        stock_service(settings(through(proxy, postgres.url), rabbit.url), watch=postgres.url) as stock,
    ):
        await postgres.set("default_transaction_read_only", "on")
        await eventually(stock.is_ready, lambda ready: not ready)
        await standby.sql("select pg_promote()")
        proxy.port = standby.port
        await eventually(stock.is_ready, bool)
        await rabbit.publish(TYPE, b'{"sku": "nail"}')
        await eventually(lambda: rabbit.count(EVENTS), lambda n: n == 1)
        assert [tuple(row) for row in await standby.sql("select quantity from stock")] == [(100,)]


async def test_the_kernel_gives_up_connections_to_a_database_that_vanished(database_url: str) -> None:
    """What asyncpg leaves as it is waits for a quarter of an hour, or for ever, when packets are dropped."""
    pool = database.make_pool(database_url, 1)
    single = await database.connect(database_url, "test")
    async with pool, pool.acquire() as pooled:
        for connection in (pooled, single):
            peer = connection._transport.get_extra_info("socket")
            assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
            assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 9000
    await single.close()


async def test_marks_whose_answer_is_lost_are_not_taken_for_crashes(postgres: OwnPostgres, rabbit: Rabbit) -> None:
    """A message that comes again is marked before it runs: each lost answer was counted as a start not survived."""
    executions, running, go_on = 0, asyncio.Event(), asyncio.Event()
    lost, asked = 0, False

    async def fail_first(received: Received, work: BillingUnitOfWork) -> None:
        nonlocal executions
        executions += 1
        if executions == 1:
            running.set()
            await go_on.wait()
            raise RuntimeError
        await add(received, work)

    async with proxy_to("127.0.0.1", postgres.port) as proxy:

        def notice(data: bytes) -> None:
            nonlocal asked
            asked = asked or b"insert into started_messages" in data

        def lose(data: bytes) -> None:
            nonlocal lost, asked
            if asked and PORTAL_SUSPENDED in data:
                lost, asked = lost + 1, False
                raise CutError

        proxy.on_request, proxy.on_answer = notice, lose
        configuration = settings(through(proxy, postgres.url), rabbit.url, max_attempts=1)
        async with stock_service(configuration, fail_first, watch=postgres.url) as stock:
            await rabbit.publish(TYPE, b'{"sku": "nail"}')
            await asyncio.wait_for(running.wait(), 10)
            consumer = stock.service._consumer
            lost_with = consumer._tag
            assert close_connections(rabbit.url, name="billing-consumer") == 1
            await eventually(lambda: _value(consumer._tag), lambda tag: tag not in (None, lost_with))
            go_on.set()
            await stock.has_stock(100)
            assert executions == 2
            assert lost >= 1
            assert await rabbit.count("orders.parking") == 0
            await eventually(lambda: postgres.sql("select from started_messages"), lambda rows: not rows)


@pytest.mark.guarantee("G6")
async def test_who_ends_its_own_session_is_parked_and_holds_nobody_up(stock_url: str, rabbit: Rabbit) -> None:
    """It looks like an outage each time; a real one does not come back whenever this handler runs."""

    async def end_session(received: Received, work: BillingUnitOfWork) -> None:
        if received.sku == "killer":
            await work.connection.execute("select pg_terminate_backend(pg_backend_pid())")
        await add(received, work)

    async with stock_service(settings(stock_url, rabbit.url, max_attempts=1), end_session) as stock:
        await rabbit.publish(TYPE, b'{"sku": "killer"}', message_id="killer")
        for _ in range(20):
            await rabbit.publish(TYPE, b"{}")
        await stock.has_stock(2000)
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1, within=60)
        [parked] = await rabbit.take("orders.parking")
        assert (parked.message_id, parked.headers["x-parked-reason"]) == ("killer", "attempts-exhausted")
        assert parked.headers["x-exception-type"].endswith("SessionLostError")
        await eventually(stock.is_ready, bool)
