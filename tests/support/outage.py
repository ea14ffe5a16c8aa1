"""What tests of outages count and measure: executions with their attempts, what is parked, and when work goes on."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from service.app import BillingUnitOfWork
from tests.support.own_broker import OwnBroker
from tests.support.rabbit import Rabbit, rabbit_client
from tests.support.stock import TYPE, Received, StockService, add
from tests.support.waiting import eventually

FAILING = "doomed"
"""Stock of this name fails at every execution, after some work."""


@dataclass(slots=True)
class Handler:
    """Adds to the stock, slowly enough that a fault meets it at work; counts who was executed how often."""

    pause: float = 0.02
    executions: Counter[str] = field(default_factory=Counter)

    async def __call__(self, received: Received, work: BillingUnitOfWork) -> None:
        """Add, or fail after that."""
        self.executions[received.reference or ""] += 1
        await asyncio.sleep(self.pause)  # before the row of the stock is locked, for which all others would wait
        await add(received.model_copy(update={"reference": None}), work)
        if received.sku == FAILING:
            raise RuntimeError

    async def executed(self) -> int:
        """Return how many executions there were in all."""
        return self.executions.total()


def body(reference: str, sku: str = "nail") -> bytes:
    """Return a message's body: one piece, with a name to count executions by."""
    return Received(sku=sku, quantity=1, reference=reference).model_dump_json().encode()


async def publish(rabbit: Rabbit, references: Iterable[str], sku: str = "nail") -> None:
    """Publish one message for each reference, its message id the same."""
    for reference in references:
        await rabbit.publish(TYPE, body(reference, sku), message_id=reference)


@asynccontextmanager
async def client(node: OwnBroker) -> AsyncIterator[Rabbit]:
    """Connect to a node as soon as its queues work, which may be some seconds after it takes connections."""

    async def try_to_look() -> bool:
        try:
            async with asyncio.timeout(3), rabbit_client(node.url(), keep=True) as rabbit:
                return await rabbit.count("orders.parking") >= 0
        except Exception:  # whatever a node says that is not there yet
            return False

    await eventually(try_to_look, bool, within=60)
    async with rabbit_client(node.url(), keep=True) as rabbit:
        yield rabbit


@dataclass(slots=True)
class Probes:
    """Asks `/livez` and `/readyz` as an orchestrator does, ten times a second."""

    port: int
    live: set[int] = field(default_factory=set)
    ready: list[int] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Ask until cancelled."""
        async with httpx.AsyncClient(timeout=20, base_url=f"http://127.0.0.1:{self.port}") as http:
            while True:
                self.live.add((await http.get("/livez")).status_code)
                answer = await http.get("/readyz")
                self.ready.append(answer.status_code)
                self.reasons.update(part for part, works in answer.json()["parts"].items() if not works)
                await asyncio.sleep(0.1)


@asynccontextmanager
async def probing(port: int) -> AsyncIterator[Probes]:
    """Ask while the block runs."""
    probes = Probes(port)
    asking = asyncio.create_task(probes.run())
    try:
        yield probes
        assert not asking.done(), asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def metric(stock: StockService, name: str, **labels: Any) -> float:
    """Return a metric's value as Prometheus would read it."""
    return stock.service.metrics.registry.get_sample_value(name, labels) or 0
