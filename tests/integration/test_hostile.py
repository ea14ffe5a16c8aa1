"""Whatever a producer puts on the wire ends processed or parked, and changes nothing for anybody else."""

import pytest

from tests.support.judge import judge_random_messages
from tests.support.rabbit import Rabbit


@pytest.mark.guarantee("G1", "G6")
async def test_whatever_is_on_the_wire_is_processed_or_parked(
    stock_url: str, rabbit: Rabbit, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches of random messages, good ones between them."""
    await judge_random_messages(6, stock_url, rabbit, caplog)
