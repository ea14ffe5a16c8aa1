"""Waiting for what others do: every wait has a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

EVERY = 0.05
"""Seconds between two looks."""


async def pause(seconds: float) -> None:
    """Let time pass: the processes that are watched tell nobody when they get on."""
    await asyncio.sleep(seconds)  # noqa: TID251 - ended by the cancellation of the demo


async def eventually(
    read: Callable[[], Awaitable[T]], is_right: Callable[[T], bool], *, within: float, every: float = EVERY
) -> T:
    """Read until the value is right; return the last one, right or not, after `within` seconds."""
    deadline = time.monotonic() + within
    while not is_right(value := await read()) and time.monotonic() < deadline:
        await pause(every)
    return value
