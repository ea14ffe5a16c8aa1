"""An application whose effect is not idempotent: each message adds to a stock.

Invoices alone would hide a missing inbox, since an order has one invoice however often it is placed. It is the real
service with another subscriber on `order.placed`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import asyncpg
from faststream import Depends
from pydantic import BaseModel

from service.app import BillingUnitOfWork, Service
from service.reliability.inbound import Inbound, current_unit_of_work
from service.reliability.outbox import Event
from service.settings import Settings
from tests.support.waiting import eventually

TYPE = "order.placed"

TABLES = """
create table stock (sku text primary key, quantity integer not null default 0);
create table deliveries (reference text constraint deliveries_reference_key unique);
"""


class Received(BaseModel):
    """Stock came in.

    Attributes:
        reference: stored under a unique constraint that is not the inbox's.
        failures: executions that fail, of those handlers that heed it.
    """

    sku: str = "nail"
    quantity: int = 100
    reference: str | None = None
    failures: int = 0


Work = Annotated[BillingUnitOfWork, Depends(current_unit_of_work)]
Act = Callable[[Received, BillingUnitOfWork], Awaitable[None]]


async def add(received: Received, work: BillingUnitOfWork) -> None:
    """Add to the stock and append an event."""
    await work.connection.execute(
        """insert into stock values ($1, $2)
           on conflict (sku) do update set quantity = stock.quantity + excluded.quantity""",
        received.sku,
        received.quantity,
    )
    if received.reference is not None:
        await work.connection.execute("insert into deliveries values ($1)", received.reference)
    await work.append(Event("stock.added", received.sku, received.model_dump_json().encode()))


def settings(database_url: str, rabbitmq_url: str, **changes: Any) -> Settings:
    """Return settings for a test: short delays, a free port, few connections, since many tests run at once."""
    values: dict[str, Any] = {
        "database_url": database_url,
        "rabbitmq_url": rabbitmq_url,
        "http_port": 0,
        "concurrency": 8,
        "retry_delays": "0.2,0.4",
        "max_attempts": 3,
        "confirm_timeout": 3,
        "shutdown_timeout": 10,
        "relay_poll_interval": 0.5,
    }
    return Settings(_env_file=None, **(values | changes))


def deliveries_settled(service: Service) -> int:
    """Return how many deliveries a service has settled, however they ended."""
    metrics = service.metrics.registry.collect()
    samples = [s for metric in metrics if metric.name == "billing_deliveries" for s in metric.samples]
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))


class StockService:
    """A running service with the stock's subscriber."""

    def __init__(self, service: Service, running: "asyncio.Task[None]", pool: asyncpg.Pool) -> None:
        """Keep the parts that tests look at."""
        self.service = service
        self.running = running
        self.pool = pool

    async def stock(self, sku: str = "nail") -> int:
        """Return the quantity in stock."""
        return await self.pool.fetchval("select quantity from stock where sku = $1", sku) or 0

    async def has_stock(self, quantity: int, *, within: float = 20) -> None:
        """Wait until the stock is so much."""
        await eventually(self.stock, lambda now: now == quantity, within=within)

    async def settled(self) -> int:
        """Return how many deliveries were settled, however they ended."""
        return deliveries_settled(self.service)

    async def held(self) -> float:
        """Return how often an execution was put off because the database was away."""
        return self.service.metrics.registry.get_sample_value("billing_deliveries_held_total") or 0

    async def is_ready(self) -> bool:
        """Tell whether every part works."""
        return all((await self.service.health.parts()).values())


def subscribe_with(act: Act, consumer: str = "test.stock") -> Callable[[Inbound], None]:
    """Return what declares the stock's subscriber."""

    def subscribe(inbound: Inbound) -> None:
        @inbound.subscriber(TYPE, Received, consumer=consumer)
        async def received(message: Received, work: Work) -> None:
            await act(message, work)

    return subscribe


@asynccontextmanager
async def stock_service(
    configuration: Settings, act: Act = add, *, consumer: str = "test.stock", watch: str | None = None
) -> AsyncIterator[StockService]:
    """Run the service with `act` as the handler; stop it at the end. `watch` is another way to its database."""
    service = Service(configuration, subscribe=subscribe_with(act, consumer))
    pool = await asyncpg.create_pool(watch or configuration.database_url.get_secret_value(), min_size=1, max_size=3)
    running = asyncio.create_task(service.run())
    stock = StockService(service, running, pool)
    try:
        await eventually(stock.is_ready, bool, within=20)
        yield stock
    finally:
        service.stopping.set()
        await asyncio.wait_for(running, 20)
        await pool.close()
