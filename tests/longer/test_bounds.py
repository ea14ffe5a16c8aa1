"""G10: memory under a full prefetch of large bodies; and a message that is held while its process is killed."""

import json
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from tests.support.outage import body, client
from tests.support.own_broker import own_broker
from tests.support.process import ServiceProcess
from tests.support.rabbit import Rabbit
from tests.support.stock import TYPE
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)

PREFETCH, CONCURRENCY, MEGABYTE = 30, 8, 1_000_000
LARGE = json.dumps({"padding": "x" * 10 * MEGABYTE}).encode()
"""JSON that is no order: parked as invalid, so each body is received, decoded, digested and published again."""

IN_WORK = 5
"""Copies of a body in work: as bytes, as text, parsed, in the frames of its successor and in the socket's buffer."""

KILLS = 25


@pytest.mark.guarantee("G10")
async def test_memory_stays_flat_under_a_full_prefetch_of_large_bodies(
    environment: dict[str, str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Six times the prefetch of 10 MB goes through: memory is for what is prefetched and in work, whatever went."""
    async with own_broker() as node:
        settings = {"BILLING_RABBITMQ_URL": node.url(), "BILLING_PREFETCH": str(PREFETCH)}
        settings |= {"BILLING_CONCURRENCY": str(CONCURRENCY)}
        service = ServiceProcess(environment | settings, tmp_path / "log")
        await service.start().ready()
        idle = peak(service)
        peaks = []
        async with client(node) as rabbit:
            for _ in range(2):
                for _ in range(3 * PREFETCH):
                    await rabbit.publish("order.placed", LARGE)
                parked = 0

                async def take() -> int:
                    nonlocal parked
                    parked += len(await rabbit.take("orders.parking"))
                    return parked

                await eventually(take, lambda n: n >= 3 * PREFETCH, within=120, every=0.5)
                peaks.append(peak(service))
                record_property("parked", parked)
        record_property("idle, first, second in MB", [round(n / MEGABYTE) for n in (idle, *peaks)])
        assert await service.stop() == 0
    assert max(peaks) <= idle + (PREFETCH + IN_WORK * CONCURRENCY) * len(LARGE)


def peak(service: ServiceProcess) -> int:
    """Return the most memory that the process has had, in bytes."""
    assert service.process is not None
    lines = Path(f"/proc/{service.process.pid}/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return int(sizes["VmHWM"].split()[0]) * 1024


async def test_what_is_held_while_the_process_is_killed_25_times_is_processed(
    environment: dict[str, str], stock_url: str, rabbit: Rabbit, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    """H03: 4.x would drop it after 20 deliveries; and it killed nobody, so it is not parked for that either."""
    name = await connection.fetchval("select current_database()")
    service = ServiceProcess(environment, tmp_path / "log", ("-m", "tests.support.stopped_at", "never", "stock"))
    await service.start().ready()
    await connection.execute(f'alter database "{name}" set default_transaction_read_only = on')
    await connection.fetch(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1 and pid <> pg_backend_pid()", name
    )
    await rabbit.publish(TYPE, body("m-1"), message_id="m-1")
    for number in range(KILLS):
        await service.logged("delivery_held", times=number + 1, within=30)
        service.kill()
        service.start()
    await connection.execute(f'alter database "{name}" reset default_transaction_read_only')
    await eventually(
        lambda: connection.fetchval("select coalesce(sum(quantity), 0) from stock"), lambda n: n == 1, within=60
    )
    assert await rabbit.count("orders.parking") == 0
    assert await service.stop() == 0
