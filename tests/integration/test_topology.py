"""The topology on a real broker: made, compared, refused, never changed behind anybody's back."""

from datetime import timedelta
from pathlib import Path

import pytest

from service.app import orders_family, whole_topology
from service.reliability import topology
from service.reliability.errors import TopologyError
from service.reliability.hosts import Hosts
from service.reliability.link import BrokerLink
from tests.support.rabbit import Rabbit, rabbitmqctl, user_with
from tests.support.stock import settings, stock_service
from tests.support.waiting import eventually

WANTED = whole_topology(
    orders_family(settings("postgresql://localhost/none", "amqp://localhost", retry_delays="5,120"))
)


async def test_declaring_twice_makes_what_the_contract_says(rabbit: Rabbit) -> None:
    """Names, types and arguments, as the broker tells them."""
    async with BrokerLink(Hosts([rabbit.url]), "billing-topology") as link:
        await topology.declare(link, WANTED)
        await topology.declare(link, WANTED)
        await topology.check(link, WANTED)
        await topology.verify(link, WANTED)
    vhost = rabbit.url.rsplit("/", 1)[1]
    queues = rabbitmqctl("list_queues", "-p", vhost, "name", "durable", "type").splitlines()
    assert sorted(line.split("\t") for line in queues if line.startswith("orders")) == [
        ["orders.parking", "true", "quorum"],
        ["orders.wait.2m", "true", "quorum"],
        ["orders.wait.5s", "true", "quorum"],
        ["orders.work", "true", "quorum"],
    ]
    bindings = rabbitmqctl("list_bindings", "-p", vhost, "source_name", "destination_name", "routing_key").splitlines()
    assert sorted(line for line in bindings if line.startswith("orders\t")) == [
        "orders\torders.work\torder.cancelled",
        "orders\torders.work\torder.paid",
        "orders\torders.work\torder.placed",
    ]


async def test_every_mismatch_is_told_with_queue_argument_found_and_wanted(rabbit: Rabbit) -> None:
    """All of them at once, so that nobody mends one after the other."""
    arguments = {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-delivery-limit": topology.NO_DELIVERY_LIMIT,
    }
    dead_letter = {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "orders.work",
        "x-dead-letter-strategy": "at-least-once",
    }
    await rabbit.channel.declare_queue(
        "orders.wait.5s", durable=True, arguments=arguments | dead_letter | {"x-message-ttl": 6000}
    )
    await rabbit.channel.declare_queue("orders.work", durable=True)
    await rabbit.channel.declare_exchange("billing", "fanout", durable=True)
    async with BrokerLink(Hosts([rabbit.url]), "billing-topology") as link:
        for act in (topology.declare, topology.check):
            with pytest.raises(TopologyError) as refused:
                await act(link, WANTED)
            lines = str(refused.value).splitlines()
            fix = "; fix: empty it, delete it, then `billing topology apply`"
            assert "exchange billing: type: found fanout, wanted topic; fix: delete it, then " in str(refused.value)
            assert f"queue orders.wait.5s: x-message-ttl: found 6000, wanted 5000{fix}" in lines
            assert any(line.startswith("queue orders.work: x-") for line in lines)


async def test_check_reports_what_is_missing_and_makes_nothing(rabbit: Rabbit) -> None:
    """Comparing must not change."""
    async with BrokerLink(Hosts([rabbit.url]), "billing-topology") as link:
        for act in (topology.check, topology.verify):
            with pytest.raises(TopologyError) as refused:
                await act(link, WANTED)
            assert "queue orders.work: missing; fix: `billing topology apply`" in str(refused.value).splitlines()
    assert await rabbit.count("orders.work") == -1


CONFIGURE = r"^(orders(\..+)?|billing)$"
READ = r"^orders(\..+)?$"
WRITE, VERIFY_WRITE = r"^(amq\.default|billing|orders\.work)$", r"^(amq\.default|billing)$"


