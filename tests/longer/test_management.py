"""What only the management interface tells: deliveries in hand, and dead letters that their queue does not take."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aio_pika
import pytest

from tests.acceptance.test_command_line import billing
from tests.support.own_broker import OwnBroker, own_broker
from tests.support.process import ServiceProcess
from tests.support.waiting import eventually

WRONG = "wr0ng-pass"


@pytest.fixture
async def managed() -> AsyncIterator[OwnBroker]:
    """A node of one's own with its management interface."""
    async with own_broker(management=True) as node:
        yield node


@pytest.mark.timeout(240)
async def test_held_dead_letters_and_unacknowledged_deliveries_are_shown(
    managed: OwnBroker, environment: dict[str, str], tmp_path: Path
) -> None:
    """A full parking queue leaves the broker's own dead letters in the work queue, where no AMQP count shows them."""
    node, url = managed, managed.management_url
    settings = environment | {"BILLING_RABBITMQ_URL": node.url(), "BILLING_RABBITMQ_MANAGEMENT_URL": url}
    assert billing("topology", "apply", environment=settings).returncode == 0
    await node.ctl("set_policy", "-p", "billing", "--apply-to", "queues", "full", "parking", '{"max-length":1}')
    async with await aio_pika.connect(node.url()) as connection:
        channel = await connection.channel()
        for queue, count in (("orders.parking", 2), ("orders.work", 5)):
            for _ in range(count):
                await channel.default_exchange.publish(aio_pika.Message(b"{"), queue)
        work = await channel.get_queue("orders.work", ensure=False)
        for _ in range(3):
            await (await work.get()).reject(requeue=False)
        await work.get()

        async def status() -> dict[str, object]:
            done = await asyncio.to_thread(billing, "status", "--json", environment=settings)
            assert done.returncode == 1
            report: dict[str, object] = json.loads(done.stdout)
            return report

        report = await eventually(status, lambda told: bool(told["held"]), within=60)
    assert (report["held"], report["ready"], report["unacknowledged"]) == (3, 1, 1)
    assert "3 dead letters are held: the queue that they are for does not take them" in report["problems"]

    service = ServiceProcess(settings, tmp_path / "log", ("-m", "service", "run", "--migrate")).start()
    await service.ready()
    held = 'billing_dead_letters_held{queue="orders.work"} 3.0'

    async def metrics() -> str:
        return (await service.get("/metrics")).text

    await eventually(metrics, lambda page: held in page, within=60)
    assert await service.stop() == 0

    wrong = settings | {"BILLING_RABBITMQ_MANAGEMENT_URL": url.replace("billing@", f"{WRONG}@")}
    done = billing("status", environment=wrong)
    assert done.returncode == 1
    assert "refused the user" in done.stderr
    assert WRONG not in done.stdout + done.stderr
