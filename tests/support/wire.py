"""Publishing what no client library will send: frames made by hand, confirmed by the broker.

The client that the service uses invents a message id where there is none, so a message without one needs this.
"""

import asyncio
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from pamqp import body, commands, frame, header


async def publish_raw(
    url: str, routing_key: str, content: bytes, *, exchange: str = "orders", **properties: Any
) -> None:
    """Publish with exactly these properties; return when the broker has confirmed it."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        wire = _Wire(reader, writer)
        writer.write(b"AMQP\x00\x00\x09\x01")
        await wire.answer("Connection.Start")
        login = f"\0{address.username}\0{address.password}"
        wire.send(0, commands.Connection.StartOk({}, "PLAIN", login, "en_US"))
        tune = await wire.answer("Connection.Tune")
        wire.send(0, commands.Connection.TuneOk(tune.channel_max, tune.frame_max, 0))
        wire.send(0, commands.Connection.Open(address.path[1:]))
        await wire.answer("Connection.OpenOk")
        wire.send(1, commands.Channel.Open())
        await wire.answer("Channel.OpenOk")
        wire.send(1, commands.Confirm.Select())
        await wire.answer("Confirm.SelectOk")
        wire.send(
            1,
            commands.Basic.Publish(exchange=exchange, routing_key=routing_key),
            header.ContentHeader(body_size=len(content), properties=commands.Basic.Properties(**properties)),
            *([body.ContentBody(content)] if content else []),
        )
        await wire.answer("Basic.Ack")
    finally:
        writer.close()


class _Wire:
    """Frames in, frames out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, channel: int, *frames: Any) -> None:
        self._writer.writelines(self._marshal(channel, frames))

    def _marshal(self, channel: int, frames: Iterable[Any]) -> list[bytes]:
        return [frame.marshal(each, channel) for each in frames]

    async def answer(self, name: str) -> Any:
        """Wait for the answer of that name; any other is an error."""
        async with asyncio.timeout(10):
            head = await self._reader.readexactly(7)
            rest = await self._reader.readexactly(int.from_bytes(head[3:]) + 1)
        _, _, answer = frame.unmarshal(head + rest)
        if answer.name != name:
            raise AssertionError(f"the broker answered {answer!r}, not {name}")
        return answer
