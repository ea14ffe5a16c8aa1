"""How exactly each strategy keeps its delay."""

import json
from collections import defaultdict
from itertools import pairwise
from statistics import median

import pytest

from service.app import BillingUnitOfWork
from tests.support.rabbit import Rabbit, possible_strategies, version_that_answers
from tests.support.stock import TYPE, Received, settings, stock_service
from tests.support.waiting import eventually

MESSAGES = 10


@pytest.mark.parametrize("strategy", possible_strategies())
@pytest.mark.parametrize("delay", [2.0, 5.0])
async def test_delays_are_kept_within_a_tenth(stock_url: str, rabbit: Rabbit, strategy: str, delay: float) -> None:
    """From a failure to the next execution, of many messages at once; `-s` shows the numbers."""
    failed: dict[str, list[float]] = defaultdict(list)

    async def fail(received: Received, work: BillingUnitOfWork) -> None:
        failed[received.sku].append(
            await work.connection.fetchval("select extract(epoch from clock_timestamp())::float8")
        )
        raise RuntimeError

    configuration = settings(stock_url, rabbit.url, retry_strategy=strategy, retry_delays=str(delay))
    async with stock_service(configuration, fail):
        for number in range(MESSAGES):
            await rabbit.publish(TYPE, json.dumps({"sku": str(number)}).encode())
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == MESSAGES, within=60)
    gaps = sorted(after - before for times in failed.values() for before, after in pairwise(times))
    assert len(gaps) == 2 * MESSAGES
    told = f"{strategy} on {version_that_answers()}, {delay:g} s: "
    told += f"{gaps[0]:.3f} to {gaps[-1]:.3f} s, median {median(gaps):.3f} s"
    print(told)  # noqa: T201 - the numbers are what it is for
    assert delay <= gaps[0], told
    assert median(gaps) <= delay * 1.1, told
