"""Several hosts of one broker: one that fails is left for the next, whichever way it fails."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from structlog.testing import capture_logs
from yarl import URL

from service.reliability.errors import BrokerUnavailableError
from service.reliability.hosts import Hosts, WatchedTransport
from service.reliability.link import BrokerLink
from tests.support.proxy import Proxy, black_hole, proxy_to
from tests.support.rabbit import BROKER, Rabbit, version_that_answers
from tests.support.stock import TYPE, settings, stock_service
from tests.support.waiting import eventually

BODY = b'{"sku": "nail", "quantity": 100}'


def by_way_of(rabbit: Rabbit, *ports: int) -> list[str]:
    """Return the broker's address once for each port."""
    return [str(URL(rabbit.url).with_port(port)) for port in ports]


@asynccontextmanager
async def connects_to(second: Proxy, addresses: list[str]) -> AsyncIterator[Hosts]:
    """Connect where the first address fails; yield, still connected to the second."""
    hosts = Hosts(addresses)
    async with BrokerLink(hosts, "billing-test") as link:
        await link.channel()
        assert second.accepted == 1
        yield hosts


async def test_a_host_that_refuses_is_left_for_the_next(rabbit: Rabbit) -> None:
    """The log names the host that took the connection, and what the other said."""
    with capture_logs() as logs:
        async with (
            proxy_to("127.0.0.1", BROKER.port) as second,
            connects_to(second, by_way_of(rabbit, 1, second.listening_on)),
        ):
            pass
    [failed, connected] = [log for log in logs if log["event"].startswith("broker_")]
    assert failed["event"] == "broker_hosts_failed"
    assert failed["explanation"] == "127.0.0.1:1 refused the connection"
    assert connected == {
        "event": "broker_connected",
        "host": "127.0.0.1",
        "port": second.listening_on,
        "connection": "billing-test",
        "version": version_that_answers(),
        "log_level": "info",
    }


async def test_a_host_that_answers_nothing_is_left_for_the_next(rabbit: Rabbit) -> None:
    with black_hole() as port:
        async with (
            proxy_to("127.0.0.1", BROKER.port) as second,
            connects_to(second, by_way_of(rabbit, port, second.listening_on)),
        ):
            pass


async def test_a_host_that_is_silent_in_the_handshake_is_left_for_the_next_by_every_link(rabbit: Rabbit) -> None:
    """Links that share the hosts ask it once: each would wait for its time-out otherwise."""
    async with proxy_to("127.0.0.1", BROKER.port) as first, proxy_to("127.0.0.1", BROKER.port) as second:
        first.passing.clear()
        async with connects_to(second, by_way_of(rabbit, first.listening_on, second.listening_on)) as hosts:
            async with BrokerLink(hosts, "billing-other") as link:
                await link.channel()
            assert (first.accepted, second.accepted) == (1, 2)


async def test_a_host_that_somebody_gave_up_waiting_for_is_tried_last(rabbit: Rabbit) -> None:
    """A publisher waits for no longer than its confirm time-out: it would ask the same dead host again and again."""
    with black_hole() as port:
        async with proxy_to("127.0.0.1", BROKER.port) as second:
            hosts = Hosts(by_way_of(rabbit, port, second.listening_on))
            async with BrokerLink(hosts, "billing-test") as link:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await link.channel()
                await link.channel()
                assert second.accepted == 1


async def test_a_lost_connection_is_opened_at_the_next_host_and_comes_round(rabbit: Rabbit) -> None:
    async with proxy_to("127.0.0.1", BROKER.port) as first, proxy_to("127.0.0.1", BROKER.port) as second:
        async with BrokerLink(
            Hosts(by_way_of(rabbit, first.listening_on, second.listening_on)), "billing-test"
        ) as link:
            for lost in (first, second, first):
                channel = await link.channel()
                await lost.cut()
                wire = await channel.get_underlay_channel()
                await asyncio.wait([wire.connection.closing])
            await link.channel()
        assert (first.accepted, second.accepted) == (2, 2)


async def test_when_no_host_will_do_one_error_says_what_each_answered(rabbit: Rabbit) -> None:
    """In plain words, and without the credentials that each address holds."""
    here = URL(rabbit.url)
    addresses = [
        here.with_port(1),
        here.with_password("S3cr3t"),
        here.with_path("/nowhere"),
        URL("amqp://u:S3cr3t@h.invalid"),
    ]
    with pytest.raises(BrokerUnavailableError) as unavailable:
        await Hosts(str(address) for address in addresses).connect("billing-test")
    refused, login, vhost, name = str(unavailable.value).removeprefix("no connection to RabbitMQ: ").split("; ")
    assert refused == "127.0.0.1:1 refused the connection"
    assert login == f"{BROKER.address} refused the login: no such user, or another password"
    assert vhost == (f"{BROKER.address} refused the virtual host 'nowhere': there is none, or this user may not use it")
    assert name.startswith("h.invalid:5672 failed: ")
    assert "S3cr3t" not in str(unavailable.value)


async def test_the_kernel_is_told_to_give_up_a_host_that_has_vanished(rabbit: Rabbit) -> None:
    """A network that swallows everything cannot be had here; see HEARTBEAT for what was measured with one."""
    _, writer = await WatchedTransport().create(URL(rabbit.url))
    connected = writer.get_extra_info("socket")
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 9000
    assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
    writer.close()
    await writer.wait_closed()


@pytest.mark.guarantee("G7")
async def test_a_host_that_dies_under_the_service_is_left_for_the_next(stock_url: str, rabbit: Rabbit) -> None:
    async with proxy_to("127.0.0.1", BROKER.port) as second, AsyncExitStack() as life:
        first = await life.enter_async_context(proxy_to("127.0.0.1", BROKER.port))
        addresses = ",".join(by_way_of(rabbit, first.listening_on, second.listening_on))
        async with stock_service(settings(stock_url, addresses)) as stock:
            await rabbit.publish(TYPE, BODY)
            await stock.has_stock(100)
            assert second.accepted == 0
            await life.aclose()
            await rabbit.publish(TYPE, BODY)
            await stock.has_stock(200)
            await eventually(stock.is_ready, bool)
            assert second.accepted > 0


@pytest.mark.guarantee("G7")
async def test_a_host_that_falls_silent_under_the_service_is_left_for_the_next(stock_url: str, rabbit: Rabbit) -> None:
    """The connection stays open and nothing passes: only the heartbeat tells, within 20 s by default."""
    async with proxy_to("127.0.0.1", BROKER.port) as first, proxy_to("127.0.0.1", BROKER.port) as second:
        addresses = ",".join(by_way_of(rabbit, first.listening_on, second.listening_on))
        async with stock_service(settings(stock_url, addresses)) as stock:
            await rabbit.publish(TYPE, BODY)
            await stock.has_stock(100)
            first.passing.clear()
            await rabbit.publish(TYPE, BODY)
            await stock.has_stock(200, within=60)
            await eventually(stock.is_ready, bool)
            assert second.accepted > 0
