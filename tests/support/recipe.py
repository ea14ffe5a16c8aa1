"""The recipe of CONTRIBUTING.md, applied to a copy of the code as it stands there, under another name.

Under another name, so that the recipe can be followed to the letter and its test still runs.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("schemas", "service", "tests", "tools", "alembic", "alembic.ini", "pyproject.toml")


OTHER_NAME = {"expired": "exceeded", "Expired": "Exceeded", "expiry": "excess"}


@dataclass(frozen=True, slots=True)
class Hunk:
    """A place in a file, and what it becomes; without a `before` it stands at the end of the file, which may be new."""

    file: str
    before: str
    after: str
    added: tuple[str, ...]


def hunks(text: str) -> Iterator[Hunk]:
    """Yield the changes of every diff in a Markdown text."""
    for diff in re.findall(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for change in re.split(r"^--- .*\n", diff, flags=re.MULTILINE)[1:]:
            name, *places = re.split(r"^@@.*\n", change, flags=re.MULTILINE)
            for place in places:
                lines = place.splitlines(keepends=True)
                yield Hunk(
                    file=name.strip().removeprefix("+++ b/"),
                    before="".join(line[1:] for line in lines if line[0] != "+"),
                    after="".join(line[1:] or "\n" for line in lines if line[0] != "-"),
                    added=tuple(line[1:] for line in lines if line[0] == "+"),
                )


def apply_to_copy(folder: Path) -> list[str]:
    """Copy the code into `folder` and apply the recipe; return the lines it adds.

    Raises:
        AssertionError: a place is not, or not only once, in its file: the recipe is out of date.
    """
    for part in CODE:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    added: list[str] = []
    recipe = (ROOT / "CONTRIBUTING.md").read_text()
    for name, other in OTHER_NAME.items():
        recipe = recipe.replace(name, other)
    for hunk in hunks(recipe):
        path = folder / hunk.file
        text = path.read_text() if path.exists() else ""
        assert not hunk.before or text.count(hunk.before) == 1, f"not once in {hunk.file}:\n{hunk.before}"
        path.write_text(text.replace(hunk.before, hunk.after) if hunk.before else text + hunk.after)
        added += hunk.added
    return added
