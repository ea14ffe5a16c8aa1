"""A TCP proxy that can fall silent: connections stay open and nothing passes, as behind a lost network."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass(slots=True)
class Proxy:
    """Passes bytes to a server while `passing` is set."""

    host: str
    port: int
    listening_on: int = 0
    passing: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a client's bytes to the server and back until either ends."""
        server_reader, server_writer = await asyncio.open_connection(self.host, self.port)
        for source, sink in ((reader, server_writer), (server_reader, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                await self.passing.wait()
                sink.write(data)
                await sink.drain()
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
        await proxy.end()
        server.close()
