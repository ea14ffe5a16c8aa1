"""Instances of the service as operating-system processes, known by their public face: environment, signals, HTTP, log.

None outlives the demo: the kernel kills them when it dies, whatever kills it.
"""

import ctypes
import http.client
import json
import os
import signal
import subprocess
import time
from asyncio import gather, to_thread
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from service.demo.errors import StalledError
from service.demo.servers import Servers
from service.demo.waiting import eventually

MAX_ATTEMPTS = 5
RETRY_DELAYS = "0.5,1"
"""Seconds."""

SHUTDOWN_TIMEOUT = 10.0
"""Seconds."""

START_TIMEOUT = 30.0
"""Seconds until an instance is ready; two or three are usual."""

_PROJECT = Path(__file__).resolve().parents[2]
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_the_demo() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True)
class Instance:
    """One instance, started when it is made."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    log_path: Path
    process: subprocess.Popen[bytes] = field(init=False)
    expected_to_run: bool = True

    def __post_init__(self) -> None:
        """Start it; its folder is the log's, so that no .env is read."""
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603 - this service, or what the command line names
                [*self.command, "run", "--migrate"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.log_path.parent,
                process_group=0,  # Ctrl-C is the demo's, which stops its instances in order
                preexec_fn=_die_with_the_demo,  # noqa: PLW1509 - nothing but one system call
            )

    def require_running(self) -> None:
        """Raise StalledError where it has ended although nobody asked."""
        if self.expected_to_run and self.process.poll() is not None:
            raise StalledError(f"the {self.name} instance ended with {self.process.returncode}, see {self.log_path}")

    def records(self, event: str) -> list[dict[str, Any]]:
        """Return the log records of an event."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [record for record in records if record.get("event") == event]

    def tail(self, lines: int = 8) -> str:
        """Return the end of its log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    @property
    def port(self) -> int | None:
        """Where it listens; None before it does."""
        started = self.records("http_started")
        return int(started[-1]["port"]) if started else None

    async def ready(self) -> None:
        """Wait until `/readyz` says yes."""

        async def ask() -> bool:
            self.require_running()
            return self.port is not None and await to_thread(_is_ready, self.port)

        if not await eventually(ask, bool, within=START_TIMEOUT, every=0.1):
            raise StalledError(f"the {self.name} instance was not ready within {START_TIMEOUT:g} s")

    async def terminate(self) -> tuple[int | None, float]:
        """Send SIGTERM; return the exit code and how many seconds it took; None where it had to be killed."""
        self.expected_to_run = False
        start = time.monotonic()
        self.process.terminate()

        async def poll() -> int | None:
            return self.process.poll()

        code = await eventually(poll, lambda code: code is not None, within=SHUTDOWN_TIMEOUT + 2, every=0.02)
        took = time.monotonic() - start
        self.kill()
        return code, took

    def freeze(self, *, on: bool) -> None:
        """Stop it where it is (SIGSTOP), or let it go on."""
        self.process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.expected_to_run = False
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(5)


@dataclass(slots=True)
class Instances:
    """Starts instances and knows all of them; kills what is left when it is closed."""

    servers: Servers
    command: Sequence[str]
    folder: Path
    started: list[Instance] = field(default_factory=list)

    def start(self, name: str, **settings: str) -> Instance:
        """Start one more."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("BILLING_")}
        environment = inherited | self.settings | {f"BILLING_{key}": value for key, value in settings.items()}
        instance = Instance(name, self.command, environment, self.folder / f"{len(self.started) + 1}-{name}.log")
        self.started.append(instance)
        return instance

    @property
    def settings(self) -> dict[str, str]:
        """What is set for every instance: short delays, few connections, a free port, a log for programs."""
        return {
            "PYTHONPATH": str(_PROJECT),
            "BILLING_DATABASE_URL": self.servers.database_url,
            "BILLING_RABBITMQ_URL": self.servers.rabbitmq_url,
            "BILLING_CONCURRENCY": "8",  # the server may have a hundred connections for everybody
            "BILLING_MAX_ATTEMPTS": str(MAX_ATTEMPTS),
            "BILLING_RETRY_DELAYS": RETRY_DELAYS,
            "BILLING_RELAY_POLL_INTERVAL": "0.2",
            "BILLING_SHUTDOWN_TIMEOUT": f"{SHUTDOWN_TIMEOUT:g}",
            "BILLING_HTTP_PORT": "0",
            "BILLING_LOG_FORMAT": "json",
        }

    def require_running(self) -> None:
        """Raise StalledError where one has ended although nobody asked."""
        for instance in self.started:
            instance.require_running()

    def records(self, event: str) -> list[dict[str, Any]]:
        """Return the log records of an event, of all instances."""
        return [record for instance in self.started for record in instance.records(event)]

    async def close(self) -> None:
        """Stop what still runs with SIGTERM, and kill what does not stop."""
        try:
            await gather(*(one.terminate() for one in self.started if one.process.poll() is None))
        finally:
            for instance in self.started:
                instance.kill()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()
