"""G6, G8: events that cannot leave wait with their destination, hold up their own key only, and cost little."""

import asyncio
import random
from datetime import timedelta
from uuid import uuid4

import asyncpg
import pytest
from aio_pika import Message

from service.reliability import lease, outbox
from service.reliability.errors import EventError
from service.reliability.outbox import MAX_EVENT_BYTES, Event, Recorded
from service.reliability.publisher import Confirmed, Publication, Refused, Unconfirmed
from tests.support.doubles import ScriptedPublisher
from tests.support.rabbit import EVENTS, Rabbit, version_that_answers
from tests.support.relays import append, relaying
from tests.support.waiting import eventually

UNSENT = "select count(*) from outbox_messages where sent_at is null"


@pytest.mark.guarantee("G6")
async def test_events_that_nobody_is_bound_for_cost_a_probe_and_leave_in_order_when_somebody_is(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """Each knows why it waits, though only a few were tried."""
    await rabbit.channel.declare_exchange("billing", "topic", durable=True)
    ids = [str(await append(connection, key=f"key-{number % 7}")) for number in range(300)]
    async with relaying(database_url, rabbit.url):
        await eventually(
            lambda: connection.fetchval("select count(*) from outbox_messages where last_error like 'returned: NO_R%'"),
            lambda n: n == 300,
            within=10,
        )
        assert await connection.fetchval("select sum(publish_attempts) from outbox_messages") <= 20
        await rabbit.collect_events()
        await eventually(lambda: connection.fetchval(UNSENT), lambda n: n == 0, within=10)
    arrived = [event.message_id for event in await rabbit.events()]
    for key in range(7):
        wanted = ids[key::7]
        assert [i for i in arrived if i in wanted] == wanted


@pytest.mark.guarantee("G6", "G8")
async def test_a_full_queue_holds_up_its_own_keys_only_and_is_used_again_within_seconds(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """More refused events than a batch holds; what comes later of their keys waits, other keys go on."""
    await rabbit.channel.declare_exchange("billing", "topic", durable=True)
    limit = {"x-max-length": 1, "x-overflow": "reject-publish", "x-queue-type": "quorum"}
    full = await rabbit.channel.declare_queue("test.full", durable=True, arguments=limit)
    await full.bind("billing", "full")
    events = await rabbit.channel.declare_queue(EVENTS, durable=True, arguments={"x-queue-type": "quorum"})
    await events.bind("billing", "other")
    refused = [str(await append(connection, routing_key="full", key=f"key-{n}")) for n in range(120)]
    behind = [str(await append(connection, routing_key="other", key=f"key-{n}")) for n in range(120)]
    others = [str(await append(connection, routing_key="other", key=f"other-{n}")) for n in range(120)]
    async with relaying(database_url, rabbit.url):
        await eventually(lambda: rabbit.count(EVENTS), lambda n: n >= 120, within=10)
        await eventually(
            lambda: connection.fetchval("select count(*) from outbox_messages where last_error like 'refused: %'"),
            lambda n: n >= 110,  # what had room is sent
        )
        sent = await connection.fetch("select id from outbox_messages where sent_at is not null and key like 'other-%'")
        assert {str(row["id"]) for row in sent} == set(others)
        waiting = {
            str(row["id"]) for row in await connection.fetch("select id from outbox_messages where sent_at is null")
        }
        assert {b for r, b in zip(refused, behind, strict=True) if r in waiting} <= waiting
        assert (
            await connection.fetchval("select sum(publish_attempts) from outbox_messages where key not like 'o%'") < 300
        )
        await rabbit.delete("test.full")
        roomy = await rabbit.channel.declare_queue("test.full", durable=True, arguments={"x-queue-type": "quorum"})
        await roomy.bind("billing", "full")
        await eventually(lambda: connection.fetchval(UNSENT), lambda n: n == 0, within=12)
    arrived = [event.message_id for event in await rabbit.events()]
    assert sorted(arrived) == sorted(behind + others)


@pytest.mark.guarantee("G8")
async def test_what_waits_holds_up_its_key_over_batches_and_over_a_takeover(
    database_url: str, connection: asyncpg.Connection
) -> None:
    """The order is in what is read, not in the memory of the relay that saw the failure."""
    first = str(await append(connection, key="a"))
    publisher = ScriptedPublisher([Refused("full")])
    async with relaying(database_url, "amqp://unused", publisher=publisher, batch=1, poll=10):
        await eventually(
            lambda: connection.fetchval("select last_error from outbox_messages"), lambda error: error is not None
        )
    await connection.execute("update outbox_messages set available_at = now() + interval '1 second'")
    second, other = [str(await append(connection, key=key)) for key in ("a", "b")]
    publisher = ScriptedPublisher()
    async with relaying(database_url, "amqp://unused", publisher=publisher, batch=1):
        await eventually(lambda: connection.fetchval(UNSENT), lambda n: n == 0)
    assert [message.message_id for message, _, _ in publisher.published] == [other, first, second]


async def test_a_body_larger_than_the_brokers_largest_is_quarantined(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """4.x closes the channel over it, with all that is in flight; 3.10 takes it. By hand: `append` refuses it."""
    await rabbit.collect_events()
    too_large = await append(connection, key="bad")
    await connection.execute("update outbox_messages set payload = repeat('x', $1)::bytea", MAX_EVENT_BYTES + 1)
    for number in range(40):
        await append(connection, key=f"good-{number}")
    taken = version_that_answers().startswith("3.")
    async with relaying(database_url, rabbit.url):
        await eventually(lambda: connection.fetchval(UNSENT), lambda n: n == (0 if taken else 1))
        await eventually(
            lambda: connection.fetchval("select count(*) from outbox_messages where quarantined_at is not null"),
            lambda n: n == (0 if taken else 1),
        )
    row = await connection.fetchrow("select last_error from outbox_messages where id = $1", too_large)
    assert taken or "larger than configured max size" in row["last_error"]
    assert await connection.fetchval("select max(publish_attempts) from outbox_messages") == 1
    assert len({event.message_id for event in await rabbit.events()}) == 41 if taken else 40


POISON = {
    "a routing key over 255 bytes": "update outbox_messages set routing_key = repeat('é', 200) where key = 'bad'",
    "an exchange over 255 bytes": "update outbox_messages set exchange = repeat('x', 300) where key = 'bad'",
    "a type over 255 bytes": "update outbox_messages set type = repeat('x', 300) where key = 'bad'",
    "a number over 64 bits": "update outbox_messages set headers = '{\"n\": 1180591620717411303424}' where key = 'bad'",
    "headers over a frame": "update outbox_messages set headers = jsonb_build_object('h', repeat('x', 140000)) "
    "where key = 'bad'",
    "headers that are no object": "update outbox_messages set headers = '[1]' where key = 'bad'",
}


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("poison", POISON)
async def test_poison_that_fills_a_batch_and_more_holds_nobody_up(
    poison: str, database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """I03: quarantined at the first attempt, with the reason; good events behind it leave at once."""
    await rabbit.collect_events()
    for _ in range(51):
        await append(connection, key="bad")
    await connection.execute(POISON[poison])
    for number in range(20):
        await append(connection, key=f"good-{number}")
    async with relaying(database_url, rabbit.url):
        await eventually(lambda: connection.fetchval(UNSENT), lambda n: n == 51, within=10)
    rows = await connection.fetch("select * from outbox_messages where sent_at is null")
    assert all(row["quarantined_at"] is not None and row["publish_attempts"] == 1 for row in rows)
    assert all(row["last_error"].startswith("quarantined: ") for row in rows)
    assert await rabbit.count(EVENTS) == 20


@pytest.mark.guarantee("G3")
async def test_what_no_broker_would_take_is_refused_where_it_is_appended(connection: asyncpg.Connection) -> None:
    """Before the commit, so that the handler's work and its event stay together."""
    at_most = Event("invoice.created", "k", b"x" * MAX_EVENT_BYTES)
    await outbox.append(connection, at_most, "billing", {})
    with pytest.raises(
        EventError, match=r"the body of an event of type 'invoice\.created' has 16777217 bytes; at most 16777216"
    ):
        await outbox.append(connection, Event("invoice.created", "k", b"x" * (MAX_EVENT_BYTES + 1)), "billing", {})
    with pytest.raises(EventError, match=r"the type of an event of type .* has 400 bytes; at most 255"):
        await outbox.append(connection, Event("é" * 200, "k", b""), "billing", {})
    assert await connection.fetchval("select count(*) from outbox_messages") == 1


async def test_who_has_lost_the_lease_records_nothing(connection: asyncpg.Connection) -> None:
    """A relay that was stopped for a while finds another one at work."""
    event_id = await append(connection)
    former, present = uuid4(), uuid4()
    assert await lease.hold(connection, former, "former")
    assert not await lease.hold(connection, present, "present")
    await connection.execute("update relay_lease set expires_at = now() - interval '1 second'")
    assert await lease.hold(connection, present, "present")
    assert not await lease.hold(connection, former, "former")
    for result in (Recorded(event_id), Recorded(event_id, "refused: full", timedelta(hours=1))):
        await outbox.record(connection, [result], former)
    row = await connection.fetchrow(
        "select publish_attempts, sent_at, available_at <= now() as due from outbox_messages"
    )
    assert tuple(row) == (0, None, True)
    await outbox.record(connection, [Recorded(event_id)], present)
    assert await connection.fetchval("select sent_at is not null from outbox_messages")
    holder = await lease.current_holder(connection)
    assert holder is not None
    assert holder.instance == "present"
    await lease.give_up(connection, former)
    assert await lease.current_holder(connection) is not None
    await lease.give_up(connection, present)
    assert await lease.current_holder(connection) is None


async def test_the_lease_is_kept_while_a_batch_takes_long(database_url: str, connection: asyncpg.Connection) -> None:
    """A broker that takes six seconds for a batch: nobody else becomes active, and nothing is sent twice."""

    class Slow(ScriptedPublisher):
        async def publish(self, message: Message, exchange: str, routing_key: str) -> Publication:
            await asyncio.sleep(0.3)
            return await super().publish(message, exchange, routing_key)

    for _ in range(20):
        await append(connection, key="a")
    one, two = Slow(), Slow()
    async with (
        relaying(database_url, "amqp://unused", publisher=one),
        relaying(database_url, "amqp://unused", publisher=two),
    ):
        await eventually(lambda: connection.fetchval(UNSENT), lambda n: n == 0)
    assert sorted((len(one.published), len(two.published))) == [0, 20]


async def test_with_nothing_but_bad_events_left_the_relay_is_idle(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """Returned, refused, quarantined and to a missing exchange: a few publishes in five seconds, not thousands."""
    await rabbit.channel.declare_exchange("billing", "topic", durable=True)
    limit = {"x-max-length": 0, "x-overflow": "reject-publish"}
    full = await rabbit.channel.declare_queue("test.full", durable=True, arguments=limit)
    await full.bind("billing", "full")
    for number in range(60):
        await append(connection, routing_key="nobody", key=f"nobody-{number}")
        await append(connection, routing_key="full", key=f"full-{number}")
        await append(connection, routing_key="x" * 300, key=f"poison-{number}")
        await append(connection, exchange="nowhere", key=f"nowhere-{number}")
    async with relaying(database_url, rabbit.url):
        await eventually(
            lambda: connection.fetchval("select count(*) from outbox_messages where last_error is null"),
            lambda n: n == 0,
        )
        before = await connection.fetchval("select sum(publish_attempts) from outbox_messages")
        await asyncio.sleep(5)
        after = await connection.fetchval("select sum(publish_attempts) from outbox_messages")
    assert after - before <= 30
    assert await connection.fetchval("select count(*) from outbox_messages where quarantined_at is not null") == 60


async def test_what_failed_at_random_leaves_all_the_same_in_the_order_of_its_key(
    database_url: str, connection: asyncpg.Connection
) -> None:
    """A third of the publishes fail in one way or another; nothing is given up, nothing overtakes."""
    chance = random.Random(8)
    answers: list[Publication] = [Refused("full"), Unconfirmed("late"), Confirmed(), Confirmed(), Confirmed()]
    publisher = ScriptedPublisher([chance.choice(answers) for _ in range(150)])
    ids = [(key, str(await append(connection, key=key))) for _ in range(12) for key in ("a", "b", "c", "d")]
    async with relaying(database_url, "amqp://unused", publisher=publisher):
        await eventually(lambda: connection.fetchval(UNSENT), lambda n: n == 0, within=60)
    arrived = list(dict.fromkeys(message.message_id for message, _, _ in publisher.published))
    for key in ("a", "b", "c", "d"):
        wanted = [i for k, i in ids if k == key]
        assert [i for i in arrived if i in wanted] == wanted
