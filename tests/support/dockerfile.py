"""The Dockerfile as steps, and the files that .dockerignore lets through: read, not run.

It knows what our Dockerfile uses. Anything else is an error: a step that is skipped or half understood would make the
result say nothing about the image.
"""

import io
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dockerfile_parse import DockerfileParser

FLAGS = {
    "ARG": (),
    "CMD": (),
    "COPY": ("from", "chown"),
    "ENTRYPOINT": (),
    "ENV": (),
    "EXPOSE": (),
    "FROM": (),
    "HEALTHCHECK": ("interval", "timeout", "start-period", "retries"),
    "RUN": (),
    "USER": (),
    "WORKDIR": (),
}
"""The instructions that are known, each with the flags that are."""

_VARIABLE = re.compile(r"\$(?:(?P<name>\w+)|\{(?P<braced>\w+)\}|(?P<wrong>.?))")
_DIRECTIVE = re.compile(r"#\s*(escape|syntax|check)\s*=", re.IGNORECASE)


class DockerfileError(Exception):
    """The Dockerfile holds something that is not known here; the text names the line."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction."""

    line: int
    name: str
    flags: Mapping[str, str]
    value: str

    def wrong(self, why: str) -> DockerfileError:
        """Return the error for this step."""
        return DockerfileError(f"Dockerfile:{self.line}: {self.name}: {why}")

    def expanded(self, variables: Mapping[str, str]) -> "Step":
        """Return the step with its variables replaced; RUN and the like leave that to the shell."""
        flags = {name: self._expand(value, variables) for name, value in self.flags.items()}
        return Step(self.line, self.name, flags, self._expand(self.value, variables))

    def _expand(self, text: str, variables: Mapping[str, str]) -> str:
        def replace(match: re.Match[str]) -> str:
            if match["wrong"] is not None:
                raise self.wrong(f"{match[0]!r} is not known")
            return variables.get(match["name"] or match["braced"], "")

        return _VARIABLE.sub(replace, text)

    def words(self) -> list[str]:
        """Return the words of a value that is no command."""
        return shlex.split(self.value)

    def pairs(self) -> dict[str, str]:
        """Return the NAME=VALUE pairs of an ENV."""
        if not all("=" in word for word in self.words()):
            raise self.wrong("only NAME=VALUE is known")
        return {name: value for name, _, value in (word.partition("=") for word in self.words())}

    def user(self) -> str:
        """Return the user and the group of a USER."""
        if not re.fullmatch(r"\d+(:\d+)?", self.value):
            raise self.wrong("only numbers are known")
        return self.value

    def check(self) -> list[str]:
        """Return the command of a HEALTHCHECK."""
        if not self.value.startswith("CMD "):
            raise self.wrong("only CMD is known")
        return Step(self.line, self.name, {}, self.value.removeprefix("CMD ")).command()

    def command(self) -> list[str]:
        """Return the command: a list as it stands, anything else for the shell."""
        if not self.value.lstrip().startswith("["):
            return ["/bin/sh", "-c", self.value]
        try:
            words: list[str] = json.loads(self.value)
        except ValueError:
            raise self.wrong("the list is no JSON") from None
        return words


@dataclass(frozen=True, slots=True)
class Stage:
    """A FROM and the steps up to the next one."""

    name: str
    base: str
    steps: tuple[Step, ...]


def read_stages(text: str) -> list[Stage]:
    """Return the stages of a Dockerfile.

    Raises:
        DockerfileError: an instruction or a flag is not known here.
    """
    stages: list[Stage] = []
    arguments: dict[str, str] = {}  # of an ARG in front of the first FROM: for FROM lines alone
    for step in _steps(text):
        if step.name == "FROM":
            match step.expanded(arguments).words():
                case [base]:
                    stages.append(Stage(str(len(stages)), base, ()))
                case [base, as_, name] if as_.upper() == "AS":
                    stages.append(Stage(name, base, ()))
                case _:
                    raise step.wrong("only 'FROM IMAGE [AS NAME]' is known")
        elif stages:
            stages[-1] = Stage(stages[-1].name, stages[-1].base, (*stages[-1].steps, step))
        elif step.name == "ARG":
            name, _, default = step.value.partition("=")
            arguments[name] = default
        else:
            raise step.wrong("stands in front of the first FROM")
    return stages


def _steps(text: str) -> Iterator[Step]:
    if _DIRECTIVE.match(text):
        raise DockerfileError("Dockerfile:1: a parser directive is not known")
    if "<<" in text:
        raise DockerfileError("Dockerfile: a here-document is not known")
    for found in DockerfileParser(fileobj=io.BytesIO(text.encode())).structure:
        if found["instruction"] == "COMMENT":
            continue
        step = Step(found["startline"] + 1, found["instruction"], {}, found["value"])
        if step.name not in FLAGS:
            raise step.wrong("this instruction is not known")
        flags = {}
        while match := re.match(r"--([\w-]+)=(\S*)\s+", step.value):
            flags[match[1]] = match[2]
            step = Step(step.line, step.name, flags, step.value[match.end() :])
        unknown = [flag for flag in flags if flag not in FLAGS[step.name]]
        if unknown or step.value.startswith("--"):
            raise step.wrong(f"the flag {', '.join(unknown) or step.value.split()[0]} is not known")
        yield step


@dataclass(frozen=True, slots=True)
class Context:
    """The folder that is sent to a builder, less what .dockerignore keeps back."""

    root: Path

    def sent(self, path: Path) -> bool:
        """Tell whether a file is sent: the last pattern that fits it, or a folder above it, decides."""
        inside = path.relative_to(self.root)
        names = [str(above) for above in (inside, *inside.parents) if above != Path()]
        sent = True
        for pattern in self._patterns():
            if any(re.fullmatch(_regular(pattern.lstrip("!")), name) for name in names):
                sent = pattern.startswith("!")
        return sent

    def _patterns(self) -> list[str]:
        lines = (self.root / ".dockerignore").read_text().splitlines()
        return [line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#")]


def _regular(pattern: str) -> str:
    """Return a .dockerignore pattern as a regular expression; `**` is any number of folders."""
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(known.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))
