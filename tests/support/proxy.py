"""Hosts that fail: a TCP proxy that falls silent, cuts and leads elsewhere, and an address that answers never."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field


class CutError(Exception):
    """Raised by `on_request` and `on_answer`: cut this connection, in both directions, and pass nothing more."""


def _pass_on(_data: bytes) -> None:
    """Look at nothing."""


@dataclass(slots=True)
class Proxy:
    """Passes bytes to a server.

    Attributes:
        host, port: of the server; a change holds for new connections.
        passing: while it is not set, connections stay open and nothing passes, as behind a lost network.
        accepted: how many connections were made to it.
        accepting: False closes new connections at once.
        on_request, on_answer: look at what comes from the client and from the server, before it passes.
    """

    host: str
    port: int
    listening_on: int = 0
    accepted: int = 0
    passing: asyncio.Event = field(default_factory=asyncio.Event)
    accepting: bool = True
    on_request: Callable[[bytes], None] = _pass_on
    on_answer: Callable[[bytes], None] = _pass_on
    _connections: set[asyncio.Task[None]] = field(default_factory=set)
    _to_server: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Begin by passing."""
        self.passing.set()

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a client's bytes to the server and back until either ends."""
        self.accepted += 1
        task = asyncio.get_running_loop().create_task(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    def strand(self) -> None:
        """Leave clients with connections that are silent for ever, and end them for the server; new ones pass."""
        self.passing.clear()
        for writer in self._to_server:
            writer.transport.abort()
        self.passing = asyncio.Event()
        self.passing.set()

    async def cut(self) -> None:
        """Cut every connection; new ones are another matter."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def go_away(self) -> None:
        """Cut every connection and accept no other."""
        self.accepting = False
        await self.cut()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            if self.accepting:
                server_reader, server_writer = await asyncio.open_connection(self.host, self.port)
                ends.append(server_writer)
                self._to_server.add(server_writer)
                await asyncio.gather(
                    self._pass(reader, server_writer, self.passing),
                    self._pass(server_reader, writer, self.passing, answers=True),
                )
        except (OSError, CutError):
            pass
        finally:
            self._to_server.difference_update(ends)
            for end in ends:
                end.transport.abort()

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, passing: asyncio.Event, *, answers: bool = False
    ) -> None:
        while data := await source.read(65536):
            await passing.wait()
            (self.on_answer if answers else self.on_request)(data)
            sink.write(data)
            await sink.drain()
        await passing.wait()  # silence hides an end, too
        with suppress(OSError):
            sink.close()


@asynccontextmanager
async def proxy_to(host: str, port: int) -> AsyncIterator[Proxy]:
    """Listen on a free port and pass everything to `host:port`."""
    proxy = Proxy(host, port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.listening_on = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        await proxy.go_away()
        server.close()


@contextmanager
def black_hole() -> Iterator[int]:
    """Listen on a port of 127.0.0.1 where a connection is neither made nor refused: its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, socket.socket() as only_one:
        only_one.connect(listening.getsockname())
        yield listening.getsockname()[1]
