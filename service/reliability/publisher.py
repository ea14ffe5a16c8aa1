"""Publishing that knows what became of the message: confirms on, mandatory, a deadline on every wait.

Each publish ends in one of five outcomes; only `Confirmed` means that the broker has taken responsibility. Nothing
that the client library can raise escapes, and no outcome is guessed: an exception whose meaning is unknown is
`Unconfirmed`.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from aio_pika import Message
from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import AMQPError, ChannelInvalidStateError, DeliveryError, PublishError
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionFrameError,
    ConnectionNotImplemented,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from service.reliability.link import BrokerLink, losses_are_errors
from service.reliability.retry import short
from service.reliability.stopping import Stopping


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker has it, on disk of a majority where the queue is a quorum queue."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Nobody is bound for this exchange and routing key; the broker does not have it."""

    explanation: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A queue said no (full, no quorum); the broker does not have it."""

    explanation: str


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """Unknown: no answer in time, or the connection was lost. The broker may have it.

    Attributes:
        away: there was no connection to publish on, which is no message's fault.
        lost: its channel or connection was lost while it was on its way.
        blamed: and the broker said that a message was the reason: this one, or another beside it.
    """

    explanation: str
    away: bool = False
    lost: bool = False
    blamed: bool = False


@dataclass(frozen=True, slots=True)
class Unsendable:
    """No frame can be made of it, now or later; nothing was sent."""

    explanation: str


Publication = Confirmed | Returned | Refused | Unconfirmed | Unsendable

FRAME_MAX = 131_072
"""Bytes of a frame as brokers are installed; a longer one ends the connection, and all headers share one."""

_FRAME_ENVELOPE = 8

_BLAMES = (
    ChannelPreconditionFailed,  # larger than the broker's largest, or a property that it does not believe
    ConnectionFrameError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
    ConnectionNotImplemented,
)
"""What the broker closes a channel or a connection with when it cannot take a message."""


class Publisher(Protocol):
    """Publishes one message and tells what became of it."""

    async def publish(self, message: Message, exchange: str, routing_key: str) -> Publication:
        """Publish and wait for the broker's answer; an empty `exchange` is the default exchange."""
        ...


