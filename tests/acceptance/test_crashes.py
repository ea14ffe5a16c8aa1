"""A message whose execution kills the process: it is found, put aside, and its neighbours are processed."""

import json
from pathlib import Path

import asyncpg
import pytest

from tests.support.rabbit import Rabbit
from tests.support.stock import TYPE
from tests.support.supervisor import Supervisor
from tests.support.waiting import eventually

NEIGHBOURS = 30


@pytest.mark.guarantee("G6")
async def test_who_kills_the_process_is_parked_and_every_neighbour_processed(
    environment: dict[str, str], stock_url: str, tmp_path: Path, rabbit: Rabbit
) -> None:
    """`tests/longer` has it with more of both, slow and instant, for each strategy, and with a replay."""
    connection = await asyncpg.connect(stock_url)
    supervisor = Supervisor(environment, tmp_path / "log")
    await supervisor.service.ready()
    for number in range(NEIGHBOURS):
        sku = "killer" if number == 10 else "nail"
        await rabbit.publish(TYPE, json.dumps({"sku": sku, "quantity": 1}).encode(), message_id=f"{sku}-{number}")

    async def stock() -> tuple[int, int]:
        await supervisor.look()
        total = await connection.fetchval("select coalesce(sum(quantity), 0) from stock")
        return total, await rabbit.count("orders.parking")

    await eventually(stock, lambda now: now == (NEIGHBOURS - 1, 1), within=60, every=0.1)
    assert 3 <= supervisor.crashes <= 4, "three of its own; the very first one is not known to be anybody's"
    [parked] = await rabbit.take("orders.parking")
    assert (parked.message_id, parked.headers["x-parked-reason"]) == ("killer-10", "crashed-consumer")
    assert await connection.fetchval("select count(*) from started_messages") == 0
    await supervisor.service.ready()
    assert await supervisor.service.stop() == 0
    await connection.close()
