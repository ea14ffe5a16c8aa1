"""A RabbitMQ node of a test's own, to be stopped, killed, restarted and alarmed; of the version that tests run against.

It lives in a mount and a process namespace of its own, which end with the process that made it, whatever kills that:
no node is left behind, and SIGKILL reaches its beam at once. Needs root, as `scripts/broker` does.
"""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from os import getpid
from pathlib import Path

import aio_pika

from tests.support.databases import is_alive
from tests.support.debian_folder import ALONE
from tests.support.ports import free_port
from tests.support.rabbit import BROKER, PASSWORD, USER, Broker, folder_of
from tests.support.waiting import eventually

VHOST = "billing"
PREFIX = "own-"
PATIENCE = 90.0
"""Seconds for a node to come up or to end."""

_START = """
root=$1; shift
[ "$root" = / ] || mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "$@"
"""

_numbers = count(1)


@dataclass(slots=True)
class OwnBroker:
    """One node.

    Attributes:
        broker: its address and how to administer it.
        root: `/`, or the Debian folder with the version's packages.
        name: of the node and of its folder.
        dist_port: for other nodes and `rabbitmqctl`.
        conf: further lines of rabbitmq.conf; read at each start.
        management_port: of the management interface; None where it is not wanted.
    """

    broker: Broker
    root: Path
    name: str
    dist_port: int
    conf: list[str] = field(default_factory=list)
    management_port: int | None = None
    process: subprocess.Popen[bytes] | None = None

    def url(self, vhost: str = VHOST) -> str:
        """Return the address of a virtual host; the default one exists."""
        return self.broker.url(vhost)

    @property
    def management_url(self) -> str:
        """Return the address of the management interface, where it was asked for."""
        return f"http://{USER}:{PASSWORD}@127.0.0.1:{self.management_port}"

    @property
    def folder(self) -> Path:
        """Everything that it writes, logs too."""
        return self.root / "var/lib/rabbitmq" / self.name

    async def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl on this node; a failure is an error with what it said."""
        return await asyncio.to_thread(self.broker.ctl, *arguments)

    async def start(self) -> None:
        """Start it and wait until it takes connections; a quorum queue may need some more seconds for its leader."""
        self._launch()
        await eventually(self._answers, bool, within=PATIENCE)

    async def stop(self) -> None:
        """Stop it as an administrator does."""
        process, self.process = self.process, None
        assert process is not None, "it does not run"
        await self.ctl("stop")
        await asyncio.to_thread(process.wait, PATIENCE)

    async def kill(self) -> None:
        """End it with SIGKILL.

        RabbitMQ writes a new quorum queue's name down some seconds after it was declared; killed before that, it loses
        the queue's messages, confirmed or not. Tests declare and kill in one breath, services do not.
        """
        await self.ctl("eval", "[dets:sync(Table) || Table <- dets:all()].")
        await self._end()

    async def restart(self) -> None:
        """Stop and start it."""
        await self.stop()
        await self.start()

    async def alarm(self, on: bool) -> None:
        """Raise or clear the memory alarm: while it is on, nobody who publishes is read from."""
        await self.ctl("set_vm_memory_high_watermark", "0.0000001" if on else "0.8")

    def _launch(self) -> None:
        assert self.process is None, "it runs already"
        self._configure()
        at = f"/var/lib/rabbitmq/{self.name}"
        settings = {
            "CONF_ENV_FILE": "/dev/null",
            "CONFIG_FILE": f"{at}/rabbitmq.conf",
            "ENABLED_PLUGINS_FILE": f"{at}/plugins",
            "NODENAME": f"{self.name}@localhost",
            "DIST_PORT": str(self.dist_port),
            "MNESIA_BASE": at,
            "LOG_BASE": at,
            "PID_FILE": f"{at}/pid",
            "SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        command = [*ALONE, _START, "sh", str(self.root), "ERL_EPMD_ADDRESS=127.0.0.1"]
        command += [f"RABBITMQ_{name}={value}" for name, value in settings.items()]
        command += ["rabbitmq-server"] if self.root == Path("/") else ["chroot", str(self.root), "rabbitmq-server"]
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def _configure(self) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "plugins").write_text("[rabbitmq_management].\n" if self.management_port else "[].\n")
        lines = [
            f"listeners.tcp.default = 127.0.0.1:{self.broker.port}",
            f"default_vhost = {VHOST}",
            f"default_user = {USER}",
            f"default_pass = {PASSWORD}",
            *self.conf,
        ]
        if self.management_port:
            lines += ["management.tcp.ip = 127.0.0.1", f"management.tcp.port = {self.management_port}"]
        (self.folder / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        owner = self.folder.parent.stat()
        for path in (self.folder, *self.folder.iterdir()):
            shutil.chown(path, owner.st_uid, owner.st_gid)

    async def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()  # takes everything in its namespace with it
            await asyncio.to_thread(process.wait, PATIENCE)
            await eventually(self._is_gone, bool, within=PATIENCE)

    async def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"it ended: {(self.folder / 'output').read_text()[-3000:]}"
        try:
            async with asyncio.timeout(5), await aio_pika.connect(self.url()):
                return True
        except (OSError, TimeoutError, aio_pika.exceptions.AMQPError):
            return False

    async def _is_gone(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.broker.port)) != 0


@asynccontextmanager
async def own_broker(
    version: str | None = BROKER.version, conf: Iterable[str] = (), *, management: bool = False
) -> AsyncIterator[OwnBroker]:
    """Run a node of `version`, None being the host's, with these lines in its rabbitmq.conf; remove it at the end.

    The user billing, password billing, may do everything in the virtual host billing, which is empty.
    """
    root = Path("/") if version is None else folder_of(version)
    _remove_leftovers(root)
    name = f"{PREFIX}{getpid()}-{next(_numbers)}"
    port, dist_port = free_port(), free_port()
    command = () if version is None else ("chroot", str(root))
    broker = Broker(version, port, (*command, "rabbitmqctl", "-n", f"{name}@localhost"))
    node = OwnBroker(broker, root, name, dist_port, list(conf), free_port() if management else None)
    try:
        await node.start()
        yield node
        if node.process is not None:
            await node.stop()
    finally:
        await node._end()
        shutil.rmtree(node.folder, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    """Remove the folders of test processes that are no more; their nodes ended with them."""
    for folder in (root / "var/lib/rabbitmq").glob(f"{PREFIX}*"):
        if not is_alive(int(folder.name.split("-")[1])):
            shutil.rmtree(folder, ignore_errors=True)
