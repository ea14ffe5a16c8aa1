"""Random messages by the thousand: what a few batches rarely draw."""

import pytest

from tests.support.judge import judge_random_messages
from tests.support.rabbit import Rabbit


@pytest.mark.timeout(600)
async def test_some_thousand_messages_are_processed_or_parked(
    stock_url: str, rabbit: Rabbit, caplog: pytest.LogCaptureFixture
) -> None:
    """As among the integration tests, ten times as many; which reasons came up is printed."""
    judge = await judge_random_messages(60, stock_url, rabbit, caplog)
    told = f"{judge.arrived} arrived, {judge.refused} refused by the broker; parked for {dict(judge.reasons)}"
    print(told)  # noqa: T201 - for who runs it with -rP
