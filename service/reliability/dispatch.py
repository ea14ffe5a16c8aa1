"""Publish a batch of events: a window in flight, those of a key one after another, and what became of each.

| outcome     | the event                                | what comes later of its key | its destination         |
|-------------|------------------------------------------|-----------------------------|-------------------------|
| confirmed   | is sent                                  | goes on                     | takes all that waited   |
| returned    | waits with its destination               | goes on                     | is probed by one event  |
| refused     | waits, doubling                          | waits                       | likewise, from two on   |
| unconfirmed | waits, doubling; the broker may have it  | waits                       | likewise                |
| unsendable  | is quarantined for people                | goes on                     | is not touched          |

Where the channel or the connection is lost, everything in flight is unconfirmed, and any of it may be the cause: the
suspects are published again by halves, and what takes a channel down alone is quarantined.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

import structlog
from aio_pika import DeliveryMode, Message

from service.reliability.barrier import Barrier, no_barrier
from service.reliability.destinations import Destination, Destinations
from service.reliability.outbox import OutboxRow, Recorded
from service.reliability.publisher import (
    Confirmed,
    Publication,
    Publisher,
    Refused,
    Returned,
    Unconfirmed,
    Unsendable,
)
from service.reliability.retry import backoff
from service.telemetry import Metrics

APP_ID = "billing"

FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=0.5), timedelta(seconds=5)
"""Between publishes of an event that was refused or not confirmed, doubling; nothing is ever given up."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Batch:
    """What became of a batch.

    Attributes:
        results: of the events that were tried, for `outbox.record`.
        released: destinations that take events again, and had some waiting.
        stuck: destinations that only a probe may be published to, and why.
        away: why the broker could not be reached; what was not tried then goes first when it is back.
    """

    results: list[Recorded] = field(default_factory=list)
    released: list[Destination] = field(default_factory=list)
    stuck: dict[Destination, str] = field(default_factory=dict)
    away: str | None = None


