"""What the queues, the outbox and the relay look like at this moment, asked of the servers themselves."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from aio_pika.exceptions import AMQPError, ChannelNotFoundEntity

from service import database
from service.reliability import outbox
from service.reliability.errors import BrokerUnavailableError
from service.reliability.hosts import Hosts
from service.reliability.link import BrokerLink
from service.reliability.retry import short
from service.reliability.topology import QueueFamily
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Ready messages and consumers of a queue; a passive declare is exact for both."""

    ready: int
    consumers: int


@dataclass(slots=True)
class Status:
    """The report; `problems` names what could not be asked or is missing."""

    queues: dict[str, QueueStatus] = field(default_factory=dict)
    outbox_unsent: int | None = None
    outbox_oldest_seconds: float | None = None
    relay_active: bool | None = None
    problems: list[str] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the report as pairs for a table."""
        for name, queue in self.queues.items():
            yield name, f"{queue.ready} ready, {queue.consumers} consumers"
        if self.outbox_unsent is not None:
            yield "outbox", f"{self.outbox_unsent} unsent, oldest {self.outbox_oldest_seconds:.0f} s"
            yield "relay", "active in some instance" if self.relay_active else "active nowhere"


async def read_status(settings: Settings, family: QueueFamily) -> Status:
    """Ask broker and database."""
    status = Status()
    await _ask_broker(status, settings, family)
    await _ask_database(status, settings)
    return status


async def _ask_broker(status: Status, settings: Settings, family: QueueFamily) -> None:
    try:
        async with BrokerLink(Hosts(settings.rabbitmq_urls), "billing-status") as link:
            for queue in family.topology.queues:
                channel = await link.channel()
                try:
                    found = (await channel.declare_queue(queue.name, passive=True)).declaration_result
                    status.queues[queue.name] = QueueStatus(found.message_count or 0, found.consumer_count or 0)
                except ChannelNotFoundEntity:
                    status.problems.append(f"queue {queue.name} is missing")
    except (BrokerUnavailableError, OSError, TimeoutError, AMQPError) as error:
        status.problems.append(f"the broker cannot be asked: {short(error)}")


async def _ask_database(status: Status, settings: Settings) -> None:
    try:
        connection = await database.connect(settings.database_url.get_secret_value(), "status")
        try:
            await database.require_current_schema(connection)
            status.outbox_unsent, status.outbox_oldest_seconds = await outbox.backlog(connection)
            status.relay_active = await outbox.is_locked(connection)
        finally:
            await connection.close(timeout=1)
    except Exception as error:  # reported, whatever it is
        status.problems.append(f"the database cannot be asked: {short(error)}")
