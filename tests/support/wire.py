"""Publishing what no client library will send: frames made by hand, confirmed by the broker.

The client that the service uses invents a message id where there is none, so a message without one needs this.
"""

import asyncio
import struct
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from pamqp import body, commands, frame, header

PROPERTIES = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
"""In the order of their flags and of their values on the wire."""


async def publish_raw(
    url: str, routing_key: str, content: bytes, *, exchange: str = "orders", **properties: Any
) -> None:
    """Publish with exactly these properties; return when the broker has confirmed it."""
    content_header = header.ContentHeader(
        body_size=len(content), properties=commands.Basic.Properties(**properties)
    ).marshal()
    await _publish(url, exchange.encode(), routing_key.encode(), content_header, content)


async def publish_bytes(
    url: str, routing_key: bytes, content: bytes, *, exchange: str = "orders", **properties: bytes
) -> None:
    """Publish with properties given as the bytes of their values on the wire; return when it is confirmed."""
    flags = sum(1 << (15 - PROPERTIES.index(name)) for name in properties)
    values = b"".join(properties[name] for name in PROPERTIES if name in properties)
    content_header = struct.pack(">HHQH", 60, 0, len(content), flags) + values
    await _publish(url, exchange.encode(), routing_key, content_header, content)


def short_string(value: bytes) -> bytes:
    """Return a short string's bytes, whatever is in it."""
    return bytes([len(value)]) + value


def table(*entries: tuple[bytes, bytes]) -> bytes:
    """Return a table of names and values, the values with their type's letter."""
    content = b"".join(short_string(name) + value for name, value in entries)
    return struct.pack(">I", len(content)) + content


async def _publish(url: str, exchange: bytes, routing_key: bytes, content_header: bytes, content: bytes) -> None:
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
        publish = struct.pack(">HHH", 60, 40, 0) + short_string(exchange) + short_string(routing_key) + b"\0"
        for kind, payload in ((1, publish), (2, content_header)):
            writer.write(struct.pack(">BHI", kind, 1, len(payload)) + payload + b"\xce")
        if content:
            wire.send(1, body.ContentBody(content))
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
