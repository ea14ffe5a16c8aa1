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
from service.reliability.hosts import Hosts, version_of
from service.reliability.stopping import is_being_cancelled

CHANNEL_TIMEOUT = 10.0
"""Seconds for the broker to open a channel."""

CLOSE_TIMEOUT = 0.5
"""Seconds for the broker to answer the end of a connection."""

UNBLOCKED = "_Connection__connection_unblocked"
"""Where aiormq keeps the event that Connection.Blocked clears; its public face can only wait for the opposite."""


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
        self.name = name
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Tell whether there is a connection, as far as is known: one that fell silent dies only by its heartbeat."""
        return self._connection is not None and _is_open(self._connection)

    @property
    def is_blocked(self) -> bool:
        """Tell whether the broker has said that it reads no more from this connection: its memory or disk is short.

        It says so only to who publishes, at the next publish. What is sent meanwhile waits in the socket, and all of
        it is published in the end.
        """
        if self._connection is None or self._connection.transport is None:
            return False
        unblocked = getattr(self._connection.transport.connection, UNBLOCKED, None)
        return self.is_open and unblocked is not None and not unblocked.is_set()

    async def answers(self) -> bool:
        """Tell whether the broker opens a channel here and reads what is published."""
        if self.is_blocked:
            return False
        channel = await self.channel()
        with losses_are_errors():
            await channel.close()
        return True

    async def version(self) -> str:
        """Return the version of RabbitMQ at the other end, as it tells it; raises as `channel` does."""
        with losses_are_errors():
            return version_of(await self._connected())

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
            self._connection = await self._hosts.connect(self.name)
            return self._connection


def _is_open(connection: Connection) -> bool:
    return connection.transport is not None and not connection.transport.connection.is_closed
