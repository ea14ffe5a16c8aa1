"""One suite over every retry strategy that the broker can do: what all promise, and how to change between them."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from service.app import BillingUnitOfWork, Service, orders_family, whole_topology
from service.billing.errors import RuleViolationError
from service.reliability import topology
from service.reliability.errors import TopologyError
from service.reliability.hosts import Hosts
from service.reliability.link import BrokerLink
from service.reliability.outcome import Reason
from service.reliability.parking import visit
from service.reliability.retry import RetryPolicy
from service.reliability.strategies import STRATEGIES
from service.reliability.topology import QueueFamily
from service.settings import Settings
from tests.integration.test_strangers import DEATHS, HISTORY
from tests.support.family import consuming
from tests.support.own_broker import own_broker
from tests.support.rabbit import (
    Rabbit,
    possible_strategies,
    rabbit_client,
    user_with,
)
from tests.support.stock import TYPE, Received, add, settings, stock_service
from tests.support.waiting import eventually

PARKING, WORK = "orders.parking", "orders.work"
POSSIBLE = possible_strategies()

Act = Callable[[Received, BillingUnitOfWork], Awaitable[None]]


@pytest.fixture(params=POSSIBLE)
def strategy(request: pytest.FixtureRequest) -> str:
    """Each strategy that the broker can do."""
    return request.param


@dataclass(frozen=True, slots=True)
class Execution:
    """What a handler saw."""

    sku: str
    attempt: int
    redelivered: bool
    at: datetime


def failing(executions: list[Execution]) -> Act:
    """Return a handler that fails as often as the message says, after some work, and notes what it sees."""

    async def act(received: Received, work: BillingUnitOfWork) -> None:
        cause = work._cause
        executions.append(Execution(received.sku, cause.attempt, cause.redelivered, datetime.now(UTC)))
        await add(received, work)
        if sum(execution.sku == received.sku for execution in executions) <= received.failures:
            raise RuntimeError

    return act


def body(sku: str = "nail", failures: int = 0) -> bytes:
    """Return the body of a message that adds one to the stock, after so many failures."""
    return json.dumps({"sku": sku, "quantity": 1, "failures": failures}).encode()


async def counted(rabbit: Rabbit, queue: str, number: int, **patience: float) -> None:
    """Wait until there are so many messages in a queue."""
    await eventually(lambda: rabbit.count(queue), lambda n: n == number, **patience)


async def declared(configuration: Settings) -> None:
    """Make the queues, as `billing topology apply` does."""
    async with BrokerLink(Hosts(configuration.rabbitmq_urls), "billing-topology") as link:
        await topology.declare(link, whole_topology(orders_family(configuration)))


@pytest.mark.guarantee("G5")
async def test_what_fails_twice_is_executed_a_third_time(stock_url: str, rabbit: Rabbit, strategy: str) -> None:
    """Not before its delay, and beside the others: that it comes again is no sign of a crash."""
    executions: list[Execution] = []
    configuration = settings(stock_url, rabbit.url, retry_strategy=strategy, retry_delays="0.3")
    async with stock_service(configuration, failing(executions)) as stock:
        await rabbit.publish(TYPE, body(failures=2), headers={"tenant": "a"})
        await stock.has_stock(1)
        assert [execution.attempt for execution in executions] == [1, 2, 3]
        for earlier, later in pairwise(executions):
            assert later.at - earlier.at >= timedelta(seconds=0.3)
        assert not any(execution.redelivered for execution in executions)
        assert await rabbit.count(PARKING) == 0


@pytest.mark.guarantee("G5")
async def test_what_always_fails_is_parked_after_max_attempts(stock_url: str, rabbit: Rabbit, strategy: str) -> None:
    """With the same headers, and where it was published first, whichever way it took."""
    executions: list[Execution] = []
    async with stock_service(settings(stock_url, rabbit.url, retry_strategy=strategy), failing(executions)) as stock:
        await rabbit.publish(TYPE, body(failures=9), message_id="m-1", headers={"tenant": "a"}, type=None)
        await counted(rabbit, PARKING, 1)
        assert [execution.attempt for execution in executions] == [1, 2, 3]
        [parked] = await rabbit.take(PARKING)
        assert (parked.message_id, parked.type, parked.body) == ("m-1", TYPE, body(failures=9))
        told = {
            name: value for name, value in parked.headers.items() if name not in {"x-parked-at", "x-exception-message"}
        }
        assert told == {
            "tenant": "a",
            "x-parked-reason": "attempts-exhausted",
            "x-attempts": 3,
            "x-exception-type": "builtins.RuntimeError",
            "x-original-exchange": "orders",
            "x-original-routing-key": TYPE,
            "x-original-queue": WORK,
        }
        assert await stock.stock() == 0


@pytest.mark.guarantee("G5")
async def test_what_can_never_succeed_is_parked_at_once(stock_url: str, rabbit: Rabbit, strategy: str) -> None:
    async def refuse(received: Received, work: BillingUnitOfWork) -> None:
        raise RuleViolationError(received.sku)

    async with stock_service(settings(stock_url, rabbit.url, retry_strategy=strategy), refuse):
        await rabbit.publish(TYPE, body())
        await rabbit.publish(TYPE, b"{")
        await counted(rabbit, PARKING, 2)
        found = {(p.headers["x-parked-reason"], p.headers["x-attempts"]) for p in await rabbit.take(PARKING)}
        assert found == {("rejected-by-rule", 1), ("unreadable", 0)}


@pytest.mark.guarantee("G6")
async def test_a_short_delay_is_not_held_up_by_a_long_one(stock_url: str, rabbit: Rabbit, strategy: str) -> None:
    """H02: one message waits its long second delay, another comes after it with the short first one."""
    executions: list[Execution] = []
    configuration = settings(stock_url, rabbit.url, retry_strategy=strategy, retry_delays="0.3,30")
    async with stock_service(configuration, failing(executions)) as stock:
        await rabbit.publish(TYPE, body("long", failures=2))
        await eventually(lambda: _times(executions, "long"), lambda n: n == 2)
        for number in range(5):
            await rabbit.publish(TYPE, body(f"short-{number}", failures=1))
            await rabbit.publish(TYPE, body("good"))
        await eventually(lambda: stock.stock("good"), lambda n: n == 5, within=10)
        for number in range(5):
            await eventually(partial(stock.stock, f"short-{number}"), lambda n: n == 1, within=10)


async def _times(executions: list[Execution], sku: str) -> int:
    return sum(execution.sku == sku for execution in executions)


@pytest.mark.guarantee("G1")
async def test_what_was_delivered_to_25_consumers_that_died_is_processed(
    stock_url: str, rabbit: Rabbit, strategy: str
) -> None:
    """H03: it costs no attempt, although it fails afterwards and comes back: the broker would see a cycle."""
    executions: list[Execution] = []
    configuration = settings(stock_url, rabbit.url, retry_strategy=strategy)
    await declared(configuration)
    await rabbit.publish(TYPE, body(failures=2))
    for _ in range(25):
        async with rabbit.connection.channel() as victim:
            queue = await victim.get_queue(WORK, ensure=False)
            await eventually(partial(queue.get, fail=False), lambda message: message is not None)
    async with stock_service(configuration, failing(executions)) as stock:
        await stock.has_stock(1)
        assert [execution.attempt for execution in executions] == [1, 2, 3]
        assert executions[0].redelivered, "it may have killed them: alone, and marked"
        assert await rabbit.count(PARKING) == 0


@pytest.mark.guarantee("G1")
async def test_what_expires_in_the_work_queue_is_parked_and_stops_no_retry(
    stock_url: str, rabbit: Rabbit, strategy: str
) -> None:
    """In a plain loop the broker takes it for a cycle; 32 of them stop whatever waits behind, on 3.10 and on 4.3."""
    executions: list[Execution] = []
    configuration = settings(stock_url, rabbit.url, retry_strategy=strategy)
    await declared(configuration)
    for _ in range(40):
        await rabbit.publish(TYPE, body("late"), expiration=0.01)
    await counted(rabbit, PARKING, 40)
    async with BrokerLink(Hosts([rabbit.url]), "billing-parking") as link, visit(link, PARKING) as seen:
        assert seen.reasons == {"broker-expired": 40}
    async with stock_service(configuration, failing(executions)) as stock:
        await rabbit.publish(TYPE, body(failures=2))
        await stock.has_stock(1)


FORGED: tuple[dict[str, Any], ...] = (
    *({"x-death": deaths} for deaths in (*DEATHS, HISTORY)),
    *(
        {"x-death": [{"queue": WORK, "reason": reason, "count": n, "exchange": "orders", "routing-keys": [TYPE]}]}
        for reason in ("rejected", "expired", "delivery_limit")
        for n in (1, 4, 2**63 - 1, -(2**63))
    ),
    {"x-attempt": 3},
    {"x-parked-without-id": True},
    {"x-original-exchange": "elsewhere", "x-original-routing-key": "any"},
    {"x-first-death-queue": WORK, "x-first-death-reason": "expired", "x-first-death-exchange": ""},
    {"x-last-death-queue": WORK, "x-last-death-reason": "expired", "x-last-death-exchange": ""},
    *({"x-delivery-count": n, "x-acquired-count": m} for n, m in ((2, 1), (0, 50), (2**62, 0), ("3", None))),
    {"x-delivery-count": 2},
    {"CC": [TYPE]},
)


@pytest.mark.guarantee("G5")
async def test_nothing_that_a_producer_writes_into_the_headers_costs_or_gives_an_attempt(stock_url: str) -> None:
    """A05, A06, A08: on a node of its own, since 3.10 can be made to crash by what it dead-letters."""
    async with own_broker() as node:
        for strategy in POSSIBLE:
            await node.ctl("add_vhost", strategy)
            await node.ctl("set_permissions", "-p", strategy, "billing", ".*", ".*", ".*")
            executions: Counter[str] = Counter()

            async def fail(received: Received, _work: BillingUnitOfWork, seen: Counter[str] = executions) -> None:
                seen[received.sku] += 1
                raise RuntimeError

            async with (
                rabbit_client(node.url(strategy), keep=True) as rabbit,
                stock_service(settings(stock_url, rabbit.url, retry_strategy=strategy), fail, consumer=strategy),
            ):
                for number, headers in enumerate(FORGED):
                    await rabbit.publish(TYPE, body(str(number)), message_id=f"m-{number}", headers=headers)
                await counted(rabbit, PARKING, len(FORGED), within=40)
                assert executions == {str(number): 3 for number in range(len(FORGED))}
                parked = await rabbit.take(PARKING)
                assert {copy.message_id for copy in parked} == {f"m-{number}" for number in range(len(FORGED))}
                assert {copy.headers["x-attempts"] for copy in parked} == {3}
                assert {copy.headers["x-original-exchange"] for copy in parked} == {"orders"}
                assert not {name for copy in parked for name in copy.headers if "death" in name}
                assert await rabbit.count(WORK) == 0


async def test_what_comes_through_the_default_exchange_with_a_history_is_executed_and_ends(
    stock_url: str, rabbit: Rabbit, strategy: str
) -> None:
    """As a recovery tool sends it. Who may publish there can cost a message attempts, not all, and give it none."""
    executions: list[Execution] = []
    deaths = [{"queue": WORK, "reason": "rejected", "count": 2, "exchange": "orders", "routing-keys": [TYPE]}]
    async with stock_service(settings(stock_url, rabbit.url, retry_strategy=strategy), failing(executions)):
        for number, count in enumerate((1, 99, 2**31 - 1, True, "3")):
            headers = {"x-death": [deaths[0] | {"count": count}], "x-attempt": 7}
            await rabbit.publish(TYPE, body(str(number), 9), exchange="", routing_key=WORK, headers=headers)
        await counted(rabbit, PARKING, 5)
        executed = Counter(execution.sku for execution in executions)
        assert all(1 <= executed[str(number)] <= 3 for number in range(5)), executed
        assert {copy.headers["x-attempts"] for copy in await rabbit.take(PARKING)} == {3}


async def test_a_broker_without_delayed_retries_is_refused_in_one_line(
    stock_url: str, rabbit: Rabbit, environment: dict[str, str]
) -> None:
    """Older ones take the arguments and requeue at once: a hot loop. 4.3 is taken."""
    configuration = settings(stock_url, rabbit.url, retry_strategy="broker")
    if "broker" in POSSIBLE:
        await declared(configuration)
        return
    with pytest.raises(TopologyError, match=r"^the retry strategy needs RabbitMQ 4\.3 or later, and this is \d+\.\d+"):
        await Service(configuration).run()
    assert await rabbit.count(WORK) == -1
    command = subprocess.run(
        [sys.executable, "-m", "service", "topology", "apply"],
        env=environment | {"BILLING_RETRY_STRATEGY": "broker"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert command.returncode == 1
    assert len(command.stderr.strip().splitlines()) == 1
    assert "needs RabbitMQ 4.3 or later" in command.stderr


async def empty(rabbit: Rabbit, configuration: Settings) -> None:
    """Wait until nothing is left but what is parked, as `billing status` shows it once the instances are stopped."""
    queues = {queue.name for queue in orders_family(configuration).topology.queues} - {PARKING}

    async def left() -> set[str]:
        return {queue for queue in queues if await rabbit.count(queue)}

    await eventually(left, lambda names: not names)


@pytest.mark.parametrize("old", POSSIBLE)
@pytest.mark.parametrize("new", POSSIBLE)
async def test_the_strategy_is_changed_by_a_drain(stock_url: str, rabbit: Rabbit, old: str, new: str) -> None:
    """The steps of docs/strategies.md. What waits when the producers stop is processed before the change."""
    if old == new:
        return
    executions: list[Execution] = []
    before = settings(stock_url, rabbit.url, retry_strategy=old, retry_delays="1")
    after = settings(stock_url, rabbit.url, retry_strategy=new, retry_delays="0.2")
    async with stock_service(before, failing(executions)) as stock:
        for number in range(5):
            await rabbit.publish(TYPE, body(f"old-{number}", failures=2))
        for number in range(5):
            await eventually(partial(stock.stock, f"old-{number}"), lambda n: n == 1)
    await empty(rabbit, before)
    with pytest.raises(TopologyError, match=r"queue orders\.work: x-"):
        await declared(after)
    for queue in orders_family(before).topology.queues:
        if queue.name != PARKING:
            await rabbit.delete(queue.name)
    await declared(after)
    async with stock_service(after, failing(executions)) as stock:
        await rabbit.publish(TYPE, body("new", failures=2))
        await eventually(lambda: stock.stock("new"), lambda n: n == 1)
    assert await rabbit.count(PARKING) == 0


async def test_the_delays_of_staged_are_changed_by_a_restart(stock_url: str, rabbit: Rabbit) -> None:
    """What waits in an old queue comes back when its old delay is over, with its attempt."""
    executions: list[Execution] = []
    async with stock_service(settings(stock_url, rabbit.url, retry_delays="2"), failing(executions)):
        await rabbit.publish(TYPE, body(failures=2))
        await counted(rabbit, "orders.wait.2s", 1)
    async with stock_service(settings(stock_url, rabbit.url, retry_delays="0.2"), failing(executions)) as stock:
        await stock.has_stock(1)
    assert [execution.attempt for execution in executions] == [1, 2, 3]
    assert executions[1].at - executions[0].at >= timedelta(seconds=2)
    await rabbit.delete("orders.wait.2s")


@pytest.mark.parametrize(
    ("strategy", "queue"), [(s, q) for s, q in (("dead-letter", "orders.wait"), ("broker", WORK)) if s in POSSIBLE]
)
async def test_the_delay_of_the_others_is_changed_by_a_drain(
    stock_url: str, rabbit: Rabbit, strategy: str, queue: str
) -> None:
    """It is an argument of one queue: the start is refused until that is drained and deleted."""
    executions: list[Execution] = []
    before = settings(stock_url, rabbit.url, retry_strategy=strategy, retry_delays="1")
    after = settings(stock_url, rabbit.url, retry_strategy=strategy, retry_delays="0.2")
    async with stock_service(before, failing(executions)) as stock:
        await rabbit.publish(TYPE, body(failures=2))
        await stock.has_stock(1)
    await empty(rabbit, before)
    with pytest.raises(TopologyError, match=rf"queue {queue}: x-\S+: found 1000, wanted 200"):
        await declared(after)
    await rabbit.delete(queue)
    async with stock_service(after, failing(executions)) as stock:
        await rabbit.publish(TYPE, body("new", failures=2))
        await eventually(lambda: stock.stock("new"), lambda n: n == 1)


async def test_the_strategy_works_with_the_rights_of_its_page(stock_url: str, rabbit: Rabbit, strategy: str) -> None:
    """Retry and parking, declaring included."""
    page = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    write = r"^(amq\.default|billing|orders\.(work|wait|parking|retry|dead))$"
    assert f"'{write}'" in page
    with user_with(rabbit, r"^(orders(\..+)?|billing)$", write, r"^orders(\..+)?$") as url:
        executions: list[Execution] = []
        async with stock_service(settings(stock_url, url, retry_strategy=strategy), failing(executions)) as stock:
            await rabbit.publish(TYPE, body(failures=1))
            await rabbit.publish(TYPE, b"{")
            await stock.has_stock(1)
            await counted(rabbit, PARKING, 1)


@asynccontextmanager
async def _two_families(rabbit: Rabbit, seen: list[str]) -> AsyncIterator[None]:
    """Consume two families with one handler that always raises a KeyError, each with rules of its own."""

    def family(name: str, policy: RetryPolicy, strategy: str) -> QueueFamily:
        return QueueFamily(name, keys=("stock.added",), policy=policy, strategy=STRATEGIES[strategy])

    patient = RetryPolicy(4, (timedelta(seconds=0.2), timedelta(seconds=0.4)))
    strict = RetryPolicy(4, (timedelta(seconds=0.2),), permanent={LookupError: Reason.REJECTED_BY_RULE})

    def act(name: str) -> Callable[[Received], Awaitable[None]]:
        async def fail(received: Received) -> None:
            seen.append(f"{name} {received.sku}")
            raise {"key": KeyError, "value": ValueError}[received.sku]

        return fail

    async with (
        consuming(family("orders", patient, "staged"), rabbit.url, act("patient")),
        consuming(family("returns", strict, "dead-letter"), rabbit.url, act("strict")),
    ):
        await eventually(lambda: rabbit.consumers("orders.work"), lambda n: n == 1)
        await eventually(lambda: rabbit.consumers("returns.work"), lambda n: n == 1)
        yield


async def test_each_family_has_a_policy_exceptions_and_a_strategy_of_its_own(rabbit: Rabbit) -> None:
    seen: list[str] = []
    queues = ("returns.work", "returns.wait", "returns.parking")
    try:
        async with _two_families(rabbit, seen):
            for exchange in ("orders", "returns"):
                for sku in ("key", "value"):
                    await rabbit.publish("stock.added", body(sku), exchange=exchange, message_id=f"{exchange}-{sku}")
            await counted(rabbit, "orders.parking", 2)
            await counted(rabbit, "returns.parking", 2)
        assert Counter(seen) == {"patient key": 4, "patient value": 4, "strict key": 1, "strict value": 4}
        reasons = {
            parked.message_id: parked.headers["x-parked-reason"]
            for queue in ("orders.parking", "returns.parking")
            for parked in await rabbit.take(queue)
        }
        assert reasons == {
            "orders-key": "attempts-exhausted",
            "orders-value": "attempts-exhausted",
            "returns-key": "rejected-by-rule",
            "returns-value": "attempts-exhausted",
        }
    finally:
        for queue in queues:
            await rabbit.delete(queue)
        for exchange in ("returns", "returns.dead", "returns.retry"):
            await rabbit.channel.exchange_delete(exchange)
