"""A PostgreSQL of a test's own, to be stopped, starved and failed over: Debian's binaries, nobody else's server.

The server is a child process: it ends with the test process, whatever kills that. Folders are named after the process
that made them, so that the leftovers of a killed run are found by its dead process.
"""

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import asyncpg

from service.database import migrate
from tests.support.databases import is_alive
from tests.support.ports import free_port
from tests.support.waiting import eventually

PREFIX = "billing-postgres-"
ROLE = DATABASE = "billing"
OWNER = "postgres"
"""The superuser, and the system's user whom the server runs as where the tests run as root."""

StopMode = Literal["fast", "immediate"]
_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "60",
    "shared_buffers": "32MB",
    "fsync": "off",  # these servers crash, the machine does not
}


@dataclass(slots=True)
class OwnPostgres:
    """One server.

    Attributes:
        folder: everything it has: data, socket, log.
        settings: `postgresql.conf`'s, from the command line; taken at the next start.
        environment: beside the tests' own, likewise.
    """

    folder: Path
    port: int
    settings: dict[str, str] = field(default_factory=SETTINGS.copy)
    environment: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The migrated database, as the role that owns it; not a superuser."""
        return f"postgresql://{ROLE}@127.0.0.1:{self.port}/{DATABASE}"

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.folder / "data"

    @property
    def log(self) -> str:
        """What the server has written."""
        return (self.folder / "log").read_text()

    async def start(self) -> None:
        """Start it; return when it takes connections."""
        self._process = self._launched()
        await eventually(self._answers, bool, within=30)

    async def stop(self, mode: StopMode = "fast") -> None:
        """Stop it: `fast` rolls back and says good-bye, `immediate` is a crash. A stopped one stays so."""
        if self._process is not None:
            self._process.send_signal(_SIGNALS[mode])
            await asyncio.to_thread(self._process.wait, 30)
            self._process = None

    async def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start it."""
        await self.stop(mode)
        await self.start()

    async def set(self, name: str, value: str) -> None:
        """Change a setting of the running server, for the sessions that are there, too."""
        await self.sql(f"alter system set {name} = {value}")
        await self.sql("select pg_reload_conf()")

    async def sql(self, statement: str, *, database: str = DATABASE) -> list[Any]:
        """Execute one statement as the superuser, on a connection of its own that may write; return its rows."""
        connection = await asyncpg.connect(
            f"postgresql://{OWNER}@127.0.0.1:{self.port}/{database}",
            timeout=10,
            server_settings={"default_transaction_read_only": "off"},
        )
        try:
            return await connection.fetch(statement)
        finally:
            await connection.close()

    def _launched(self) -> subprocess.Popen[bytes]:
        given = {"unix_socket_directories": str(self.folder), "port": str(self.port)} | self.settings
        options = [argument for name, value in given.items() for argument in ("-c", f"{name}={value}")]
        command = [*as_owner(), program("postgres"), "-D", str(self.data), *options]
        with (self.folder / "log").open("ab") as log:
            environment = os.environ | self.environment
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    async def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"PostgreSQL ended:\n{self.log[-3000:]}"
        try:
            await self.sql("select 1", database="postgres")
        except (OSError, TimeoutError, asyncpg.PostgresError):
            return False
        return True


@asynccontextmanager
async def own_postgres() -> AsyncIterator[OwnPostgres]:
    """Make a server with a migrated database, started; at the end remove it with everything that belongs to it."""
    with _folder() as folder:
        server = OwnPostgres(folder, free_port())
        execute("initdb", "-D", server.data, "-U", OWNER, "--auth=trust", "--locale=C", "--encoding=UTF8", "--no-sync")
        try:
            await server.start()
            await server.sql(f"create role {ROLE} login", database="postgres")
            await server.sql(f"create database {DATABASE} owner {ROLE}", database="postgres")
            await asyncio.to_thread(migrate, server.url)
            yield server
        finally:
            await server.stop("immediate")


@asynccontextmanager
async def standby_of(primary: OwnPostgres) -> AsyncIterator[OwnPostgres]:
    """Make a streaming copy of a server, started; `select pg_promote()` makes it a primary."""
    with _folder() as folder:
        server = OwnPostgres(folder, free_port(), primary.settings.copy())
        address = ("-h", "127.0.0.1", "-p", str(primary.port), "-U", OWNER)
        execute("pg_basebackup", *address, "-D", server.data, "-R", "-X", "stream", "-c", "fast", "--no-sync")
        try:
            await server.start()
            yield server
        finally:
            await server.stop("immediate")


def execute(name: str, *arguments: str | Path) -> None:
    """Run one of PostgreSQL's programs to its end; a failure is an error with what it said."""
    command = (*as_owner(), program(name), *map(str, arguments))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed: {done.stdout} {done.stderr}")


def program(name: str) -> str:
    """Return the path of one of the server's programs, the newest version's; Debian keeps them off the PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda found: int(found.parent.name), reverse=True)
    path = shutil.which(name, path=os.pathsep.join([*map(str, folders), os.environ["PATH"]]))
    if path is None:
        raise RuntimeError(f"PostgreSQL's {name} not found: the package postgresql has it")
    return path


def as_owner() -> tuple[str, ...]:
    """Return what a command of the server starts with: root may not run it, and it ends with its parent."""
    who = ("--reuid", OWNER, "--regid", OWNER, "--init-groups") if os.geteuid() == 0 else ()
    return ("setpriv", *who, "--pdeathsig", "QUIT")


@contextmanager
def _folder() -> Iterator[Path]:
    for leftover in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        if not is_alive(int(leftover.name.removeprefix(PREFIX).split("-")[0])):
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as name:
        if os.geteuid() == 0:
            owner = pwd.getpwnam(OWNER)
            os.chown(name, owner.pw_uid, owner.pw_gid)
        yield Path(name)
