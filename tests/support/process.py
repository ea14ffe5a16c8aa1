"""The service as a subprocess, known by its public face: environment, signals, HTTP, log lines on stderr."""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.waiting import eventually

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_the_test() -> None:
    """Be killed when the test process is, whatever kills it: an orphan would go on eating messages."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


STARTED: list["ServiceProcess"] = []
"""Every process started: a fixture kills what a test left running, or it would eat the next test's messages."""


@dataclass(slots=True)
class ServiceProcess:
    """One instance of the service.

    Attributes:
        environment: the `BILLING_*` settings.
        log_path: where stderr goes; JSON lines.
        arguments: what to run: the service, or its variant that stops at a barrier.
        folder: of the code that is run.
    """

    environment: dict[str, str]
    log_path: Path
    arguments: tuple[str, ...] = ("-m", "service", "run")
    folder: Path = Path(__file__).parents[2]
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> "ServiceProcess":
        """Start it, appending to its log."""
        STARTED.append(self)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.arguments],
                env={"PATH": os.environ["PATH"], "BILLING_LOG_FORMAT": "json", "BILLING_HTTP_PORT": "0"}
                | self.environment,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=_die_with_the_test,  # noqa: PLW1509 - nothing but one system call
            )
        return self

    @property
    def log(self) -> str:
        """Everything it has written."""
        return self.log_path.read_text()

    def records(self, event: str) -> list[dict[str, Any]]:
        """Return the log records of an event."""
        records = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [record for record in records if record.get("event") == event]

    async def logged(self, event: str, *, times: int = 1, within: float = 20.0) -> list[dict[str, Any]]:
        """Wait until an event was logged so many times; return its records."""

        async def read() -> list[dict[str, Any]]:
            assert self.is_running(), f"the service ended:\n{self.log[-3000:]}"
            return self.records(event)

        return await eventually(read, lambda found: len(found) >= times, within=within)

    def is_running(self) -> bool:
        """Tell whether the process is alive."""
        return self.process is not None and self.process.poll() is None

    async def get(self, path: str) -> httpx.Response:
        """Ask the instance over HTTP."""
        port = (await self.logged("http_started"))[-1]["port"]
        async with httpx.AsyncClient(timeout=10) as client:
            return await client.get(f"http://127.0.0.1:{port}{path}")

    async def ready(self, *, within: float = 30.0) -> "ServiceProcess":
        """Wait until `/readyz` says yes."""

        async def ask() -> int:
            assert self.is_running(), f"the service ended:\n{self.log[-3000:]}"
            try:
                return (await self.get("/readyz")).status_code
            except httpx.HTTPError:
                return 0

        await eventually(ask, lambda code: code == httpx.codes.OK, within=within, every=0.1)
        return self

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    async def stop(self, *, within: float = 30.0) -> int:
        """Send SIGTERM; return the exit code."""
        if self.is_running():
            self.signal(signal.SIGTERM)
        return await self.wait(within=within)

    async def wait(self, *, within: float = 30.0) -> int:
        """Wait for the end; return the exit code."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, within)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.wait(10)
