"""The path of a message in, with three subscribers of the tests' own: what runs, in which order, and how it ends."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import pytest
from faststream import Depends
from faststream.exceptions import NackMessage
from faststream.rabbit import RabbitBroker, TestRabbitBroker
from pydantic import BaseModel, ConfigDict, Field, field_validator
from structlog.testing import capture_logs

from service.reliability.barrier import Point
from service.reliability.errors import DatabaseUnavailableError, PermanentError
from service.reliability.gate import Gate
from service.reliability.inbound import Inbound, current_unit_of_work
from service.reliability.middleware import MOST_SESSIONS, Reliability
from service.reliability.outbox import Event
from service.reliability.outcome import Reason
from service.reliability.retry import RetryPolicy
from service.reliability.settlement import Settlement, channel_is_closed
from service.reliability.stopping import Stopping
from service.reliability.strategies import Staged
from service.reliability.topology import QueueFamily
from service.reliability.unit_of_work import PostgresTransactions, PostgresUnitOfWork
from service.telemetry import Metrics
from service.testing.memory import MemoryDatabase, MemoryUnitOfWork
from tests.support.doubles import FakeConnection, FakePool, ScriptedPublisher, ScriptedTransactions, delivery

NOW = datetime(2026, 5, 4, 10, tzinfo=UTC)
CARD = "4111-1111-1111-1111"


class RuleError(Exception):
    """The domain says no, in a text for people."""


class Added(BaseModel):
    """Goods came in."""

    sku: str
    count: int


class Cash(BaseModel):
    """One way to pay."""

    kind: Literal["cash"]


class Card(BaseModel):
    """Another."""

    kind: Literal["card"]


class Sold(BaseModel):
    """Goods went out; has every kind of field whose complaint might quote what it got."""

    model_config = ConfigDict(extra="forbid")

    by_sku: dict[str, int] = {}
    payment: Annotated[Cash | Card, Field(discriminator="kind")] | None = None
    note: str = ""

    @field_validator("note")
    @classmethod
    def _is_short(cls, note: str) -> str:
        if len(note) > 5:
            raise ValueError(f"too long: {note}")
        return note


class Counted(BaseModel):
    """Goods were counted."""

    sku: str


Work = Annotated[MemoryUnitOfWork, Depends(current_unit_of_work, cast=False)]
Act = Callable[[MemoryUnitOfWork], Awaitable[None]]


async def append(work: MemoryUnitOfWork) -> None:
    """Do what a handler does."""
    await work.append(Event("stock.changed", "nail", b"{}"))


class Bench:
    """A stock service without servers; `act` is what its handlers do."""

    def __init__(
        self, transactions: Any = None, *, timeout: float = 5, slots: int = 5, lost: Any = channel_is_closed
    ) -> None:
        self.journal: list[str] = []
        self.act: Act = append
        self.database = MemoryDatabase(NOW)
        self.publisher = ScriptedPublisher(journal=self.journal)
        self.metrics = Metrics()
        self.stopping = Stopping()
        policy = RetryPolicy(
            3, (timedelta(seconds=5), timedelta(minutes=2)), {RuleError: Reason.REJECTED_BY_RULE}, safe=(RuleError,)
        )
        family = QueueFamily("stock", ("stock.added", "stock.sold", "stock.counted"), policy, Staged())
        self.broker = RabbitBroker(logger=None)
        self.inbound = Inbound(self.broker, family)
        self._subscribe()
        self.reliability = Reliability(
            inbound=self.inbound,
            transactions=transactions or self.database,
            settlement=Settlement(
                family,
                self.publisher,
                self.metrics,
                now=lambda: NOW,
                jitter=random.random,
                is_lost=lost,
                barrier=self.barrier,
            ),
            metrics=self.metrics,
            handler_timeout=timedelta(seconds=timeout),
            max_body_bytes=1000,
            gate=Gate(
                slots, self._database_answers, self.metrics, random.random, self.stopping, timedelta(milliseconds=1)
            ),
            jitter=random.random,
            stopping=self.stopping,
            barrier=self.barrier,
            first_pause=timedelta(milliseconds=1),
            longest_pause=timedelta(milliseconds=2),
        )
        self.broker.add_middleware(self.reliability)

    async def _database_answers(self) -> bool:
        return True

    def _subscribe(self) -> None:
        @self.inbound.subscriber("stock.added", Added, consumer="stock.added")
        async def added(event: Added, work: Work) -> None:
            self.journal.append(f"added {event.count} {event.sku}")
            await self.act(work)

        @self.inbound.subscriber("stock.sold", Sold, consumer="stock.sold")
        async def sold(event: Sold, work: Work) -> None:
            self.journal.append("sold")
            await self.act(work)

        @self.inbound.subscriber("stock.counted", Counted, consumer="stock.counted")
        async def counted(event: Counted, work: Work) -> None:
            self.journal.append(f"counted {event.sku}")
            await self.act(work)

    async def barrier(self, point: Point) -> None:
        """Note how far a delivery is."""
        self.journal.append(point)

    async def deliver(
        self, body: bytes = b'{"sku": "nail", "count": 100}', kind: str = "stock.added", **properties: Any
    ) -> None:
        """Feed a delivery to the subscriber of its type, as the consumer does."""
        subscriber = self.inbound.find(kind)
        assert subscriber is not None
        properties = {"exchange": "stock", "routing_key": kind} | properties
        await subscriber.process_message(delivery(body, journal=self.journal, **properties))

    @property
    def copies(self) -> list[tuple[str, dict[str, Any]]]:
        """The successors handed over: queue and headers."""
        return [(queue, dict(message.headers)) for message, _, queue in self.publisher.published]

    def count(self, metric: str, **labels: str) -> float | None:
        """Return the value of a metric."""
        return self.metrics.registry.get_sample_value(metric, labels)


@pytest.fixture
def bench() -> Bench:
    """The service with its subscribers prepared: they are never started."""
    bench = Bench()
    bench.inbound.prepare()
    return bench


async def test_a_message_is_claimed_handled_committed_and_only_then_acked(bench: Bench) -> None:
    await bench.deliver()
    assert bench.journal == ["claimed", "added 100 nail", "handled", "committed", "ack"]
    assert [event.type for event in bench.database.tables.events] == ["stock.changed"]
    assert bench.database.tables.processed.keys() == {("stock.added", "m-1")}
    assert bench.count("billing_deliveries_total", type="stock.added", outcome="processed") == 1


@pytest.mark.guarantee("G4")
async def test_the_commit_is_visible_before_the_ack_is_sent(bench: Bench) -> None:
    seen: dict[str, int] = {}

    async def look(point: Point) -> None:
        seen[point] = len(bench.database.tables.events)

    bench.reliability.barrier = look
    await bench.deliver()
    assert seen == {"claimed": 0, "handled": 0, "committed": 1}


async def test_a_duplicate_is_acked_without_running_the_handler(bench: Bench) -> None:
    await bench.deliver()
    bench.journal.clear()
    await bench.deliver(b'{ "count":100, "sku":"n\\u0061il" }')
    assert bench.journal == ["claimed", "ack"]
    assert len(bench.database.tables.events) == 1
    assert bench.count("billing_deliveries_total", type="stock.added", outcome="duplicate") == 1


async def test_the_same_id_with_other_content_is_parked_without_running_the_handler(bench: Bench) -> None:
    await bench.deliver()
    bench.journal.clear()
    await bench.deliver(b'{"sku": "nail", "count": 101}')
    assert bench.journal == ["claimed", "confirmed stock.parking", "successor-confirmed", "ack"]
    [(_, headers)] = bench.copies
    assert (headers["x-parked-reason"], headers["x-attempts"]) == ("message-id-conflict", 0)
    assert len(bench.database.tables.events) == 1


async def test_the_same_id_to_another_subscriber_is_another_message(bench: Bench) -> None:
    await bench.deliver()
    await bench.deliver(b'{"sku": "nail"}', "stock.counted")
    assert bench.database.tables.processed.keys() == {("stock.added", "m-1"), ("stock.counted", "m-1")}
    assert bench.copies == []


@pytest.mark.parametrize(
    ("kind", "body", "ran"),
    [
        ("stock.added", b'{"sku": "nail", "count": 1}', "added 1 nail"),
        ("stock.sold", b"{}", "sold"),
        ("stock.counted", b'{"sku": "nail"}', "counted nail"),
    ],
)
async def test_the_test_broker_routes_each_key_to_its_own_handler(kind: str, body: bytes, ran: str) -> None:
    bench = Bench(lost=lambda _: False)
    async with TestRabbitBroker(bench.broker):
        await bench.broker.publish(body, exchange="stock", routing_key=kind, message_id="m-1")
    assert bench.journal == ["claimed", ran, "handled", "committed"]


async def test_a_message_without_an_id_is_parked_although_the_framework_invents_one() -> None:
    bench = Bench(lost=lambda _: False)
    message = delivery(b'{"sku": "nail"}', exchange="stock", routing_key="stock.counted", message_id=None)
    subscriber = bench.inbound.find("stock.counted")
    assert subscriber is not None
    async with TestRabbitBroker(bench.broker):
        await subscriber.process_message(message)
    [(queue, headers)] = bench.copies
    assert (queue, headers["x-parked-reason"], headers["x-attempts"]) == ("stock.parking", "missing-message-id", 0)
    assert bench.database.tables.processed == {}


async def test_a_failure_is_rolled_back_and_waits_with_the_next_attempt(bench: Bench) -> None:
    async def fail(work: MemoryUnitOfWork) -> None:
        await append(work)
        raise RuntimeError(CARD)

    bench.act = fail
    await bench.deliver(headers={"tenant": "a"})
    assert bench.journal == ["claimed", "added 100 nail", "confirmed stock.wait.5s", "successor-confirmed", "ack"]
    assert bench.copies == [
        (
            "stock.wait.5s",
            {
                "tenant": "a",
                "x-attempt": 2,
                "x-original-exchange": "stock",
                "x-original-routing-key": "stock.added",
            },
        )
    ]
    assert bench.database.tables.processed == {}
    assert bench.database.tables.events == []


async def test_a_message_is_executed_as_often_as_the_policy_says_and_then_parked(bench: Bench) -> None:
    async def fail(work: MemoryUnitOfWork) -> None:
        raise RuntimeError(CARD)

    bench.act = fail
    await bench.deliver()
    for _ in range(2):
        headers = bench.copies[-1][1]
        await bench.deliver(exchange="", routing_key="stock.work", message_type="stock.added", headers=headers)
    assert bench.journal.count("added 100 nail") == 3
    assert [queue for queue, _ in bench.copies] == ["stock.wait.5s", "stock.wait.2m", "stock.parking"]
    parked = bench.copies[-1][1]
    place = parked.pop("x-exception-message")
    assert place.startswith("RuntimeError at test_middleware.py:")
    assert parked == {
        "x-parked-reason": "attempts-exhausted",
        "x-parked-at": "2026-05-04T10:00:00.000+00:00",
        "x-attempts": 3,
        "x-exception-type": "builtins.RuntimeError",
        "x-original-exchange": "stock",
        "x-original-routing-key": "stock.added",
        "x-original-queue": "stock.work",
    }


@pytest.mark.guarantee("G5")
async def test_an_attempt_that_a_producer_wrote_is_not_believed(bench: Bench) -> None:
    async def fail(work: MemoryUnitOfWork) -> None:
        raise RuntimeError

    bench.act = fail
    await bench.deliver(
        headers={"x-attempt": 3, "x-death": [{"queue": "stock.work", "reason": "rejected", "count": 9}]}
    )
    assert [(queue, headers["x-attempt"]) for queue, headers in bench.copies] == [("stock.wait.5s", 2)]
    assert "x-death" not in bench.copies[0][1]


@pytest.mark.parametrize(
    ("error", "reason", "explanation"),
    [
        (RuleError("the shelf is gone"), "rejected-by-rule", "the shelf is gone"),
        (PermanentError(Reason.INVALID, "no such shelf"), "invalid", "no such shelf"),
    ],
)
async def test_what_a_handler_calls_permanent_is_parked_at_its_first_execution(
    bench: Bench, error: Exception, reason: str, explanation: str
) -> None:
    async def fail(work: MemoryUnitOfWork) -> None:
        await append(work)
        raise error

    bench.act = fail
    await bench.deliver()
    [(queue, headers)] = bench.copies
    assert (queue, headers["x-parked-reason"], headers["x-attempts"]) == ("stock.parking", reason, 1)
    assert headers["x-exception-message"] == explanation
    assert bench.database.tables.events == []


@pytest.mark.parametrize("error", [NackMessage(), TimeoutError(), ExceptionGroup("two", [ValueError(), KeyError()])])
async def test_whatever_a_handler_raises_is_a_failed_attempt(bench: Bench, error: Exception) -> None:
    async def fail(work: MemoryUnitOfWork) -> None:
        raise error

    bench.act = fail
    await bench.deliver()
    assert [queue for queue, _ in bench.copies] == ["stock.wait.5s"]
    assert bench.journal[-1] == "ack"


async def test_a_cancellation_that_a_handler_ran_into_is_a_failed_attempt(bench: Bench) -> None:
    """Nobody cancelled the delivery's task: the handler awaited something that was cancelled elsewhere.

    The delivery stayed unsettled on a living channel, so nothing brought it back and its place in the prefetch was
    lost until the next reconnect.
    """

    async def fail(work: MemoryUnitOfWork) -> None:
        elsewhere = asyncio.ensure_future(asyncio.Event().wait())
        elsewhere.cancel()
        await elsewhere

    bench.act = fail
    task = asyncio.create_task(bench.deliver())
    await asyncio.wait({task})
    assert not task.cancelled()
    assert [queue for queue, _ in bench.copies] == ["stock.wait.5s"]


async def test_a_cancelled_task_is_rolled_back_and_left_unsettled(bench: Bench) -> None:
    runs = asyncio.Event()

    async def hang(work: MemoryUnitOfWork) -> None:
        await append(work)
        runs.set()
        await asyncio.Event().wait()

    bench.act = hang
    task = asyncio.create_task(bench.deliver())
    await runs.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert bench.journal == ["claimed", "added 100 nail"]
    assert bench.database.tables.processed == {}


async def test_a_handler_that_hangs_is_cut_off_and_tried_again() -> None:
    bench = Bench(timeout=0.05)
    bench.inbound.prepare()

    async def hang(work: MemoryUnitOfWork) -> None:
        await append(work)
        await asyncio.Event().wait()

    bench.act = hang
    with capture_logs() as logs:
        await bench.deliver()
    assert [queue for queue, _ in bench.copies] == ["stock.wait.5s"]
    assert bench.database.tables.events == []
    [retried] = [entry for entry in logs if entry["event"] == "message_retried"]
    assert retried["error"] == "service.reliability.errors.HandlerTimeoutError"
    assert retried["explanation"] == "the handler did not finish within 0.05 s"


async def test_an_outage_holds_the_message_and_spends_no_attempt() -> None:
    away = DatabaseUnavailableError("the database is not available")
    database = MemoryDatabase(NOW)
    bench = Bench(ScriptedTransactions(database, [away, away, away]))
    bench.inbound.prepare()
    await bench.deliver()
    assert bench.journal == ["claimed", "added 100 nail", "handled", "committed", "ack"]
    assert bench.copies == []
    assert bench.count("billing_deliveries_held_total") == 3


async def test_a_handler_that_loses_its_session_again_and_again_has_failed() -> None:
    """Each time the probe finds the database well: it is not an outage, and would go on for ever."""
    bench = Bench()

    async def lose(_work: MemoryUnitOfWork) -> None:
        raise DatabaseUnavailableError("the session was lost")

    bench.act = lose
    bench.inbound.prepare()
    await bench.deliver()
    assert [queue for queue, _ in bench.copies] == ["stock.wait.5s"]
    assert bench.count("billing_deliveries_held_total") == MOST_SESSIONS
    assert bench.journal[-1] == "ack"


async def test_an_outage_during_the_last_attempt_parks_nothing() -> None:
    database = MemoryDatabase(NOW)
    bench = Bench(ScriptedTransactions(database, [DatabaseUnavailableError("away")]))
    bench.inbound.prepare()
    await bench.deliver(exchange="", routing_key="stock.work", headers={"x-attempt": 3})
    assert bench.copies == []
    assert bench.journal[-1] == "ack"


async def _with_a_silent_database(connection: FakeConnection | None) -> Bench:
    """Deliver while the first connection gets no answer and the second is fine."""
    pool: Any = FakePool([connection, FakeConnection()])
    transactions = PostgresTransactions(pool, lambda c, e: PostgresUnitOfWork(c, e, "x"), lambda: None)
    bench = Bench(transactions, timeout=0.05)

    async def nothing(work: MemoryUnitOfWork) -> None:
        pass

    bench.act = nothing
    bench.inbound.prepare()
    await bench.deliver()
    return bench


async def test_a_database_that_does_not_answer_to_a_connect_spends_no_attempt() -> None:
    """With a handler time-out below the pool's ten seconds a silent network counted as the message's failure.

    Five of them parked a good message during an outage.
    """
    bench = await _with_a_silent_database(None)
    assert bench.copies == []
    assert bench.journal[-2:] == ["committed", "ack"]


async def test_a_database_that_vanishes_in_the_middle_spends_no_attempt() -> None:
    """The handler's time-out came first and counted as its failure, although the rollback got no answer either."""
    bench = await _with_a_silent_database(FakeConnection(vanishes_after_begin=True))
    assert bench.copies == []
    assert bench.journal[-2:] == ["committed", "ack"]


