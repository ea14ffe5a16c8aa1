"""Properties and history that a message brings along from elsewhere change nothing here, and do not pile up."""

import json
import struct
from collections import Counter
from typing import Any

import pytest
from structlog.testing import capture_logs

from service.app import BillingUnitOfWork
from tests.support.rabbit import BROKER, EVENTS, Rabbit, user_with
from tests.support.stock import TYPE, Received, settings, stock_service
from tests.support.waiting import eventually
from tests.support.wire import RawMessage, RawProducer, content_header, publish_bytes, publish_raw, short_string, table

PARKING = "orders.parking"
FOREIGN = "test.full"

BODY = b'{"sku": "nail", "quantity": 100}'
INVALID = b'{"sku": "nail", "quantity": "many"}'

HISTORY = [
    {"queue": f"elsewhere.{number}", "reason": reason, "count": 7, "exchange": "elsewhere", "routing-keys": ["any"]}
    for number in range(150)
    for reason in ("rejected", "expired")
]
"""As it is after a long life with others: 31 kB of headers."""


COUNTS: tuple[Any, ...] = (3, 2**40, True, "3", -5, 2.5, None)
DEATHS: tuple[Any, ...] = (
    *([{"queue": "orders.work", "reason": "rejected", "count": count}] for count in COUNTS),
    [{"queue": "orders.work", "reason": "rejected"}],
    *("junk", 3, {"count": 3}, None, [], [1, "rejected", None, {}, [{"count": 3}]]),
)
"""Histories as recovery tools and other clients write them."""


async def parked(rabbit: Rabbit) -> RawMessage:
    """Wait for the one parked message and take it, as it is on the wire."""
    await eventually(lambda: rabbit.count(PARKING), lambda n: n == 1)
    async with RawProducer(rabbit.url) as wire:
        [message] = await wire.take(PARKING)
    return message


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("by", ["its producer", "a foreign queue"])
async def test_a_history_from_elsewhere_costs_no_attempt(stock_url: str, rabbit: Rabbit, by: str) -> None:
    """A06: also where another system dead-letters into our exchange, which is the newest entry then."""
    executions = 0

    async def fail(received: Received, work: BillingUnitOfWork) -> None:
        nonlocal executions
        executions += 1
        raise RuntimeError

    async with stock_service(settings(stock_url, rabbit.url), fail):
        if by == "a foreign queue":
            upstream = {
                "x-message-ttl": 1,
                "x-dead-letter-exchange": "orders",
                "x-dead-letter-routing-key": TYPE,
            }
            await rabbit.channel.declare_queue(FOREIGN, durable=True, arguments=upstream)
            await rabbit.publish(TYPE, BODY, exchange="", routing_key=FOREIGN, headers={"x-death": HISTORY})
        else:
            await rabbit.publish(TYPE, BODY, headers={"x-death": HISTORY})
        copy = await parked(rabbit)
        assert executions == 3
        assert (copy.headers["x-parked-reason"], copy.headers["x-attempts"]) == ("attempts-exhausted", 3)
        assert not [name for name in copy.headers if "death" in name]
        assert len(copy.head) < 1000


@pytest.mark.guarantee("G5")
async def test_no_form_of_a_history_costs_an_attempt(stock_url: str, rabbit: Rabbit) -> None:
    """A05, A08: nor does one that tells of our own queue."""
    executions: Counter[str] = Counter()

    async def fail(received: Received, work: BillingUnitOfWork) -> None:
        executions[received.sku] += 1
        raise RuntimeError

    async with stock_service(settings(stock_url, rabbit.url), fail):
        for number, deaths in enumerate(DEATHS):
            await rabbit.publish(TYPE, json.dumps({"sku": str(number)}).encode(), headers={"x-death": deaths})
        await eventually(lambda: rabbit.count(PARKING), lambda n: n == len(DEATHS))
        assert executions == {str(number): 3 for number in range(len(DEATHS))}
        assert {copy.headers["x-attempts"] for copy in await rabbit.take(PARKING)} == {3}


async def test_a_producers_user_id_is_parked_by_the_services_user(stock_url: str, rabbit: Rabbit) -> None:
    """A11: copied, it would be refused with 406, and the channel closed with all that is in flight on it."""
    with user_with(rabbit, "^$", "^orders$", "^$") as url, capture_logs() as logs:
        user = url.partition("//")[2].partition(":")[0]
        async with stock_service(settings(stock_url, rabbit.url)) as stock:
            for number in range(5):
                await publish_raw(url, TYPE, INVALID, message_id=f"bad-{number}", user_id=user)
                await publish_raw(url, TYPE, BODY, message_id=f"good-{number}", user_id=user)
            await stock.has_stock(500)
            await eventually(lambda: rabbit.count(PARKING), lambda n: n == 5)
            copies = await rabbit.take(PARKING)
            assert [copy.user_id for copy in copies] == [None] * 5
            assert {copy.headers["x-parked-reason"] for copy in copies} == {"invalid"}
    told = [line["event"] for line in logs]
    assert told.count("consumer_started") == 1
    assert not {"successor_held", "settlement_lost", "consumer_lost"} & set(told)


