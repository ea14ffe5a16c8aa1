"""The commands `billing parking …`: look at the messages put aside for people, send them again, or throw them away."""

import getpass
import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import asyncpg
import typer
from aio_pika import IncomingMessage
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from service import database
from service.app import consumers, orders_family
from service.console import AsJson, broker_link, fail, read_settings, run_to_the_end
from service.reliability import audit
from service.reliability.audit import Deed
from service.reliability.parking import MOST, REASONS, Parked, Selection, visit
from service.reliability.publisher import ConfirmingPublisher
from service.reliability.replay import EXPLANATIONS, Clerk, Done, Orders, Result
from service.settings import Settings

WIDE = 240
"""Columns of a table in a pipe."""

REDACTED = "[redacted]"

FEW = 20
"""Messages that are told one by one; of more, only how many there were."""

DONE = {Result.REPLAYED, Result.DISCARDED, Result.COMPLETED, Result.ALREADY_PROCESSED, Result.WOULD_BE}
"""Results after which nobody has to do anything more."""

app = typer.Typer(help="The messages put aside for people.", no_args_is_help=True)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _moment(text: str) -> datetime:
    """Return the moment that was so long ago: '90s', '30m', '2h', '7d'."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 30m, 2h or 7d")
    return datetime.now(UTC) - timedelta(seconds=float(found[1]) * _UNITS[found[2]])  # noqa: TID251 - a person's clock


Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Message ids.")]
Reasons = Annotated[list[str] | None, typer.Option("--reason", help=f"Parked for this reason: {', '.join(REASONS)}.")]
Types = Annotated[list[str] | None, typer.Option("--type", help="Of this event type.")]
Older = Annotated[
    datetime | None, typer.Option("--older-than", parser=_moment, metavar="AGE", help="90s, 30m, 2h, 7d.")
]
Newer = Annotated[
    datetime | None, typer.Option("--newer-than", parser=_moment, metavar="AGE", help="90s, 30m, 2h, 7d.")
]
Everything = Annotated[bool, typer.Option("--all", help="Yes, all of them: needed where nothing else chooses.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")]
By = Annotated[str, typer.Option(help="Who does it, for the audit. Default: the user of this computer.")]
Why = Annotated[str, typer.Option(help="Why, for the audit.")]


@app.command("list")
def list_(
    *,
    message_id: Annotated[list[str] | None, typer.Option("--id", help="With this message id.")] = None,
    reason: Reasons = None,
    event_type: Types = None,
    older_than: Older = None,
    newer_than: Newer = None,
    limit: Annotated[int, typer.Option(min=1, help="Messages to show, from the oldest.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """List the parked messages: how many, why, which. Nothing is taken out."""
    settings = read_settings()
    queue = orders_family(settings).parking
    chosen = _selection(message_id, reason, event_type, older_than, newer_than)

    async def look() -> Any:
        async with (
            _visiting(settings),
            broker_link(settings, "billing-parking") as broker,
            visit(broker, queue) as seen,
        ):
            return seen.missing, len(seen.messages), [parked for parked in seen.messages if chosen.has(parked)]

    missing, total, found = run_to_the_end(look())
    if missing:
        print(f"billing: {missing} more are parked: beyond the first {MOST}, or in other hands", file=sys.stderr)
    reasons = dict(Counter(parked.reason for parked in found).most_common())
    shown = found[:limit]
    if as_json:
        messages = [_fields(parked) for parked in shown]
        print(json.dumps({"total": total, "matching": len(found), "reasons": reasons, "messages": messages}))
        return
    counts = ", ".join(f"{name}: {number}" for name, number in reasons.items())
    of_total = "" if chosen.is_everything else f" of {total}"
    print(f"{len(found)}{of_total} parked" + (f" ({counts})" if counts else ""))
    if shown:
        table = Table()
        for heading in ("message id", "type", "reason", "executed", "parked at", "explanation"):
            table.add_column(heading, overflow="fold")
        for parked in shown:
            at = "" if parked.parked_at is None else f"{parked.parked_at:%Y-%m-%dT%H:%M:%S}"
            cells = (parked.message_id, parked.type, parked.reason, parked.attempts, at, parked.explanation)
            table.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))  # a stranger's: no markup
        Console(width=None if sys.stdout.isatty() else WIDE).print(table)
    if len(found) > len(shown):
        print(f"showing the oldest {len(shown)}: see --limit", file=sys.stderr)


@app.command()
def show(
    message_id: Annotated[str, typer.Argument(metavar="ID", help="A message id.")],
    *,
    raw: Annotated[bool, typer.Option(help="Print the body alone, as it is, with nothing left out.")] = False,
) -> None:
    """Show all of a parked message: body, properties and headers, without the BILLING_REDACTED_FIELDS."""
    settings = read_settings()
    queue = orders_family(settings).parking
    chosen = Selection(ids=frozenset({message_id}))

    async def look() -> Any:
        async with (
            _visiting(settings),
            broker_link(settings, "billing-parking") as broker,
            visit(broker, queue, chosen.has) as seen,
        ):
            return list(seen.kept())

    found = run_to_the_end(look())
    if not found:
        fail(f"no parked message has the id {message_id!r}")
    if raw:
        sys.stdout.buffer.write(found[0][1].body)
        return
    documents = [_document(parked, message, frozenset(settings.redacted_fields)) for parked, message in found]
    for document in documents:
        print(json.dumps(document, indent=2, ensure_ascii=False, default=str))


@app.command()
def replay(
    ids: Ids = None,
    *,
    reason: Reasons = None,
    event_type: Types = None,
    older_than: Older = None,
    newer_than: Newer = None,
    everything: Everything = False,
    body: Annotated[
        Path | None, typer.Option(help="Send this file instead of the parked body, under a new id; '-' is stdin.")
    ] = None,
    new_id: Annotated[bool, typer.Option("--new-id", help="Send it under a new message id.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even what was parked before BILLING_REPLAY_HORIZON.")] = False,
    rate: Annotated[float, typer.Option(min=0.1, max=10_000, help="Messages per second at most.")] = 100.0,
    dry_run: DryRun = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Send parked messages to the work queue again, each confirmed before it is removed; exit 1 where one was not.

    Interrupted, it goes on when it is run again; run twice, it has one effect.
    """
    settings = read_settings()
    chosen = _chosen(_selection(ids, reason, event_type, older_than, newer_than), everything)
    if body is not None and len(chosen.ids) != 1:
        raise typer.BadParameter("--body is for exactly one ID")
    try:
        content = None if body is None else (sys.stdin.buffer.read() if str(body) == "-" else body.read_bytes())
    except OSError as error:
        raise typer.BadParameter(f"{body}: {error.strerror}") from None
    deed = Deed("replay", by or _user(), why)
    _carry_out(settings, Orders(deed, content, new_id, force, dry_run, rate), chosen, as_json)


