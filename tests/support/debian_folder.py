"""A Dockerfile's steps run in plain Debian folders: what a builder does, without one.

Every command runs in a mount and a process namespace of its own, which end with it, and it ends with this process,
whatever kills that: no mount is ever seen outside, nothing goes on, and a folder can be removed at any time.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.dockerfile import Context, DockerfileError, Stage, Step

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SUITES = {"debian:bookworm-slim": "bookworm"}
"""The base images that are known, each with the Debian release that it is made of."""

ALONE = ("setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc")

_IN_FOLDER = """
root=$1 use=$2 certificates=$3; shift 3
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
if [ "$use" = build ]; then
    for file in /etc/hosts /etc/resolv.conf; do mount --bind "$file" "$root$file"; done
    mount -t tmpfs tmpfs "$root/mnt"
    cp "$certificates" "$root/mnt/certificates.pem"
else
    mount -o remount,bind,ro "$root"
fi
exec chroot "$root" "$@"
"""

# What makes the image of Debian smaller than its packages; a difference here would be one in the sizes.
_SLIM = {
    "apt/apt.conf.d/docker-clean": """
        DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
        Dir::Cache::pkgcache "";
        Dir::Cache::srcpkgcache "";
    """,
    "dpkg/dpkg.cfg.d/docker": "".join(
        f"path-exclude /usr/share/{folder}/*\n" for folder in ("doc", "info", "lintian", "locale", "man")
    ),
}


class FolderError(Exception):
    """A step failed, or something that it needs is missing; the text ends with what was said."""


@dataclass(slots=True)
class Image:
    """A folder and the settings to start it with.

    Attributes:
        arguments: values of ARG: seen by the steps of this stage, not by what is started.
    """

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    healthcheck_timeout: float = 30.0

    def start(self, command: Iterable[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        """Start a command as a container would with everything taken away: its user, its ENV, a read-only folder."""
        with output.open("ab") as log:
            return subprocess.Popen(
                self._line("run", command, self.environment | environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, command: Iterable[str], environment: Mapping[str, str], within: float) -> str:
        """Run a command likewise to its end; return what it printed.

        Raises:
            FolderError: it failed, or took longer than `within` seconds.
        """
        command = list(command)
        try:
            return execute(self._line("run", command, self.environment | environment), within)
        except FolderError as error:
            raise FolderError(f"{' '.join(command):.60}: {error}") from None

    def build(self, command: Iterable[str]) -> None:
        """Run a command that may change the folder and reach the package registries."""
        environment = registry_environment() | self.environment | self.arguments
        execute(self._line("build", command, environment), within=1800)

    def _line(self, use: str, command: Iterable[str], environment: Mapping[str, str]) -> list[str]:
        certificates = pip_settings().get("cert", "/dev/null")
        inside = ["env", "-i", f"--chdir={self.folder}", *(f"{k}={v}" for k, v in environment.items())]
        uid, _, gid = self.user.partition(":")
        drop = ["setpriv", f"--reuid={uid}", f"--regid={gid or uid}", "--clear-groups", "--pdeathsig=KILL"]
        if use == "run":
            drop += ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        return [*ALONE, _IN_FOLDER, "sh", str(self.root), use, certificates, *inside, *drop, "--", *command]


def execute(command: Iterable[str], within: float) -> str:
    """Run a command to its end; return what it printed.

    Raises:
        FolderError: it failed, or took longer than `within` seconds.
    """
    try:
        done = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within, check=False
        )
    except subprocess.TimeoutExpired:
        raise FolderError(f"not done after {within:g} s") from None
    if done.returncode != 0:
        raise FolderError(f"exit code {done.returncode}\n" + (done.stdout + done.stderr)[-4000:].strip())
    return done.stdout


def child_of(process: subprocess.Popen[bytes]) -> int:
    """Return the started command's own process: number 1 of its namespace, as in a container."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def base_folder(image: str, cache: Path) -> Path:
    """Return the folder of a base image; made where it is not there yet.

    Raises:
        FolderError: the image is not known, or apt knows no mirror of its release.
    """
    if image not in SUITES:
        raise FolderError(f"FROM {image}: only {', '.join(SUITES)} is known")
    suite = SUITES[image]
    base = cache / suite
    if not base.is_dir():
        unfinished = cache / f"run-{os.getpid()}" / suite
        debootstrap = ("debootstrap", "--variant=minbase", suite, str(unfinished), _mirror(suite))
        execute((*ALONE, 'exec "$@"', "sh", *debootstrap), within=1800)
        for name, text in _SLIM.items():
            (unfinished / "etc" / name).write_text(text)
        for leftovers in ("var/lib/apt/lists", "var/cache/apt/archives"):
            shutil.rmtree(unfinished / leftovers)
            (unfinished / leftovers / "partial").mkdir(parents=True)
        for bound in ("hosts", "resolv.conf"):
            (unfinished / "etc" / bound).write_text("")
        unfinished.rename(base)  # whole or not at all
    return base