@pytest.mark.guarantee("G7")
async def test_a_commit_that_is_not_answered_in_time_spends_no_attempt() -> None:
    """A standby that does not confirm, say: the connection is fine, and the message is not to blame."""
    bench = await _with_a_silent_database(FakeConnection(unanswered="commit"))
    assert bench.copies == []
    assert bench.journal[-2:] == ["committed", "ack"]


async def test_a_service_that_stops_gives_a_held_message_back() -> None:
    away = [DatabaseUnavailableError("away") for _ in range(1000)]
    bench = Bench(ScriptedTransactions(MemoryDatabase(NOW), list(away)))
    bench.inbound.prepare()
    task = asyncio.create_task(bench.deliver())
    while bench.count("billing_deliveries_held_total") == 0:
        await asyncio.wait({task}, timeout=0.001)
    bench.stopping.set()
    await task
    assert bench.journal == ["reject requeue"]
    assert bench.copies == []


async def test_no_handler_starts_once_the_service_stops(bench: Bench) -> None:
    bench.stopping.set()
    await bench.deliver()
    assert bench.journal == ["reject requeue"]
    assert bench.count("billing_deliveries_total", type="stock.added", outcome="returned") == 1


@pytest.mark.guarantee("G10")
async def test_no_more_handlers_run_at_once_than_there_are_slots() -> None:
    class Unserialised(MemoryDatabase):
        """Opens transactions that do not wait for each other, as a server does."""

        def begin(self, cause: Any) -> Any:
            return MemoryDatabase(NOW).begin(cause)

    bench = Bench(Unserialised(NOW), slots=2)
    bench.inbound.prepare()
    running, most = 0, 0
    may_go = asyncio.Event()
    both_run = asyncio.Event()

    async def count(work: MemoryUnitOfWork) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            both_run.set()
        await may_go.wait()
        running -= 1

    bench.act = count
    tasks = [asyncio.create_task(bench.deliver(message_id=f"m-{n}")) for n in range(6)]
    await both_run.wait()
    may_go.set()
    await asyncio.gather(*tasks)
    assert most == 2
    assert bench.journal.count("ack") == 6


