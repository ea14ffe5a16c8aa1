"""A message whose execution kills the process: it is found, put aside, and its neighbours are processed."""

import json
from pathlib import Path

import asyncpg
import pytest

from tests.support.rabbit import Rabbit, possible_strategies
from tests.support.stock import TYPE
from tests.support.supervisor import Supervisor
from tests.support.waiting import eventually

NEIGHBOURS = 150


def received(sku: str, **fields: int) -> bytes:
    """Return the body of a message for the stock."""
    return json.dumps({"sku": sku, "quantity": 1} | fields).encode()


@pytest.mark.parametrize(
    ("milliseconds", "strategy"), [(700, "staged"), *((0, strategy) for strategy in possible_strategies())]
)
async def test_who_kills_the_process_is_parked_and_every_neighbour_processed(
    milliseconds: int, strategy: str, environment: dict[str, str], stock_url: str, tmp_path: Path, rabbit: Rabbit
) -> None:
    """Two killers among many, prefetch 100, concurrency 20: three crashes of its own park each, nobody else."""
    connection = await asyncpg.connect(stock_url)
    prefetching = {
        "BILLING_PREFETCH": "100",
        "BILLING_CONCURRENCY": "20",
        "BILLING_RETRY_STRATEGY": strategy,
    }
    supervisor = Supervisor(environment | prefetching, tmp_path / "log")
    await supervisor.service.ready()
    for number in range(NEIGHBOURS):
        if number in {0, 40}:
            await rabbit.publish(TYPE, received("killer", quantity=milliseconds), message_id=f"killer-{number}")
        await rabbit.publish(TYPE, received("nail"))

    async def stock() -> tuple[int, int]:
        await supervisor.look()
        total = await connection.fetchval("select coalesce(sum(quantity), 0) from stock where sku = 'nail'")
        return total, await rabbit.count("orders.parking")

    await eventually(stock, lambda now: now == (NEIGHBOURS, 2), within=90, every=0.1)
    assert 6 <= supervisor.crashes <= 8, "three of its own each; the very first ones are not known to be anybody's"
    parked = await rabbit.take("orders.parking")
    assert {message.message_id for message in parked} == {"killer-0", "killer-40"}
    assert {message.headers["x-parked-reason"] for message in parked} == {"crashed-consumer"}
    assert await connection.fetchval("select count(*) from started_messages") == 0

    # Replayed as it is, it starts with no crash on its account: it kills three more times and is parked again.
    before = supervisor.crashes
    again = parked[0]
    await rabbit.publish(
        TYPE, again.body, exchange="", routing_key="orders.work", message_id="again", headers=again.headers
    )
    await eventually(stock, lambda now: now == (NEIGHBOURS, 1), within=60, every=0.1)
    assert 3 <= supervisor.crashes - before <= 4
    await supervisor.service.ready()
    assert await supervisor.service.stop() == 0
    await connection.close()
