"""Publishing what no client library will send: frames made by hand, confirmed by the broker.

The client that the service uses invents a message id where there is none, so a message without one needs this.
"""

import asyncio
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from pamqp import body, commands, frame, header
from pamqp.exceptions import PAMQPException

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
    head = header.ContentHeader(body_size=len(content), properties=commands.Basic.Properties(**properties)).marshal()
    await _publish(url, exchange.encode(), routing_key.encode(), head, content)


async def publish_bytes(
    url: str, routing_key: bytes, content: bytes, *, exchange: str = "orders", **properties: bytes
) -> None:
    """Publish with properties given as the bytes of their values on the wire; return when it is confirmed."""
    await _publish(url, exchange.encode(), routing_key, content_header(len(content), properties), content)


def short_string(value: bytes) -> bytes:
    """Return a short string's bytes, whatever is in it."""
    return bytes([len(value)]) + value


def table(*entries: tuple[bytes, bytes]) -> bytes:
    """Return a table of names and values, the values with their type's letter."""
    content = b"".join(short_string(name) + value for name, value in entries)
    return struct.pack(">I", len(content)) + content


class RawProducer:
    """Publishes one message after another on a connection of its own, opened again when the broker has closed it."""

    def __init__(self, url: str) -> None:
        """Connect at the first message."""
        self._url = url
        self._wire: _Wire | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def publish(self, exchange: bytes, routing_key: bytes, content_header: bytes, content: bytes) -> bool:
        """Publish and tell whether the broker has confirmed it; one that it refuses has not arrived."""
        self._wire = self._wire or await _open(self._url)
        try:
            self._wire.publish(exchange, routing_key, content_header, content)
            answer = await self._wire.read()
        except (ConnectionError, asyncio.IncompleteReadError, PAMQPException):  # no word, or one that quotes bad bytes
            answer = None
        if answer is not None and answer.name == "Basic.Ack":
            return True
        await self._close()
        return False

    async def get(self, queue: str) -> "RawMessage | None":
        """Take the first message out of a queue, None where there is none."""
        self._wire = self._wire or await _open(self._url)
        self._wire.send(1, commands.Basic.Get(0, queue, no_ack=True))
        _, method = await self._wire.read_frame()
        if method[:4] == struct.pack(">HH", 60, 72):  # Get-Empty
            return None
        _, head = await self._wire.read_frame()
        content, size = b"", int.from_bytes(head[4:12], "big")
        while len(content) < size:
            content += (await self._wire.read_frame())[1]
        return RawMessage(head, content)

    async def take(self, queue: str) -> list["RawMessage"]:
        """Take everything out of a queue."""
        taken: list[RawMessage] = []
        while (message := await self.get(queue)) is not None:
            taken.append(message)
        return taken

    async def _close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


@dataclass(frozen=True, slots=True)
class RawMessage:
    """A message as its bytes on the wire: the content header's frame, and the body."""

    head: bytes
    content: bytes

    @property
    def properties(self) -> commands.Basic.Properties:
        """Decode the properties."""
        decoded = header.ContentHeader()
        decoded.unmarshal(self.head)
        return decoded.properties

    @property
    def headers(self) -> dict[str, Any]:
        """Decode the headers."""
        return self.properties.headers or {}


def content_header(size: int, properties: dict[str, bytes]) -> bytes:
    """Return a content header with properties given as the bytes of their values on the wire."""
    flags = sum(1 << (15 - PROPERTIES.index(name)) for name in properties)
    values = b"".join(properties[name] for name in PROPERTIES if name in properties)
    return struct.pack(">HHQH", 60, 0, size, flags) + values


async def _publish(url: str, exchange: bytes, routing_key: bytes, head: bytes, content: bytes) -> None:
    wire = await _open(url)
    try:
        wire.publish(exchange, routing_key, head, content)
        await wire.answer("Basic.Ack")
    finally:
        wire.close()


async def _open(url: str) -> "_Wire":
    """Return a connection with one channel that confirms."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
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
    return wire


class _Wire:
    """Frames in, frames out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, channel: int, *frames: Any) -> None:
        self._writer.writelines(self._marshal(channel, frames))

    def _marshal(self, channel: int, frames: Iterable[Any]) -> list[bytes]:
        return [frame.marshal(each, channel) for each in frames]

    def publish(self, exchange: bytes, routing_key: bytes, head: bytes, content: bytes) -> None:
        """Send the frames of one message."""
        publish = struct.pack(">HHH", 60, 40, 0) + short_string(exchange) + short_string(routing_key) + b"\0"
        for kind, payload in ((1, publish), (2, head)):
            self._writer.write(struct.pack(">BHI", kind, 1, len(payload)) + payload + b"\xce")
        if content:
            self.send(1, body.ContentBody(content))

    async def answer(self, name: str) -> Any:
        """Wait for the answer of that name; any other is an error."""
        answer = await self.read()
        if answer.name != name:
            raise AssertionError(f"the broker answered {answer!r}, not {name}")
        return answer

    async def read(self) -> Any:
        """Wait for a frame."""
        head, payload = await self.read_frame()
        _, _, answer = frame.unmarshal(head + payload + b"\xce")
        return answer

    async def read_frame(self) -> tuple[bytes, bytes]:
        """Wait for a frame; return its head and what is in it."""
        async with asyncio.timeout(10):
            head = await self._reader.readexactly(7)
            rest = await self._reader.readexactly(int.from_bytes(head[3:]) + 1)
        return head, rest[:-1]

    def close(self) -> None:
        """Close the connection without a word."""
        self._writer.close()
