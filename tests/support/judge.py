"""Sends hostile messages to a running service, good ones between them, and checks what became of each."""

import json
import logging
from collections import Counter, defaultdict
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from service.reliability.hosts import Hosts
from service.reliability.link import BrokerLink
from service.reliability.parking import visit
from service.reliability.settlement import HEADERS_LIMIT
from tests.support.hostile import LARGEST_BODY, SECRET, TRAP, Hostile, draw_batches
from tests.support.rabbit import EVENTS, Rabbit
from tests.support.stock import TYPE, StockService, settings, stock_service
from tests.support.waiting import eventually
from tests.support.wire import RawMessage, RawProducer, content_header, short_string

PARKING = "orders.parking"

BY_THE_BROKER = "broker-expired"

OTHER_PROPERTIES = 14 + 8 * 256 + 32
"""Bytes that the other properties of a content header need at most, and the broker's count of deliveries."""

ADDED = 3000
"""Bytes that a parked copy's headers have at most beyond the producer's."""

_HARMLESS = {
    "broker_connected",
    "consumer_started",
    "message_parked",
    "delivery_settled",
    "relay_state_changed",
    "parking_alarm",
}


async def judge_random_messages(
    number: int, stock_url: str, rabbit: Rabbit, caplog: pytest.LogCaptureFixture
) -> "Judge":
    """Judge so many batches of 25 random messages; return the judge with its counts."""
    batches = draw_batches(number, 25)
    await rabbit.collect_events()
    await rabbit.channel.declare_queue(TRAP, durable=True)
    caplog.set_level(logging.WARNING)
    async with stock_service(settings(stock_url, rabbit.url, max_body_bytes=LARGEST_BODY)) as stock:
        with capture_logs() as logs:
            judge = Judge(rabbit, stock, logs, caplog.records)
            for batch in batches:
                await judge.judge(batch)
    return judge


