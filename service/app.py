"""The composition root: the only module that knows every other. Wires the parts, starts them in order, stops them.

Start: HTTP first, so that probes are answered; then the database, with its schema; then the topology; then relay and
consumer. A server that is not there yet is waited for. Stop, in one budget: cancel the consumer, finish what is in
flight, let the relay finish its window, close.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import structlog
from faststream.rabbit import RabbitBroker

from schemas.money import LARGEST_TOTAL
from service import contract, database
from service.alarm import ParkingAlarm
from service.asyncapi import Limits, asyncapi_yaml
from service.billing import handlers
from service.billing.errors import BillingError, RuleViolationError
from service.billing.repository import PostgresInvoices
from service.health import Health, within
from service.http import serve, web_application
from service.management import Management, ManagementError, compare
from service.reliability import outbox, parking, topology
from service.reliability.barrier import Barrier, no_barrier
from service.reliability.connection import Connection
from service.reliability.consumer import Consumer
from service.reliability.dispatch import Dispatcher
from service.reliability.envelope import Envelope
from service.reliability.errors import TopologyError
from service.reliability.frames import guard
from service.reliability.gate import Gate
from service.reliability.hosts import Hosts
from service.reliability.inbound import Inbound
from service.reliability.link import BrokerLink, losses_are_errors
from service.reliability.middleware import Reliability
from service.reliability.outcome import Reason
from service.reliability.publisher import ConfirmingPublisher
from service.reliability.relay import Relay
from service.reliability.retry import RetryPolicy, backoff, short
from service.reliability.settlement import Settlement
from service.reliability.stopping import Stopping
from service.reliability.strategies import STRATEGIES
from service.reliability.topology import Exchange, QueueFamily, Topology
from service.reliability.unit_of_work import PostgresTransactions, PostgresUnitOfWork
from service.settings import Settings, default_settings
from service.telemetry import Metrics

FIRST_PAUSE, LONGEST_PAUSE = timedelta(milliseconds=250), timedelta(seconds=3)
"""Between attempts to reach a server at the start, doubling."""

TOPOLOGY_INTERVAL = timedelta(seconds=10)
"""Between declarations while running."""

COMPARE_INTERVAL = timedelta(minutes=1)
"""Between comparisons through the management interface."""

PARKING_INTERVAL = timedelta(seconds=10)
"""Between looks at the parking queue's length, whether anybody asks for metrics or not."""

BLOCKED_INTERVAL = timedelta(seconds=0.5)
"""Between looks at whether the broker has blocked a connection."""

log = structlog.get_logger(__name__)


class BillingUnitOfWork(PostgresUnitOfWork):
    """A transaction with the invoices in it."""

    def __init__(self, connection: Connection, cause: Envelope) -> None:
        """Bind to an open transaction."""
        super().__init__(connection, cause, contract.BILLING_EXCHANGE)
        self.invoices = PostgresInvoices(connection)


def orders_family(settings: Settings) -> QueueFamily:
    """Return the queues of the order events and how their failures are treated."""
    policy = RetryPolicy(
        max_attempts=settings.max_attempts,
        delays=settings.delays,
        permanent={RuleViolationError: Reason.REJECTED_BY_RULE},
        safe=(BillingError,),
    )
    strategy = STRATEGIES[settings.retry_strategy]
    return QueueFamily(contract.ORDERS_EXCHANGE, keys=contract.ORDER_EVENTS, policy=policy, strategy=strategy)


def whole_topology(family: QueueFamily) -> Topology:
    """Return all that the service needs on the broker."""
    return family.topology + Topology(exchanges=(Exchange(contract.BILLING_EXCHANGE, "topic"),))


def consumers(settings: Settings) -> dict[str, str]:
    """Return for each event type the name of its consumer in the inbox."""
    inbound = Inbound(RabbitBroker(logger=None), orders_family(settings))
    handlers.subscribe(inbound)
    return inbound.consumers


def published_contract(subscribe: Callable[[Inbound], None] = handlers.subscribe) -> str:
    """Return the AsyncAPI document: the published one, with the defaults, whatever an instance is configured to."""
    settings = default_settings()
    limits = Limits(
        bodyBytes=settings.max_body_bytes,
        totalMinorUnits=LARGEST_TOTAL,
        messageIdDays=settings.inbox_retention.days,
        executions=settings.max_attempts,
    )
    return asyncapi_yaml(subscribe, orders_family(settings), limits)


