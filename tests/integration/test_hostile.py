"""Whatever a producer puts on the wire ends processed or parked, and changes nothing for anybody else."""

import logging

import pytest
from structlog.testing import capture_logs

from tests.support.hostile import LARGEST_BODY, TRAP, draw_batches
from tests.support.judge import Judge
from tests.support.rabbit import Rabbit
from tests.support.stock import settings, stock_service


@pytest.mark.guarantee("G1", "G6")
async def test_whatever_is_on_the_wire_is_processed_or_parked(
    stock_url: str, rabbit: Rabbit, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches of random messages, good ones between them."""
    batches = draw_batches(6, 25)
    await rabbit.collect_events()
    await rabbit.channel.declare_queue(TRAP, durable=True)
    caplog.set_level(logging.WARNING)
    async with stock_service(settings(stock_url, rabbit.url, max_body_bytes=LARGEST_BODY)) as stock:
        with capture_logs() as logs:
            judge = Judge(rabbit, stock, logs, caplog.records)
            for batch in batches:
                await judge.judge(batch)
