"""What was sent against what was found: pure. Every expectation comes from `orders`, by its own arithmetic."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from service.demo.auditor import Arrival, Findings
from service.demo.orders import OVERTAKING, PROCESSED, Message, Order, Step, money
from service.demo.process import MAX_ATTEMPTS, SHUTDOWN_TIMEOUT
from service.demo.scenario import Faults

STATUS_AFTER = {"invoice.paid": "paid", "invoice.voided": "void"}


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of messages: how many were sent, what should and what did become of them."""

    kind: str
    sent: int
    expected: str
    found: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a guarantee promises, with what was counted; it holds where there are no problems."""

    guarantee: str
    promise: str
    counted: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a verdict rests on.

    Attributes:
        confirmed: every message as often as the broker confirmed it, in that order.
        executions: how many failed executions the service's logs tell of, by message id.
    """

    orders: Sequence[Order]
    confirmed: Sequence[Message]
    copies: Sequence[Step]
    faults: Faults
    found: Findings
    executions: Mapping[str, int]

    @property
    def messages(self) -> list[Message]:
        """The messages, each once."""
        return list(dict.fromkeys(self.confirmed))

    @property
    def effects(self) -> list[Message]:
        """The messages that must have an effect."""
        return [message for message in self.messages if message.event]

    @property
    def expected_invoices(self) -> dict[str, tuple[str, str, str]]:
        """Total, currency and state of the invoice of each order, by what was sent about it."""
        events: dict[str, set[str]] = defaultdict(set)
        for message in self.effects:
            events[message.order_id].add(message.event)
        return {
            order.id: (money(order.total, order.currency), order.currency, _status(events[order.id]))
            for order in self.orders
            if "invoice.created" in events[order.id]
        }

    @property
    def causes(self) -> Counter[str]:
        """How many events each message id has caused."""
        return Counter(_cause(row) for row in self.found.outbox)


def rows(evidence: Evidence) -> list[Row]:
    """Return what became of what was sent."""
    return [*_originals(evidence), *_copies(evidence)]


def checks(evidence: Evidence) -> list[Check]:
    """Return what each guarantee comes to."""
    return [
        *_nothing_lost(evidence),
        *_one_effect(evidence),
        *_events(evidence),
        *_failures(evidence),
        _order(evidence),
        _stops(evidence),
    ]


def _originals(evidence: Evidence) -> Iterable[Row]:
    kinds: dict[str, list[Message]] = defaultdict(list)
    for message in evidence.messages:
        kinds[message.kind].append(message)
    for kind, messages in sorted(kinds.items(), key=lambda kind: kind[1][0].fate != PROCESSED):  # good ones first
        outcomes = {message: evidence.found.outcome(message.id, message.body) for message in messages}
        fate, event = messages[0].fate, messages[0].event
        yield Row(
            kind,
            len(messages),
            f"processed, {event}" if fate == PROCESSED else f"parked: {fate}",
            ", ".join(f"{number} {outcome}" for outcome, number in Counter(outcomes.values()).most_common()),
            (
                *(f"{m.name}: {outcome}, not {m.fate}" for m, outcome in outcomes.items() if outcome != m.fate),
                *(f"{m.name}: parked under another message id" for m in messages if _lost_its_id(evidence.found, m)),
            ),
        )


def _lost_its_id(found: Findings, message: Message) -> bool:
    return bool(message.id) and any(parked.id != message.id for parked in found.parked.get(message.body, ()))


def _copies(evidence: Evidence) -> Iterable[Row]:
    causes = evidence.causes
    kinds: dict[str, list[Message]] = defaultdict(list)
    for step in evidence.copies:
        kinds[step.copy].append(step.message)
    for kind, messages in kinds.items():
        wrong = [
            f"{m.name}: {evidence.found.inbox.get(m.name, 0)} inbox rows, {causes[m.name]} events, not one of each"
            for m in messages
            if (evidence.found.inbox.get(m.name), causes[m.name]) != (1, 1)
        ]
        found = f"{len(messages) - len(wrong)} without an effect"
        yield Row(kind, len(messages), "recognised", found, tuple(wrong))


