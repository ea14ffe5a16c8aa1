"""The node that outage tests break: it survives what they do to it, and leaves nothing behind."""

from tests.support.own_broker import own_broker
from tests.support.rabbit import EVENTS, rabbit_client
from tests.support.waiting import eventually


async def test_a_node_of_ones_own_is_killed_restarted_and_alarmed_and_keeps_what_was_confirmed() -> None:
    """A quorum queue's message outlives SIGKILL; the folder does not outlive the block."""
    async with own_broker(conf=("consumer_timeout = 123456",)) as node:
        async with rabbit_client(node.url(), keep=True) as rabbit:
            await rabbit.collect_events()
            await rabbit.publish("any", b"{}", exchange="", routing_key="test.events")
        await node.kill()
        await node.start()
        assert "123456" in await node.ctl("environment")
        await node.alarm(on=True)
        assert "memory" in await node.ctl("eval", "rabbit_alarm:get_alarms().")
        await node.alarm(on=False)
        assert "memory" not in await node.ctl("eval", "rabbit_alarm:get_alarms().")
        await node.restart()
        async with rabbit_client(node.url()) as rabbit:
            await eventually(lambda: rabbit.count(EVENTS), lambda ready: ready == 1)  # when it has elected its leader
            assert len(await rabbit.events()) == 1
        folder = node.folder
    assert not folder.exists()
