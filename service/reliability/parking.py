"""What is in a parking queue, told without taking anything out of it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aio_pika.abc import AbstractIncomingMessage
from pamqp.commands import Basic

from service.reliability.frames import build
from service.reliability.link import BrokerLink
from service.reliability.outcome import Reason


@dataclass(frozen=True, slots=True)
class Parked:
    """One parked message, without its body."""

    message_id: str | None
    type: str | None
    reason: str
    parked_at: str | None
    attempts: int | None
    explanation: str | None


@dataclass(frozen=True, slots=True)
class ParkingList:
    """The messages looked at, and how many there are in all."""

    total: int
    messages: tuple[Parked, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """How many of the messages looked at were parked for each reason."""
        return dict(Counter(message.reason for message in self.messages).most_common())


async def list_parked(link: BrokerLink, queue: str, limit: int) -> ParkingList:
    """Look at up to `limit` messages from the head of the queue.

    They are fetched unacknowledged on one channel and go back, in their order, when it is closed.
    """
    channel = await link.channel()
    try:
        parking = await channel.declare_queue(queue, passive=True)
        total = parking.declaration_result.message_count or 0
        wire = await channel.get_underlay_channel()
        messages: list[Parked] = []
        while len(messages) < limit:
            delivered = await wire.basic_get(queue, no_ack=False)
            if isinstance(delivered.delivery, Basic.GetEmpty):
                break
            message, _ = build(delivered)  # what the broker parked itself may be unreadable
            messages.append(describe(message))
        return ParkingList(max(total, len(messages)), tuple(messages))
    finally:
        await channel.close()


def describe(message: AbstractIncomingMessage) -> Parked:
    """Return what the headers of a parked message tell."""
    headers = message.headers or {}
    attempts = headers.get("x-attempts")
    return Parked(
        message_id=message.message_id,
        type=message.type,
        reason=_broker_reason(headers["x-death"]) if "x-death" in headers else _our_reason(headers),
        parked_at=_text(headers.get("x-parked-at")),
        attempts=attempts if isinstance(attempts, int) else None,
        explanation=_text(headers.get("x-exception-message")),
    )


def _our_reason(headers: Mapping[str, Any]) -> str:
    reason = headers.get("x-parked-reason")
    return reason if reason in tuple(Reason) else "unknown"


_BROKER_REASONS = {
    "delivery_limit": "broker-delivery-limit",
    "expired": "broker-expired",
    "rejected": "broker-rejected",
}


def _broker_reason(deaths: Any) -> str:
    """Return why the broker parked a message itself: the newest entry of its x-death.

    No copy of ours has that header. What the broker moves keeps the producer's own, a forged reason among them.
    """
    for death in deaths if isinstance(deaths, Iterable) and not isinstance(deaths, (str, bytes)) else ():
        if isinstance(death, dict) and (reason := _BROKER_REASONS.get(str(death.get("reason")))):
            return reason
    return "unknown"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
