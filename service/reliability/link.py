"""One named connection to the broker, opened when it is needed and reopened, at another host, when it was lost.

It is deliberately not aio-pika's robust connection: that one restores channels and consumers behind the caller's
back, re-declares queues with the arguments of yesterday for ever, and reuses consumer tags that RabbitMQ 4.3 refuses.
Here whoever needs a channel asks for one, and learns that it is gone by an exception.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import aio_pika
from aio_pika import Connection
from aio_pika.abc import AbstractChannel

from service.reliability.frames import guard
from service.reliability.hosts import Hosts
from service.reliability.stopping import is_being_cancelled

CHANNEL_TIMEOUT = 10.0
"""Seconds for the broker to open a channel."""

CLOSE_TIMEOUT = 0.5
"""Seconds for the broker to answer the end of a connection."""


@contextmanager
def losses_are_errors() -> Iterator[None]:
    """Turn the CancelledError of a connection that died by heartbeat into a ConnectionError.

    The client raises it in whatever waits on that connection, in tasks that nobody cancelled; unturned, it would end
    them without a word.
    """
    try:
        yield
    except asyncio.CancelledError:
        if is_being_cancelled():
            raise
        raise ConnectionError("the connection was lost") from None


class BrokerLink:
    """A connection under a fixed name, shared by those who need channels on it."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        """Remember where to connect; nothing is opened yet.

        Args:
            hosts: where to connect; links that share them begin at the same host.
            name: shown in the broker's list of connections.
        """
        self._hosts = hosts
        self._name = name
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()

    async def channel(self, *, confirms: bool = False) -> AbstractChannel:
        """Open a new channel, connecting first where there is no connection.

        Args:
            confirms: publisher confirms, and an exception for what the broker returns as unroutable.

        Raises:
            BrokerUnavailableError: no host takes the connection.
            OSError, aio_pika.exceptions.AMQPError, TimeoutError: the connection was lost, or no channel opened.
        """
        with losses_are_errors():
            connection = await self._connected()
            async with asyncio.timeout(CHANNEL_TIMEOUT):
                channel = connection.channel(publisher_confirms=confirms, on_return_raises=confirms)
                await channel.initialize()
        return channel

    async def close(self) -> None:
        """Close the connection, within half a second even where the broker no longer answers."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                with losses_are_errors():
                    async with asyncio.timeout(CLOSE_TIMEOUT):
                        await connection.close()
            except (TimeoutError, OSError, aio_pika.exceptions.AMQPError):
                pass  # the broker sees the socket close when the process ends

    async def __aenter__(self) -> Self:
        """Return itself; nothing is opened."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the connection."""
        await self.close()

    async def _connected(self) -> Connection:
        async with self._connecting:
            if self._connection is not None and _is_open(self._connection):
                return self._connection
            if (lost := self._connection) is not None:
                self._connection = None
                self._hosts.put_last(lost.url)
            guard()
            self._connection = await self._hosts.connect(self._name)
            return self._connection


def _is_open(connection: Connection) -> bool:
    return connection.transport is not None and not connection.transport.connection.is_closed
