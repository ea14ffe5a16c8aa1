"""Parked messages are looked at without loss, and sent again or thrown away with one effect and an audit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import aio_pika
import asyncpg
import pytest
from aio_pika import Message

from service.app import BillingUnitOfWork, orders_family, whole_topology
from service.reliability import audit, topology
from service.reliability.audit import Deed
from service.reliability.errors import ParkingInUseError
from service.reliability.hosts import Hosts
from service.reliability.link import BrokerLink
from service.reliability.parking import Parked, Selection, visit
from service.reliability.publisher import ConfirmingPublisher, Publication, Unconfirmed
from service.reliability.replay import Clerk, Done, Orders, Result
from tests.support.rabbit import Rabbit
from tests.support.stock import TYPE, Received, add, settings, stock_service
from tests.support.waiting import eventually
from tests.support.wire import publish_raw

FAMILY = orders_family(settings("postgresql://localhost/none", "amqp://localhost"))
PARKING = FAMILY.parking
NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
REPLAY, DISCARD = Deed("replay", "ann", "mended"), Deed("discard", "ann", "a test's")


@pytest.fixture
async def link(rabbit: Rabbit) -> AsyncIterator[BrokerLink]:
    """A connection for the tools, and everything declared."""
    async with BrokerLink(Hosts([rabbit.url]), "billing-parking") as link:
        await topology.declare(link, whole_topology(FAMILY))
        yield link


async def park(rabbit: Rabbit, message_id: str, body: bytes = b"{}", **headers: Any) -> None:
    """Put a message into the parking queue as the service does."""
    told = {
        "x-parked-reason": "invalid",
        "x-parked-at": (NOW - timedelta(hours=1)).isoformat(),
        "x-attempts": 0,
        "x-original-exchange": "orders",
        "x-original-routing-key": TYPE,
    }
    await rabbit.publish(TYPE, body, exchange="", routing_key=PARKING, message_id=message_id, headers=told | headers)


async def look(link: BrokerLink) -> list[Parked]:
    """Return what is parked."""
    async with visit(link, PARKING) as seen:
        return seen.messages


@dataclass(slots=True)
class Flaky:
    """A publisher whose connection is lost after so many messages, with or without the last one."""

    real: ConfirmingPublisher
    works: int = 10**6
    dies: type[BaseException] | None = None
    sent: list[Message] = field(default_factory=list)

    async def publish(self, message: Message, exchange: str, routing_key: str) -> Publication:
        """Publish, or not."""
        if len(self.sent) >= self.works:
            if self.dies:
                await self.real.publish(message, exchange, routing_key)
                raise self.dies
            return Unconfirmed("no confirm within 3 s")
        self.sent.append(message)
        return await self.real.publish(message, exchange, routing_key)


@asynccontextmanager
async def a_clerk(link: BrokerLink, url: str, **flaws: Any) -> AsyncIterator[Clerk]:
    """Make who carries out orders, on the real servers."""
    connection = await asyncpg.connect(url)
    publisher = Flaky(ConfirmingPublisher(link, timedelta(seconds=3)), **flaws)
    consumers = {TYPE: "test.stock"}
    yield Clerk(link, publisher, connection, FAMILY, consumers, timedelta(days=14), NOW)
    await connection.close()


async def carried_out(clerk: Clerk, orders: Orders, selection: Selection = Selection()) -> list[Done]:  # noqa: B008 - frozen
    """Return what became of each message that is meant."""
    return [told async for told in clerk.carry_out(orders, selection) if isinstance(told, Done)]


async def test_looking_thirty_times_loses_and_reorders_nothing(rabbit: Rabbit, link: BrokerLink) -> None:
    """Each look costs a delivery count: without a limit of its own, the broker deletes after twenty on 4.x."""
    for number in range(5):
        await park(
            rabbit,
            f"m-{number}",
            **{"x-parked-reason": "invalid" if number % 2 else "unreadable", "x-attempts": number},
        )
    first = await look(link)
    assert [message.message_id for message in first] == [f"m-{number}" for number in range(5)]
    assert [message.attempts for message in first] == list(range(5))
    for _ in range(30):
        async with visit(link, PARKING) as seen:
            assert seen.messages == first
            assert seen.reasons == {"unreadable": 3, "invalid": 2}
    assert [message.message_id for message in await rabbit.take(PARKING)] == [f"m-{number}" for number in range(5)]


async def test_removing_some_leaves_the_others_in_order(rabbit: Rabbit, link: BrokerLink) -> None:
    for number in range(30):
        await park(rabbit, f"m-{number}")
    async with visit(link, PARKING, lambda parked: parked.message_id == "m-7") as seen:
        assert [message.body for _, message in seen.kept()] == [b"{}"]
        for parked in seen.messages[::3]:
            await seen.remove(parked)
    left = [f"m-{number}" for number in range(30) if number % 3]
    assert [parked.message_id for parked in await look(link)] == left
    assert [parked.message_id for parked in await look(link)] == left


async def test_what_is_parked_meanwhile_is_not_part_of_a_visit(rabbit: Rabbit, link: BrokerLink) -> None:
    await park(rabbit, "m-1")
    async with visit(link, PARKING) as seen:
        await park(rabbit, "m-2")
        assert [parked.message_id for parked in seen.messages] == ["m-1"]
    assert {parked.message_id for parked in await look(link)} == {"m-1", "m-2"}


async def test_a_visit_takes_all_of_thousands(rabbit: Rabbit, link: BrokerLink) -> None:
    """A quorum queue gives no more than 2000 to who names no limit."""
    for start in range(0, 2500, 100):
        await asyncio.gather(*(park(rabbit, f"m-{number}") for number in range(start, start + 100)))
    for _ in range(2):
        async with visit(link, PARKING) as seen:
            assert {parked.message_id for parked in seen.messages} == {f"m-{number}" for number in range(2500)}
            assert seen.missing == 0


async def test_what_is_in_other_hands_is_told(
    rabbit: Rabbit, link: BrokerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.reliability.parking.MOST", 2)
    for number in range(3):
        await park(rabbit, f"m-{number}")
    async with visit(link, PARKING) as seen:
        assert (len(seen.messages), seen.missing) == (2, 1)


async def test_an_empty_queue_is_nothing_to_wait_for(link: BrokerLink) -> None:
    assert await look(link) == []


async def test_what_the_broker_parked_itself_is_explained(rabbit: Rabbit, link: BrokerLink) -> None:
    """No header of ours says why: the broker's own does, and a producer's that looks like ours does not count."""
    await rabbit.publish("order.paid", b"{}", message_id="m-1", type="", headers={"x-parked-reason": "invalid"})
    queue = await rabbit.channel.get_queue("orders.work", ensure=False)
    await (await queue.get()).reject(requeue=False)
    [parked] = await eventually(lambda: look(link), lambda found: len(found) == 1)
    assert (parked.message_id, parked.type, parked.reason) == ("m-1", "order.paid", "broker-rejected")
    assert "none of ours" in (parked.explanation or "")
    assert parked.parked_at is not None
    async with visit(link, PARKING, lambda _: True) as seen:
        [(_, message)] = seen.kept()
        assert message.headers["x-death"]


async def test_two_commands_at_once_wait_for_each_other(stock_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would find the other's messages missing."""
    one, other = await asyncpg.connect(stock_url), await asyncpg.connect(stock_url)
    monkeypatch.setattr(audit, "PATIENCE", (2, timedelta(milliseconds=10)))
    async with audit.lock(one):
        with pytest.raises(ParkingInUseError, match="another 'billing parking' command"):
            async with audit.lock(other):
                pass
    async with audit.lock(other):
        pass
    await one.close()
    await other.close()


