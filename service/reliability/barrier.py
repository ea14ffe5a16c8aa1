"""Named points in the two paths at which a crash test stops the process; nothing happens there in production."""

from collections.abc import Awaitable, Callable
from typing import Literal

Point = Literal[
    "claimed",
    "handled",
    "committed",
    "successor-confirmed",
    "event-sent",
    "event-confirmed",
]

Barrier = Callable[[Point], Awaitable[None]]


async def no_barrier(point: Point) -> None:
    """Pass."""
