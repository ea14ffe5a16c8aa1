"""Where the broker can be reached: the nodes of one cluster, tried one after another.

The first connection goes to the first address. A host that fails, or whose connection was lost, is tried last from then
on, by every link that shares the value. So the links of a process meet at one host, and the death of another node does
not disturb it; to spread instances over the nodes, give each another order.
"""

from asyncio import CancelledError, StreamReader, StreamWriter, timeout
from collections import deque
from collections.abc import Iterable
from typing import Any

import structlog
from aio_pika import Connection
from aiormq.connection import DEFAULT_PORTS, TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import ProbableAuthenticationError
from yarl import URL

from service.reliability.errors import BrokerUnavailableError
from service.reliability.retry import short
from service.reliability.sockets import watch

CONNECT_TIMEOUT = 5.0
"""Seconds for TCP, TLS and the AMQP handshake together, at each host."""

HEARTBEAT = 5
"""Seconds. The client gives up a connection on which nothing came for 3 * (heartbeat + 1) s; it looks every 2 s.

So a host that falls silent, while its TCP still answers, is given up after 20 s at most: 16 to 19 s were measured, and
31 to 38 s with a heartbeat of 10. Less than 5 is advised against by RabbitMQ: a busy moment passes for a death.
"""

log = structlog.get_logger(__name__)


class Hosts:
    """The broker's addresses, the one to try first in front."""

    def __init__(self, addresses: Iterable[str]) -> None:
        """Keep the addresses; a `heartbeat` in the query of one wins over the default.

        Args:
            addresses: `amqp://` or `amqps://`, with the same virtual host in each.
        """
        self._addresses = deque(_with_heartbeat(URL(address)) for address in addresses)

    async def connect(self, name: str) -> Connection:
        """Connect to the first host that takes the connection, each within `CONNECT_TIMEOUT`.

        Args:
            name: shown in the broker's list of connections.

        Raises:
            BrokerUnavailableError: no host does; the text says what each answered, and nothing secret.
        """
        failed = []
        for address in tuple(self._addresses):
            try:
                connection = await _connect(address, name)
            except CancelledError:
                self.put_last(address)  # whoever asked has waited long enough for this one
                raise
            except Exception as error:  # a host that will not do, in whatever form it is told
                self.put_last(address)
                failed.append(f"{_place(address)} {_answer(error, address)}")
                continue
            if failed:
                log.warning("broker_hosts_failed", connection=name, explanation="; ".join(failed))
            told = {"connection": name, "version": version_of(connection)}
            log.info("broker_connected", host=address.host, port=_port(address), **told)
            return connection
        raise BrokerUnavailableError("no connection to RabbitMQ: " + "; ".join(failed))

    def put_last(self, address: URL) -> None:
        """Try a host last from now on; one that is not in front has been passed already."""
        if self._addresses[0] == address:
            self._addresses.rotate(-1)


class WatchedTransport(TransportFactory):
    """The client's transports, on sockets that notice when the other end is gone."""

    async def create(self, url: URL, **kwargs: Any) -> tuple[StreamReader, StreamWriter]:
        """Open a transport to the host of `url`."""
        if url.scheme == "amqps":
            # A host that is silent does not take part in closing either; 30 s by default.
            reader, writer = await TLSTransportFactory().create(url, ssl_shutdown_timeout=1.0, **kwargs)
        else:
            reader, writer = await TCPTransportFactory().create(url, **kwargs)
        watch(writer.get_extra_info("socket"))
        return reader, writer


def version_of(connection: Connection) -> str:
    """Return the version that the broker told at connect."""
    properties = connection.transport.connection.server_properties if connection.transport else {}
    return str(properties.get("version"))


async def _connect(address: URL, name: str) -> Connection:
    """Connect to one host."""
    connection = Connection(address, client_properties={"connection_name": name})
    connection.kwargs["transport_factory"] = WatchedTransport()
    async with timeout(CONNECT_TIMEOUT):
        await connection.connect()
    return connection


def _with_heartbeat(address: URL) -> URL:
    return address if "heartbeat" in address.query else address.update_query(heartbeat=str(HEARTBEAT))


def _answer(error: Exception, address: URL) -> str:
    """Say in plain words what a host answered. The client's own texts hold no credentials."""
    if isinstance(error, TimeoutError):
        return f"did not answer within {CONNECT_TIMEOUT:g} s"
    if isinstance(error, ProbableAuthenticationError):
        return "refused the login: no such user, or another password"
    if "Connection.OpenOk" in str(error):  # the client does not tell the broker's reason
        return f"refused the virtual host '{address.path[1:] or '/'}': there is none, or this user may not use it"
    if isinstance(error.__cause__, ConnectionRefusedError):
        return "refused the connection"
    return f"failed: {short(error)}"


def _place(address: URL) -> str:
    return f"{address.host}:{_port(address)}"


def _port(address: URL) -> int:
    return address.explicit_port or DEFAULT_PORTS[address.scheme]