def apply(step: Step, image: Image, context: Context, stages: Mapping[str, Image]) -> None:
    """Do what an instruction says, to the folder or to the settings."""
    if step.name not in ("RUN", "CMD", "ENTRYPOINT", "HEALTHCHECK"):
        step = step.expanded(image.arguments | image.environment)
    match step.name:
        case "RUN":
            image.build(step.command())
        case "COPY":
            _copy(step, image, context, stages)
        case "WORKDIR":
            image.folder = str(Path(image.folder) / step.value)
            _inside(image.root, image.folder).mkdir(parents=True, exist_ok=True)
        case _:
            _configure(step, image)


def _configure(step: Step, image: Image) -> None:
    match step.name:
        case "ENV":
            image.environment |= step.pairs()
        case "ARG":
            name, _, default = step.value.partition("=")
            image.arguments[name] = default
        case "USER":
            image.user = step.user()
        case "ENTRYPOINT":
            image.entrypoint, image.command = step.command(), []
        case "CMD":
            image.command = step.command()
        case "HEALTHCHECK":
            image.healthcheck = step.check()
            image.healthcheck_timeout = float(step.flags.get("timeout", "30s").removesuffix("s"))
        case "EXPOSE":
            pass  # documentation
        case _:
            raise step.wrong("this instruction is not known")


def new_stage(stage: Stage, cache: Path, target: Path, stages: Mapping[str, Image]) -> Image:
    """Return a copy of what the stage is based on."""
    if stage.base in stages:
        raise DockerfileError(f"FROM {stage.base}: a stage on top of another is not known")
    execute(("cp", "-a", "--reflink=auto", str(base_folder(stage.base, cache)), str(target)), within=600)
    return Image(target)


def size(folder: Path) -> int:
    """Return the bytes of the files in a folder, links counted once."""
    found = {
        (s.st_dev, s.st_ino): s.st_size for path in folder.rglob("*") if not (s := path.lstat()).st_mode & 0o040000
    }
    return sum(found.values())


def remove(folder: Path) -> None:
    """Remove a folder and everything in it; never one with a mount in it."""
    if any(str(folder) in line for line in Path("/proc/self/mounts").read_text().splitlines()):
        raise FolderError(f"{folder} has a mount in it, and is left alone: look at /proc/self/mounts")
    shutil.rmtree(folder, ignore_errors=True)


def pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine, from its files and its environment."""
    listed = execute((sys.executable, "-m", "pip", "config", "list"), within=60)
    pairs = (line.split("=", 1) for line in listed.splitlines())
    return {name.rsplit(".", 1)[-1]: value.strip("'\"") for name, value in pairs}


def registry_environment() -> dict[str, str]:
    """Return what a step needs to reach the registries as this machine does; it stays out of the image."""
    settings = pip_settings()
    known = ("index-url", "extra-index-url", "trusted-host", "proxy", "default-timeout")
    environment = {f"PIP_{name.upper().replace('-', '_')}": settings[name] for name in known if name in settings}
    if "cert" in settings:
        environment["PIP_CERT"] = "/mnt/certificates.pem"
    proxies = ("http_proxy", "https_proxy", "no_proxy")
    return environment | {name: os.environ[name] for name in proxies if name in os.environ}


def _copy(step: Step, image: Image, context: Context, stages: Mapping[str, Image]) -> None:
    *sources, target = step.words()
    origin = context.root
    if "from" in step.flags:
        if step.flags["from"] not in stages:
            raise step.wrong(f"there is no stage {step.flags['from']!r}")
        origin = stages[step.flags["from"]].root
    uid, _, gid = step.flags.get("chown", "0:0").partition(":")
    destination = _inside(image.root, str(Path(image.folder) / target))
    for source in sources:
        found = _inside(origin, source)
        into = destination
        if not found.is_dir() and (target.endswith("/") or len(sources) > 1 or destination.is_dir()):
            into = destination / found.name
        paths = sorted(found.rglob("*")) if found.is_dir() else [found]
        paths = [path for path in paths if os.path.lexists(path)]
        if origin == context.root:
            paths = [path for path in paths if context.sent(path)]
        if not paths:
            raise step.wrong(f"{source}: there is no such file, or .dockerignore keeps it back")
        for path in paths:
            _copy_one(path, into / path.relative_to(found), int(uid), int(gid or uid))


def _copy_one(path: Path, target: Path, uid: int, gid: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        target.mkdir(exist_ok=True)
        shutil.copystat(path, target)
    else:
        shutil.copy2(path, target, follow_symlinks=False)
    os.chown(target, uid, gid, follow_symlinks=False)


def _inside(root: Path, path: str) -> Path:
    """Return a path of an image's as one of this machine's; a link that leads out of the folder is an error."""
    found = root / path.lstrip("/")
    if found != root and not found.parent.resolve().is_relative_to(root.resolve()):
        raise FolderError(f"{path} leads out of {root}")
    return found


def _mirror(suite: str) -> str:
    """Return the address of the mirror of a release that this machine's apt uses."""
    listed = execute(
        ("apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"), within=60
    )
    addresses = [line.split()[1] for line in listed.splitlines() if line.split()[0] == suite]
    if not addresses:
        raise FolderError(f"apt's sources name no mirror of Debian {suite}")
    return addresses[0]
