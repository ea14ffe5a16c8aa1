"""Looking into the parking queue takes nothing out of it, however often."""

from typing import Any

import aio_pika
import pytest

from service.app import BillingUnitOfWork, orders_family, whole_topology
from service.reliability import topology
from service.reliability.hosts import Hosts
from service.reliability.link import BrokerLink
from service.reliability.parking import describe, list_parked
from tests.support.doubles import delivery
from tests.support.rabbit import Rabbit
from tests.support.stock import TYPE, Received, add, settings, stock_service
from tests.support.waiting import eventually

WANTED = whole_topology(orders_family(settings("postgresql://localhost/none", "amqp://localhost")))

NO_DEATHS: tuple[Any, ...] = (None, True, 5, 2.5, "expired", b"expired", {}, [], [[]])


async def test_looking_thirty_times_loses_and_reorders_nothing(rabbit: Rabbit) -> None:
    """Each look costs a delivery count: without a limit of its own, the broker deletes after twenty on 4.x."""
    async with BrokerLink(Hosts([rabbit.url]), "billing-parking") as link:
        await topology.declare(link, WANTED)
        for number in range(5):
            headers = {"x-parked-reason": "invalid" if number % 2 else "unreadable", "x-attempts": number}
            await rabbit.publish(
                "t", b"{}", exchange="", routing_key="orders.parking", message_id=f"m-{number}", headers=headers
            )
        first = await list_parked(link, "orders.parking", 100)
        assert [message.message_id for message in first.messages] == [f"m-{number}" for number in range(5)]
        assert (first.total, first.reasons) == (5, {"unreadable": 3, "invalid": 2})
        for _ in range(30):
            assert await list_parked(link, "orders.parking", 100) == first
        assert [message.message_id for message in (await list_parked(link, "orders.parking", 2)).messages] == [
            "m-0",
            "m-1",
        ]
    assert len(await rabbit.take("orders.parking")) == 5


async def test_what_the_broker_parked_itself_is_explained(rabbit: Rabbit) -> None:
    """No header of ours says why: the broker's own does."""
    async with BrokerLink(Hosts([rabbit.url]), "billing-parking") as link:
        await topology.declare(link, WANTED)
        await rabbit.publish("order.placed", b"{}", message_id="m-1")
        queue = await rabbit.channel.get_queue("orders.work", ensure=False)
        await (await queue.get()).reject(requeue=False)
        listed = await eventually(lambda: list_parked(link, "orders.parking", 10), lambda parked: parked.total == 1)
    assert listed.messages[0].reason == "broker-rejected"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"x-parked-reason": "too-large"}, "too-large"),
        ({"x-parked-reason": "all is well"}, "unknown"),
        ({"x-parked-reason": ["too-large"]}, "unknown"),
        ({}, "unknown"),
        ({"x-parked-reason": "too-large", "x-death": [{"reason": "expired"}]}, "broker-expired"),
        ({"x-death": [1, "expired", {"reason": ["expired"]}, {"reason": "rejected"}]}, "broker-rejected"),
        *(({"x-death": deaths}, "unknown") for deaths in NO_DEATHS),
    ],
)
def test_a_reason_is_from_the_vocabulary_whatever_a_producer_wrote(headers: dict[str, Any], reason: str) -> None:
    """What the broker parks keeps the producer's headers."""
    assert describe(delivery(headers=headers)).reason == reason


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