async def test_a_held_successor_does_not_occupy_a_slot() -> None:
    """Otherwise a parking queue that is full would stop the good messages."""
    bench = Bench(slots=1)
    bench.inbound.prepare()
    asked, answer = asyncio.Event(), asyncio.Event()
    publish = bench.publisher.publish

    async def slow(*arguments: Any) -> Any:
        asked.set()
        await answer.wait()
        return await publish(*arguments)

    class SlowPublisher:
        """Answers when told to."""

        publish = staticmethod(slow)

    bench.reliability.settlement.publisher = SlowPublisher()
    parked = asyncio.create_task(bench.deliver(b"{", message_id="bad"))
    await asked.wait()
    await bench.deliver(message_id="good")
    assert bench.journal[-1] == "ack"
    answer.set()
    await parked
    assert [queue for queue, _ in bench.copies] == ["stock.parking"]


async def test_each_message_has_a_transaction_of_its_own(bench: Bench) -> None:
    works: list[MemoryUnitOfWork] = []

    async def keep(work: MemoryUnitOfWork) -> None:
        works.append(work)

    bench.act = keep
    await asyncio.gather(*(bench.deliver(message_id=f"m-{n}") for n in range(3)))
    assert len({id(work) for work in works}) == 3


@pytest.mark.parametrize(
    ("body", "properties", "reason"),
    [
        (b"{", {}, "unreadable"),
        (b"\xff\xfe", {}, "unreadable"),
        (b"", {}, "unreadable"),
        ('{"sku": "nail", "count": 1}'.encode("utf-16"), {}, "unreadable"),
        (b"null", {}, "invalid"),
        (b"[]", {}, "invalid"),
        (b'"{\\"sku\\": \\"nail\\", \\"count\\": 1}"', {}, "invalid"),
        (b'{"sku": "nail"}', {}, "invalid"),
        (b'{"sku": "nail", "count": ' + b"9" * 900 + b"}", {}, None),
        (b'{"sku": "nail", "count": 1}' + b" " * 974, {}, "too-large"),
        (b"[" * 999, {}, "unreadable"),
        (b'{"sku": "nail", "count": 1}', {"message_id": "a\0"}, "invalid"),
        (b'{"sku": "nail", "count": 1}', {"message_id": None}, "missing-message-id"),
        (b"{", {"message_id": None}, "missing-message-id"),
        (b'{"sku": "nail", "count": 1}', {"content_encoding": "gzip"}, "unreadable"),
        (b"\x1f\x8b\x08\x00", {"content_encoding": "gzip"}, "unreadable"),
        (b"\x1f\x8b\x08\x00", {}, "unreadable"),
        (b'{"sku": "nail", "count": 1}', {"content_encoding": "br"}, "unreadable"),
        (b'{"sku": "nail", "count": 1}', {"content_encoding": "UTF-8"}, None),
    ],
)
async def test_a_body_is_processed_or_parked_unexecuted(
    bench: Bench, body: bytes, properties: dict[str, Any], reason: str | None
) -> None:
    await bench.deliver(body, **properties)
    parked = [(queue, headers["x-parked-reason"], headers["x-attempts"]) for queue, headers in bench.copies]
    assert parked == ([] if reason is None else [("stock.parking", reason, 0)])
    assert bench.journal[-1] == "ack"
    assert len(bench.database.tables.processed) == (1 if reason is None else 0)


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "application/json;charset=utf-8",
        "application/json; charset=utf-8",
        "APPLICATION/JSON",
        "application/vnd.x.v1+json",
        "application/jsonlines",
        "text/plain",
        "application/octet-stream",
        "x" * 255,
    ],
)
async def test_the_content_type_decides_nothing(bench: Bench, content_type: str | None) -> None:
    await bench.deliver(content_type=content_type)
    assert bench.journal[-2:] == ["committed", "ack"]
    assert bench.copies == []