async def test_a_replay_has_one_effect_and_its_row(rabbit: Rabbit, link: BrokerLink, stock_url: str) -> None:
    """Run again it is said to be processed; what is not meant stays."""
    await park(rabbit, "m-1", mine="kept")
    await park(rabbit, "m-2", **{"x-parked-reason": "rejected-by-rule"})
    async with stock_service(settings(stock_url, rabbit.url)) as stock, a_clerk(link, stock_url) as clerk:
        only_invalid = Selection(reasons=frozenset({"invalid"}))
        [done] = await carried_out(clerk, Orders(REPLAY, dry_run=True), only_invalid)
        assert (done.result, len(await look(link))) == (Result.WOULD_BE, 2)
        [done] = await carried_out(clerk, Orders(REPLAY), only_invalid)
        assert (done.result, done.new_message_id) == (Result.REPLAYED, None)
        await stock.has_stock(100)
        assert [parked.message_id for parked in await look(link)] == ["m-2"]

        await park(rabbit, "m-1")  # parked in two copies, say
        [done] = await carried_out(clerk, Orders(REPLAY), only_invalid)
        assert done.result == Result.ALREADY_PROCESSED
        assert [parked.message_id for parked in await look(link)] == ["m-2", "m-1"]
        assert await stock.stock() == 100
        rows = await clerk.connection.fetch("select * from parking_actions")
        assert [(r["action"], r["actor"], r["why"], r["message_id"], r["type"], r["reason"]) for r in rows] == [
            ("replay", "ann", "mended", "m-1", TYPE, "invalid")
        ]
        assert rows[0]["finished_at"] is not None


