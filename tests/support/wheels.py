"""Wheels of this repository in environments of their own: what somebody has who installed one."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def install(source: Path, folder: Path) -> Path:
    """Build the wheel of `source` and install it, alone, into a new environment; return that one's Python.

    Dependencies are those of the tests' own environment; the repository is not on its path: `.pth` files are not
    followed from a folder that is named in one.
    """
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
    alone = ("--no-deps", "--no-index")
    run(*pip, "wheel", *alone, "--no-build-isolation", "--wheel-dir", str(folder / "wheels"), str(source))
    (wheel,) = (folder / "wheels").glob("*.whl")

    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    run(*pip, "install", *alone, "--target", str(packages), str(wheel))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin" / "python"


def run(*command: str, folder: Path = Path("/"), environment: dict[str, str] | None = None) -> str:
    """Run a command away from the repository; return what it printed; a failure is an error with what it said."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
