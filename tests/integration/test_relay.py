"""G3: an event leaves if and only if its transaction committed, at least once, always under the same id."""

import asyncio
from datetime import timedelta

import asyncpg
import pytest
from aio_pika import Message

from service.reliability.hosts import Hosts
from service.reliability.link import BrokerLink
from service.reliability.publisher import Confirmed, ConfirmingPublisher, Refused, Returned, Unconfirmed
from service.reliability.relay import Relay, RelayState
from tests.support.doubles import ScriptedPublisher
from tests.support.proxy import proxy_to
from tests.support.rabbit import BROKER, EVENTS, Rabbit, close_connections
from tests.support.relays import append, relaying
from tests.support.waiting import eventually

TERMINATE = """
select count(pg_terminate_backend(pid)) from pg_stat_activity
where datname = current_database() and application_name = 'billing-relay'
"""


async def _sent(connection: asyncpg.Connection) -> int:
    return await connection.fetchval("select count(*) from outbox_messages where sent_at is not null")


async def test_an_event_leaves_as_the_contract_says(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """The row's id is the message id; persistent; the identity chain is in its headers."""
    await rabbit.collect_events()
    event_id = await append(connection)
    async with relaying(database_url, rabbit.url):
        await eventually(lambda: _sent(connection), lambda n: n == 1)
    [event] = await rabbit.events()
    created_at = await connection.fetchval("select created_at from outbox_messages")
    assert event.message_id == str(event_id)
    assert event.delivery_mode == 2
    assert (event.exchange, event.routing_key, event.type) == ("billing", "invoice.created", "invoice.created")
    assert (event.content_type, event.app_id, event.correlation_id) == ("application/json", "billing", "c-1")
    assert event.timestamp == created_at.replace(microsecond=0)
    assert event.headers == {"schema-version": 1, "causation-id": "m-1"}
    assert event.body == b'{"n": 1}'
    row = await connection.fetchrow("select publish_attempts, last_error from outbox_messages")
    assert tuple(row) == (1, None)


@pytest.mark.guarantee("G3")
async def test_what_nobody_is_bound_for_is_never_marked_sent(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """The broker returns it: recorded with its reason, tried again, sent once somebody binds; others go on."""
    await rabbit.channel.declare_exchange("billing", "topic", durable=True)
    lost = await append(connection)
    async with relaying(database_url, rabbit.url):
        await eventually(
            lambda: connection.fetchval("select publish_attempts from outbox_messages where id = $1", lost),
            lambda n: n >= 1,
        )
        row = await connection.fetchrow(
            "select sent_at, last_error, available_at > now() as waits from outbox_messages"
        )
        assert row["sent_at"] is None
        assert row["last_error"].startswith("returned: NO_ROUTE")
        await rabbit.collect_events()
        await eventually(lambda: _sent(connection), lambda n: n == 1)
    [event] = await rabbit.events()
    assert event.message_id == str(lost)


@pytest.mark.guarantee("G3")
async def test_what_a_queue_refuses_is_never_marked_sent(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """A nack is not a confirm."""
    await rabbit.channel.declare_exchange("billing", "topic", durable=True)
    full = await rabbit.channel.declare_queue(
        "test.full", durable=True, arguments={"x-max-length": 0, "x-overflow": "reject-publish"}
    )
    await full.bind("billing", "#")
    await append(connection)
    async with relaying(database_url, rabbit.url):
        await eventually(
            lambda: connection.fetchval("select last_error from outbox_messages"), lambda error: error is not None
        )
    row = await connection.fetchrow("select sent_at, last_error from outbox_messages")
    assert row["sent_at"] is None
    assert row["last_error"].startswith("refused: ")


@pytest.mark.guarantee("G8")
async def test_events_of_one_key_leave_in_their_order(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """One after another within a key, at once between keys, over several batches."""
    await rabbit.collect_events()
    ids = [(key, str(await append(connection, key=key))) for _ in range(40) for key in ("a", "b", "c")]
    async with relaying(database_url, rabbit.url):
        await eventually(lambda: _sent(connection), lambda n: n == 120)
    arrived = [event.message_id for event in await rabbit.events()]
    for key in ("a", "b", "c"):
        wanted = [i for k, i in ids if k == key]
        assert [i for i in arrived if i in set(wanted)] == wanted


async def test_a_commit_with_a_lower_sequence_that_comes_late_is_sent(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """I01: nothing remembers the last sequence number."""
    await rabbit.collect_events()
    other = await asyncpg.connect(database_url)
    slow = other.transaction()
    await slow.start()
    late = await append(other)
    early = await append(connection)
    async with relaying(database_url, rabbit.url):
        await eventually(lambda: _sent(connection), lambda n: n == 1)
        await slow.commit()
        await eventually(lambda: _sent(connection), lambda n: n == 2)
    await other.close()
    assert [event.message_id for event in await rabbit.events()] == [str(early), str(late)]


async def test_one_relay_is_active_and_one_is_again_when_all_their_sessions_have_died(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """The lease is no session's: its holder goes on with it, on another connection."""
    await rabbit.collect_events()
    async with relaying(database_url, rabbit.url) as first:
        await eventually(_state(first), lambda s: s is RelayState.ACTIVE)
        async with relaying(database_url, rabbit.url) as second:
            await eventually(_state(second), lambda s: s is RelayState.STANDBY)
            assert first.is_alive()
            assert second.is_alive()
            await append(connection)
            await eventually(lambda: _sent(connection), lambda n: n == 1)
            assert await connection.fetchval(TERMINATE) == 2
            await append(connection)
            await eventually(lambda: _sent(connection), lambda n: n == 2, within=5)
            await eventually(_states(first, second), lambda s: s == {RelayState.ACTIVE, RelayState.STANDBY})
    assert len(await rabbit.events()) == 2


async def test_a_relay_that_stands_by_wakes_the_active_one(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """A commit in another process is told by NOTIFY, long before the poll."""
    await rabbit.collect_events()
    async with (
        relaying(database_url, rabbit.url, poll=30) as active,
        relaying(database_url, rabbit.url, poll=30, competes=False) as bystander,
    ):
        await eventually(_state(active), lambda s: s is RelayState.ACTIVE)
        await eventually(_state(bystander), lambda s: s is RelayState.STANDBY)
        await append(connection)
        bystander.wake()
        await eventually(lambda: _sent(connection), lambda n: n == 1, within=5)


async def test_a_relay_survives_the_loss_of_its_broker_connection(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """The rows in flight are unconfirmed, wait, and leave under the same id."""
    await rabbit.collect_events()
    async with relaying(database_url, rabbit.url):
        for _ in range(5):
            await append(connection)
            await eventually(
                lambda: connection.fetchval("select count(*) from outbox_messages where sent_at is null"),
                lambda n: n == 0,
            )
            await asyncio.to_thread(close_connections, rabbit.url, name="billing-relay")
    assert len({event.message_id for event in await rabbit.events()}) == 5


async def test_a_broker_that_answers_never_does_not_hold_the_relay(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """A publish can hang for ever (a lost network, a memory alarm): unconfirmed after the time-out, sent later."""
    await rabbit.collect_events()
    async with proxy_to("127.0.0.1", BROKER.port) as proxy:
        url = rabbit.url.replace(f":{BROKER.port}/", f":{proxy.listening_on}/")
        async with relaying(database_url, url, confirm_timeout=2):
            await append(connection)
            await eventually(lambda: _sent(connection), lambda n: n == 1)
            proxy.passing.clear()
            await append(connection, key="later")
            await eventually(
                lambda: connection.fetchval("select last_error from outbox_messages where key = 'later'"),
                lambda error: error == "unconfirmed: no confirm within 2 s",
            )
            assert await _sent(connection) == 1
            proxy.passing.set()
            await eventually(lambda: _sent(connection), lambda n: n == 2)
    assert len({event.message_id for event in await rabbit.events()}) == 2


@pytest.mark.guarantee("G7")
async def test_a_broker_that_is_away_spends_no_attempt_of_any_event(
    database_url: str, connection: asyncpg.Connection
) -> None:
    """After a minute's absence each event tried meanwhile waited for up to another minute."""
    for number in range(30):
        await append(connection, key=f"key-{number}")
    publisher = ScriptedPublisher([Unconfirmed("no connection", away=True)] * 3)
    async with relaying(database_url, "amqp://unused", publisher=publisher, poll=30):
        await eventually(lambda: _sent(connection), lambda n: n == 30)
    assert await connection.fetchval("select max(publish_attempts) from outbox_messages") == 1


async def test_a_connection_that_died_of_silence_is_replaced(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """A death by heartbeat cancels what waits on the connection, in tasks that nobody cancelled: the relay lives on."""
    await rabbit.collect_events()
    async with proxy_to("127.0.0.1", BROKER.port) as proxy:
        url = rabbit.url.replace(f":{BROKER.port}/", f":{proxy.listening_on}/") + "?heartbeat=1"
        async with relaying(database_url, url) as relay:
            await append(connection)
            await eventually(lambda: _sent(connection), lambda n: n == 1)
            proxy.passing.clear()
            await append(connection, key="later")
            await eventually(_state(relay), lambda state: state is RelayState.DOWN, within=25)
            proxy.passing.set()
            await eventually(lambda: _sent(connection), lambda n: n == 2, within=25)
            assert relay.is_alive()
    assert await connection.fetchval("select max(publish_attempts) from outbox_messages") == 1  # none for the outage
    assert len({event.message_id for event in await rabbit.events()}) == 2


@pytest.mark.guarantee("G6")
async def test_a_missing_exchange_does_not_end_the_relay(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """The others leave at their first attempt, as if it were not there."""
    await rabbit.collect_events()
    for number in range(20):
        await append(connection, exchange="nowhere", key=f"bad-{number}")
        await append(connection, key=f"good-{number}")
    async with relaying(database_url, rabbit.url):
        await eventually(lambda: _sent(connection), lambda n: n == 20)
        rows = await eventually(
            lambda: connection.fetch("select sent_at, last_error from outbox_messages where key like 'bad%'"),
            lambda rows: all(row["last_error"] for row in rows),
        )
    assert {row["sent_at"] for row in rows} == {None}
    assert all("NOT_FOUND - no exchange 'nowhere'" in row["last_error"] for row in rows)
    assert await connection.fetchval("select max(publish_attempts) from outbox_messages where key like 'good%'") == 1
    assert len({event.message_id for event in await rabbit.events()}) == 20


@pytest.mark.guarantee("G8")
async def test_what_stands_behind_a_refused_event_of_its_key_is_not_published_in_the_same_batch(
    database_url: str, connection: asyncpg.Connection
) -> None:
    """Rows of one key go one after another, each after the confirm of the one before; other keys go on."""
    first, second, other = [str(await append(connection, key=key)) for key in ("a", "a", "b")]
    publisher = ScriptedPublisher([Refused("full")])
    async with relaying(database_url, "amqp://unused", publisher=publisher, poll=30):
        await eventually(lambda: _sent(connection), lambda n: n == 1)
        errors = await connection.fetch("select last_error from outbox_messages order by sequence")
    published = [message.message_id for message, _, _ in publisher.published]
    assert published[:2] == [first, other]
    assert [row["last_error"] for row in errors] == ["refused: full", None, None]
    assert second not in published[:2]


async def test_two_publishes_of_one_id_do_not_swap_their_outcomes(rabbit: Rabbit) -> None:
    """The client matches what is returned by message id: with two in flight, the wrong one would be told."""
    await rabbit.collect_events()
    async with BrokerLink(Hosts([rabbit.url]), "billing-publisher") as link:
        publisher = ConfirmingPublisher(link, timedelta(seconds=5))
        for _ in range(20):
            outcomes = await asyncio.gather(
                publisher.publish(Message(b"", message_id="same"), "", "nobody"),
                publisher.publish(Message(b"", message_id="same"), "billing", "somebody"),
                publisher.publish(Message(b"", message_id="same"), "", "nobody"),
            )
            assert [type(outcome) for outcome in outcomes] == [Returned, Confirmed, Returned]
    assert await rabbit.count(EVENTS) == 20


@pytest.mark.guarantee("G6")
async def test_a_row_that_no_client_can_send_does_not_end_the_relay(
    database_url: str, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """A routing key over 255 bytes cannot be framed: quarantined; the others leave, of its own key too."""
    await rabbit.collect_events()
    await append(connection, routing_key="x" * 300, key="a")
    await append(connection, key="a")
    await append(connection, key="b")
    async with relaying(database_url, rabbit.url):
        await eventually(lambda: _sent(connection), lambda n: n == 2)
    row = await connection.fetchrow("select * from outbox_messages where sent_at is null")
    assert row["quarantined_at"] is not None
    assert row["attempted_at"] is not None
    assert row["last_error"].startswith("quarantined: ")
    assert await rabbit.count(EVENTS) == 2


def _state(relay: Relay):
    async def read() -> RelayState:
        return relay.state

    return read


def _states(*relays: Relay):
    async def read() -> set[RelayState]:
        return {relay.state for relay in relays}

    return read
