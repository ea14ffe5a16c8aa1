"""Policies: everything exported as one, and whatever somebody else's make of our queues found and told."""

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import pytest
from structlog.testing import capture_logs

from service import app
from service.app import orders_family, whole_topology
from service.management import ManagementError, compare
from service.reliability import topology
from service.reliability.comparison import Differences, Found, differences
from service.reliability.definitions import definitions
from service.reliability.hosts import Hosts
from service.reliability.link import BrokerLink
from service.reliability.topology import NO_DELIVERY_LIMIT, Topology
from tests.acceptance.test_command_line import billing
from tests.integration.test_topology import READ, VERIFY_WRITE
from tests.support.managed import Managed
from tests.support.own_broker import OwnBroker, own_broker
from tests.support.rabbit import USER, rabbit_client
from tests.support.stock import settings, stock_service
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(180)

DELAYS = "0.3,5"
WANTED = whole_topology(orders_family(settings("postgresql://localhost/none", "amqp://localhost", retry_delays=DELAYS)))
ARGUMENTS = {queue.name: dict(queue.arguments) for queue in WANTED.queues}

_numbers = count(1)


@pytest.fixture(scope="module")
def node() -> Iterator[OwnBroker]:
    """A node with the management interface, which a test may change as it likes."""
    with asyncio.Runner() as runner:
        manager = own_broker(management=True)
        yield runner.run(manager.__aenter__())
        runner.run(manager.__aexit__(None, None, None))


@pytest.fixture
def empty(node: OwnBroker) -> Iterator[Managed]:
    """An empty virtual host, with a name that must be quoted in an address."""
    managed = Managed(node, f"managed/{next(_numbers)}").make()
    yield managed
    managed.delete()


@pytest.fixture
async def right(empty: Managed) -> Managed:
    """A virtual host with everything as the service declares it."""
    async with BrokerLink(Hosts([address(empty)]), "billing-topology") as link:
        await topology.declare(link, WANTED)
    return empty


def address(managed: Managed, user: str = USER) -> str:
    return managed.node.broker.url(managed.vhost.replace("/", "%2F"), user)


def environment(managed: Managed, user: str = USER, **more: str) -> dict[str, str]:
    return {
        "BILLING_RABBITMQ_URL": address(managed, user),
        "BILLING_RABBITMQ_MANAGEMENT_URL": managed.node.management_url,
        "BILLING_RETRY_DELAYS": DELAYS,
    } | more


async def problems(managed: Managed, *, declared: bool = True) -> list[str]:
    found = await compare(managed.node.management_url, managed.vhost, WANTED, declared=declared)
    assert found.warnings == []
    return found.problems


async def test_what_the_service_declares_is_as_wanted(right: Managed) -> None:
    """With the interface and without it, which is told."""
    assert await problems(right) == []
    done = billing("topology", "check", environment=environment(right))
    assert (done.returncode, done.stderr) == (0, "topology is as wanted\n")
    alone = environment(right)
    del alone["BILLING_RABBITMQ_MANAGEMENT_URL"]
    done = billing("topology", "check", environment=alone)
    assert done.returncode == 0
    assert "not compared: bindings, policies, replicas: BILLING_RABBITMQ_MANAGEMENT_URL is not set" in done.stderr


def without(queue: str, *keys: str, **changed: object) -> dict[str, object]:
    """Return a queue's arguments without some and with others."""
    kept = {key: value for key, value in ARGUMENTS[queue].items() if key not in keys}
    return kept | {f"x-{key.replace('_', '-')}": value for key, value in changed.items()}


