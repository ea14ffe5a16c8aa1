"""Waiting for a condition instead of sleeping."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(
    read: Callable[[], Awaitable[T]], is_right: Callable[[T], bool], *, within: float = 20.0, every: float = 0.05
) -> T:
    """Read until the value is right, and return it; fail with the last value after `within` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    while not is_right(value := await read()):
        if loop.time() > deadline:
            raise AssertionError(f"still not right after {within:g} s: {value!r}")
        await asyncio.sleep(every)
    return value