@dataclass(slots=True)
class Judge:
    """Judges batch after batch, on one service.

    Attributes:
        logs: what the service has logged, growing.
        records: what libraries have logged, growing.
        arrived, refused: messages that the broker took, and did not take.
    """

    rabbit: Rabbit
    stock: StockService
    logs: list[MutableMapping[str, Any]]
    records: list[logging.LogRecord]
    arrived: int = 0
    refused: int = 0
    batches: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    _connected: Counter[str] = field(default_factory=Counter)
    _goods: int = 0

    async def judge(self, batch: list[Hostile]) -> None:
        """Send a batch; check that each is processed or parked as it should be, and again when it is replayed."""
        async with RawProducer(self.rabbit.url) as wire:
            before = await self._settled()
            sent: list[Hostile] = []
            goods: list[str] = []
            for message in batch:
                for _ in range(message.copies):
                    if await wire.publish(message.exchange, message.routing_key, message.head, message.content):
                        sent.append(message)
                    else:
                        self.refused += 1
                goods.append(await self._publish_good(wire))
            await self._all_settled(before, len(sent) + len(goods))
            self.arrived += len(sent)
            self.batches += 1
            await self._check_parking_tool()
            parked = await wire.take(PARKING)
            for copy in parked:
                self._check_copy(copy)
            effects = await self._effects([*goods, *(message.sku for message in sent)])
            assert {sku: effects.get(sku) for sku in goods} == dict.fromkeys(goods, 1)
            self._check_outcomes(sent, parked, effects)
            await self._check_events(effects)
            await self._check_replays(wire, parked, {message.sku: message.quantity for message in sent}, effects)
            assert await self.rabbit.count(TRAP) == 0
            assert await self.stock.pool.fetchval("select count(*) from started_messages") == 0
            self._check_logs()

    async def _publish_good(self, wire: RawProducer) -> str:
        self._goods += 1
        number = f"good-{self._goods:08}"
        sku = SECRET + number
        content = json.dumps({"sku": sku, "quantity": 1}).encode()
        head = content_header(len(content), {"message_id": short_string(number.encode())})
        assert await wire.publish(b"orders", TYPE.encode(), head, content)
        return sku

    async def _settled(self) -> float:
        """Return how many messages were processed so far, copies among them."""
        value = self.stock.service.metrics.registry.get_sample_value
        kinds = [(kind, outcome) for kind in (TYPE, "other") for outcome in ("processed", "duplicate")]
        return sum(
            value("billing_deliveries_total", {"type": kind, "outcome": outcome}) or 0 for kind, outcome in kinds
        )

    async def _all_settled(self, before: float, sent: int) -> None:
        """Wait until every message is processed or in the parking queue."""

        async def ended() -> float:
            return await self._settled() - before + await self.rabbit.count(PARKING)

        await eventually(ended, lambda n: n >= sent, within=30)
        assert await ended() == sent
        assert await self.rabbit.count("orders.work") == 0

    async def _check_parking_tool(self) -> None:
        """The tool reads each parked message, and knows why it was parked."""
        count = await self.rabbit.count(PARKING)
        async with BrokerLink(Hosts([self.rabbit.url]), "billing-parking") as link, visit(link, PARKING) as seen:
            assert len(seen.messages) == count
            self.reasons.update(seen.reasons)
            json.dumps([(m.message_id, m.type, m.reason, m.explanation) for m in seen.messages]).encode()
        assert await self.rabbit.count(PARKING) == count

    def _check_copy(self, copy: RawMessage) -> None:
        """Nothing in a parked copy makes it answered, routed elsewhere or expire; its headers are bounded in bytes."""
        properties, headers = copy.properties, copy.headers
        assert properties.expiration is None
        if _reason(copy) == BY_THE_BROKER:
            return
        assert (properties.reply_to, properties.user_id, properties.priority) == (None, None, 0), properties
        assert properties.delivery_mode == 2
        assert not {"CC", "BCC", "x-death", "x-attempt"} & headers.keys()
        assert len(copy.head) <= HEADERS_LIMIT + OTHER_PROPERTIES
        assert SECRET not in headers["x-exception-message"]
        assert SECRET not in headers["x-exception-type"]

    async def _effects(self, skus: list[str]) -> dict[str, int]:
        rows = await self.stock.pool.fetch("select sku, quantity from stock where sku = any($1)", skus)
        return dict(rows)

    def _check_outcomes(self, sent: list[Hostile], parked: list[RawMessage], effects: dict[str, int]) -> None:
        owners: dict[bytes, list[Hostile]] = defaultdict(list)
        for message in sent:
            owners[message.content].append(message)
            if message.sku in effects:
                assert not message.reasons, f"should have been parked: {message}"
                assert effects[message.sku] == message.quantity, f"not processed once: {message}"
            else:
                assert message.reasons or message.expires, f"should have been processed: {message}"
        copies: dict[bytes, list[RawMessage]] = defaultdict(list)
        for copy in parked:
            copies[copy.content].append(copy)
        assert copies.keys() <= owners.keys(), [copies[c] for c in copies.keys() - owners.keys()]
        for content, messages in owners.items():
            allowed = frozenset().union(*(message.reasons for message in messages))
            allowed |= {BY_THE_BROKER} if any(message.expires for message in messages) else frozenset()
            for copy in copies[content]:
                assert _reason(copy) in allowed, f"parked for {copy.headers}: {messages}"
                largest = max(len(message.head) for message in messages)
                assert len(copy.head) <= largest + OTHER_PROPERTIES + ADDED, f"grown: {messages}"
            wrong = sum(bool(message.reasons) for message in messages)
            assert wrong <= len(copies[content]) <= len(messages)

    async def _check_events(self, effects: dict[str, int]) -> None:
        """What left equals the effects."""
        await eventually(lambda: self.rabbit.count(EVENTS), lambda n: n >= len(effects))
        events = [json.loads(event.body) for event in await self.rabbit.events()]
        assert len(events) == len(effects)
        assert {event["sku"]: event["quantity"] for event in events} == effects

    async def _check_replays(
        self, wire: RawProducer, parked: list[RawMessage], quantities: dict[str, int], effects: dict[str, int]
    ) -> None:
        """Each parked message can be published to the work queue as it is; its copies do not grow.

        What could not be read is left out at the first parking, so some are processed then: once.
        """
        sizes: list[int] = []
        first = parked
        for _ in range(3):
            before = await self._settled()
            for copy in parked:
                assert await wire.publish(b"", b"orders.work", copy.head, copy.content), f"refused: {copy}"
            await self._all_settled(before, len(parked))
            parked = await wire.take(PARKING)
            for copy in parked:
                self._check_copy(copy)
            sizes.append(sum(len(copy.head) for copy in parked))
        assert sizes[1] == sizes[2], sizes
        more = await self._effects([sku for sku in quantities if sku not in effects])
        assert all(quantities[sku] == quantity for sku, quantity in more.items()), (more, quantities, first)
        await self._check_events(more)

    def _check_logs(self) -> None:
        """No payload in them, one line for each end, and none of a delivery lost: so nobody was delivered again."""
        told = Counter(line["event"] for line in self.logs)
        assert told.keys() <= _HARMLESS, {line["event"]: line for line in self.logs if line["event"] not in _HARMLESS}
        assert told["consumer_started"] == 0
        self._connected.update(line["connection"] for line in self.logs if line["event"] == "broker_connected")
        assert self._connected["billing-consumer"] == 0
        assert max(self._connected["billing-publisher"], self._connected["billing-relay"]) <= 1
        assert SECRET not in repr(self.logs)
        self.logs.clear()
        libraries = [f"{record.name}: {record.getMessage()}" for record in self.records]
        assert not libraries, libraries


def _reason(copy: RawMessage) -> str:
    headers = copy.headers
    return BY_THE_BROKER if "x-death" in headers else headers["x-parked-reason"]
