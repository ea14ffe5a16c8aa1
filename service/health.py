"""Whether the service works: asked by `/readyz`, by `/metrics` and by nobody else.

Readiness is proven, not remembered: the broker answers on the channel that consumes, the database answers a query, the
relay was seen at work. Answers are shared for a second, so that probes cost the same however many ask.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from service.telemetry import Metrics

T = TypeVar("T")

FRESH = 1.0
"""Seconds for which an answer is shared."""


@dataclass(slots=True)
class Health:
    """Asks each part; a part that raises or takes longer than `timeout` seconds does not work."""

    metrics: Metrics
    timeout: float = 3.0
    _probes: dict[str, Callable[[], Awaitable[bool]]] = field(default_factory=dict)
    _answer: dict[str, bool] = field(default_factory=dict)
    _answered_at: float = float("-inf")
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def watch(self, part: str, probe: Callable[[], Awaitable[bool]]) -> None:
        """Ask `probe` for the state of `part`."""
        self._probes[part] = probe

    async def parts(self) -> dict[str, bool]:
        """Return for each part whether it works."""
        loop = asyncio.get_running_loop()
        async with self._asking:
            if loop.time() - self._answered_at > FRESH:
                answers = await asyncio.gather(*(self._ask(probe) for probe in self._probes.values()))
                self._answer = dict(zip(self._probes, answers, strict=True))
                self._answered_at = loop.time()
                for part, works in self._answer.items():
                    self.metrics.ready.labels(part).set(works)
            return self._answer

    async def _ask(self, probe: Callable[[], Awaitable[bool]]) -> bool:
        return await within(self.timeout, probe()) is True


async def within(seconds: float, awaitable: Awaitable[T]) -> T | None:
    """Return the result, or None where there is none in time or it fails.

    What takes longer is cancelled and not waited for: a driver whose server has fallen silent waits for the
    cancellation's answer, too.
    """
    task = asyncio.ensure_future(awaitable)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        return None
    return None if task.cancelled() or task.exception() is not None else task.result()