@dataclass(slots=True)
class ConfirmingPublisher:
    """Publishes on channels of its own, one for each exchange: a missing exchange closes the whole channel.

    That an exchange is there is asked when its channel is opened. What is published to a missing one would fail
    everything in flight beside it, and the next frame on the closed channel would take down the connection.

    Attributes:
        link: the connection to publish on.
        confirm_timeout: deadline for connecting, sending and the confirm together; the framework ignores the one
            given to it.
        stopping: until it is set, the time stands still while the connection is blocked: what was sent is in the
            socket, and sent again it would be published twice. Without it, nobody publishes again.
    """

    link: BrokerLink
    confirm_timeout: timedelta
    stopping: Stopping | None = None
    _channels: dict[str, AbstractChannel] = field(default_factory=dict)
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _locks: dict[str, "_KeyLock"] = field(default_factory=lambda: defaultdict(_KeyLock))

    async def publish(self, message: Message, exchange: str, routing_key: str) -> Publication:
        """Publish and wait for the broker's answer, at most `confirm_timeout`."""
        if (fault := _fault_of(message, exchange, routing_key)) is not None:
            return Unsendable(fault)
        try:
            with losses_are_errors():
                await self._publish(message, exchange, routing_key)
        except TimeoutError:
            text = f"no confirm within {self.confirm_timeout.total_seconds():g} s"
            return Unconfirmed(text, away=not self.link.is_open)
        except Exception as error:  # whatever the client raises, the outcome is unknown, never success
            return _outcome_of(error, f"exchange '{exchange}', routing key '{routing_key}'")
        return Confirmed()

    async def _publish(self, message: Message, exchange: str, routing_key: str) -> None:
        async with self._deadline(), self._alone(message.message_id or ""):
            channel = await self._open_channel(exchange)
            target = channel.default_exchange if exchange == "" else await channel.get_exchange(exchange, ensure=False)
            try:
                await target.publish(message, routing_key, mandatory=True)
            except PublishError:
                raise
            except DeliveryError:
                self._retire(channel, exchange)
                raise

    def _retire(self, channel: AbstractChannel, exchange: str) -> None:
        """Publish on another channel from now on: RabbitMQ 3.10 goes on refusing on one that was refused once.

        The old one is closed when what is in flight on it has been answered or given up.
        """
        if channel is self._channels.get(exchange):
            del self._channels[exchange]
            loop = asyncio.get_running_loop()
            loop.call_later(self.confirm_timeout.total_seconds(), lambda: loop.create_task(_close(channel)))

    async def _open_channel(self, exchange: str) -> AbstractChannel:
        async with self._opening:
            channel = self._channels.get(exchange)
            if channel is None or channel.is_closed:
                channel = await self._connect()
                if exchange:
                    await channel.get_exchange(exchange, ensure=True)
                self._channels[exchange] = channel
            return channel

    async def _connect(self) -> AbstractChannel:
        try:
            return await self.link.channel(confirms=True)
        except Exception as error:
            raise _AwayError(f"no connection: {type(error).__name__}: {error}"[:500]) from error

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        seconds = self.confirm_timeout.total_seconds()
        timer: asyncio.TimerHandle | None = None

        def expire() -> None:
            nonlocal timer
            if self.stopping is not None and not self.stopping.is_set() and self.link.is_blocked:
                timer = loop.call_later(seconds, expire)
            else:
                time.reschedule(loop.time())

        async with asyncio.timeout(None) as time:
            timer = loop.call_later(seconds, expire)
            try:
                yield
            finally:
                timer.cancel()

    @asynccontextmanager
    async def _alone(self, message_id: str) -> AsyncIterator[None]:
        """Let one message of an id be in flight at a time: the client matches returns by id and swaps outcomes."""
        key = self._locks[message_id]
        key.users += 1
        try:
            async with key.lock:
                yield
        finally:
            key.users -= 1
            if not key.users:
                del self._locks[message_id]


class _AwayError(Exception):
    """There is no connection to publish on."""


@dataclass(slots=True)
class _KeyLock:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


def _outcome_of(error: Exception, destination: str) -> Publication:
    outcome: Publication
    match error:
        case PublishError():
            outcome = Returned(f"{_reply(error)} for {destination}")
        case ChannelNotFoundEntity():
            outcome = Returned(short(error))
        case DeliveryError():
            outcome = Refused(f"refused by a queue behind {destination}")
        case ChannelAccessRefused():
            outcome = Refused(short(error))
        case _AwayError():
            outcome = Unconfirmed(str(error), away=True)
        case AMQPError() | ChannelInvalidStateError() | ConnectionError():
            text = f"{type(error).__name__}: {short(error)}"
            outcome = Unconfirmed(text, lost=True, blamed=isinstance(error, _BLAMES))
        case _:
            outcome = Unconfirmed(f"{type(error).__name__}: {error}"[:500])
    return outcome


def _fault_of(message: Message, exchange: str, routing_key: str) -> str | None:
    """Return why no frame can be made of a message; None where it can."""
    try:
        Basic.Publish(exchange=exchange, routing_key=routing_key).marshal()
        header = ContentHeader(body_size=len(message.body), properties=message.properties).marshal()
    except Exception as error:  # whatever the client's encoders raise
        return f"{type(error).__name__}: {short(error)}"
    if len(header) + _FRAME_ENVELOPE > FRAME_MAX:
        return f"properties and headers take {len(header)} bytes; a frame holds {FRAME_MAX - _FRAME_ENVELOPE}"
    return None


async def _close(channel: AbstractChannel) -> None:
    with suppress(Exception), losses_are_errors():  # the link may be closed or lost by then
        await channel.close()


def _reply(error: PublishError) -> str:
    return str(getattr(error.frame, "reply_text", "") or "returned")