WRONG: dict[str, tuple[Callable[[Managed], None], str, str]] = {
    "queue missing": (
        lambda m: m.call("DELETE", "queues", "{vhost}", "orders.wait.5s"),
        "queue orders.wait.5s: missing",
        "`billing topology apply`",
    ),
    "queue classic": (
        lambda m: m.queue("orders.work", {"x-queue-type": "classic"}),
        "queue orders.work: type: found classic, wanted quorum",
        "empty it, delete it, then `billing topology apply`",
    ),
    "wait queue with another TTL": (
        lambda m: m.queue("orders.wait.5s", without("orders.wait.5s", message_ttl=6000)),
        "queue orders.wait.5s: x-message-ttl: found 6000, wanted 5000",
        "empty it, delete it, then `billing topology apply`",
    ),
    "wait queue with a shorter TTL by policy": (
        lambda m: m.policy(r"^orders\.wait", message_ttl=1000),
        "queue orders.wait.5s: message-ttl: found 1000 by policy 'theirs', wanted 5000",
        "take message-ttl out of policy 'theirs'",
    ),
    "work queue without dead-lettering": (
        lambda m: m.queue(
            "orders.work",
            without("orders.work", "x-dead-letter-exchange", "x-dead-letter-routing-key", "x-dead-letter-strategy"),
        ),
        "queue orders.work: x-dead-letter-exchange: found none, wanted ''",
        "`billing topology apply`",
    ),
    "work queue dead-letters elsewhere": (
        lambda m: m.queue("orders.work", without("orders.work", dead_letter_routing_key="elsewhere")),
        "queue orders.work: x-dead-letter-routing-key: found elsewhere, wanted orders.parking",
        "`billing topology apply`",
    ),
    "at-most-once": (
        lambda m: m.queue("orders.work", without("orders.work", dead_letter_strategy="at-most-once")),
        "queue orders.work: x-dead-letter-strategy: found at-most-once, wanted at-least-once",
        "`billing topology apply`",
    ),
    "TTL on parking by policy": (
        lambda m: m.policy(".*", message_ttl=1000),
        "queue orders.parking: message-ttl: found 1000 by policy 'theirs', wanted none",
        "take message-ttl out of policy 'theirs'",
    ),
    "TTL by operator policy": (
        lambda m: m.policy(".*", kind="operator-policies", message_ttl=1000),
        "queue orders.work: message-ttl: found 1000 by policy 'theirs', wanted none",
        "take message-ttl out of policy 'theirs'",
    ),
    "drop-head on parking by policy": (
        lambda m: m.policy("parking", overflow="drop-head", max_length=5),
        "queue orders.parking: overflow: found drop-head by policy 'theirs', wanted reject-publish",
        "take overflow out of policy 'theirs'",
    ),
    "drop-head on work by policy": (
        lambda m: m.policy("work", overflow="drop-head", max_length=5),
        "queue orders.work: overflow: found drop-head by policy 'theirs', wanted reject-publish",
        "take overflow out of policy 'theirs'",
    ),
    "parking without its delivery limit": (
        lambda m: m.queue("orders.parking", without("orders.parking", "x-delivery-limit")),
        f"queue orders.parking: x-delivery-limit: found none, wanted {NO_DELIVERY_LIMIT}",
        "`billing topology apply`",
    ),
    "a lower delivery limit on parking by policy": (
        lambda m: m.policy(".*", delivery_limit=3),
        f"queue orders.parking: delivery-limit: found 3 by policy 'theirs', wanted {NO_DELIVERY_LIMIT}",
        "take delivery-limit out of policy 'theirs'",
    ),
    "parking expires by policy": (
        lambda m: m.policy(".*", expires=3_600_000),
        "queue orders.parking: expires: found 3600000 by policy 'theirs', wanted none",
        "take expires out of policy 'theirs'",
    ),
    "binding missing": (
        lambda m: m.call("DELETE", "bindings", "{vhost}", "e", "orders", "q", "orders.work", "order.paid"),
        "binding of queue orders.work to exchange orders with order.paid: missing",
        "`billing topology apply`",
    ),
    "alternate exchange by policy": (
        lambda m: m.policy("billing", apply_to="exchanges", alternate_exchange="amq.fanout"),
        "exchange billing: alternate-exchange: found amq.fanout by policy 'theirs', wanted none",
        "take alternate-exchange out of policy 'theirs'",
    ),
    "dead-lettering of everything by policy": (
        lambda m: m.policy(".*", apply_to="all", dead_letter_exchange="amq.fanout"),
        "queue orders.parking: dead-letter-exchange: found amq.fanout by policy 'theirs', wanted none",
        "take dead-letter-exchange out of policy 'theirs'",
    ),
    "exchange of another type": (
        lambda m: m.exchange("billing", type="fanout"),
        "exchange billing: type: found fanout, wanted topic",
        "delete it, then `billing topology apply`",
    ),
    "exchange not durable": (
        lambda m: m.exchange("billing", durable=False),
        "exchange billing: durable: found false, wanted true",
        "delete it, then `billing topology apply`",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_set_up_is_found_and_its_fix_named(right: Managed, name: str) -> None:
    """In one line; a policy that is not ours is named."""
    make_wrong, told, fix = WRONG[name]
    make_wrong(right)

    found = await problems(right)
    [line] = [line for line in found if line.startswith(told)]
    assert fix in line.partition("; fix: ")[2]


async def test_check_exits_1_with_a_line_for_each_problem_and_changes_nothing(right: Managed) -> None:
    right.policy(".*", message_ttl=1000)
    right.queue("orders.work", {"x-queue-type": "classic"})
    before = right.call("GET", "definitions", "{vhost}")
    done = billing("topology", "check", environment=environment(right))
    assert done.returncode == 1
    lines = done.stderr.removeprefix("billing: ").splitlines()
    assert sum(line.startswith("queue orders.work: type: found classic, wanted quorum; fix: ") for line in lines) == 1
    assert sum(line.startswith("queue orders.parking: message-ttl: found 1000 by policy") for line in lines) == 1
    assert len(lines) == len(await problems(right))
    assert right.call("GET", "definitions", "{vhost}") == before


async def test_max_length_where_the_queue_refuses_is_nobodys_problem(right: Managed) -> None:
    """Producers are refused and we wait: nothing is lost."""
    right.policy("^orders", max_length=100_000)
    assert await problems(right) == []


async def test_a_management_interface_that_does_not_tell_is_said_without_its_password(right: Managed) -> None:
    right.may("stranger", "^$", "^$", "^$")
    for url, told in (
        (right.node.management_url.replace("billing:billing", "billing:S3cr3t"), "refused the user"),
        ("http://u:S3cr3t@127.0.0.1:1", "did not answer"),
    ):
        with pytest.raises(ManagementError, match=told) as refused:
            await compare(url, right.vhost, WANTED, declared=True)
        assert "S3cr3t" not in str(refused.value)
        done = billing("topology", "check", environment=environment(right) | {"BILLING_RABBITMQ_MANAGEMENT_URL": url})
        assert done.returncode == 1
        assert told in done.stderr
        assert "S3cr3t" not in done.stderr
    with pytest.raises(ManagementError, match="404"):
        await compare(right.node.management_url, "nowhere", WANTED, declared=True)
    url = right.node.management_url.replace("billing:", "stranger:")
    assert (await compare(url, right.vhost, WANTED, declared=True)).problems == []


@pytest.mark.parametrize("way", ["rabbitmqctl", "management"])
async def test_the_export_is_imported_and_the_service_runs_on_it_with_no_right_to_configure(
    empty: Managed, stock_url: str, way: str
) -> None:
    """Only x-queue-type is an argument: a message is retried, another parked, an event leaves, all by policies."""
    mine = environment(empty, BILLING_TOPOLOGY="verify")
    file = empty.node.folder / "definitions.json"
    assert billing("topology", "export", "--file", str(file), environment=mine).returncode == 0
    exported = json.loads(billing("topology", "export", environment=mine).stdout)
    assert exported == json.loads(file.read_text()) == definitions(WANTED, empty.vhost)
    if way == "management":
        empty.call("POST", "definitions", json=exported)
    else:
        file.chmod(0o644)
        empty.node.broker.ctl("import_definitions", f"/{file.relative_to(empty.node.root)}")
    for queue in empty.call("GET", "queues", "{vhost}"):
        assert queue["arguments"] == {"x-queue-type": "quorum"}
    assert await problems(empty, declared=False) == []
    assert billing("topology", "check", environment=mine).returncode == 0
    refused = billing("topology", "check", environment=mine | {"BILLING_TOPOLOGY": "declare"})
    assert "queue orders.work: x-delivery-limit: found none, wanted 200; fix: " in refused.stderr

    empty.may("nobody", "^$", VERIFY_WRITE, READ)
    done = billing("topology", "check", environment=mine | {"BILLING_RABBITMQ_URL": address(empty, "nobody")})
    assert (done.returncode, done.stderr) == (0, "topology is as wanted\n")
    async with rabbit_client(address(empty), keep=True) as rabbit:
        await rabbit.collect_events()
        configuration = settings(
            stock_url, address(empty, "nobody"), topology="verify", retry_delays=DELAYS, max_attempts=2
        )
        async with stock_service(configuration) as stock:
            await rabbit.publish("order.placed", b"{}")
            await rabbit.publish("order.placed", b'{"quantity": 999999999999}')
            await stock.has_stock(100)
            await eventually(rabbit.events, lambda events: [e.type for e in events] == ["stock.added"])
            await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)


async def test_an_imported_parking_queue_keeps_what_is_looked_at(empty: Managed) -> None:
    """Without its limit RabbitMQ 4.x deletes a message after 20 looks."""
    empty.call("POST", "definitions", json=definitions(WANTED, empty.vhost))
    async with rabbit_client(address(empty), keep=True) as rabbit:
        await rabbit.publish("any", b"{}", exchange="", routing_key="orders.parking")
        for _ in range(25):
            async with rabbit.connection.channel() as channel:
                queue = await channel.get_queue("orders.parking", ensure=False)
                await eventually(partial(queue.get, fail=False), bool)
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)