async def test_a_replayed_message_starts_anew_with_what_was_its_own(
    rabbit: Rabbit, link: BrokerLink, stock_url: str
) -> None:
    headers = {"mine": "kept", "x-attempt": 3, "x-exception-type": "Boom", "x-parked-without-id": False}
    await park(rabbit, "m-1", b'{"quantity": 1}', **headers)
    async with a_clerk(link, stock_url) as clerk:
        await carried_out(clerk, Orders(REPLAY))
    [copy] = await rabbit.take("orders.work")
    assert (copy.message_id, copy.type, copy.body, copy.delivery_mode) == ("m-1", TYPE, b'{"quantity": 1}', 2)
    assert copy.headers == {"mine": "kept", "x-original-exchange": "orders", "x-original-routing-key": TYPE}


async def test_an_edited_body_goes_under_a_new_id_with_its_lineage(
    rabbit: Rabbit, link: BrokerLink, stock_url: str
) -> None:
    """Sent twice, it has the same id: one effect."""
    await park(rabbit, "m-1", b'{"quantity": "many"}')
    edited = Orders(REPLAY, body=b'{"quantity": 5}')
    async with stock_service(settings(stock_url, rabbit.url)) as stock, a_clerk(link, stock_url) as clerk:
        [done] = await carried_out(clerk, edited)
        await stock.has_stock(5)
        await park(rabbit, "m-1", b'{"quantity": "many"}')
        [again] = await carried_out(clerk, edited)
        assert (again.result, again.new_message_id) == (Result.ALREADY_PROCESSED, done.new_message_id)
        new_id = await clerk.connection.fetchval("select new_message_id from parking_actions")
        assert new_id == done.new_message_id
    await park(rabbit, "m-3", b"{}")
    async with a_clerk(link, stock_url) as clerk:
        await carried_out(clerk, Orders(REPLAY, body=b"{}"), Selection(ids=frozenset({"m-3"})))
    [copy] = await rabbit.take("orders.work")
    assert copy.headers["x-replayed-from"] == "m-3"
    assert copy.message_id != "m-3"


async def test_a_message_without_an_id_needs_a_new_one(rabbit: Rabbit, link: BrokerLink, stock_url: str) -> None:
    """The parked copy's id is the client's invention; the new one is the same in each try."""
    async with stock_service(settings(stock_url, rabbit.url)) as stock, a_clerk(link, stock_url) as clerk:
        await publish_raw(rabbit.url, TYPE, b"{}")
        await eventually(lambda: rabbit.count(PARKING), lambda n: n == 1)
        [done] = await carried_out(clerk, Orders(REPLAY, force=True))
        assert (done.result, done.parked.message_id) == (Result.WITHOUT_ID, None)
        [done] = await carried_out(clerk, Orders(REPLAY, new_id=True, force=True))
        assert done.result == Result.REPLAYED
        await stock.has_stock(100)
        assert await look(link) == []


async def test_what_the_inbox_may_have_forgotten_needs_force(rabbit: Rabbit, link: BrokerLink, stock_url: str) -> None:
    """Older than the horizon, or of an age that nothing tells."""
    await park(rabbit, "old", **{"x-parked-at": (NOW - timedelta(days=15)).isoformat()})
    await park(rabbit, "ageless", **{"x-parked-at": "yesterday"})
    async with a_clerk(link, stock_url) as clerk:
        done = await carried_out(clerk, Orders(REPLAY))
        assert {(d.parked.message_id, d.result) for d in done} == {("old", Result.TOO_OLD), ("ageless", Result.TOO_OLD)}
        done = await carried_out(clerk, Orders(REPLAY, force=True))
        assert {d.result for d in done} == {Result.REPLAYED}


async def test_a_replay_that_was_interrupted_goes_on(rabbit: Rabbit, link: BrokerLink, stock_url: str) -> None:
    """Killed between a confirm and the removal: the audit shows it, and the next run completes it."""
    for number in range(6):
        await park(rabbit, f"m-{number}")
    async with stock_service(settings(stock_url, rabbit.url)) as stock:
        async with a_clerk(link, stock_url, works=2, dies=KeyboardInterrupt) as clerk:
            with pytest.raises(KeyboardInterrupt):
                await carried_out(clerk, Orders(REPLAY))
        await stock.has_stock(300)
        await eventually(lambda: rabbit.count(PARKING), lambda n: n == 4)
        async with a_clerk(link, stock_url) as clerk:
            rows = await clerk.connection.fetch("select message_id, finished_at is null as open from parking_actions")
            assert [tuple(row) for row in rows] == [("m-0", False), ("m-1", False), ("m-2", True)]
            done = await carried_out(clerk, Orders(REPLAY))
            assert [d.result for d in done] == [Result.COMPLETED, *[Result.REPLAYED] * 3]
            assert (
                await clerk.connection.fetchval("select count(*) from parking_actions where finished_at is null") == 0
            )
        await stock.has_stock(600)
        assert await look(link) == []