class Service:
    """The billing service: one instance, for one run."""

    def __init__(
        self,
        settings: Settings,
        *,
        barrier: Barrier = no_barrier,
        subscribe: Callable[[Inbound], None] = handlers.subscribe,
    ) -> None:
        """Wire everything; nothing is opened yet. Call it inside a running event loop.

        Args:
            settings: read by the caller.
            barrier: where crash tests stop the process.
            subscribe: declares the subscribers.
        """
        self.settings = settings
        self._subscribe = subscribe
        self.stopping = Stopping()
        self._jitter = random.random
        self.metrics = Metrics()
        self.health = Health(self.metrics)
        self.family = orders_family(settings)
        for queue in self.family.topology.queues:
            self.metrics.successors_refused.labels(queue.name)  # there before the first one: an alarm reads them
        for reason in Reason:
            self.metrics.parked.labels(reason)
        self._parking_alarm = ParkingAlarm(settings.parked_alarm)
        self._management_answers = True
        self._hosts = Hosts(settings.rabbitmq_urls)
        self._consumer_link = self._link("billing-consumer")
        self._publisher_link = self._link("billing-publisher")
        self._relay_link = self._link("billing-relay")
        # One connection for each handler, one for probes and metrics.
        self._pool = database.make_pool(self._database_url, settings.concurrency + 1)
        # Set after the consumer is cancelled: what is given back before that would be delivered to us again.
        self._handlers_stopping = Stopping()
        self._repairing = asyncio.Lock()
        self._gate = Gate(
            settings.concurrency, self._database_is_back, self.metrics, self._jitter, self._handlers_stopping
        )
        self._relay = Relay(
            connect=lambda: database.connect(self._database_url, "relay"),
            dispatcher=Dispatcher(
                publisher=ConfirmingPublisher(self._relay_link, settings.confirm_timeout, self.stopping),
                metrics=self.metrics,
                window=settings.relay_window,
                jitter=self._jitter,
                barrier=barrier,
            ),
            metrics=self.metrics,
            poll=settings.relay_poll_interval,
            batch=settings.relay_batch,
            jitter=self._jitter,
            competes=settings.relay == "on",
            barrier=barrier,
        )
        self.broker = RabbitBroker(logger=None)
        inbound = Inbound(self.broker, self.family)
        subscribe(inbound)
        settlement = Settlement(
            family=self.family,
            publisher=ConfirmingPublisher(self._publisher_link, settings.confirm_timeout, self.stopping),
            metrics=self.metrics,
            now=lambda: datetime.now(UTC),  # noqa: TID251 - the one place that reads the clock
            jitter=self._jitter,
            stopping=self._handlers_stopping,
            repair=self._repair,
            barrier=barrier,
        )
        reliability = Reliability(
            inbound=inbound,
            transactions=PostgresTransactions(self._pool, BillingUnitOfWork, self._relay.wake),
            settlement=settlement,
            metrics=self.metrics,
            handler_timeout=settings.handler_timeout,
            max_body_bytes=settings.max_body_bytes,
            gate=self._gate,
            jitter=self._jitter,
            stopping=self._handlers_stopping,
            barrier=barrier,
        )
        self.broker.add_middleware(reliability)
        inbound.prepare()
        self._consumer = Consumer(
            link=self._consumer_link,
            inbound=inbound,
            settlement=settlement,
            declare=self._declare,
            gate=self._gate,
            prefetch=settings.prefetch,
            jitter=self._jitter,
        )
        self.health.watch("consumer", self._consumer.is_consuming)
        self.health.watch("database", self._database_answers)
        self.health.watch("publisher", self._publisher_works)
        self.health.watch("relay", self._relay_works)

    async def run(self, *, migrate_first: bool = False) -> None:
        """Run until `stopping` is set; return when everything is closed, within the shutdown budget.

        Args:
            migrate_first: bring the database schema up to date instead of waiting until somebody else has.

        Raises:
            TopologyError: the broker's queues are not what the contract says.
            OSError: the HTTP address cannot be listened on.
        """
        web = web_application(self.health, self.metrics, self._refresh_gauges, self._contract)
        async with serve(web, self.settings.http_host, self.settings.http_port) as port:
            log.info("http_started", host=self.settings.http_host, port=port)
            try:
                if migrate_first:
                    await self._patiently("migration", self._migrate)
                await self._patiently("database", self._require_database)
                await self._patiently("broker", self._declare)
                if not self.stopping.is_set():
                    await self._work()
            finally:
                await self._close()
        log.info("service_stopped")

    async def _work(self) -> None:
        """Relay and consume until asked to stop, or until a part ends that must not."""
        relay = asyncio.create_task(self._relay.run(), name="relay")
        consumer = asyncio.create_task(self._consumer.run(), name="consumer")
        topology_task = asyncio.create_task(self._keep_topology(), name="topology")
        blocked = asyncio.create_task(self._watch_blocked(), name="blocked")
        compared = asyncio.create_task(self._watch_differences(), name="compared")
        parked = asyncio.create_task(self._watch_parking(), name="parking")
        stop = asyncio.create_task(self.stopping.wait(), name="stop")
        log.info("service_started")
        ended, _ = await asyncio.wait((relay, consumer, stop), return_when=asyncio.FIRST_COMPLETED)
        self.stopping.set()
        await self._stop(relay)
        tasks = (relay, consumer, topology_task, blocked, compared, parked)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [r for r in results if isinstance(r, Exception)]
        if failed:
            raise failed[0]
        if stop not in ended:
            raise RuntimeError(f"{' and '.join(task.get_name() for task in ended)} ended although nobody asked")

    async def _stop(self, relay: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        budget = self.settings.shutdown_timeout
        # What the relay's last window may take, and a second to close.
        reserve = min(self.settings.confirm_timeout + timedelta(seconds=2), budget / 2)
        end = loop.time() + budget.total_seconds()
        log.info("service_stopping", budget=budget.total_seconds())
        await self._consumer.cancel(end - reserve.total_seconds())
        self._handlers_stopping.set()
        self._gate.sweep()
        cut_off = await self._consumer.drain(end - reserve.total_seconds())
        if cut_off:
            log.warning("deliveries_cut_off", count=cut_off, explanation="rolled back; the broker delivers them again")
        self._relay.stop()
        await asyncio.wait({relay}, timeout=max(0.0, end - 1 - loop.time()))

    async def _close(self) -> None:
        links = (self._consumer_link, self._publisher_link, self._relay_link)
        await asyncio.gather(*(link.close() for link in links))
        with suppress(asyncpg.InterfaceError):  # it was never used
            self._pool.terminate()

    async def _patiently(self, server: str, attempt: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Try until it works or the service is asked to stop; only a wrong topology ends the waiting."""
        failures = 0
        while not self.stopping.is_set():
            try:
                return await self._unless_stopped(attempt())
            except TopologyError:
                raise
            except Exception as error:  # a server that is not there yet, in whatever form it is told
                failures += 1
                log.warning(
                    "server_not_available",
                    server=server,
                    failures=failures,
                    error=type(error).__name__,
                    explanation=short(error),
                )
                await self.stopping.pause(backoff(failures, self._jitter(), first=FIRST_PAUSE, longest=LONGEST_PAUSE))
        return None

    async def _unless_stopped(self, attempt: Coroutine[Any, Any, None]) -> None:
        """Make an attempt; leave it where it is when the service is asked to stop meanwhile."""
        tasks = asyncio.create_task(attempt), asyncio.create_task(self.stopping.wait())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        if tasks[0].done():
            await tasks[0]

    async def _migrate(self) -> None:
        await _in_thread(lambda: database.migrate(self._database_url))  # Alembic runs an event loop of its own

    async def _require_database(self) -> None:
        await self._pool
        async with self._pool.acquire(timeout=database.CONNECT_TIMEOUT) as connection:
            await database.require_current_schema(connection)

    async def _declare(self) -> None:
        async with self._link("billing-topology") as link:
            with losses_are_errors():
                await self._make_topology(link)

    async def _make_topology(self, link: BrokerLink) -> None:
        make = topology.declare if self.settings.topology == "declare" else topology.verify
        await make(link, whole_topology(self.family))

    async def _keep_topology(self) -> None:
        """Declare again and again: the loss of an exchange or of a binding is noticed by nobody, as messages just stop.

        What is wrong is told and left to people: the service does what it still can.
        """
        while True:
            await self.stopping.pause(TOPOLOGY_INTERVAL * (1 + self._jitter() / 4))
            if self.stopping.is_set():
                return
            try:
                with losses_are_errors():
                    await self._make_topology(self._publisher_link)
            except TopologyError as error:
                log.error("topology_wrong", explanation=str(error))  # noqa: TRY400 - the text says it all
            except Exception as error:  # the broker is away, in whatever form it is told; the consumer's log says so
                log.debug("topology_not_declared", error=type(error).__name__)

    async def _watch_differences(self) -> None:
        """Tell each difference once, as long as it is there: a policy may come while the service runs.

        It is no reason to stop: messages that are not taken in are no safer, and the policy may be mended meanwhile.
        """
        told: set[str] = set()
        while self.settings.rabbitmq_management_url is not None and not self.stopping.is_set():
            try:
                found = await compare(
                    self.settings.rabbitmq_management_url.get_secret_value(),
                    self.settings.vhost,
                    whole_topology(self.family),
                    declared=self.settings.topology == "declare",
                )
                self.metrics.topology_differences.set(len(found.problems))
                event, now = "topology_differs", {*found.problems, *found.warnings}
            except ManagementError as error:
                event, now = "topology_not_compared", {str(error)}
            except Exception as error:  # an answer like none that was seen must not end anything
                event, now = "topology_not_compared", {f"the answer was not understood: {type(error).__name__}"}
            for line in sorted(now - told):
                log.warning(event, explanation=line)
            told = now
            await self.stopping.pause(COMPARE_INTERVAL)

    async def _watch_blocked(self) -> None:
        """Say when the broker reads nothing that is published, and when it does again."""
        was: set[str] = set()
        while not self.stopping.is_set():
            now = {link.name for link in (self._publisher_link, self._relay_link) if link.is_blocked}
            self.metrics.broker_blocked.set(bool(now))
            if now and not was:
                log.warning("broker_blocked", connections=sorted(now), explanation="a memory or disk alarm")
            elif was and not now:
                log.info("broker_unblocked")
            was = now
            await self.stopping.pause(BLOCKED_INTERVAL)

    async def _watch_parking(self) -> None:
        """Look at how much is parked, so that somebody is told where nobody asks."""
        while not self.stopping.is_set():
            await within(self.health.timeout, self._look_at_parking())
            await self.stopping.pause(PARKING_INTERVAL * (1 + self._jitter() / 4))

    async def _look_at_parking(self) -> None:
        """Ask how much is parked, on the connection that no alarm of the broker blocks; warn where it is too much."""
        if not self._consumer_link.is_open:
            return
        count = await parking.length(self._consumer_link, self.family.parking)
        now = asyncio.get_running_loop().time()
        if self._parking_alarm.look(count, now):
            log.warning(
                "parking_alarm",
                queue=self.family.parking,
                count=count,
                threshold=self.settings.parked_alarm,
                explanation="'billing parking list' says why",
            )
        self.metrics.parking_length.set(count)
        self.metrics.parking_oldest_seconds.set(self._parking_alarm.filled_seconds(now))

    async def _look_at_dead_letters(self) -> None:
        if self.settings.rabbitmq_management_url is None:
            return
        try:
            async with Management(self.settings.rabbitmq_management_url.get_secret_value()) as management:
                queues = (queue.name for queue in self.family.topology.queues)
                inside = await management.inside(self.settings.vhost, queues)
        except ManagementError as error:
            if self._management_answers:
                log.warning("management_not_available", explanation=str(error))
            self._management_answers = False
            return
        self._management_answers = True
        for name, queue in inside.items():
            self.metrics.dead_letters_held.labels(name).set(queue.held)

    async def _repair(self) -> None:
        """Declare the topology for all who found a queue missing at once."""
        if self._repairing.locked():
            async with self._repairing:
                return
        async with self._repairing:
            await self._declare()

    async def _database_answers(self) -> bool:
        if self._gate.is_open and not await database.takes_writes(self._pool):
            self._gate.close("the database takes no writes")
        return self._gate.is_open

    async def _database_is_back(self) -> bool:
        """Ask on a new connection, and if so begin anew with the others: they may be dead, or lead elsewhere."""
        connection = await database.connect(self._database_url, "probe")
        try:
            is_back = await database.takes_writes(connection)
        finally:
            await connection.close(timeout=1)
        if is_back:
            await self._pool.expire_connections()
            self._relay.renew()
        return is_back

    async def _publisher_works(self) -> bool:
        return not self._relay_link.is_blocked and await self._publisher_link.answers()

    async def _relay_works(self) -> bool:
        return self._relay.is_alive()

    async def _refresh_gauges(self) -> None:
        """Ask for what nobody pushes. What cannot be asked keeps what was last known: `billing_ready` tells."""
        self.metrics.frames_guarded.set(guard())
        looks = (self._look_at_outbox, self._look_at_parking, self._look_at_dead_letters)
        await asyncio.gather(*(within(self.health.timeout, look()) for look in looks))

    async def _look_at_outbox(self) -> None:
        async with self._pool.acquire(timeout=1) as connection:
            unsent, oldest = await outbox.backlog(connection)
        self.metrics.outbox_unsent.set(unsent)
        self.metrics.outbox_oldest_seconds.set(oldest)

    def _contract(self) -> str:
        return published_contract(self._subscribe)

    def _link(self, name: str) -> BrokerLink:
        return BrokerLink(self._hosts, name)

    @property
    def _database_url(self) -> str:
        return self.settings.database_url.get_secret_value()


async def _in_thread(work: Callable[[], None]) -> None:
    """Run blocking work in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error = None
        try:
            work()
        except Exception as raised:  # handed to the one who waits
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=run, name="migration", daemon=True).start()
    await done
