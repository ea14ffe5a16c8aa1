"""What is sent, in which order, and what must become of each message: pure, worked out before anything is sent.

The service is killed in the middle of `first`; `while_dead` is published when nobody is there; `second` goes on during
a rolling restart, and beside it the payments in `overtaking` come a second before their orders in `overtaken`; `third`
makes events that nobody takes at first. Every body is different, so that a parked message is known by its body.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID, uuid5

CURRENCIES = {"EUR": 2, "JPY": 0, "KWD": 3}
"""With their number of decimals (ISO 4217)."""

PROCESSED = "processed"

OVERTAKING = "payments ahead of their order"

AGAIN_AT_ONCE = "copies at once"
AGAIN_LATER = "copies later"
AGAIN_AFTER_RESTART = "copies after a restart"
SAME_MOMENT = "copies at the same moment"

_NAMESPACE = UUID("b0f6ab8e-5a52-4b7c-8f0f-3c1b7f0b6d5e")


@dataclass(frozen=True, slots=True)
class Message:
    """One message as a producer sends it.

    Attributes:
        kind: the row of the report that counts it.
        id: None leaves the property away.
        fate: `processed`, or the reason for which it must be parked.
        event: the event that it must cause, empty for none.
    """

    kind: str
    id: str | None
    type: str
    order_id: str
    body: bytes
    fate: str = PROCESSED
    event: str = ""

    @property
    def name(self) -> str:
        """The id, to be told to people."""
        return self.id or f"(no id, order {self.order_id})"


@dataclass(frozen=True, slots=True)
class Step:
    """What is published at once: one message, or it and its copy on another connection.

    Attributes:
        copy: the report's row of the copy, empty where the message is sent for the first time only.
    """

    message: Message
    copy: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """An order; amounts are whole minor units."""

    number: int
    currency: str
    lines: tuple[tuple[str, int, int], ...]

    @property
    def id(self) -> str:
        """The order's id, the same in every demo."""
        return order_id(f"order-{self.number}")

    @property
    def total(self) -> int:
        """What the invoice must be over."""
        return sum(quantity * price for _, quantity, price in self.lines)

    @property
    def status(self) -> str:
        """How its invoice must end: five in ten are paid, two are void, three stay issued."""
        return ("paid", "paid", "paid", "paid", "paid", "void", "void", "issued", "issued", "issued")[self.number % 10]


