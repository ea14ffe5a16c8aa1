"""Three RabbitMQ nodes of one cluster, run by `scripts/broker`, with a virtual host of the test's own.

Needs root, as `scripts/broker` does; what it cannot start is an error. It is stopped at the end: nobody else uses it.
"""

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import aio_pika
from aio_pika.abc import AbstractChannel

from tests.support.rabbit import USER, VHOST_PREFIX, Broker, node_of, rabbitmqctl

VERSION = "4.3"
SCRIPT = Path(__file__).parents[2] / "scripts" / "broker"

CONFIRM_TIMEOUT = 5.0
"""Seconds that a producer waits before it goes to another node."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes `rabbit1` to `rabbit3`, by their names, and a virtual host."""

    nodes: dict[str, Broker]
    vhost: str

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the address of the virtual host at each node."""
        return tuple(node.url(self.vhost) for node in self.nodes.values())

    def start(self) -> None:
        """Start the nodes that do not run; return when all three are in the cluster."""
        _run("cluster", VERSION)

    def leader(self, queue: str) -> str:
        """Return the name of the node that has a queue's leader."""
        lines = rabbitmqctl("-p", self.vhost, "list_queues", "name", "leader", broker=self._any()).splitlines()
        return dict(line.split("\t") for line in lines)[queue].removesuffix("@localhost")

    def kill(self, process: int) -> None:
        """End a node's process with SIGKILL."""
        os.kill(process, signal.SIGKILL)

    def process(self, name: str) -> int:
        """Return the id of a node's process."""
        return int(rabbitmqctl("eval", "list_to_integer(os:getpid()).", broker=self.nodes[name]))

    def _any(self) -> Broker:
        return next(iter(self.nodes.values()))


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Start the cluster and make a virtual host in it; stop it at the end."""
    nodes = {f"rabbit{n}": node_of(VERSION, f"rabbit{n}", 5690 + n) for n in (1, 2, 3)}
    made = Cluster(nodes, f"{VHOST_PREFIX}{os.getpid()}")
    made.start()
    try:
        rabbitmqctl("add_vhost", made.vhost, broker=nodes["rabbit1"])
        rabbitmqctl("set_permissions", "-p", made.vhost, USER, ".*", ".*", ".*", broker=nodes["rabbit1"])
        yield made
        rabbitmqctl("delete_vhost", made.vhost, broker=nodes["rabbit1"])
    finally:
        _run("cluster", "stop")


@dataclass(slots=True)
class Producer:
    """Publishes with confirms, and goes on to the next node with what was not confirmed, under the same id."""

    urls: tuple[str, ...]
    moves: int = 0

    async def publish(self, messages: list[tuple[str, str, bytes]]) -> AsyncIterator[int]:
        """Publish messages, each of id, type and body, one after another; yield how many are confirmed so far."""
        waiting = list(enumerate(messages, 1))
        for url in cycle(self.urls):
            try:
                async with self._channel(url) as channel:
                    exchange = await channel.get_exchange("orders")
                    while waiting:
                        number, (message_id, event_type, body) = waiting[0]
                        message = aio_pika.Message(body, message_id=message_id, type=event_type, delivery_mode=2)
                        await exchange.publish(message, event_type, timeout=CONFIRM_TIMEOUT)
                        del waiting[0]
                        yield number
                    return
            except (OSError, TimeoutError, aio_pika.exceptions.AMQPError):
                self.moves += 1

    @asynccontextmanager
    async def _channel(self, url: str) -> AsyncIterator[AbstractChannel]:
        connection = await aio_pika.connect(url, timeout=CONFIRM_TIMEOUT)
        async with connection, connection.channel(on_return_raises=True) as channel:
            yield channel


def _run(*arguments: str) -> None:
    done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"scripts/broker {' '.join(arguments)} failed: {done.stdout} {done.stderr}")
