"""Hosts that fail: a TCP proxy that can fall silent, as behind a lost network, and an address that answers never."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field


@dataclass(slots=True)
class Proxy:
    """Passes bytes to a server while `passing` is set.

    Attributes:
        accepted: how many connections were made to it.
    """

    host: str
    port: int
    listening_on: int = 0
    accepted: int = 0
    passing: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a client's bytes to the server and back until either ends."""
        self.accepted += 1
        server_reader, server_writer = await asyncio.open_connection(self.host, self.port)
        for source, sink in ((reader, server_writer), (server_reader, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await source.read(65536):
                    await self.passing.wait()
                    sink.write(data)
                    await sink.drain()
        finally:
            sink.close()

    async def end(self) -> None:
        """Cut every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxy_to(host: str, port: int) -> AsyncIterator[Proxy]:
    """Listen on a free port and pass everything to `host:port`."""
    proxy = Proxy(host, port)
    proxy.passing.set()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.listening_on = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()


@contextmanager
def black_hole() -> Iterator[int]:
    """Listen on a port of 127.0.0.1 where a connection is neither made nor refused: its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, socket.socket() as only_one:
        only_one.connect(listening.getsockname())
        yield listening.getsockname()[1]
