"""Runs the demo: an empty place, the scenario, the audit, the report; stops everything, whatever happens."""

import asyncio
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from service.demo.auditor import auditor
from service.demo.checks import Evidence, checks, rows
from service.demo.errors import DemoError, StalledError
from service.demo.orders import SAME_MOMENT, make_streams
from service.demo.process import RETRY_DELAYS, Instances
from service.demo.producer import producer
from service.demo.report import Report, tell, teller
from service.demo.scenario import Scenario
from service.demo.servers import Servers, emptied, shown
from service.demo.waiting import pause

SERVICE = (sys.executable, "-m", "service")

FIRST_PORT = 8000


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    servers: Servers
    orders: int
    as_json: bool
    keep: bool
    command: Sequence[str] = SERVICE


async def run(options: Options) -> bool:
    """Run the demo and print its result; tell whether everything holds.

    Raises:
        DemoError: it could not be run; one line.
    """
    start = time.monotonic()
    _stop_on_signals()
    try:
        async with emptied(options.servers):
            return await _judged(options, start)
    except asyncio.CancelledError:
        raise DemoError("stopped") from None
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DemoError(f"PostgreSQL: {type(error).__name__}: {error}") from error


async def _judged(options: Options, start: float) -> bool:
    """Play, print the result, keep an instance where that is wanted; the logs of a success are removed."""
    instances = Instances(options.servers, options.command, Path(tempfile.mkdtemp(prefix="billing-demo-")))
    try:
        report = await _played(options, instances, start)
        report.show(as_json=options.as_json)
        if options.keep:
            await _kept(instances)
    finally:
        await instances.close()
    if report.ok:
        shutil.rmtree(instances.folder)
    return report.ok


async def _played(options: Options, instances: Instances, start: float) -> Report:
    """Play the scenario and audit what is there then, also where the service stalled."""
    streams = make_streams(options.orders)
    stalled, tail = "", ""
    async with AsyncExitStack() as stack:
        told = stack.enter_context(teller(sum(1 + (step.copy == SAME_MOMENT) for step in streams.steps)))
        told.say(
            f"database {options.servers.database}, virtual host {options.servers.vhost}, logs in {instances.folder}"
        )
        sending = await stack.enter_async_context(producer(options.servers, told.advance))
        audit = await stack.enter_async_context(auditor(options.servers))
        scenario = Scenario(streams, instances, sending, audit, told.say)
        try:
            await scenario.play()
        except StalledError as error:
            stalled, tail = str(error), _tail(instances)
        if not scenario.started:
            raise DemoError("\n".join(filter(None, (stalled, tail, f"The service's logs: {instances.folder}"))))
        evidence = Evidence(
            streams.orders,
            sending.confirmed,
            sending.copies,
            scenario.faults,
            await audit.look(),
            _failed_executions(instances),
        )
    seconds = time.monotonic() - start
    return Report(rows(evidence), checks(evidence), seconds, str(instances.folder), stalled, tail)


def _failed_executions(instances: Instances) -> Counter[str]:
    """Return how often the logs tell of a failed execution, by message id."""
    records = instances.records("message_retried") + instances.records("message_parked")
    return Counter(str(record.get("message_id")) for record in records)


def _tail(instances: Instances) -> str:
    """Return the end of the log of the instance that died, else of the one that was started last."""
    died = [one for one in instances.started if one.expected_to_run and one.process.poll() is not None]
    return "\n".join(f"    {line}" for one in (died or instances.started)[-1:] for line in one.tail().splitlines())


async def _kept(instances: Instances) -> None:
    """Keep one instance running until Ctrl-C, and say where to look."""
    instance = instances.start("kept", HTTP_PORT=str(_free_port()))
    try:
        await instance.ready()
        servers = instances.servers
        web = f"http://127.0.0.1:{instance.port}"
        lines = (
            f"{web}/readyz  {web}/metrics  {web}/asyncapi",
            f"database {servers.database}, virtual host {servers.vhost}; to ask them:",
            f"export BILLING_DATABASE_URL={shown(servers.database_url)} BILLING_RETRY_DELAYS={RETRY_DELAYS}",
            f"export BILLING_RABBITMQ_URL={shown(servers.rabbitmq_url)}",
            f"{shlex.join(instances.command)} status; {shlex.join(instances.command)} parking list",
            "psql $BILLING_DATABASE_URL -c 'select status, currency, sum(total) from invoices group by 1, 2'",
            "Ctrl-C ends it.",
        )
        for line in lines:
            tell(line)
        while True:
            instance.require_running()
            await pause(0.5)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()  # Ctrl-C is how this is meant to end


def _free_port() -> int:
    for port in range(FIRST_PORT, FIRST_PORT + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    return 0


def _stop_on_signals() -> None:
    task = asyncio.current_task()
    if task is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