def _nothing_lost(evidence: Evidence) -> Iterable[Check]:
    found, faults = evidence.found, evidence.faults
    lost = [m.name for m in evidence.messages if found.outcome(m.id, m.body) == "nothing"]
    unknown = found.inbox.keys() - {m.id for m in evidence.messages}
    unknown |= {str(p.id) for body, ps in found.parked.items() for p in ps if body not in _bodies(evidence.messages)}
    parked, copies = sum(m.body in found.parked for m in evidence.messages), sum(map(len, found.parked.values()))
    processed = sum(found.outcome(m.id, m.body) == PROCESSED for m in evidence.messages)
    yield Check(
        "G1",
        "every message that was sent is processed or parked",
        f"{len(evidence.messages)} sent = {processed} processed + {parked} parked, in {copies} copies",
        (*(f"{name}: neither" for name in lost), *(f"{name}: was never sent" for name in sorted(unknown))),
    )
    yield Check(
        "G1",
        "nothing is left in the work queue and the wait queues",
        f"{sum(found.depths.values())} messages",
        tuple(f"{queue}: {depth} messages" for queue, depth in found.depths.items() if depth),
    )
    yield Check(
        "G1",
        "kill -9 of the only instance, in the middle of work",
        f"{faults.unprocessed} unprocessed, {faults.unsent} events unsent, {faults.while_dead} sent while dead",
        () if faults.unprocessed and faults.while_dead else ("nothing was in flight",),
    )


def _one_effect(evidence: Evidence) -> Iterable[Check]:
    found = evidence.found
    expected = evidence.expected_invoices
    names = {order.id: f"order-{order.number}" for order in evidence.orders}
    yield Check(
        "G2",
        "one invoice for each order, total and state right",
        f"{len(found.invoices)} invoices: {_sums(found)}",
        (
            *(f"{names[order]}: no invoice" for order in expected.keys() - found.invoices.keys()),
            *(f"order {order}: an invoice that must not be" for order in found.invoices.keys() - expected.keys()),
            *(
                f"{names[order]}: an invoice of {_plain(found.invoices[order])}, not {total} {currency} {status}"
                for order, (total, currency, status) in expected.items()
                if order in found.invoices and _plain(found.invoices[order]) != f"{total} {currency} {status}"
            ),
        ),
    )
    yield Check(
        "G2",
        "one inbox row for each processed message, none for a parked one",
        f"{sum(found.inbox.values())} rows",
        _differences(Counter(m.name for m in evidence.effects), Counter(found.inbox), "inbox rows"),
    )
    yield Check(
        "G2",
        "one event in the outbox for each effect",
        f"{len(found.outbox)} events",
        _differences(Counter(m.name for m in evidence.effects), evidence.causes, "events"),
    )


def _events(evidence: Evidence) -> Iterable[Check]:
    found, faults = evidence.found, evidence.faults
    expected = {(m.event, m.name) for m in evidence.effects}
    stored = {str(row["id"]): (row["type"], _cause(row)) for row in found.outbox}
    arrived = {arrival.id: (arrival.type, arrival.causation_id) for arrival in found.arrivals}
    yield Check(
        "G3",
        "what arrived is what the outbox has and what must be",
        f"{len(arrived)} events in {len(found.arrivals)} copies",
        (
            *(f"{_told(stored[i])}: did not arrive" for i in stored.keys() - arrived.keys()),
            *(f"{_told(arrived[i])}: arrived and is not in the outbox" for i in arrived.keys() - stored.keys()),
            *(f"{_told(event)}: does not exist" for event in expected - set(arrived.values())),
            *(f"{_told(event)}: must not exist" for event in set(arrived.values()) - expected),
        ),
    )
    yield Check(
        "G3",
        "all are recorded as sent, once the broker had them",
        f"{sum(row['sent_at'] is not None for row in found.outbox)} sent",
        tuple(f"{_told(stored[str(row['id'])])}: {row['last_error']}" for row in found.outbox if not row["sent_at"]),
    )
    yield Check(
        "G3",
        "each says what its invoice says",
        f"{len(found.arrivals)} compared",
        tuple(p for arrival in found.arrivals for p in _event_problems(arrival.type, arrival.content, found.invoices)),
    )
    yield Check(
        "G3",
        "each is persistent and says what caused it",
        f"{len(found.arrivals)} compared",
        tuple(
            f"{arrival.type} {arrival.id}: {name} is {arrival.properties[name]!r}, not {wanted!r}"
            for arrival in found.arrivals
            for name, wanted in _properties(arrival).items()
            if arrival.properties[name] != wanted
        ),
    )
    yield Check(
        "G3",
        "events nobody takes stay, with the reason, and leave later",
        f"{faults.returned} unroutable, {faults.refused} refused",
        tuple(
            f"no event was held as {what}"
            for what, number in (("unroutable", faults.returned), ("refused", faults.refused))
            if not number
        ),
    )


def _properties(arrival: Arrival) -> dict[str, Any]:
    """Return what the contract says of an event whose cause had no correlation id."""
    return {
        "delivery_mode": 2,
        "content_type": "application/json",
        "app_id": "billing",
        "correlation_id": arrival.causation_id,
        "schema-version": 1,
        "timestamp": True,
    }


