"""What the queues, the outbox and the relay look like at this moment, asked of the servers themselves.

What belongs to one instance is not among it: whether its gate is closed or its connections are blocked says that
instance's `/metrics`.
"""

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime

import asyncpg
from aio_pika.exceptions import AMQPError, ChannelNotFoundEntity

from service import database
from service.management import Management, ManagementError
from service.reliability import audit, lease, outbox
from service.reliability.errors import BrokerUnavailableError, ParkingInUseError
from service.reliability.hosts import Hosts
from service.reliability.lease import Holder
from service.reliability.link import BrokerLink
from service.reliability.parking import visit
from service.reliability.retry import short
from service.reliability.topology import QueueFamily
from service.settings import Settings

NOT_KNOWN = "not known: see BILLING_RABBITMQ_MANAGEMENT_URL"


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Ready messages and consumers of a queue; a passive declare is exact for both."""

    ready: int
    consumers: int


@dataclass(slots=True)
class Status:
    """The report; None is what is not known.

    Attributes:
        ready, unacknowledged: in the work queue.
        waiting: in all wait queues together.
        parked_oldest_seconds: asked for only on demand.
        held: dead letters that their target does not take, in all queues together.
        relay: who holds the relay's lease.
        problems: what is wrong, each in a line for a person.
    """

    queues: dict[str, QueueStatus] = field(default_factory=dict)
    ready: int | None = None
    unacknowledged: int | None = None
    waiting: int | None = None
    parked: int | None = None
    parked_alarm: int = 0
    parked_oldest_seconds: float | None = None
    held: int | None = None
    outbox_unsent: int | None = None
    outbox_oldest_seconds: float | None = None
    relay_active: bool | None = None
    relay: Holder | None = None
    problems: list[str] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the report as pairs for a table."""
        for name, queue in self.queues.items():
            yield name, f"{queue.ready} ready, {queue.consumers} consumers"
        for name, number in (("ready", self.ready), ("waiting", self.waiting)):
            yield name, "not known" if number is None else str(number)
        for name, number in (("unacknowledged", self.unacknowledged), ("held dead letters", self.held)):
            yield name, NOT_KNOWN if number is None else str(number)
        alarm = f"alarm from {self.parked_alarm}" if self.parked_alarm else "no alarm"
        yield "parked", f"{'not known' if self.parked is None else self.parked} ({alarm})"
        if self.parked_oldest_seconds is not None:
            yield "oldest parked", f"{self.parked_oldest_seconds:.0f} s"
        if self.outbox_unsent is not None:
            yield "outbox", f"{self.outbox_unsent} unsent, oldest {self.outbox_oldest_seconds:.0f} s"
            yield "relay", "active nowhere" if self.relay is None else _holder(self.relay)


async def read_status(
    settings: Settings, family: QueueFamily, now: Callable[[], datetime], *, oldest: bool = False
) -> Status:
    """Ask broker, management interface and database.

    Args:
        settings: where they are, and from which numbers on something is wrong.
        family: whose queues.
        now: the time.
        oldest: look at every parked message for the age of the oldest, as `billing parking list` does.
    """
    status = Status(parked_alarm=settings.parked_alarm)
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(BrokerLink(Hosts(settings.rabbitmq_urls), "billing-status"))
        await _ask_broker(status, link, family)
        await _ask_management(status, settings, family)
        connection = await _ask_database(status, settings, stack)
        if oldest and status.parked and connection is not None:
            await _look_at_parked(status, link, connection, family.parking, now)
    _judge(status, settings, family)
    return status


async def _ask_broker(status: Status, link: BrokerLink, family: QueueFamily) -> None:
    try:
        for queue in family.topology.queues:
            channel = await link.channel()
            try:
                found = (await channel.declare_queue(queue.name, passive=True)).declaration_result
                status.queues[queue.name] = QueueStatus(found.message_count or 0, found.consumer_count or 0)
            except ChannelNotFoundEntity:
                status.problems.append(f"queue {queue.name} is missing")
    except (BrokerUnavailableError, OSError, TimeoutError, AMQPError) as error:
        status.problems.append(f"the broker cannot be asked: {short(error)}")
    ready = {name: queue.ready for name, queue in status.queues.items()}
    status.ready, status.parked = ready.get(family.work), ready.get(family.parking)
    waiting = [count for name, count in ready.items() if name not in {family.work, family.parking}]
    status.waiting = sum(waiting) if waiting else None


async def _ask_management(status: Status, settings: Settings, family: QueueFamily) -> None:
    if settings.rabbitmq_management_url is None:
        return
    try:
        async with Management(settings.rabbitmq_management_url.get_secret_value()) as management:
            inside = await management.inside(settings.vhost, (queue.name for queue in family.topology.queues))
    except ManagementError as error:
        status.problems.append(str(error))
        return
    if family.work in inside:
        status.unacknowledged = inside[family.work].unacknowledged
        status.held = sum(queue.held for queue in inside.values())


async def _ask_database(status: Status, settings: Settings, stack: AsyncExitStack) -> asyncpg.Connection | None:
    try:
        connection = await database.connect(settings.database_url.get_secret_value(), "status")
        stack.push_async_callback(connection.close, timeout=1)
        await database.require_current_schema(connection)
        status.outbox_unsent, status.outbox_oldest_seconds = await outbox.backlog(connection)
        status.relay = await lease.current_holder(connection)
        status.relay_active = status.relay is not None
    except Exception as error:  # reported, whatever it is
        status.problems.append(f"the database cannot be asked: {short(error)}")
        return None
    return connection


async def _look_at_parked(
    status: Status, link: BrokerLink, connection: asyncpg.Connection, queue: str, now: Callable[[], datetime]
) -> None:
    try:
        async with audit.lock(connection), visit(link, queue) as seen:
            moments = [parked.parked_at for parked in seen.messages if parked.parked_at is not None]
    except (ParkingInUseError, OSError, TimeoutError, AMQPError) as error:
        status.problems.append(f"the parked messages cannot be looked at: {short(error)}")
        return
    if moments:
        status.parked_oldest_seconds = (now() - min(moments)).total_seconds()


def _judge(status: Status, settings: Settings, family: QueueFamily) -> None:
    """Add what is wrong with the numbers."""
    problems = status.problems
    work = status.queues.get(family.work)
    if work is not None and not work.consumers:
        problems.append(f"queue {family.work} has no consumer: no instance works")
    if status.parked and 0 < settings.parked_alarm <= status.parked:
        problems.append(f"{status.parked} parked, alarm from {settings.parked_alarm}: see 'billing parking list'")
    if status.held:
        problems.append(f"{status.held} dead letters are held: the queue that they are for does not take them")
    limit = settings.outbox_alarm.total_seconds()
    if status.outbox_unsent and status.outbox_oldest_seconds and 0 < limit <= status.outbox_oldest_seconds:
        problems.append(f"the oldest unsent event is {status.outbox_oldest_seconds:.0f} s old, alarm from {limit:g} s")
    if status.outbox_unsent and not status.relay_active:
        problems.append(f"no relay is active, and {status.outbox_unsent} events wait to leave")


def _holder(holder: Holder) -> str:
    return f"active: {holder.instance}, for {holder.seconds:.0f} s"
