"""Stand-ins for what lies outside of the project: a broker's answers and its deliveries."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aio_pika import IncomingMessage, Message
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelInvalidStateError
from pamqp import commands
from pamqp.header import ContentHeader

from service.reliability.envelope import Envelope
from service.reliability.publisher import Confirmed, Publication


@dataclass(slots=True)
class ScriptedPublisher:
    """Answers publishes from a script, then with confirms.

    Attributes:
        script: the first answers.
        published: what was published, with exchange and routing key.
        journal: shared with deliveries, to see what came first.
    """

    script: list[Publication] = field(default_factory=list)
    published: list[tuple[Message, str, str]] = field(default_factory=list)
    journal: list[str] = field(default_factory=list)

    async def publish(self, message: Message, exchange: str, routing_key: str) -> Publication:
        """Note the message and answer."""
        self.published.append((message, exchange, routing_key))
        answer = self.script.pop(0) if self.script else Confirmed()
        self.journal.append(f"{type(answer).__name__.lower()} {routing_key}")
        return answer


@dataclass(slots=True)
class FakeChannel:
    """The wire under a delivery: notes what it is told, or raises `error`."""

    journal: list[str]
    is_closed: bool = False
    error: BaseException | None = None
    number: int = 1

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        """Return any of the methods that settle a delivery."""

        async def tell(**arguments: Any) -> None:
            if self.is_closed:
                raise ChannelInvalidStateError
            if self.error is not None:
                raise self.error
            self.journal.append(name.removeprefix("basic_") + (" requeue" if arguments.get("requeue") else ""))

        if not name.startswith("basic_"):
            raise AttributeError(name)
        return tell

    @property
    def connection(self) -> Any:
        """The connection: asked whether it can nack."""
        return self


def delivery(
    body: bytes = b"{}",
    *,
    exchange: str = "orders",
    routing_key: str = "order.placed",
    journal: list[str] | None = None,
    **properties: Any,
) -> IncomingMessage:
    """Return a delivery as the client library builds it; `properties` are those of AMQP, `message_type` among them."""
    channel: Any = FakeChannel([] if journal is None else journal)
    properties = {"message_id": "m-1", "headers": {}} | properties
    return IncomingMessage(
        DeliveredMessage(
            delivery=commands.Basic.Deliver("tag", 1, False, exchange, routing_key),
            header=ContentHeader(properties=commands.Basic.Properties(**properties)),
            body=body,
            channel=channel,
        )
    )


@dataclass(slots=True)
class ScriptedTransactions:
    """Raises errors from a script where a transaction is opened, then opens those of `database`."""

    database: Any
    script: list[Exception] = field(default_factory=list)

    @asynccontextmanager
    async def begin(self, cause: Envelope) -> AsyncIterator[Any]:
        """Raise the next error, or open a transaction."""
        if self.script:
            raise self.script.pop(0)
        async with self.database.begin(cause) as work:
            yield work

    async def count_start(self, consumer: str, message_id: str) -> int:
        """Count."""
        return int(await self.database.count_start(consumer, message_id))

    async def clear_starts(self, consumer: str, message_id: str) -> None:
        """Forget."""
        await self.database.clear_starts(consumer, message_id)


@dataclass(slots=True)
class FakeConnection:
    """A database connection that says yes to everything, or one whose server has vanished without a word.

    A vanished server answers nothing: a call ends when its own time-out is over, which here is at once. A server that
    is slow to `unanswered` answers to everything else.
    """

    vanishes_after_begin: bool = False
    unanswered: str | None = None
    statements: list[str] = field(default_factory=list)
    _in_transaction: bool = False

    async def execute(self, query: str, *_: Any, timeout: float | None = None) -> str:  # noqa: ASYNC109 - the driver's
        """Answer with the command's tag."""
        self.statements.append(query)
        if query.startswith("begin"):
            self._in_transaction = True
            return "BEGIN"
        await self._answer(timeout)
        self._in_transaction = False
        if query == self.unanswered:
            raise TimeoutError
        return query.upper()

    async def fetchval(self, query: str, *_: Any) -> bool:
        """Answer that the claim was won."""
        self.statements.append(query)
        await self._answer(None)
        return True

    async def _answer(self, timeout: float | None) -> None:  # noqa: ASYNC109 - the driver's
        if self.vanishes_after_begin:
            if timeout is not None:
                raise TimeoutError
            await asyncio.Event().wait()

    def is_in_transaction(self) -> bool:
        """Tell what the client remembers."""
        return self._in_transaction

    def is_closed(self) -> bool:
        """Tell what the client knows: nobody closed it."""
        return False

    def terminate(self) -> None:
        """Give it up."""


@dataclass(slots=True)
class FakePool:
    """Hands out connections from a script; None stands for a server that does not answer to a connect.

    Nobody waits for long: a time-out of seconds is over after `patience`.
    """

    script: list[FakeConnection | None]
    patience: float = 0.2

    async def acquire(self, *, timeout: float) -> FakeConnection:  # noqa: ASYNC109 - the driver's
        """Return the next connection, or wait in vain."""
        connection = self.script.pop(0)
        if connection is None:
            async with asyncio.timeout(min(timeout, self.patience)):
                await asyncio.Event().wait()
        assert connection is not None
        return connection

    async def release(self, connection: FakeConnection) -> None:
        """Take a connection back."""
