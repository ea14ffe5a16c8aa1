"""What is asked of the client library beyond its public face is where it is expected."""

from aiormq import Connection

from service.reliability.link import UNBLOCKED, BrokerLink


async def test_the_client_keeps_whether_it_is_blocked_where_it_is_expected() -> None:
    """Else an alarm of the broker would not be seen, and copies be sent into it again and again."""
    assert not getattr(Connection("amqp://unused"), UNBLOCKED).is_set()


async def test_a_link_that_was_never_opened_is_neither_open_nor_blocked() -> None:
    link = BrokerLink("amqp://unused", "name")
    assert (link.is_open, link.is_blocked) == (False, False)
