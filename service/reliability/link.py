"""One named connection to the broker, opened when it is needed and reopened when it was lost.

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
from aio_pika.abc import AbstractChannel, AbstractConnection
from yarl import URL

from service.reliability.frames import guard
from service.reliability.stopping import is_being_cancelled

CONNECT_TIMEOUT = 10.0
"""Seconds for TCP, TLS and the AMQP handshake together."""

HEARTBEAT = 10
"""Seconds; the client declares a silent connection dead after three missed ones. Its default of 60 means minutes."""


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

    def __init__(self, url: str, name: str) -> None:
        """Remember where to connect; nothing is opened yet.

        Args:
            url: `amqp://` or `amqps://`; a `heartbeat` in its query wins over the default.
            name: shown in the broker's list of connections.
        """
        address = URL(url)
        self._url = address if "heartbeat" in address.query else address.update_query(heartbeat=str(HEARTBEAT))
        self._name = name
        self._connection: AbstractConnection | None = None
        self._connecting = asyncio.Lock()

    async def channel(self, *, confirms: bool = False) -> AbstractChannel:
        """Open a new channel, connecting first where there is no connection.

        Args:
            confirms: publisher confirms, and an exception for what the broker returns as unroutable.

        Raises:
            OSError, aio_pika.exceptions.AMQPError, TimeoutError: the broker cannot be reached or refuses.
        """
        with losses_are_errors():
            connection = await self._connected()
            async with asyncio.timeout(CONNECT_TIMEOUT):
                channel = connection.channel(publisher_confirms=confirms, on_return_raises=confirms)
                await channel.initialize()
        return channel

    async def close(self) -> None:
        """Close the connection, within half a second even where the broker no longer answers."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                with losses_are_errors():
                    async with asyncio.timeout(0.5):
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

    async def _connected(self) -> AbstractConnection:
        async with self._connecting:
            if self._connection is not None and _is_open(self._connection):
                return self._connection
            self._connection = None
            guard()
            async with asyncio.timeout(CONNECT_TIMEOUT):
                connection = await aio_pika.connect(self._url, client_properties={"connection_name": self._name})
            self._connection = connection
            return connection


def _is_open(connection: AbstractConnection) -> bool:
    return connection.transport is not None and not connection.transport.connection.is_closed