@pytest.mark.parametrize(
    ("mode", "rights"), [("declare", (CONFIGURE, WRITE, READ)), ("verify", ("^$", VERIFY_WRITE, READ))]
)
async def test_the_service_runs_with_the_rights_of_the_checklist(
    rabbit: Rabbit, stock_url: str, mode: str, rights: tuple[str, ...]
) -> None:
    """A failing message is retried and parked, and an event leaves: every right is used."""
    command = "rabbitmqctl set_permissions -p VHOST USER " + " ".join(f"'{right}'" for right in rights)
    assert command in (Path(__file__).parents[2] / "docs" / "checklist.md").read_text()
    if mode == "verify":
        async with BrokerLink(Hosts([rabbit.url]), "billing-topology") as link:
            await topology.declare(link, whole_topology(orders_family(settings(stock_url, rabbit.url))))
    await rabbit.collect_events()
    with user_with(rabbit, *rights) as url:
        async with stock_service(settings(stock_url, url, topology=mode)) as stock:
            await rabbit.publish("order.placed", b"{}")
            await rabbit.publish("order.placed", b'{"quantity": 999999999999}')
            await stock.has_stock(100)
            await eventually(rabbit.events, lambda events: [e.type for e in events] == ["stock.added"])
            await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)


async def test_who_may_configure_nothing_can_verify_and_see_that_everything_exists(rabbit: Rabbit) -> None:
    async with BrokerLink(Hosts([rabbit.url]), "billing-topology") as link:
        await topology.declare(link, WANTED)
        assert await topology.check(link, WANTED) == []
    with user_with(rabbit, "^$", VERIFY_WRITE, READ) as url:
        async with BrokerLink(Hosts([url]), "billing-topology") as link:
            await topology.verify(link, WANTED)
            assert len(await topology.check(link, WANTED)) == len(WANTED.items)
            with pytest.raises(TopologyError, match="TOPOLOGY=verify"):
                await topology.declare(link, WANTED)


async def test_a_right_that_is_missing_for_a_binding_is_named(rabbit: Rabbit) -> None:
    """Taken for an outage, the start would wait for it for ever."""
    with user_with(rabbit, CONFIGURE, VERIFY_WRITE, ".*") as url:
        async with BrokerLink(Hosts([url]), "billing-topology") as link:
            with pytest.raises(TopologyError, match=r"binding of queue orders\.work to exchange orders"):
                await topology.declare(link, WANTED)


async def test_a_message_waits_for_the_delay_of_its_queue_and_returns(rabbit: Rabbit) -> None:
    """Without the dead-letter arguments it would stay for ever, or vanish: a test broker shows neither."""
    quick = whole_topology(
        orders_family(settings("postgresql://localhost/none", "amqp://localhost", retry_delays="0.3"))
    )
    async with BrokerLink(Hosts([rabbit.url]), "billing-topology") as link:
        await topology.declare(link, quick)
    await rabbit.publish("order.placed", b"{}", exchange="", routing_key="orders.wait.300ms")

    await eventually(lambda: rabbit.count("orders.work"), lambda n: n == 1)
    [returned] = await rabbit.take("orders.work")
    assert (returned.exchange, returned.routing_key) == ("", "orders.work")
    assert topology.delay_name(timedelta(seconds=0.3)) == "300ms"


@pytest.mark.guarantee("G1")
async def test_what_the_broker_rejects_ends_in_parking(rabbit: Rabbit) -> None:
    """The last resort of the work queue is parking, at-least-once: never the floor."""
    async with BrokerLink(Hosts([rabbit.url]), "billing-topology") as link:
        await topology.declare(link, WANTED)
    await rabbit.publish("order.placed", b"{}", message_id="m-1")
    queue = await rabbit.channel.get_queue("orders.work", ensure=False)
    message = await queue.get()
    await message.reject(requeue=False)

    await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)
