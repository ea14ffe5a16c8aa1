"""Looking into the parking queue takes nothing out of it, however often."""

from service.app import orders_family, whole_topology
from service.reliability import topology
from service.reliability.link import BrokerLink
from service.reliability.parking import list_parked
from tests.support.rabbit import Rabbit
from tests.support.stock import settings
from tests.support.waiting import eventually

WANTED = whole_topology(orders_family(settings("postgresql://localhost/none", "amqp://localhost")))


async def test_looking_thirty_times_loses_and_reorders_nothing(rabbit: Rabbit) -> None:
    """Each look costs a delivery count: without a limit of its own, the broker deletes after twenty on 4.x."""
    async with BrokerLink(rabbit.url, "billing-parking") as link:
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
    async with BrokerLink(rabbit.url, "billing-parking") as link:
        await topology.declare(link, WANTED)
        await rabbit.publish("order.placed", b"{}", message_id="m-1")
        queue = await rabbit.channel.get_queue("orders.work", ensure=False)
        await (await queue.get()).reject(requeue=False)
        listed = await eventually(lambda: list_parked(link, "orders.parking", 10), lambda parked: parked.total == 1)
    assert listed.messages[0].reason == "broker-rejected"
