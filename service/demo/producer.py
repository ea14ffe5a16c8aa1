"""An ordinary producer: persistent, mandatory, confirmed, on two connections; and a diary of what was confirmed."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aio_pika.abc import AbstractChannel
from pamqp.commands import Basic

from service.demo.errors import DemoError
from service.demo.orders import SAME_MOMENT, Message, Step
from service.demo.servers import ORDERS_EXCHANGE, Servers, connect_rabbitmq
from service.demo.waiting import pause

CONFIRM_TIMEOUT = 15.0
"""Seconds for one publish."""

WINDOW = 50
"""Publishes in flight at once."""

KNOWN_TYPES = ("order.placed", "order.paid", "order.cancelled")


class _WithoutId(Basic.Properties):
    """Properties that keep the message id unset: the client would invent one."""

    @property
    def message_id(self) -> None:
        """Always None."""
        return

    @message_id.setter
    def message_id(self, value: str | None) -> None:
        """Take no notice."""


@dataclass(slots=True)
class Producer:
    """Publishes steps; what the broker has confirmed is in `confirmed`, in that order.

    Attributes:
        channels: two, each on a connection of its own.
        progress: called with the number of messages confirmed since the last call.
    """

    channels: Sequence[AbstractChannel]
    progress: Callable[[int], None]
    confirmed: list[Message] = field(default_factory=list)
    copies: list[Step] = field(default_factory=list)

    async def publish(self, steps: Sequence[Step], *, seconds: float = 0.0) -> None:
        """Publish in order, a window in flight, evenly over so many seconds; 0 is as fast as it goes."""
        window = asyncio.Semaphore(WINDOW)
        start = time.monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, step in enumerate(steps):
                    await pause(max(0.0, start + seconds * number / len(steps) - time.monotonic()))
                    await window.acquire()
                    tasks.create_task(self._publish(step)).add_done_callback(lambda _: window.release())
        except ExceptionGroup as group:
            error = group.exceptions[0]
            raise DemoError(f"publishing failed: {type(error).__name__}: {error}") from group

    async def _publish(self, step: Step) -> None:
        """Publish the message, or it and its copy at the same moment."""
        channels = self.channels if step.copy == SAME_MOMENT else self.channels[:1]
        await asyncio.gather(*(self._send(channel, step.message) for channel in channels))
        if step.copy:
            self.copies.append(step)
        self.confirmed += [step.message] * len(channels)
        self.progress(len(channels))

    async def _send(self, channel: AbstractChannel, message: Message) -> None:
        """Return when the broker has confirmed it; raise where it was returned or refused."""
        properties = (Basic.Properties if message.id else _WithoutId)(
            message_id=message.id,
            message_type=message.type,
            content_type="application/json",
            delivery_mode=2,
            timestamp=datetime.now(UTC),  # noqa: TID251 - what a producer writes
            app_id="billing-demo",
        )
        async with asyncio.timeout(CONFIRM_TIMEOUT):
            underlay = await channel.get_underlay_channel()
            await underlay.basic_publish(
                message.body,
                exchange=ORDERS_EXCHANGE,
                # An unknown type reaches the queue under a known key: another would be returned to the producer.
                routing_key=message.type if message.type in KNOWN_TYPES else KNOWN_TYPES[0],
                properties=properties,
                mandatory=True,
            )


@asynccontextmanager
async def producer(servers: Servers, progress: Callable[[int], None]) -> AsyncIterator[Producer]:
    """Connect twice."""
    connections = [await connect_rabbitmq(servers.rabbitmq_url, f"billing-demo-producer-{n}") for n in (1, 2)]
    try:
        yield Producer([await connection.channel(on_return_raises=True) for connection in connections], progress)
    finally:
        for connection in connections:
            await connection.close()