@app.command()
def discard(
    ids: Ids = None,
    *,
    why: Annotated[str, typer.Option(help="Why, for the audit.")],
    reason: Reasons = None,
    event_type: Types = None,
    older_than: Older = None,
    newer_than: Newer = None,
    everything: Everything = False,
    dry_run: DryRun = False,
    by: By = "",
    as_json: AsJson = False,
) -> None:
    """Throw parked messages away for good; the audit keeps their ids and types, not their bodies."""
    settings = read_settings()
    chosen = _chosen(_selection(ids, reason, event_type, older_than, newer_than), everything)
    if not why.strip():
        raise typer.BadParameter("--why must say why")
    _carry_out(settings, Orders(Deed("discard", by or _user(), why), dry_run=dry_run), chosen, as_json)


@dataclass(frozen=True, slots=True)
class _Outcome:
    meant: int
    done: list[Done]


def _carry_out(settings: Settings, orders: Orders, chosen: Selection, as_json: bool) -> None:
    outcome = run_to_the_end(_with_progress(settings, orders, chosen))
    results = Counter(done.result for done in outcome.done)
    if as_json:
        messages = [
            {
                "message_id": done.parked.message_id,
                "result": str(done.result),
                "new_message_id": done.new_message_id,
                "explanation": done.explanation,
            }
            for done in outcome.done
        ]
        print(json.dumps({"results": {str(name): count for name, count in results.items()}, "messages": messages}))
    else:
        for done in outcome.done if len(outcome.done) <= FEW or orders.dry_run else ():
            new = f" as {done.new_message_id}" if done.new_message_id else ""
            told = f": {done.explanation}" if done.explanation else ""
            print(f"{done.parked.message_id or '(no id)'}: {done.result}{new}{told}")
        if results:
            print(", ".join(f"{name}: {count}" for name, count in results.items()))
    for result in results.keys() & EXPLANATIONS.keys():
        print(f"{result}: {EXPLANATIONS[result]}", file=sys.stderr)
    if not outcome.meant:
        fail("no parked message is meant by that")
    if gone := outcome.meant - len(outcome.done):
        fail(f"{gone} messages were gone when their turn came")
    if any(done.result not in DONE for done in outcome.done):
        raise typer.Exit(1)