async def test_a_copy_that_is_not_confirmed_stays_parked(rabbit: Rabbit, link: BrokerLink, stock_url: str) -> None:
    await park(rabbit, "m-1")
    async with a_clerk(link, stock_url, works=0) as clerk:
        [done] = await carried_out(clerk, Orders(REPLAY))
    assert (done.result, done.explanation) == (Result.NOT_CONFIRMED, "no confirm within 3 s")
    assert len(await look(link)) == 1


async def test_what_fails_again_is_not_replayed_for_ever(rabbit: Rabbit, link: BrokerLink, stock_url: str) -> None:
    """It is parked anew while the replay is at work."""

    async def fail(_received: Received, _work: BillingUnitOfWork) -> None:
        raise ValueError

    for number in range(10):
        await park(rabbit, f"m-{number}")
    async with stock_service(settings(stock_url, rabbit.url, max_attempts=1), fail), a_clerk(link, stock_url) as clerk:
        done = await carried_out(clerk, Orders(REPLAY, rate=20))
        assert [d.result for d in done] == [Result.REPLAYED] * 10
        await eventually(lambda: rabbit.count(PARKING), lambda n: n == 10)


async def test_bodies_that_have_no_room_have_their_turn_later(
    rabbit: Rabbit, link: BrokerLink, stock_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.reliability.parking.BODIES_KEPT", 2500)
    for number in range(7):
        await park(rabbit, f"m-{number}", b" " * 1000)
    async with a_clerk(link, stock_url) as clerk:
        done = await carried_out(clerk, Orders(REPLAY))
    assert [d.parked.message_id for d in done] == [f"m-{number}" for number in range(7)]
    assert await rabbit.count("orders.work") == 7


async def test_a_discarded_message_is_gone_and_on_record(rabbit: Rabbit, link: BrokerLink, stock_url: str) -> None:
    r"""Also one whose id PostgreSQL cannot store: it is told with `\0`."""
    await park(rabbit, "m-1")
    await park(rabbit, "m-\0")
    async with a_clerk(link, stock_url) as clerk:
        assert [d.result for d in await carried_out(clerk, Orders(DISCARD, dry_run=True))] == [Result.WOULD_BE] * 2
        assert [d.result for d in await carried_out(clerk, Orders(DISCARD))] == [Result.DISCARDED] * 2
        rows = await clerk.connection.fetch("select action, message_id, why from parking_actions order by id")
        assert [tuple(row) for row in rows] == [("discard", "m-1", "a test's"), ("discard", r"m-\0", "a test's")]
    assert await look(link) == []


async def test_a_selection_has_what_it_names(rabbit: Rabbit, link: BrokerLink) -> None:
    await park(rabbit, "m-1", **{"x-parked-at": (NOW - timedelta(hours=3)).isoformat()})
    await park(rabbit, "m-2", **{"x-parked-reason": "too-large"})
    await park(rabbit, "m-3", **{"x-parked-at": "never"})
    found = await look(link)

    def chosen(**fields: Any) -> list[str | None]:
        return [parked.message_id for parked in found if Selection(**fields).has(parked)]

    two_hours_ago = NOW - timedelta(hours=2)
    assert chosen() == ["m-1", "m-2", "m-3"]
    assert chosen(ids=frozenset({"m-1", "m-9"})) == ["m-1"]
    assert chosen(reasons=frozenset({"too-large"})) == ["m-2"]
    assert chosen(types=frozenset({"order.paid"})) == []
    assert chosen(parked_before=two_hours_ago) == ["m-1"]
    assert chosen(parked_after=two_hours_ago) == ["m-2"]


async def test_a_parked_message_that_is_published_again_as_it_is_starts_anew(rabbit: Rabbit, stock_url: str) -> None:
    """To the default exchange, with its properties and headers: what they tell of its past does not count."""
    failing = True

    async def act(received: Received, work: BillingUnitOfWork) -> None:
        if failing:
            raise ValueError
        await add(received, work)

    async with stock_service(settings(stock_url, rabbit.url, max_attempts=2, retry_delays="0.2"), act) as stock:
        await rabbit.publish(TYPE, b"{}", message_id="m-1")
        await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)
        [parked] = await rabbit.take("orders.parking")
        failing = False
        copy = aio_pika.Message(
            parked.body, headers=parked.headers, message_id=parked.message_id, type=parked.type, delivery_mode=2
        )
        await rabbit.channel.default_exchange.publish(copy, "orders.work")
        await stock.has_stock(100)
        assert await rabbit.count("orders.parking") == 0
