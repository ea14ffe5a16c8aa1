"""The command line: `billing …`, also `python -m service …`.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings. Results go to stdout, messages for people to stderr.
"""

import asyncio
import json
import shlex
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from uuid import UUID

import structlog
import typer
from aio_pika import DeliveryMode, Message
from rich.console import Console
from rich.table import Table

from service import contract, database, parking, samples
from service.app import Service, orders_family, published_contract, whole_topology
from service.console import AsJson, broker_link, fail, read_settings, run_to_the_end
from service.demo import main as demo_main
from service.demo.errors import DemoError
from service.demo.servers import DATABASE, VHOST, Servers, beside
from service.management import compare
from service.reliability import topology
from service.reliability.comparison import Differences
from service.reliability.definitions import definitions
from service.reliability.errors import ReliabilityError, TopologyError
from service.reliability.publisher import Confirmed, ConfirmingPublisher
from service.settings import Settings, SettingsError, unknown_settings
from service.status import read_status

app = typer.Typer(
    name="billing",
    help="Order events in from RabbitMQ, invoices kept in PostgreSQL, invoice events out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
topology_app = typer.Typer(help="The exchanges and queues on the broker.", no_args_is_help=True)
app.add_typer(topology_app, name="topology")
app.add_typer(parking.app, name="parking")

log = structlog.get_logger(__name__)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except SettingsError as error:
        fail(str(error), code=2)


@app.command()
def run(
    *,
    migrate_first: Annotated[
        bool, typer.Option("--migrate", help="Bring the database schema up to date first.")
    ] = False,
) -> None:
    """Run the service until SIGTERM or Ctrl-C."""
    settings = read_settings(news=True)
    run_to_the_end(_serve(settings, migrate_first=migrate_first))


@app.command()
def migrate() -> None:
    """Bring the database schema to this version; safe to run in several places at once."""
    settings = read_settings()
    try:
        database.migrate(settings.database_url.get_secret_value())
    except ReliabilityError as error:
        fail(str(error))


@app.command()
def status(
    *,
    oldest: Annotated[
        bool, typer.Option("--oldest", help="Look at every parked message, for the age of the oldest.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show queues, outbox and relay; exit 1 with a line for each thing that is wrong.

    Wrong is: a server cannot be asked, a queue is missing, nobody consumes, so much is parked that BILLING_PARKED_ALARM
    rings, dead letters are held, the oldest unsent event is older than BILLING_OUTBOX_ALARM, events wait and no relay
    is active.
    """
    settings = read_settings()
    now = lambda: datetime.now(UTC)  # noqa: E731, TID251 - compared with what the broker has kept for days
    report = run_to_the_end(read_status(settings, orders_family(settings), now, oldest=oldest))
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        table = Table("what", "value")
        for name, value in report.rows():
            table.add_row(name, value)
        Console().print(table)
    for problem in report.problems:
        print(f"billing: {problem}", file=sys.stderr)
    raise typer.Exit(1 if report.problems else 0)


@app.command()
def publish(
    event_type: Annotated[str, typer.Argument(metavar="TYPE", help=f"One of: {', '.join(contract.ORDER_EVENTS)}.")],
    file: Annotated[
        Path | None, typer.Argument(help="The body as JSON; '-' is standard input. Without: a sample.")
    ] = None,
    *,
    count: Annotated[int, typer.Option(min=1, help="How many samples to make, each for an order of its own.")] = 1,
    order_id: Annotated[UUID | None, typer.Option(help="The order that a sample is about. Default: a new one.")] = None,
    message_id: Annotated[str | None, typer.Option(help="Default: a new one.")] = None,
) -> None:
    """Publish order events, each confirmed by the broker; print their message ids.

    The body of a file is sent as it is, so that wrong ones can be tried.
    """
    settings = read_settings()
    if event_type not in contract.ORDER_EVENTS:
        raise typer.BadParameter(f"{event_type!r} is not one of {', '.join(contract.ORDER_EVENTS)}")
    if count > 1 and (file, message_id, order_id) != (None, None, None):
        raise typer.BadParameter("--count makes samples: it goes with neither FILE, --message-id nor --order-id")
    if file is not None and order_id is not None:
        raise typer.BadParameter("--order-id is for samples: a FILE names its order itself")
    try:
        bodies = [_read(file)] if file is not None else [_sample(event_type, order_id) for _ in range(count)]
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}") from None
    run_to_the_end(_publish(settings, event_type, bodies, message_id))


@app.command()
def asyncapi() -> None:
    """Print the AsyncAPI document."""
    try:
        print(published_contract(), end="")
    except FileNotFoundError as error:
        fail(str(error))


@app.command()
def demo(
    *,
    orders: Annotated[int, typer.Option(min=50, max=2000, help="How many orders.")] = 300,
    keep: Annotated[bool, typer.Option(help="Leave an instance running at the end, until Ctrl-C.")] = False,
    database_url: Annotated[str, typer.Option(help=f"Default: {DATABASE} on the configured server.")] = "",
    rabbitmq_url: Annotated[str, typer.Option(help=f"Default: {VHOST} on the configured server.")] = "",
    service_command: Annotated[str, typer.Option(hidden=True, help="What to run instead of this service.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show what the service guarantees: orders, crashes, restarts, an audit; wipes a database and vhost of its own."""
    settings = read_settings()
    try:
        servers = Servers(
            database_url or beside(settings.database_url.get_secret_value(), DATABASE),
            rabbitmq_url or beside(settings.rabbitmq_urls[0], VHOST),
        )
    except DemoError as error:
        fail(str(error), code=2)
    command = shlex.split(service_command) or demo_main.SERVICE
    try:
        holds = run_to_the_end(demo_main.run(demo_main.Options(servers, orders, as_json, keep, command)))
    except DemoError as error:
        fail(str(error))
    raise typer.Exit(0 if holds else 1)


@topology_app.command("apply")
def topology_apply() -> None:
    """Declare the exchanges and queues; exit 1 where something exists with other properties."""
    run_to_the_end(_apply(read_settings()))
    print("topology declared", file=sys.stderr)


@topology_app.command("check")
def topology_check() -> None:
    """Compare without changing any; exit 1 with a line for each difference and what to do about it.

    With BILLING_RABBITMQ_MANAGEMENT_URL, policies, bindings and replicas are compared, too.
    """
    settings = read_settings()
    found, uncompared = run_to_the_end(_compare(settings))
    for line in uncompared:
        print(f"not compared: {line}", file=sys.stderr)
    for line in found.warnings:
        print(f"warning: {line}", file=sys.stderr)
    if found.problems:
        fail("\n".join(found.problems))
    print("what was compared is as wanted" if uncompared else "topology is as wanted", file=sys.stderr)


@topology_app.command("export")
def topology_export(
    *,
    file: Annotated[Path | None, typer.Option(dir_okay=False, help="Where to write it. Default: stdout.")] = None,
) -> None:
    """Print broker definitions for the virtual host: everything but a queue's type is a policy there.

    For those who manage queues centrally, with BILLING_TOPOLOGY=verify: rabbitmqctl import_definitions FILE.
    """
    settings = read_settings()
    text = json.dumps(definitions(whole_topology(orders_family(settings)), settings.vhost), indent=2)
    if file is None:
        print(text)
        return
    try:
        file.write_text(text + "\n")
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}") from None


async def _serve(settings: Settings, *, migrate_first: bool) -> None:
    service = Service(settings)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        service.stopping.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # a second signal ends the process at once

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    for name, nearest in unknown_settings().items():
        log.warning("setting_unknown", name=name, meant=nearest)
    await service.run(migrate_first=migrate_first)


async def _publish(settings: Settings, event_type: str, bodies: list[bytes], message_id: str | None) -> None:
    async with broker_link(settings, "billing-cli") as link:
        publisher = ConfirmingPublisher(link, settings.confirm_timeout)
        for body in bodies:
            message = Message(
                body,
                content_type="application/json",
                delivery_mode=DeliveryMode.PERSISTENT,
                message_id=message_id or samples.new_message_id(),
                type=event_type,
                app_id="billing-cli",
            )
            publication = await publisher.publish(message, contract.ORDERS_EXCHANGE, event_type)
            if not isinstance(publication, Confirmed):
                fail(f"{type(publication).__name__.lower()}: {publication.explanation}")
            print(message.message_id)


async def _apply(settings: Settings) -> None:
    async with broker_link(settings, "billing-topology") as link:
        await topology.declare(link, whole_topology(orders_family(settings)))


async def _compare(settings: Settings) -> tuple[Differences, list[str]]:
    """Return what is other than wanted, and what could not be compared."""
    wanted, management = whole_topology(orders_family(settings)), settings.rabbitmq_management_url
    declared = settings.topology == "declare"
    found, uncompared = Differences(), []
    async with broker_link(settings, "billing-topology") as link:
        try:
            if management is None and declared:
                uncompared = await topology.check(link, wanted)
            else:
                await topology.verify(link, wanted)
        except TopologyError as error:
            found.problems = str(error).splitlines()
    if management is None:
        if not declared:
            uncompared.append("arguments, with TOPOLOGY=verify: they may be policies as well")
        return found, [*uncompared, "bindings, policies, replicas: BILLING_RABBITMQ_MANAGEMENT_URL is not set"]
    told = await compare(management.get_secret_value(), settings.vhost, wanted, declared=declared)
    told.problems = list(dict.fromkeys(found.problems + told.problems))
    return told, uncompared


def _sample(event_type: str, order_id: UUID | None) -> bytes:
    return samples.body(event_type, None if order_id is None else str(order_id))


def _read(file: Path) -> bytes:
    return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