async def _with_progress(settings: Settings, orders: Orders, chosen: Selection) -> _Outcome:
    family = orders_family(settings)
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(_visiting(settings))
        if connection is None:
            fail("without the database there is no audit: nothing was done")
        broker = await stack.enter_async_context(broker_link(settings, "billing-parking"))
        now = datetime.now(UTC)  # noqa: TID251 - compared with what the broker has kept for days
        publisher = ConfirmingPublisher(broker, settings.confirm_timeout)
        clerk = Clerk(broker, publisher, connection, family, consumers(settings), settings.replay_horizon, now)
        progress = stack.enter_context(Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()))
        bar = progress.add_task(orders.deed.action, total=None)
        meant, done = 0, []
        async for told in clerk.carry_out(orders, chosen):
            if isinstance(told, int):
                meant = told
                progress.update(bar, total=meant)
            else:
                done.append(told)
                progress.advance(bar)
        return _Outcome(meant, done)


@asynccontextmanager
async def _visiting(settings: Settings) -> AsyncIterator[asyncpg.Connection | None]:
    """Be the only one at the parking queue; where the database is away, look all the same, and say so."""
    try:
        connection = await database.connect(settings.database_url.get_secret_value(), "parking")
        await database.require_current_schema(connection)
    except (OSError, TimeoutError, asyncpg.PostgresError):
        print("billing: the database is away: others may be at work in the parking queue", file=sys.stderr)
        yield None
        return
    try:
        async with audit.lock(connection):
            yield connection
    finally:
        await connection.close(timeout=1)


def _selection(
    ids: list[str] | None,
    reasons: list[str] | None,
    types: list[str] | None,
    older_than: datetime | None,
    newer_than: datetime | None,
) -> Selection:
    for reason in reasons or ():
        if reason not in REASONS:
            raise typer.BadParameter(f"{reason!r} is no reason; reasons are {', '.join(REASONS)}")
    return Selection(
        frozenset(ids or ()), frozenset(reasons or ()), frozenset(types or ()), newer_than, parked_before=older_than
    )


def _chosen(selection: Selection, everything: bool) -> Selection:
    if selection.is_everything and not everything:
        raise typer.BadParameter("say which messages: IDs, --reason, --type, --older-than, --newer-than or --all")
    if everything and not selection.is_everything:
        raise typer.BadParameter("--all goes with nothing else that chooses")
    return selection


def _user() -> str:
    return f"{os.environ.get('SUDO_USER') or getpass.getuser()}@{socket.gethostname()}"


def _fields(parked: Parked) -> dict[str, Any]:
    return {
        "message_id": parked.message_id,
        "type": parked.type,
        "reason": parked.reason,
        "parked_at": None if parked.parked_at is None else parked.parked_at.isoformat(),
        "attempts": parked.attempts,
        "exception_type": parked.exception_type,
        "explanation": parked.explanation,
        "bytes": parked.size,
    }


def _document(parked: Parked, message: IncomingMessage, redacted: frozenset[str]) -> dict[str, Any]:
    properties = ("content_type", "content_encoding", "correlation_id", "timestamp", "app_id", "delivery_mode")
    return _fields(parked) | {
        "properties": {name: value for name in properties if (value := getattr(message, name)) is not None},
        "headers": _redact(message.headers or {}, redacted),
        "body": _readable(message.body, redacted),
    }


def _readable(body: bytes, redacted: frozenset[str]) -> Any:
    """Return a body as it may be shown: fields cannot be left out of what is no JSON."""
    try:
        return _redact(json.loads(body), redacted)
    except (ValueError, RecursionError):
        return f"{len(body)} bytes that are no JSON: see --raw"


def _redact(value: Any, redacted: frozenset[str]) -> Any:
    match value:
        case Mapping():
            return {n: REDACTED if n in redacted else _redact(inner, redacted) for n, inner in value.items()}
        case list():
            return [_redact(inner, redacted) for inner in value]
        case _:
            return value