async def test_a_parked_message_outlives_its_expiration(stock_url: str, rabbit: Rabbit) -> None:
    """A13: a witness with the same expiration, published after it was parked, is gone; the copy is not."""
    async with stock_service(settings(stock_url, rabbit.url)):
        await rabbit.channel.declare_queue(FOREIGN, durable=True)
        await rabbit.publish(TYPE, INVALID, expiration=3)
        await eventually(lambda: rabbit.count(PARKING), lambda n: n == 1)
        await rabbit.publish(TYPE, INVALID, exchange="", routing_key=FOREIGN, expiration=3)
        assert await rabbit.count(FOREIGN) == 1
        await eventually(lambda: rabbit.count(FOREIGN), lambda n: n == 0)
        copy = await parked(rabbit)
        assert copy.properties.expiration is None
        assert copy.content == INVALID


async def test_numbers_in_headers_are_copied_as_they_are(stock_url: str, rabbit: Rabbit) -> None:
    """The client library would write a double in single precision, and none that is too large for that."""
    rate, large = (b"d" + struct.pack(">d", number) for number in (0.1, 1e300))
    headers = table((b"rate", rate), (b"large", large), (b"rates", b"F" + table((b"EUR", rate))))
    async with stock_service(settings(stock_url, rabbit.url)):
        await publish_bytes(rabbit.url, TYPE.encode(), INVALID, message_id=short_string(b"m-1"), headers=headers)
        copy = await parked(rabbit)
        told = {name: copy.headers.get(name) for name in ("rate", "large", "rates")}
        assert told == {"rate": 0.1, "large": 1e300, "rates": {"EUR": 0.1}}


async def test_two_hundred_replays_add_nothing(stock_url: str, rabbit: Rabbit) -> None:
    """A15: the parked copy published again as it is, each time."""
    async with stock_service(settings(stock_url, rabbit.url)) as stock, RawProducer(rabbit.url) as wire:
        await rabbit.publish(TYPE, INVALID, headers={"tenant": "a", "x-death": HISTORY[:3]})
        sizes: list[int] = []
        for _ in range(200):
            copy = await parked(rabbit)
            sizes.append(len(copy.head))
            assert await wire.publish(b"", b"orders.work", copy.head, copy.content)
        copy = await parked(rabbit)
        assert set(sizes[1:]) == {len(copy.head)}
        assert len(copy.head) < 1000
        assert copy.headers["tenant"] == "a"
        assert copy.content == INVALID
        assert await stock.settled() == 201


@pytest.mark.guarantee("G6")
async def test_an_invalid_message_is_delivered_once(stock_url: str, rabbit: Rabbit) -> None:
    """G14: no requeue, so no loop."""
    with capture_logs() as logs:
        async with stock_service(settings(stock_url, rabbit.url)) as stock:
            await rabbit.publish(TYPE, INVALID, message_id="m-1")
            await rabbit.publish(TYPE, BODY, message_id="m-2")
            await stock.has_stock(100)
            await eventually(lambda: rabbit.count(PARKING), lambda n: n == 1)
            assert await stock.settled() == 2
    ends = [line for line in logs if line["event"] in {"message_parked", "message_retried", "delivery_settled"}]
    assert sorted((line["message_id"], line["redelivered"], line["attempt"]) for line in ends) == [
        ("m-1", False, 1),
        ("m-2", False, 1),
    ]


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("mode", [0, 1, 3, 255])
async def test_a_delivery_mode_that_no_specification_has_stops_nobody(
    stock_url: str, rabbit: Rabbit, mode: int
) -> None:
    """RabbitMQ 4.x takes any octet, aio-pika none but 1 and 2; 3.10 refuses the others by closing the connection."""
    properties = {"delivery_mode": bytes([mode]), "message_id": short_string(b"m-1")}
    async with stock_service(settings(stock_url, rabbit.url)) as stock, RawProducer(rabbit.url) as wire:
        head = content_header(len(BODY), properties)
        if not await wire.publish(b"orders", TYPE.encode(), head, BODY):
            assert BROKER.version in {None, "3.10"}
            assert mode not in {1, 2}
            return
        if mode > 2:
            copy = await parked(rabbit)
            assert copy.headers["x-parked-reason"] == "unreadable"
            assert "delivery_mode" in copy.headers["x-exception-message"]
            assert copy.properties.delivery_mode == 2
        await rabbit.publish(TYPE, BODY)
        await stock.has_stock(100 if mode > 2 else 200)


@pytest.mark.guarantee("G1")
async def test_what_expires_while_nobody_consumes_is_parked_by_the_broker(stock_url: str, rabbit: Rabbit) -> None:
    """Nobody could process it in the time that its producer gave it; published again, it has no such time."""
    await rabbit.collect_events()
    async with stock_service(settings(stock_url, rabbit.url)):
        pass
    await rabbit.publish(TYPE, BODY, message_id="m-1", expiration=0.2)
    copy = await parked(rabbit)
    assert copy.headers["x-death"][0]["reason"] == "expired"
    assert copy.headers["x-death"][0]["original-expiration"] == "200"
    assert (copy.properties.expiration, copy.properties.message_id, copy.content) == (None, "m-1", BODY)
    async with stock_service(settings(stock_url, rabbit.url)) as stock, RawProducer(rabbit.url) as wire:
        assert await wire.publish(b"", b"orders.work", copy.head, copy.content)
        await stock.has_stock(100)
        await eventually(lambda: rabbit.count(EVENTS), lambda n: n == 1)
        assert await rabbit.count(PARKING) == 0
