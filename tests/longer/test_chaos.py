"""Thousands of messages, good, failing and hostile, while everything dies again and again: each ends as it should."""

import asyncio
import json
import os
import random
import signal
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import aio_pika
import asyncpg
import pytest

from tests.support.own_broker import VHOST, OwnBroker, own_broker
from tests.support.own_postgres import OwnPostgres, own_postgres
from tests.support.rabbit import rabbit_client, version_that_answers
from tests.support.stock import TABLES, TYPE
from tests.support.supervisor import Supervisor
from tests.support.waiting import eventually
from tests.support.wire import publish_bytes, publish_raw, short_string, table

MESSAGES = int(os.environ.get("BILLING_CHAOS_MESSAGES", "5000"))
FAILING, HOSTILE, COPIES = 0.35, 0.05, 0.05
ATTEMPTS = 4
FAULTS = ("kill",) * 10 + ("broker",) * 2 + ("database",)
LARGEST_BODY = 2048


@dataclass(frozen=True, slots=True)
class Sent:
    """A message of the run.

    Attributes:
        number: in its headers, so that a parked copy can be told whose it is.
        reason: why it must be parked; None where it must have its effect.
        send: puts it on the wire; done again until the broker has confirmed it.
    """

    number: int
    reason: str | None
    send: Callable[["Producer"], Awaitable[None]]


@dataclass(slots=True)
class Producer:
    """Publishes until it is confirmed, whatever happens to the broker meanwhile."""

    url: str
    connection: Any = None
    exchange: Any = None
    again: int = 0

    async def send(self, sent: Sent) -> None:
        """Publish one message; an unconfirmed one is published again, as every good producer does."""
        while True:
            try:
                async with asyncio.timeout(20):
                    await sent.send(self)
            except Exception:  # the broker's absence, in whatever form the client tells it
                self.again += 1
                self.connection = None
                await asyncio.sleep(0.3)
            else:
                return

    async def publish(self, body: bytes, **properties: Any) -> None:
        """Publish with the client library."""
        if self.connection is None:
            self.connection = await aio_pika.connect(self.url, client_properties={"connection_name": "producer"})
            channel = await self.connection.channel(on_return_raises=True)
            self.exchange = await channel.get_exchange("orders", ensure=False)
        await self.exchange.publish(aio_pika.Message(body, delivery_mode=2, **properties), TYPE)


def effect(number: int, failures: int) -> Sent:
    """Return a valid message that fails so often before it has its effect, or too often."""
    body = json.dumps({"sku": f"sku-{number}", "quantity": 1, "failures": failures}).encode()

    async def send(producer: Producer) -> None:
        await producer.publish(body, message_id=message_id(number), type=TYPE, headers={"number": number})

    return Sent(number, "attempts-exhausted" if failures >= ATTEMPTS else None, send)


def message_id(number: int) -> str:
    """Return the id of a message of the run."""
    return str(UUID(int=number))


def numbered(number: int) -> bytes:
    """Return the header table's bytes with the number in it."""
    return table((b"number", b"I" + struct.pack(">i", number)))