@pytest.mark.parametrize(
    "deaths",
    [
        *([{"queue": "elsewhere", "reason": "rejected", "count": count}] for count in (3, True, "3", -5, 2.5, None)),
        [{"queue": "stock.work", "reason": "rejected", "count": 2**63 - 1}],
        [{}] * 300,
        "3",
        3,
        {},
        None,
        [],
        [1, "a", None, {"count": 1}],
    ],
)
async def test_a_history_of_deaths_counts_for_nothing_and_is_not_carried_on(bench: Bench, deaths: object) -> None:
    async def fail(work: MemoryUnitOfWork) -> None:
        raise RuntimeError

    bench.act = fail
    await bench.deliver(headers={"x-death": deaths, "x-first-death-queue": "elsewhere"})
    assert bench.copies == [
        ("stock.wait.5s", {"x-attempt": 2, "x-original-exchange": "stock", "x-original-routing-key": "stock.added"})
    ]


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize(
    "body",
    [
        f'{{"note": "{CARD}"}}',
        f'{{"by_sku": {{"{CARD}": "x"}}}}',
        f'{{"payment": {{"kind": "{CARD}"}}}}',
        f'{{"{CARD}": 1}}',
        f'{{"note": ["{CARD}"]}}',
        f'"{CARD}"',
        f'{{"note": "{CARD}',
    ],
)
async def test_what_is_wrong_with_a_body_is_told_without_quoting_it(bench: Bench, body: str) -> None:
    """Keys, tags of unions and texts of a model's own validators come from the body and ended in logs and headers."""
    with capture_logs() as logs:
        await bench.deliver(body.encode(), "stock.sold")
    [(queue, headers)] = bench.copies
    assert queue == "stock.parking"
    assert CARD not in str(headers)
    assert CARD not in str(logs)


@pytest.mark.guarantee("G11")
async def test_a_failure_is_logged_without_what_the_exception_quotes(bench: Bench) -> None:
    async def fail(work: MemoryUnitOfWork) -> None:
        raise RuntimeError(CARD) from ValueError(CARD)

    bench.act = fail
    with capture_logs() as logs:
        await bench.deliver(b'{"sku": "%s", "count": 1}' % CARD.encode())
    assert CARD not in str(logs)
    assert CARD not in str(bench.copies)
    [retried] = [entry for entry in logs if entry["event"] == "message_retried"]
    assert (retried["message_id"], retried["attempt"], retried["delay"]) == ("m-1", 1, 5.0)
