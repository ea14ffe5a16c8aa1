"""A cluster of three RabbitMQ nodes, one of which is killed under load: nothing is lost and nothing has two effects.

Where the service's own connections were on the dead node, RabbitMQ 4.3 keeps what was unacked on them for a minute
(`consumer_disconnected_timeout`) before it delivers it again; everything else goes on within a second.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from tests.support.cluster import Cluster, Producer, cluster
from tests.support.orders import placed
from tests.support.process import ServiceProcess
from tests.support.rabbit import Rabbit, rabbit_client, version_that_answers
from tests.support.waiting import eventually

ORDERS = 600
KILLED_AT = 200
"""How many orders are confirmed when the node is killed."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    """The cluster, started once."""
    with cluster() as started:
        yield started


@pytest.fixture
def nodes(running: Cluster) -> Iterator[Cluster]:
    """The cluster, whole again after each test."""
    yield running
    running.start()


@pytest.mark.parametrize("declared_at", ["rabbit1", "rabbit2"], ids=["where-the-service-is", "elsewhere"])
async def test_a_killed_leader_loses_and_doubles_no_order(
    declared_at: str,
    nodes: Cluster,
    connection: asyncpg.Connection,
    database_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A queue's leader is where it is declared; the service begins at the first address, which is rabbit1's."""
    environment = {
        "BILLING_DATABASE_URL": database_url,
        "BILLING_RABBITMQ_URL": ",".join(nodes.urls),
        "BILLING_CONCURRENCY": "8",
    }
    survivor = nodes.nodes["rabbit3"]
    async with rabbit_client(survivor.url(nodes.vhost)) as rabbit:
        at_one = environment | {"BILLING_RABBITMQ_URL": nodes.nodes[declared_at].url(nodes.vhost)}
        topology = ServiceProcess(at_one, tmp_path / "topology.log", ("-m", "service", "topology", "apply"))
        assert await topology.start().wait() == 0, topology.log
        await rabbit.collect_events()
        assert nodes.leader("orders.work") == declared_at

        service = await ServiceProcess(environment, tmp_path / "service.log").start().ready()
        process = service.process
        leader = nodes.process(declared_at)
        producer = Producer(nodes.urls)
        orders = [str(uuid4()) for _ in range(ORDERS)]
        async for confirmed in producer.publish([(order, *placed(order)) for order in orders]):
            if confirmed == KILLED_AT:
                invoices_when_killed = await _invoices(connection)
                nodes.kill(leader)

        await eventually(lambda: _invoices(connection), lambda n: n == ORDERS, within=180)
        await service.ready(within=60)
        await asyncio.to_thread(nodes.start)  # takes a while, in which the client must keep its heartbeat
        late = [str(uuid4()) for _ in range(20)]
        assert [_ async for _ in producer.publish([(order, *placed(order)) for order in late])][-1] == len(late)
        await eventually(lambda: _invoices(connection), lambda n: n == ORDERS + len(late), within=60)
        await service.ready(within=60)

        assert service.process is process
        placed_orders = await connection.fetch("select order_id::text from invoices")
        assert sorted(row["order_id"] for row in placed_orders) == sorted(orders + late)
        assert await connection.fetchval("select count(*) from processed_messages") == ORDERS + len(late)
        assert await rabbit.count("orders.parking") == 0
        assert len(await _all_events(rabbit, ORDERS + len(late))) == ORDERS + len(late)
        with capsys.disabled():
            sys.stderr.write(  # the broker's own word; what a parallel worker has on stdout is lost
                f"\nRabbitMQ {version_that_answers(survivor)}: killed {declared_at} with {invoices_when_killed} of"
                f" {KILLED_AT} confirmed orders invoiced; the producer moved {producer.moves} times, the service"
                f" connected {len(service.records('broker_connected'))} times\n"
            )
        assert await service.stop() == 0


async def _invoices(connection: asyncpg.Connection) -> int:
    return await connection.fetchval("select count(*) from invoices")


async def _all_events(rabbit: Rabbit, number: int) -> set[str]:
    """Return the ids of the events that have left, when there are so many."""
    found: set[str] = set()

    async def read() -> set[str]:
        found.update(event.message_id for event in await rabbit.events())
        return found

    return await eventually(read, lambda ids: len(ids) >= number, within=60)
