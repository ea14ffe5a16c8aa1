"""The stock service under a stream of messages while something is taken away from it, seen from outside."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import structlog

from service.app import BillingUnitOfWork
from tests.support.own_postgres import OwnPostgres, own_postgres
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.rabbit import Rabbit
from tests.support.stock import TABLES, TYPE, Received, StockService, add, settings, stock_service
from tests.support.waiting import eventually

PAUSE = 0.02
"""Seconds between two messages, and at least for each execution."""


@dataclass(slots=True)
class Stream:
    """What was sent, what was seen.

    Attributes:
        together: for each start of a handler, how many were inside then.
        lives: each answer of `/livez`.
        logs: of the service.
    """

    rabbit: Rabbit
    http: httpx.AsyncClient
    sent: int = 0
    together: list[int] = field(default_factory=list)
    lives: set[int] = field(default_factory=set)
    logs: list[Any] = field(default_factory=list)
    events: set[str] = field(default_factory=set)
    _inside: int = 0
    _stock: StockService | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def act(self, received: Received, work: BillingUnitOfWork) -> None:
        """Note who is inside, and add to the stock."""
        self._inside += 1
        self.together.append(self._inside)
        try:
            await asyncio.sleep(PAUSE)
            await add(received, work)
        finally:
            self._inside -= 1

    def values(self, event: str, field: str) -> list[Any]:
        """Return a field of each log record of an event."""
        return [record[field] for record in self.logs if record["event"] == event]

    async def flows(self) -> None:
        """Wait until a few more messages are settled."""
        assert self._stock is not None
        enough = await self._stock.settled() + 10
        await eventually(self._stock.settled, lambda n: n >= enough, within=40)

    async def is_told(self, *, within: float = 20) -> None:
        """Wait until the outage is told from outside, and nobody is inside any more."""
        await eventually(self._ready, lambda code: code == 503, within=within)
        await eventually(self._gate_open, lambda value: value == 0, within=within)
        await eventually(self._how_many_inside, lambda n: n == 0, within=within)
        self.together.clear()

    async def resumes(self, *, within: float = 40) -> dict[str, float]:
        """Wait until messages are settled again and the service is ready; return after how many seconds from now."""
        assert self._stock is not None
        loop = asyncio.get_running_loop()
        start, before = loop.time(), await self._stock.settled()
        await eventually(self._stock.settled, lambda n: n > before, within=within, every=0.01)
        settled = loop.time() - start
        await eventually(self._ready, lambda code: code == 200, within=within)
        return {"settled": round(settled, 2), "ready": round(loop.time() - start, 2)}

    def opened_gradually(self) -> None:
        """Check that after the return one handler ran at first, and one more at most with each that ended."""
        assert self.together, "nothing was executed"
        for number, inside in enumerate(self.together[:20], start=1):
            assert inside <= number, self.together[:20]

    async def ends_well(self, postgres: OwnPostgres, *, redelivered: bool = False) -> None:
        """End the stream; check that each message has one effect and one event, and that nothing was paid for it."""
        assert self._stock is not None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        query = "select (select coalesce(sum(quantity), 0) from stock), (select count(*) from processed_messages)"

        async def effects() -> tuple[int, int]:
            (row,) = await postgres.sql(query)
            return row[0], row[1]

        await eventually(effects, lambda now: now == (self.sent, self.sent), within=60, every=0.2)
        await eventually(self._different_events, lambda n: n == self.sent, within=30, every=0.2)
        await eventually(lambda: self.rabbit.count("orders.work"), lambda n: n == 0)
        outcomes = self.outcomes()
        assert not outcomes.keys() & {"retried", "parked"}, outcomes
        assert await self.rabbit.count("orders.parking") == 0
        assert self.lives == {200}
        if not redelivered:
            await eventually(self._stock.settled, lambda n: n == self.sent)  # each delivery once: none came again
            assert "returned" not in self.outcomes()
            assert len(self.values("consumer_started", "queue")) == 1

    def outcomes(self) -> dict[str, float]:
        assert self._stock is not None
        collected = self._stock.service.metrics.deliveries.collect()
        samples = [sample for metric in collected for sample in metric.samples if sample.name.endswith("_total")]
        return {sample.labels["outcome"]: sample.value for sample in samples if sample.value}

    async def _publish(self) -> None:
        while True:
            body = {"sku": f"nail-{self.sent % 50}", "quantity": 1}
            await asyncio.shield(self._publish_one(json.dumps(body).encode()))
            await asyncio.sleep(PAUSE)

    async def _publish_one(self, body: bytes) -> None:
        self.sent += 1
        await self.rabbit.publish(TYPE, body)

    async def _look(self) -> None:
        while True:
            self.lives.add((await self.http.get("/livez")).status_code)
            await asyncio.sleep(0.1)

    async def _ready(self) -> int:
        return (await self.http.get("/readyz")).status_code

    async def _gate_open(self) -> float:
        lines = (await self.http.get("/metrics")).text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("billing_gate_open "))

    async def _how_many_inside(self) -> int:
        return self._inside

    async def _different_events(self) -> int:
        self.events |= {event.message_id for event in await self.rabbit.events()}
        return len(self.events)


def through(proxy: Proxy, url: str) -> str:
    """Return the way to a server that leads through a proxy."""
    return url.replace(f":{urlsplit(url).port}/", f":{proxy.listening_on}/")


@asynccontextmanager
async def stock_postgres() -> AsyncIterator[OwnPostgres]:
    """Make a server with a migrated database that has the stock's tables, too."""
    async with own_postgres() as server:
        connection = await asyncpg.connect(server.url)
        await connection.execute(TABLES)
        await connection.close()
        yield server


@asynccontextmanager
async def stream(
    postgres: OwnPostgres, rabbit: Rabbit, *, database_url: str = "", broker_url: str = "", **changes: Any
) -> AsyncIterator[Stream]:
    """Run the service, where one failed attempt would park a message, and publish without a pause to speak of.

    Args:
        postgres: the database, with the stock's tables.
        rabbit: where messages come from and events go to.
        database_url, broker_url: the service's ways to them, where these are others.
        changes: of the settings.
    """
    await rabbit.collect_events()
    port = free_port()
    configuration = settings(
        database_url or postgres.url,
        broker_url or rabbit.url,
        **({"http_port": port, "max_attempts": 1, "prefetch": 40} | changes),
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
        seen = Stream(rabbit, http)
        with structlog.testing.capture_logs() as seen.logs:
            async with stock_service(configuration, seen.act, watch=postgres.url) as seen._stock:
                seen._tasks = [asyncio.create_task(seen._publish()), asyncio.create_task(seen._look())]
                try:
                    await seen.flows()
                    yield seen
                finally:
                    for task in seen._tasks:
                        task.cancel()
                    await asyncio.gather(*seen._tasks, return_exceptions=True)
