"""What starts the service again when it dies."""

import signal
from pathlib import Path

from tests.support.process import ServiceProcess


class Supervisor:
    """Starts the service again whenever it dies, as an operating system does; counts how often."""

    def __init__(self, environment: dict[str, str], log: Path, variant: str = "killer") -> None:
        arguments = ("-m", "tests.support.stopped_at", "never", variant)
        self.service = ServiceProcess(environment, log, arguments).start()
        self.crashes = 0

    async def look(self) -> None:
        """Start it again if it is dead: killed, for it must not end in any other way."""
        if not self.service.is_running():
            assert self.service.process is not None
            assert self.service.process.returncode == -signal.SIGKILL, self.service.log[-3000:]
            self.crashes += 1
            self.service.start()