async def test_an_imported_work_queue_parks_what_it_rejects(empty: Managed) -> None:
    empty.call("POST", "definitions", json=definitions(WANTED, empty.vhost))
    async with rabbit_client(address(empty), keep=True) as rabbit:
        await rabbit.publish("order.placed", b"{}")
        queue = await rabbit.channel.get_queue("orders.work", ensure=False)
        message = await queue.get()
        await message.reject(requeue=False)
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)


async def test_a_policy_that_takes_the_place_of_an_exported_one_is_found(empty: Managed) -> None:
    """A queue has one policy: another of a higher priority takes everything away, not only what it names."""
    empty.call("POST", "definitions", json=definitions(WANTED, empty.vhost))
    theirs = {"pattern": "parking", "definition": {"max-length": 10**6}, "priority": 200, "apply-to": "queues"}
    empty.call("PUT", "policies", "{vhost}", "theirs", json=theirs)
    lines = await problems(empty, declared=False)
    assert [line.partition(": found")[0] for line in lines] == [
        "queue orders.parking: delivery-limit",
        "queue orders.parking: overflow",
    ]
    assert all("; fix: import `billing topology export`" in line for line in lines)


async def test_a_policy_wins_over_the_overflow_of_a_queues_argument(right: Managed) -> None:
    """Why policies are compared although everything is an argument: the drop is without a word to the publisher."""
    right.policy("parking", overflow="drop-head", max_length=2)
    async with rabbit_client(address(right), keep=True) as rabbit:

        async def publish() -> int:
            await rabbit.publish("any", b"{}", exchange="", routing_key="orders.parking")
            return await rabbit.count("orders.parking")

        await eventually(publish, lambda n: len(rabbit.published) > 5 and n == 2)


