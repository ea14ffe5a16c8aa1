"""The Dockerfile, and the reader that scripts/image runs it with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.debian_folder import FolderError, Image, apply
from tests.support.dockerfile import Context, DockerfileError, Stage, Step, read_stages
from tests.support.wheels import PROJECT

STAGES = read_stages((PROJECT / "Dockerfile").read_text())


def steps(stage: Stage, name: str) -> list[Step]:
    """Return the steps of one kind."""
    return [step for step in stage.steps if step.name == name]


def test_hadolint_has_nothing_to_say() -> None:
    """What is ignored is ignored inline, with a reason."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "Dockerfile"], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_signal_reaches_the_service_and_nobody_is_root() -> None:
    """A shell would keep SIGTERM; a name would hide from an orchestrator whether the user is root."""
    service = STAGES[-1]
    (entrypoint,), (command,), (user,) = (steps(service, name) for name in ("ENTRYPOINT", "CMD", "USER"))
    assert entrypoint.command() == ["billing"]
    assert command.command() == ["run"]
    assert user.user() == "10001:10001"


def test_every_stage_is_of_the_same_debian() -> None:
    """A venv works where its interpreter is."""
    assert [stage.base for stage in STAGES] == ["debian:bookworm-slim"] * 2


def test_dependencies_come_with_hashes_and_the_index_is_asked_for_nothing_else() -> None:
    """The project itself is installed from what is there."""
    installs = [step.value for step in steps(STAGES[0], "RUN") if "pip install" in step.value]
    assert len(installs) == 2
    assert "--require-hashes --requirement requirements.lock" in installs[0]
    assert "--no-deps --no-build-isolation" in installs[1]
    assert not any("pip" in step.value for step in steps(STAGES[-1], "RUN"))


def test_only_what_the_image_needs_is_sent_to_a_builder() -> None:
    """A secret or a file that nobody thought of stays here."""
    context = Context(PROJECT)
    for sent in ("requirements.lock", "pyproject.toml", "alembic/env.py", "service/cli.py", "schemas/py.typed"):
        assert context.sent(PROJECT / sent), sent
    for kept in (".env", ".git/config", ".venv/pyvenv.cfg", "tests/conftest.py", "service/__pycache__/x.pyc", "new"):
        assert not context.sent(PROJECT / kept), kept


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("FROM a\nVOLUME /data\n", "Dockerfile:2: VOLUME: this instruction is not known"),
        ("FROM a\nRUN --mount=type=cache,target=/x true\n", "Dockerfile:2: RUN: the flag mount is not known"),
        ("FROM a\nCOPY --link a b\n", "Dockerfile:2: COPY: the flag --link is not known"),
        ("FROM --platform=x a\n", "Dockerfile:1: FROM: the flag platform is not known"),
        ("RUN true\n", "Dockerfile:1: RUN: stands in front of the first FROM"),
        ("FROM a\nRUN <<EOF\ntrue\nEOF\n", "Dockerfile: a here-document is not known"),
        ("# syntax=docker/dockerfile:1\nFROM a\n", "Dockerfile:1: a parser directive is not known"),
    ],
)
def test_what_the_reader_does_not_know_is_an_error(text: str, why: str) -> None:
    """A step that is skipped would make the result say nothing about the image."""
    with pytest.raises(DockerfileError) as caught:
        read_stages(text)
    assert str(caught.value) == why


def test_variables_are_replaced_and_other_forms_refused() -> None:
    """As a builder does, except for what nobody here writes."""
    stages = read_stages("ARG BASE=debian\nFROM $BASE AS one\n# why\nENV A=1 \\\n    B=${C}/x\n")
    assert (stages[0].base, stages[0].name) == ("debian", "one")
    (step,) = stages[0].steps
    assert step.expanded({"C": "c"}).pairs() == {"A": "1", "B": "c/x"}
    with pytest.raises(DockerfileError, match="not known"):
        Step(1, "ENV", {}, "A=${B:-c}").expanded({})
    with pytest.raises(DockerfileError, match="only numbers"):
        Step(1, "USER", {}, "billing").user()


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """A folder with one file that is kept back."""
    for name in ("context/code/module.py", "context/code/secret", "context/one", "root/old"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "context/.dockerignore").write_text("**/secret\n.dockerignore\n")
    return Context(tmp_path / "context")


@pytest.mark.parametrize(
    ("value", "copied"),
    [
        ("one there", {"there"}),
        ("one there/", {"there/one"}),
        ("one .", {"one"}),
        ("code there", {"there/module.py"}),
        (". .", {"one", "code/module.py"}),
    ],
)
def test_files_are_copied_as_a_builder_does(context: Context, value: str, copied: set[str]) -> None:
    """A folder's content, not the folder; a file into a folder only where the target is one."""
    image = Image(context.root.parent / "root")
    apply(Step(1, "COPY", {"chown": f"{os.getuid()}:{os.getgid()}"}, value), image, context, {})
    found = {str(path.relative_to(image.root)) for path in image.root.rglob("*") if path.is_file()}
    assert found == copied | {"old"}


@pytest.mark.parametrize(
    ("flags", "value", "why"),
    [
        ({}, "missing .", "no such file"),
        ({}, "code/secret .", "keeps it back"),
        ({"from": "nobody"}, "/x .", "no stage 'nobody'"),
    ],
)
def test_what_is_not_there_to_be_copied_is_an_error(
    context: Context, flags: dict[str, str], value: str, why: str
) -> None:
    """As for a builder."""
    with pytest.raises(DockerfileError, match=why):
        apply(Step(1, "COPY", flags, value), Image(context.root.parent / "root"), context, {})


def test_a_link_does_not_lead_out_of_the_folder(context: Context) -> None:
    """A step of the image must never write to this machine."""
    image = Image(context.root.parent / "root")
    (image.root / "away").symlink_to("/tmp")
    with pytest.raises(FolderError, match="leads out"):
        apply(Step(1, "COPY", {}, "one /away/one"), image, context, {})
