"""RabbitMQ for tests: a virtual host for each test worker, and a client that imports nothing from `service`.

Virtual hosts are named after the process that made them, so that runs beside each other do not meet and the leftovers
of a killed run are found by its dead process.
"""

import os
import re
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from aio_pika.exceptions import ChannelClosed, QueueEmpty

from tests.support.databases import is_alive

VHOST_PREFIX = "billing-test-"
USER, PASSWORD = "billing", "billing"


class BrokerError(Exception):
    """The broker that the tests are to run against is not the one that answers."""


@dataclass(frozen=True, slots=True)
class Broker:
    """The broker that tests run against: the host's, or a newer one of `scripts/broker`, beside it.

    Attributes:
        version: what was asked for, major and minor; None takes whatever the host has.
        port: on 127.0.0.1.
        rabbitmqctl: the command that administers it.
    """

    version: str | None
    port: int
    rabbitmqctl: tuple[str, ...]

    @property
    def address(self) -> str:
        """Return its host and port, as in a URL."""
        return f"127.0.0.1:{self.port}"

    def url(self, vhost: str, user: str = USER) -> str:
        """Return the address of a virtual host."""
        return f"amqp://{user}:{PASSWORD}@{self.address}/{vhost}"

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl; a failure is an error with what it said."""
        done = subprocess.run(
            [*self.rabbitmqctl, "--quiet", *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"rabbitmqctl {' '.join(arguments)} failed: {done.stdout} {done.stderr}")
        return done.stdout


def folder_of(version: str) -> Path:
    """Return the Debian folder that `scripts/broker` makes for a version."""
    return Path(os.environ.get("BILLING_BROKERS") or "/var/cache/billing-brokers") / version


def _chosen() -> Broker:
    """Return the broker that BILLING_TEST_RABBITMQ names; ports and nodes are those of `scripts/broker`."""
    version = os.environ.get("BILLING_TEST_RABBITMQ") or None
    ports = {None: 5672, "3.10": 5681, "4.0": 5680, "4.3": 5683}
    if version not in ports:
        raise BrokerError(f"BILLING_TEST_RABBITMQ={version}: only {', '.join(filter(None, ports))} are known")
    if version is None:
        return Broker(None, ports[None], ("rabbitmqctl",))
    return node_of(version, f"billing{version.replace('.', '')}", ports[version])


def node_of(version: str, name: str, port: int) -> Broker:
    """Return a node of `scripts/broker`, which lives in the folder of its version, or in a container of its name."""
    inside = ("chroot", str(folder_of(version))) if os.access(folder_of(version), os.X_OK) else ("docker", "exec", name)
    return Broker(version, port, (*inside, "rabbitmqctl", "-n", f"{name}@localhost"))


BROKER = _chosen()


def version_that_answers(broker: Broker = BROKER) -> str:
    """Return the version that the broker itself tells to who connects, before any password.

    Raises:
        BrokerError: nothing answers, or another version than was asked for.
    """
    try:
        with socket.create_connection(("127.0.0.1", broker.port), timeout=10) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            with connection.makefile("rb") as answer:
                _, _, size = struct.unpack(">BHI", answer.read(7))
                start = answer.read(size)
    except (OSError, struct.error) as error:
        wanted = f"scripts/broker {broker.version}" if broker.version else "scripts/servers local"
        raise BrokerError(f"no RabbitMQ on {broker.address} ({error}): run {wanted}") from None
    # Connection.Start: class, method, protocol version, then the server's properties as a table of long strings.
    found = re.search(rb"\x07versionS\x00\x00\x00.([0-9.]+)", start, re.DOTALL)
    if start[:4] != struct.pack(">HH", 10, 10) or not found:
        raise BrokerError(f"what answers on {broker.address} is no RabbitMQ that tells its version")
    version = found[1].decode()
    if broker.version is not None and not version.startswith(f"{broker.version}."):
        raise BrokerError(f"RabbitMQ {version} answers on {broker.address}, where {broker.version} was asked for")
    return version


def possible_strategies() -> tuple[str, ...]:
    """Return the retry strategies that the broker can do; all of them where there is none: their tests then fail."""
    try:
        version = version_that_answers()
    except BrokerError:
        return ("staged", "dead-letter", "broker")
    major, minor = (int(part) for part in version.split(".")[:2])
    return ("staged", "dead-letter", *(("broker",) if (major, minor) >= (4, 3) else ()))


EVENTS = "test.events"
"""Queue bound to everything that leaves on the exchange `billing`."""

DELAYS = ("200ms", "300ms", "400ms", "1s", "2s", "5s", "30s", "1m", "2m", "10m")
QUEUES = (
    "orders.work",
    "orders.parking",
    "orders.wait",
    *(f"orders.wait.{delay}" for delay in DELAYS),
    EVENTS,
    "test.full",
)
"""Every queue that tests make: listing them takes rabbitmqctl a second after each test."""


def rabbitmqctl(*arguments: str, broker: Broker = BROKER) -> str:
    """Run rabbitmqctl; a failure is an error with what it said."""
    return broker.ctl(*arguments)


@contextmanager
def virtual_host() -> Iterator[str]:
    """Make a virtual host for this process, on the broker that was asked for; yield its address."""
    version_that_answers()
    _remove_leftovers()
    name = f"{VHOST_PREFIX}{os.getpid()}"
    rabbitmqctl("add_vhost", name)
    rabbitmqctl("set_permissions", "-p", name, USER, ".*", ".*", ".*")
    try:
        yield BROKER.url(name)
    finally:
        rabbitmqctl("delete_vhost", name)


def close_connections(url: str, *, name: str | None = None) -> int:
    """Close the connections to the virtual host of `url` by force; return how many there were."""
    vhost = url.rsplit("/", 1)[1]
    lines = rabbitmqctl("list_connections", "pid", "vhost", "client_properties").splitlines()
    pids = [line.split("\t")[0] for line in lines if vhost in line and (name is None or f'"{name}"' in line)]
    for pid in pids:
        rabbitmqctl("close_connection", pid, "closed by a test")
    return len(pids)


@dataclass(slots=True)
class Rabbit:
    """A producer, a consumer and an administrator, as they would be outside of the service."""

    url: str
    connection: AbstractConnection
    channel: AbstractChannel
    published: list[str] = field(default_factory=list)

    async def publish(
        self,
        event_type: str,
        body: bytes,
        *,
        message_id: str | None = None,
        exchange: str = "orders",
        routing_key: str | None = None,
        **properties: Any,
    ) -> str:
        """Publish persistently and confirmed, with a new message id where none is given; return the id."""
        message_id = message_id or str(uuid4())
        target = (
            self.channel.default_exchange if exchange == "" else await self.channel.get_exchange(exchange, ensure=False)
        )
        properties = {"content_type": "application/json", "type": event_type} | properties
        await target.publish(
            aio_pika.Message(body, message_id=message_id, delivery_mode=2, **properties),
            event_type if routing_key is None else routing_key,
        )
        self.published.append(message_id)
        return message_id

    async def count(self, queue: str) -> int:
        """Return the number of ready messages; -1 where there is no such queue."""
        found = await self._look(queue)
        return -1 if found is None else found.message_count or 0

    async def consumers(self, queue: str) -> int:
        """Return the number of consumers; -1 where there is no such queue."""
        found = await self._look(queue)
        return -1 if found is None else found.consumer_count or 0

    async def _look(self, queue: str) -> Any:
        try:
            async with self.connection.channel() as channel:
                return (await channel.declare_queue(queue, passive=True)).declaration_result
        except ChannelClosed:
            return None

    async def take(self, queue: str) -> list[Any]:
        """Take everything out of a queue."""
        taken: list[Any] = []
        async with self.connection.channel() as channel:
            source = await channel.get_queue(queue, ensure=False)
            while True:
                try:
                    message = await source.get(no_ack=True)
                    message.headers.pop("x-delivery-count", None)  # the broker's, on every delivery of a quorum queue
                    taken.append(message)
                except QueueEmpty:
                    return taken

    async def collect_events(self) -> None:
        """Bind a queue to everything that leaves on the exchange `billing`."""
        await self.channel.declare_exchange("billing", "topic", durable=True)
        queue = await self.channel.declare_queue(EVENTS, durable=True, arguments={"x-queue-type": "quorum"})
        await queue.bind("billing", "#")

    async def events(self) -> list[Any]:
        """Take the events that have left since the last call."""
        return await self.take(EVENTS)

    async def delete(self, queue: str) -> None:
        """Delete a queue with what is in it."""
        async with self.connection.channel() as channel:
            await channel.queue_delete(queue)


@asynccontextmanager
async def rabbit_client(url: str, *, keep: bool = False) -> AsyncIterator[Rabbit]:
    """Connect; at the end delete every queue and exchange of the virtual host, unless they are to be kept."""
    connection = await aio_pika.connect(url, client_properties={"connection_name": "test"})
    try:
        channel = await connection.channel(on_return_raises=True)
        yield Rabbit(url, connection, channel)
    finally:
        await connection.close()
        if not keep:
            await wipe(url)


@contextmanager
def user_with(rabbit: Rabbit, *rights: str) -> Iterator[str]:
    """Make a user that may configure, write and read so much; yield the address to use."""
    vhost = rabbit.url.rsplit("/", 1)[1]
    user = f"restricted-{vhost}"
    rabbitmqctl("add_user", user, PASSWORD)
    try:
        rabbitmqctl("set_permissions", "-p", vhost, user, *rights)
        yield BROKER.url(vhost, user)
    finally:
        rabbitmqctl("delete_user", user)


async def wipe(url: str) -> None:
    """Delete every queue and exchange that the service or a test makes; what is not there is no error."""
    async with await aio_pika.connect(url) as connection, connection.channel() as channel:
        for queue in QUEUES:
            await channel.queue_delete(queue)
        for exchange in ("orders", "orders.dead", "orders.retry", "billing"):
            await channel.exchange_delete(exchange)


def _remove_leftovers() -> None:
    for name in rabbitmqctl("list_vhosts", "name").split():
        pid = name.removeprefix(VHOST_PREFIX)
        if name.startswith(VHOST_PREFIX) and pid.isdigit() and not is_alive(int(pid)):
            subprocess.run(
                [*BROKER.rabbitmqctl, "--quiet", "delete_vhost", name], check=False, capture_output=True, timeout=60
            )