@pytest.mark.guarantee("G1")
async def test_a_dangerous_policy_is_logged_by_the_service_while_it_runs(
    right: Managed, stock_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H07: a warning for each difference, once as long as it is there, and a gauge to ring at."""
    monkeypatch.setattr(app, "COMPARE_INTERVAL", app.COMPARE_INTERVAL / 200)
    configuration = settings(
        stock_url, address(right), rabbitmq_management_url=right.node.management_url, retry_delays=DELAYS
    )

    async def told_of() -> float:
        registry = stock.service.metrics.registry
        return registry.get_sample_value("billing_topology_differences") or 0

    async def not_compared() -> int:
        return sum(log["event"] == "topology_not_compared" for log in logs)

    async def answer_nonsense(url: str, vhost: str, wanted: Topology, *, declared: bool) -> Differences:
        return differences(wanted, Found(queues=[{"name": "orders.work", "type": "quorum"}]), declared=declared)

    with capture_logs() as logs:
        async with stock_service(configuration) as stock:
            right.policy("parking", message_ttl=60_000, overflow="drop-head", max_length=5)
            await eventually(told_of, lambda n: n == 2)
            told = [log["explanation"] for log in logs if log["event"] == "topology_differs"]
            assert [line.partition(" by policy")[0] for line in told] == [
                "queue orders.parking: message-ttl: found 60000",
                "queue orders.parking: overflow: found drop-head",
            ]
            right.call("DELETE", "policies", "{vhost}", "theirs")
            await eventually(told_of, lambda n: n == 0)
            monkeypatch.setattr(app, "compare", answer_nonsense)
            await eventually(not_compared, lambda n: n == 1)
            assert await stock.is_ready()