@dataclass(frozen=True, slots=True)
class Streams:
    """All that is sent, and the orders whose invoices must be there at the end."""

    orders: tuple[Order, ...]
    first: tuple[Step, ...]
    while_dead: tuple[Step, ...]
    second: tuple[Step, ...]
    overtaking: tuple[Step, ...]
    overtaken: tuple[Step, ...]
    third: tuple[Step, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """All of them, in their order."""
        return self.first + self.while_dead + self.second + self.overtaking + self.overtaken + self.third


def order_id(name: str) -> str:
    """Return the id of the order of that name."""
    return str(uuid5(_NAMESPACE, name))


def money(units: int, currency: str) -> str:
    """Return an amount as the contract writes it: exactly the currency's decimals."""
    decimals = CURRENCIES[currency]
    digits = f"{units:0{decimals + 1}d}"
    return f"{digits[:-decimals]}.{digits[-decimals:]}" if decimals else digits


def make_streams(number: int) -> Streams:
    """Return what a demo of so many orders sends."""
    orders = tuple(_order(n) for n in range(number))
    early, middle, late = (
        orders[: number * 2 // 5],
        orders[number * 2 // 5 : number * 4 // 5],
        orders[number * 4 // 5 :],
    )
    first, while_dead = early[: len(early) * 3 // 4], early[len(early) * 3 // 4 :]
    slow_payers = [order for order in middle if order.number % 10 in {3, 4}]
    overtaken = [order for order in middle if order.status == "paid" and order not in slow_payers][:2]
    patient = [order for order in early if order.status == "issued"]
    return Streams(
        orders,
        first=_in_order(_orders(first), _payments(first), _bad(1)),
        while_dead=_in_order(_orders(while_dead), _payments(while_dead)),
        second=_in_order(
            _orders(order for order in middle if order not in overtaken),
            _payments(order for order in middle if order not in slow_payers and order not in overtaken),
            ((middle[0].number + 2 * n, Step(_placed(o), AGAIN_AFTER_RESTART)) for n, o in enumerate(early[::4])),
            _bad(2, at=middle[0].number),
            ((middle[9].number + n, Step(_conflicting(n, o))) for n, o in enumerate(early[:3])),
            ((middle[5].number + n, Step(_wrong_amount(o))) for n, o in enumerate(patient[:2])),
            ((middle[3].number + n, Step(_never_ordered(n))) for n in range(2)),
        ),
        overtaking=tuple(Step(_paid(order, kind=OVERTAKING)) for order in overtaken),
        overtaken=tuple(Step(_placed(order)) for order in overtaken),
        third=_in_order(
            _orders(late),
            _payments(late),
            ((late[0].number, Step(_paid(order))) for order in slow_payers),
            ((late[-1].number + 1, Step(_cancelled(order))) for order in orders if order.status == "void"),
        ),
    )


Placed = Iterable[tuple[float, Step]]
"""Steps with their place in the stream; an order's is its number."""


def _in_order(*groups: Placed) -> tuple[Step, ...]:
    steps = [step for group in groups for step in group]
    return tuple(step for _, step in sorted(steps, key=lambda placed: placed[0]))


def _orders(orders: Iterable[Order]) -> Placed:
    for order in orders:
        message = _placed(order)
        yield order.number, Step(message, SAME_MOMENT if order.number % 12 == 1 else "")
        if order.number % 10 == 2:  # noqa: PLR2004 - one in ten
            yield order.number + 0.1, Step(message, AGAIN_AT_ONCE)
        if order.number % 10 == 8:  # noqa: PLR2004 - one in ten
            yield order.number + 15, Step(message, AGAIN_LATER)


def _payments(orders: Iterable[Order]) -> Placed:
    return ((order.number + 6.5, Step(_paid(order))) for order in orders if order.status == "paid")


def _bad(number: int, *, at: int = 0) -> Placed:
    return (
        (at + 1.5, Step(_broken("unreadable bodies", f"unreadable-{number}", "unreadable", cut=20))),
        (at + 2.5, Step(_invalid(number))),
        (at + 3.5, Step(_broken("orders without a message id", None, "missing-message-id", salt=number))),
        (at + 4.5, Step(_broken("events of unknown types", f"unknown-{number}", "unknown-type", "order.invented"))),
    )


def _order(number: int) -> Order:
    lines = tuple(
        (f"SKU-{line}", 1 + (number + line) % 4, 1 + 977 * (number + 31 * line) % 25_000) for line in range(1, 4)
    )
    return Order(number, tuple(CURRENCIES)[number % len(CURRENCIES)], lines[: 1 + number % 3])


def _placed(order: Order) -> Message:
    return Message(
        "orders",
        f"order-{order.number}",
        "order.placed",
        order.id,
        _order_body(order, order.id),
        event="invoice.created",
    )


def _order_body(order: Order, identity: str) -> bytes:
    lines = [
        {"sku": sku, "quantity": quantity, "unit_price": money(price, order.currency)}
        for sku, quantity, price in order.lines
    ]
    return _json(
        order_id=identity,
        customer_id=f"C-{order.number}",
        currency=order.currency,
        lines=lines,
        placed_at="2026-05-04T10:00:00+02:00",
    )


def _paid(order: Order, kind: str = "payments") -> Message:
    body = _payment_body(order.id, order.total, order.currency, f"PAY-{order.number}")
    return Message(kind, f"payment-{order.number}", "order.paid", order.id, body, event="invoice.paid")


def _payment_body(identity: str, units: int, currency: str, reference: str) -> bytes:
    return _json(
        order_id=identity,
        amount=money(units, currency),
        currency=currency,
        payment_reference=reference,
        paid_at="2026-05-04T10:05:00+02:00",
    )


def _cancelled(order: Order) -> Message:
    body = _json(order_id=order.id, reason="changed my mind", cancelled_at="2026-05-04T10:05:00+02:00")
    name = f"cancellation-{order.number}"
    return Message("cancellations", name, "order.cancelled", order.id, body, event="invoice.voided")


def _conflicting(number: int, original: Order) -> Message:
    """Return another order under the id of one that was processed: without an inbox it would get an invoice."""
    other = order_id(f"conflicting-{number}")
    body = _order_body(_order(original.number + 1), other)
    kind = "orders under a used message id"
    return Message(kind, f"order-{original.number}", "order.placed", other, body, "message-id-conflict")


def _wrong_amount(order: Order) -> Message:
    body = _payment_body(order.id, order.total + 1, order.currency, f"WRONG-{order.number}")
    name = f"wrong-amount-{order.number}"
    return Message("payments of a wrong amount", name, "order.paid", order.id, body, "rejected-by-rule")


def _never_ordered(number: int) -> Message:
    name = f"never-ordered-{number}"
    body = _payment_body(order_id(name), 1990, "EUR", name)
    kind = "payments without an order"
    return Message(kind, name, "order.paid", order_id(name), body, "attempts-exhausted")


def _invalid(number: int) -> Message:
    """Return an order whose prices are JSON numbers."""
    name = f"invalid-{number}"
    line = {"sku": "SKU-1", "quantity": 1, "unit_price": 9.95}
    body = _json(
        order_id=order_id(name), customer_id="C", currency="EUR", lines=[line], placed_at="2026-05-04T10:00:00Z"
    )
    return Message("orders with prices as numbers", name, "order.placed", order_id(name), body, "invalid")


def _broken(
    kind: str,
    identity: str | None,
    fate: str,
    event_type: str = "order.placed",
    *,
    salt: int = 0,
    cut: int | None = None,
) -> Message:
    """Return a good order, spoiled in one way: cut off, without id, or of a type that nobody knows."""
    order = order_id(identity or f"without-id-{salt}")
    return Message(kind, identity, event_type, order, _order_body(_order(salt), order)[: cut and -cut], fate)


def _json(**content: object) -> bytes:
    return json.dumps(content).encode()
