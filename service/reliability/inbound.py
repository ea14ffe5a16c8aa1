"""Declaring subscribers: one FastStream subscriber per event type, all on the family's one work queue.

FastStream documents them and routes to them in tests. It must not start them: each would consume the queue and get
its share of the others' messages. `consumer.Consumer` feeds them instead.
"""

from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from faststream import AckPolicy
from faststream.message import StreamMessage
from faststream.rabbit import QueueType, RabbitBroker, RabbitExchange, RabbitQueue
from faststream.rabbit.subscriber import RabbitSubscriber
from pydantic import BaseModel, ValidationError

from service.reliability.envelope import SCHEMA_VERSION, require_plain, require_schema_version
from service.reliability.errors import PermanentError
from service.reliability.outcome import Reason
from service.reliability.topology import QueueFamily
from service.reliability.unit_of_work import UnitOfWork

_current: ContextVar[UnitOfWork] = ContextVar("unit_of_work")


async def current_unit_of_work() -> Any:
    """Return the transaction of the message being handled; for `Depends` in a handler's signature.

    Asynchronous because FastStream sends every synchronous dependency through a thread pool.
    """
    return _current.get()


@dataclass(frozen=True, slots=True)
class Subscription:
    """What the middleware knows of a subscriber: its event type and its stable name in the inbox."""

    event_type: str
    consumer: str


@dataclass(slots=True)
class Inbound:
    """The subscribers of one queue family."""

    broker: RabbitBroker
    family: QueueFamily
    _subscribers: dict[str, RabbitSubscriber] = field(default_factory=dict)
    _subscriptions: dict[int, Subscription] = field(default_factory=dict)

    def subscriber(
        self,
        event_type: str,
        model: type[BaseModel],
        *,
        consumer: str,
        schema_versions: Collection[int] = (1,),
        description: str | None = None,
    ) -> RabbitSubscriber:
        """Declare the subscriber of an event type; decorate the handler with it.

        Args:
            event_type: one of the family's routing keys.
            model: what the body must be; the handler's first parameter.
            consumer: the handler's name in the inbox. Written down, never derived: with another name, everything
                would count as not yet processed.
            schema_versions: of the body, that the model reads; a message of another one is parked.
            description: for the integrator; the handler's docstring where it is absent.

        Raises:
            ValueError: the family is not bound with the event type, or it has a subscriber already.
        """
        if event_type not in self.family.keys:
            raise ValueError(f"{event_type!r} is not among the keys of family {self.family.name!r}: {self.family.keys}")
        if event_type in self._subscribers:
            raise ValueError(f"{event_type!r} has a subscriber already")
        subscriber = self.broker.subscriber(
            RabbitQueue(
                self.family.work,
                queue_type=QueueType.QUORUM,
                durable=True,
                declare=False,
                routing_key=event_type,
            ),
            RabbitExchange(self.family.name, durable=True, declare=False),
            ack_policy=AckPolicy.MANUAL,
            no_reply=True,  # a stranger's reply_to would make FastStream publish the handler's result anywhere
            decoder=_decoder(model, schema_versions),
            title=event_type,
            description=description,
        )
        self._subscribers[event_type] = subscriber
        self._subscriptions[id(subscriber)] = Subscription(event_type, consumer)
        return subscriber

    @property
    def handled(self) -> tuple[str, ...]:
        """The event types that have a subscriber."""
        return tuple(self._subscribers)

    @property
    def consumers(self) -> dict[str, str]:
        """Return for each event type that has a subscriber the name of its consumer in the inbox."""
        return {known.event_type: known.consumer for known in self._subscriptions.values()}

    def find(self, event_type: str) -> RabbitSubscriber | None:
        """Return the subscriber of an event type, None where nobody handles it."""
        return self._subscribers.get(event_type)

    def subscription(self, subscriber: object) -> Subscription:
        """Return what was declared for a subscriber."""
        return self._subscriptions[id(subscriber)]

    def prepare(self) -> None:
        """Make the subscribers able to process messages without starting them.

        These are the steps of the framework's own start, apart from connecting and consuming; without the logger
        every message would fail silently. They are not public: a test holds them to the pinned version.
        """
        self.broker._setup_logger()  # noqa: SLF001
        for subscriber in self._subscribers.values():
            subscriber._build_fastdepends_model()  # noqa: SLF001
            subscriber._post_start()  # noqa: SLF001


def _decoder(
    model: type[BaseModel], schema_versions: Collection[int]
) -> Callable[[StreamMessage[Any]], Awaitable[BaseModel]]:
    """Return a decoder that reads JSON whatever the content type says, and raises what the message is parked with."""
    names = _field_names(model)

    async def decode(message: StreamMessage[Any]) -> BaseModel:
        require_schema_version(message.headers.get(SCHEMA_VERSION), schema_versions)
        require_plain(message.raw_message.content_encoding)
        try:
            return model.model_validate_json(message.body)
        except ValidationError as error:
            raise _invalid(error, names) from None

    return decode


_MAY_QUOTE = frozenset({"value_error", "assertion_error", "union_tag_invalid", "uuid_parsing"})
"""Kinds of errors whose text may quote the body. A validator that has something to tell raises PydanticCustomError."""


def _invalid(error: ValidationError, names: frozenset[str]) -> PermanentError:
    """Return what is wrong with a body: places and rules, never values, nor keys that the model does not know."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    if any(problem["type"] == "json_invalid" for problem in problems):
        return PermanentError(Reason.UNREADABLE, "the body is not JSON in UTF-8")
    lines = []
    for problem in problems[:10]:
        place = ".".join(str(part) if isinstance(part, int) or part in names else "?" for part in problem["loc"])
        kind = problem["type"]
        lines.append(f"{place or 'body'}: {kind if kind in _MAY_QUOTE else problem['msg']}")
    return PermanentError(Reason.INVALID, "; ".join(lines))


def _field_names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of the fields of a model and of the models in it, as they stand in the body."""
    schema = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return frozenset(name for part in parts for name in part.get("properties", {}))