def hostile(number: int, kind: int) -> Sent:
    """Return a message that no good producer sends; `kind` takes one after another."""
    identity = {"message_id": message_id(number), "headers": {"number": number}}
    frame = {"message_id": short_string(message_id(number).encode()), "headers": numbered(number)}

    def through_the_client(reason: str, body: bytes, **properties: Any) -> Sent:
        async def send(producer: Producer) -> None:
            await producer.publish(body, **(identity | {"type": TYPE} | properties))

        return Sent(number, reason, send)

    def by_hand(reason: str, **properties: bytes) -> Sent:
        async def send(producer: Producer) -> None:
            await publish_bytes(producer.url, TYPE.encode(), b"{}", **(frame | properties))

        return Sent(number, reason, send)

    async def without_id(producer: Producer) -> None:
        await publish_raw(producer.url, TYPE, b"{}", headers={"number": number})

    kinds: tuple[Callable[[], Sent], ...] = (
        lambda: through_the_client("unreadable", b'{"sku": '),
        lambda: through_the_client("invalid", b'{"quantity": "many"}', reply_to="orders.work"),
        lambda: through_the_client("invalid", b'{"sku": "\\u0000"}'),
        lambda: through_the_client("unknown-type", b"{}", type="order.eaten"),
        lambda: through_the_client("too-large", b" " * (LARGEST_BODY + 1)),
        lambda: through_the_client("unreadable", b"{}", content_encoding="gzip"),
        # The id of an order that was there before, with other content.
        lambda: through_the_client("message-id-conflict", b'{"sku": "other"}', message_id=message_id(0)),
        lambda: Sent(number, "missing-message-id", without_id),
        lambda: by_hand("unreadable", timestamp=struct.pack(">Q", 2**64 - 1)),
        lambda: by_hand("unreadable", app_id=short_string(b"\xff\xfe")),
    )
    return kinds[kind % len(kinds)]()


def messages(chance: random.Random) -> list[Sent]:
    """Return the run's messages in the order in which they are sent."""
    failing, bad = round(MESSAGES * FAILING), round(MESSAGES * HOSTILE)
    # Of those that fail, each fourth goes on failing.
    failures = [1 + n % ATTEMPTS for n in range(failing)] + [0] * (MESSAGES - failing - bad)
    chance.shuffle(failures)
    sent = [effect(number, count) for number, count in enumerate(failures, 1)]
    sent += [hostile(MESSAGES + n, n) for n in range(bad)]
    chance.shuffle(sent)
    return sent


