"""Stand-ins for what lies outside of the project: a broker's answers and its deliveries."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aio_pika import IncomingMessage, Message
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelInvalidStateError
from pamqp import commands
from pamqp.header import ContentHeader

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
    """The wire under a delivery: notes what it is told."""

    journal: list[str]
    is_closed: bool = False
    number: int = 1

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        """Return any of the methods that settle a delivery."""

        async def tell(**arguments: Any) -> None:
            if self.is_closed:
                raise ChannelInvalidStateError
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