def _failures(evidence: Evidence) -> Iterable[Check]:
    exhausted = [m for m in evidence.messages if m.fate == "attempts-exhausted"]
    early = [m.name for m in evidence.messages if m.kind == OVERTAKING]
    told = {m.name: [p.attempts for p in evidence.found.parked.get(m.body, ())] for m in exhausted}
    yield Check(
        "G5",
        f"a failing message is executed {MAX_ATTEMPTS} times, then parked",
        f"{sum(evidence.executions.get(name, 0) for name in told)} executions of {len(exhausted)} messages",
        (
            *(
                f"{name}: {evidence.executions.get(name, 0)} executions, parked with attempts {attempts}"
                for name, attempts in told.items()
                if attempts != [MAX_ATTEMPTS] or evidence.executions.get(name) != MAX_ATTEMPTS
            ),
            *(f"{name}: did not overtake its order" for name in early if not evidence.executions.get(name)),
        ),
    )
    messages = evidence.messages
    bad = [number for number, message in enumerate(messages) if message.fate != PROCESSED]
    behind = [m for m in messages[bad[0] if bad else 0 :] if m.fate == PROCESSED]
    stuck = [m.name for m in behind if m.name not in evidence.found.inbox]
    yield Check(
        "G6",
        "bad messages stop no good one",
        f"{len(behind) - len(stuck)} processed behind the first of {len(bad)} bad ones",
        tuple(f"{name}: not processed" for name in stuck),
    )


def _order(evidence: Evidence) -> Check:
    sequences = {str(row["id"]): row["sequence"] for row in evidence.found.outbox}
    first_copies: dict[str, Arrival] = {}
    for arrival in evidence.found.arrivals:
        first_copies.setdefault(arrival.id, arrival)
    last: dict[str, int] = {}
    problems = []
    for arrival in first_copies.values():
        order, sequence = str(arrival.content["order_id"]), sequences.get(arrival.id, 0)
        if sequence < last.get(order, 0):
            problems.append(f"order {order}: {arrival.type} arrived too late")
        last[order] = sequence
    several = sum(number > 1 for number in Counter(row["key"] for row in evidence.found.outbox).values())
    return Check("G8", "events of one order arrive in commit order", f"{several} orders of several", tuple(problems))


def _stops(evidence: Evidence) -> Check:
    stops = evidence.faults.stops
    times = " and ".join(f"{seconds:.1f} s" for _, seconds in stops)
    problems = [f"SIGTERM: exit {code} in {s:.1f} s" for code, s in stops if code != 0 or s > SHUTDOWN_TIMEOUT]
    if not evidence.faults.while_rolling:
        problems.append("nothing was published during the rolling restart")
    return Check(
        "G9",
        f"rolling restart: SIGTERM ends with 0 within {SHUTDOWN_TIMEOUT:g} s",
        f"{times or 'no stop'}; {evidence.faults.while_rolling} messages sent meanwhile",
        tuple(problems),
    )


def _bodies(messages: Iterable[Message]) -> set[bytes]:
    return {message.body for message in messages}


def _cause(row: Mapping[str, object]) -> str:
    headers = row["headers"]
    return str(headers.get("causation-id")) if isinstance(headers, dict) else ""


def _told(event: tuple[str, str]) -> str:
    return f"{event[0]} of {event[1]}"


def _status(events: set[str]) -> str:
    return next((status for event, status in STATUS_AFTER.items() if event in events), "issued")


def _sums(found: Findings) -> str:
    sums: dict[str, Decimal] = defaultdict(Decimal)
    for invoice in found.invoices.values():
        sums[invoice["currency"]] += invoice["total"]
    return ", ".join(f"{amount:f} {currency}" for currency, amount in sorted(sums.items()))


def _event_problems(
    event_type: str, content: Mapping[str, Any], invoices: Mapping[str, Mapping[str, Any]]
) -> Iterable[str]:
    invoice = invoices.get(str(content["order_id"]))
    if invoice is None:
        yield f"{event_type} of order {content['order_id']}: there is no such invoice"
        return
    wanted = {"invoice_id": str(invoice["id"]), "customer_id": invoice["customer_id"]}
    if event_type != "invoice.voided":
        wanted |= {"currency": invoice["currency"], "total": str(invoice["total"])}
    different = [name for name, value in wanted.items() if content.get(name) != value]
    if invoice["status"] != STATUS_AFTER.get(event_type, invoice["status"]):
        different.append("status")
    if different:
        yield f"{event_type} of order {content['order_id']}: other {', '.join(different)}"


def _differences(expected: Counter[str], found: Counter[str], what: str) -> tuple[str, ...]:
    return tuple(
        f"{name}: {found[name]} {what}, not {expected[name]}"
        for name in sorted(expected.keys() | found.keys())
        if expected[name] != found[name]
    )


def _plain(invoice: Mapping[str, Any]) -> str:
    return f"{invoice['total']} {invoice['currency']} {invoice['status']}"