@dataclass(slots=True)
class Chaos:
    """The servers and the service, and what has been done to them."""

    broker: OwnBroker
    database: OwnPostgres
    supervisor: Supervisor
    done: Counter[str] = field(default_factory=Counter)

    async def strike(self, fault: str) -> None:
        """Kill the service, restart the broker, or the database; return when it is up again."""
        match fault:
            case "kill":
                self.supervisor.service.signal(signal.SIGKILL)
                await self.supervisor.service.wait()
                await self.supervisor.look()
            case "broker":
                await self.broker.restart()
            case "database":
                await self.database.restart("immediate")
        self.done[fault] += 1

    async def database_says(self, query: str, wanted: int) -> None:
        """Wait for the answer of a query."""

        async def ask() -> int:
            [[answer]] = await self.database.sql(query)
            return int(answer)

        await eventually(ask, lambda answer: answer == wanted, within=120, every=0.2)

    async def broker_says(self, wanted: dict[str, int]) -> None:
        """Wait until the queues have so many messages, ready, unacknowledged or held."""

        async def ask() -> dict[str, int]:
            lines = (
                await self.broker.ctl("list_queues", "--no-table-headers", "-p", VHOST, "name", "messages")
            ).splitlines()
            counts = {name: int(count) for name, count in (line.split() for line in lines if line.count("\t") == 1)}
            return {name: counts[name] for name in wanted}

        await eventually(ask, lambda counts: counts == wanted, within=60, every=1)

    def redelivered(self) -> int:
        """Return how many settled deliveries had come before."""
        return sum('"redelivered": true' in line for line in self.supervisor.service.log.splitlines())


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print what is to be seen of a run that passes, too."""

    def tell(line: str) -> None:
        with capsys.disabled():
            sys.stderr.write(f"chaos: {line}\n")  # what a parallel worker has on stdout is lost

    return tell


@pytest.mark.timeout(900)
async def test_chaos(tmp_path: Path, tell: Callable[[str], None]) -> None:
    """Each valid message has one effect, each other one is parked with its reason, and nothing else is left."""
    seed = int(os.environ.get("BILLING_CHAOS_SEED") or random.SystemRandom().randrange(10**6))
    chance = random.Random(seed)
    async with own_postgres() as database, own_broker() as broker:
        tell(f"seed {seed}, RabbitMQ {version_that_answers(broker.broker)}, {MESSAGES} messages")
        connection = await asyncpg.connect(database.url)
        await connection.execute(TABLES)
        await connection.close()
        url = broker.url()
        settings = {
            "BILLING_DATABASE_URL": database.url,
            "BILLING_RABBITMQ_URL": url,
            "BILLING_MAX_ATTEMPTS": str(ATTEMPTS),
            "BILLING_RETRY_DELAYS": "0.2,0.4",
            "BILLING_MAX_BODY_BYTES": str(LARGEST_BODY),
        }
        chaos = Chaos(broker, database, Supervisor(settings, tmp_path / "log", "failing"))
        await chaos.supervisor.service.ready(within=60)
        async with rabbit_client(url, keep=True) as rabbit:
            await rabbit.collect_events()
        sent = [effect(0, 0), *messages(chance)]
        producer = Producer(url)
        await producer.send(sent[0])  # before those that claim its id for other content
        await chaos.database_says("select count(*) from processed_messages", 1)
        await rage(chaos, producer, sent[1:], chance)
        expected = [message for message in sent if message.reason is None]
        await chaos.database_says("select count(*) from stock", len(expected))
        await chaos.database_says("select count(*) from outbox_messages where sent_at is null", 0)
        await chaos.broker_says({"orders.work": 0, "orders.wait.200ms": 0, "orders.wait.400ms": 0})
        assert await chaos.supervisor.service.stop() == 0
        await balance(chaos, url, sent, tell)
        redelivered = chaos.redelivered()
        tell(f"{dict(chaos.done)}, {redelivered} redeliveries, {producer.again} published again")
        assert chaos.done == Counter(FAULTS)
        assert redelivered > 0, "no fault has met a message in flight: the run has shown nothing"


async def rage(chaos: Chaos, producer: Producer, sent: list[Sent], chance: random.Random) -> None:
    """Publish everything, and let one fault after another strike meanwhile."""
    faults = list(FAULTS)
    chance.shuffle(faults)
    share = -(-len(sent) // len(faults))
    for number, fault in enumerate(faults):
        batch = sent[number * share : (number + 1) * share]
        async with asyncio.TaskGroup() as group:
            group.create_task(publish(producer, batch, chance))
            await asyncio.sleep(chance.uniform(0.1, 1.5))
            await chaos.strike(fault)
        await chaos.supervisor.service.ready(within=60)


async def publish(producer: Producer, sent: list[Sent], chance: random.Random) -> None:
    """Publish in order, some of them twice."""
    for message in sent:
        for _ in range(1 + (chance.random() < COPIES)):
            await producer.send(message)


async def balance(chaos: Chaos, url: str, sent: list[Sent], tell: Callable[[str], None]) -> None:
    """Compare what was sent with what has become of it."""
    valid = {f"sku-{message.number}": 1 for message in sent if message.reason is None}
    stock = {row["sku"]: row["quantity"] for row in await chaos.database.sql("select * from stock")}
    assert stock == valid, "one effect each"
    assert await chaos.database.sql("select from started_messages") == []
    async with rabbit_client(url) as rabbit:
        events = [(event.body, event.message_id) for event in await rabbit.events()]
        assert {json.loads(body)["sku"] for body, _ in events} == valid.keys()
        assert len(set(events)) == len(valid), "an event has one id, however often it leaves"
        parked = await rabbit.take("orders.parking")
    reasons = {(message.headers["number"], message.headers["x-parked-reason"]) for message in parked}
    assert reasons == {(message.number, message.reason) for message in sent if message.reason}
    exhausted = [m.headers["x-attempts"] for m in parked if m.headers["x-parked-reason"] == "attempts-exhausted"]
    assert set(exhausted) == {ATTEMPTS}
    tell(f"{len(valid)} effects, {len(events)} events, {len(reasons)} parked in {len(parked)} copies")
    tell(f"{dict(Counter(reason for _, reason in reasons))}")