@dataclass(slots=True)
class Dispatcher:
    """Publishes batches.

    Attributes:
        window: publishes in flight at once.
        destinations: what is known of them from earlier batches.
    """

    publisher: Publisher
    metrics: Metrics
    window: int
    jitter: Callable[[], float]
    barrier: Barrier = no_barrier
    destinations: Destinations = field(default_factory=Destinations)

    async def dispatch(self, rows: Sequence[OutboxRow], may_start: Callable[[Batch], bool]) -> Batch:
        """Publish rows, in sequence order and at most one probe for each destination that waits.

        Args:
            rows: of one batch, a key's in their order.
            may_start: asked before each publish; what is not started stays as it is.
        """
        batch = Batch()
        probes = {d: row.id for row in reversed(rows) if self.destinations.waits(d := destination_of(row))}
        window = asyncio.Semaphore(self.window)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._publish_chain(chain, probes, window, may_start, batch))
                for chain in _chains(rows)
            ]
        suspects = [suspect for task in tasks if (suspect := task.result()) is not None]
        middle = (len(suspects) + 1) // 2
        await self._sift(suspects[:middle], may_start, batch)
        await self._sift(suspects[middle:], may_start, batch)
        return batch

    async def _publish_chain(
        self,
        chain: list[OutboxRow],
        probes: dict[Destination, UUID],
        window: asyncio.Semaphore,
        may_start: Callable[[Batch], bool],
        batch: Batch,
    ) -> OutboxRow | None:
        """Publish the rows of a key one after another; return the one that was lost with the channel."""
        passed_over: set[Destination] = set()  # also if it takes events again before the batch ends: order
        for row in chain:
            async with window:
                if batch.away is not None or not may_start(batch):
                    return None
                destination = destination_of(row)
                if self.destinations.waits(destination) and probes.get(destination) != row.id:
                    passed_over.add(destination)
                    if destination in self.destinations.holding():
                        return None
                if destination in passed_over:
                    continue
                publication = await self._publish(row)
            if isinstance(publication, Unconfirmed) and publication.lost:
                return row
            if not self._settle(row, publication, batch):
                return None
            if isinstance(publication, Returned):
                passed_over.add(destination)
        return None

    async def _sift(self, suspects: list[OutboxRow], may_start: Callable[[Batch], bool], batch: Batch) -> None:
        """Publish rows of different keys again; where they are lost again, by halves, until the culprit is alone."""
        if not suspects or batch.away is not None or not may_start(batch):
            return
        publications = await asyncio.gather(*(self._publish(row) for row in suspects))
        lost = []
        for row, publication in zip(suspects, publications, strict=True):
            if len(suspects) > 1 and isinstance(publication, Unconfirmed) and publication.lost:
                lost.append(row)
            elif isinstance(publication, Unconfirmed) and publication.blamed:
                self._settle(row, Unsendable(publication.explanation), batch)
            else:
                self._settle(row, publication, batch)
        middle = (len(lost) + 1) // 2
        await self._sift(lost[:middle], may_start, batch)
        await self._sift(lost[middle:], may_start, batch)

    async def _publish(self, row: OutboxRow) -> Publication:
        try:
            message = event_message(row)
        except Exception as error:  # headers that somebody wrote into the table by hand
            return Unsendable(f"cannot be built: {type(error).__name__}: {error}"[:500])
        publishing = asyncio.ensure_future(self.publisher.publish(message, row.exchange, row.routing_key))
        await self.barrier("event-sent")
        return await publishing

    def _settle(self, row: OutboxRow, publication: Publication, batch: Batch) -> bool:
        """Take note of what became of a row; return whether what comes later of its key may go on."""
        destination = destination_of(row)
        attempts = row.publish_attempts + 1
        pause = timedelta()
        match publication:
            case Confirmed():
                self.metrics.publications.labels("confirmed").inc()
                if self.destinations.confirmed(destination):
                    batch.released.append(destination)
                    batch.stuck.pop(destination, None)
                batch.results.append(Recorded(row.id))
                return True
            case Unconfirmed(away=True):
                batch.away = publication.explanation
                return False  # not the row's fault: no attempt is spent, and it goes at once when the broker is back
            case Unsendable():
                outcome, holds_keys = "quarantined", False
            case Returned():
                outcome, holds_keys = "returned", False
                self._note_failure(destination, holds_keys=False)
            case Refused() | Unconfirmed():
                outcome, holds_keys = type(publication).__name__.lower(), True
                self._note_failure(destination, holds_keys=True)
                pause = backoff(attempts, self.jitter(), first=FIRST_PAUSE, longest=LONGEST_PAUSE)
        self.metrics.publications.labels(outcome).inc()
        log.warning(
            "event_not_sent",
            event_id=str(row.id),
            type=row.type,
            publication=outcome,
            explanation=publication.explanation,
            attempts=attempts,
        )
        error = f"{outcome}: {publication.explanation}"
        if self.destinations.waits(destination):
            batch.stuck[destination] = error
        batch.results.append(Recorded(row.id, error, pause, quarantined=outcome == "quarantined"))
        return not holds_keys

    def _note_failure(self, destination: Destination, *, holds_keys: bool) -> None:
        now = asyncio.get_running_loop().time()
        self.destinations.failed(destination, now, self.jitter(), holds_keys=holds_keys)


def destination_of(row: OutboxRow) -> Destination:
    """Return where a row is published."""
    return Destination(row.exchange, row.routing_key)


def event_message(row: OutboxRow) -> Message:
    """Return the message of an event: equal at every publish of the same row."""
    headers = dict(row.headers)
    correlation_id = headers.pop("correlation-id", None)
    return Message(
        row.payload,
        headers=dict(headers),
        content_type="application/json",
        delivery_mode=DeliveryMode.PERSISTENT,
        message_id=str(row.id),
        correlation_id=None if correlation_id is None else str(correlation_id),
        timestamp=row.created_at,
        type=row.type,
        app_id=APP_ID,
    )


def _chains(rows: Iterable[OutboxRow]) -> list[list[OutboxRow]]:
    """Return the rows of each key in their order."""
    chains: dict[str, list[OutboxRow]] = {}
    for row in rows:
        chains.setdefault(row.key, []).append(row)
    return list(chains.values())
