"""The result: two tables for people, or JSON for programs, on stdout; what is going on, on stderr."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from service.demo.checks import Check, Row

LEGEND = """\
The numbers are those of docs/guarantees.md; what G4, G7, G10 and G11 promise is shown by their tests, not here, and so
is what a handler stores and then fails. A kill hits one moment: the tests stop the service at each step.
Copies: a message in work at the kill may be parked twice, and an event whose answer was lost or that one of two queues
refused is published again, under the same message id: its consumers recognise it."""

PROBLEMS_SHOWN = 5
"""Of one line of a table: the first ones say what is wrong."""


@dataclass(frozen=True, slots=True)
class Report:
    """The whole result.

    Attributes:
        stalled: why the demo could not be played to its end, empty where it was.
        log_tail: of the instance that died or hung.
    """

    rows: list[Row]
    checks: list[Check]
    seconds: float
    logs: str
    stalled: str = ""
    log_tail: str = ""

    @property
    def ok(self) -> bool:
        """Tell whether everything holds."""
        return not self.stalled and not any(name for name, _ in self._failing())

    def show(self, *, as_json: bool) -> None:
        """Print it."""
        if as_json:
            sys.stdout.write(self._as_json() + "\n")
        else:
            self._print()

    def _as_json(self) -> str:
        content = asdict(self)
        tables = {"sent": content.pop("rows"), "guarantees": content.pop("checks")}
        return json.dumps({"ok": self.ok} | tables | content, indent=2)

    def _print(self) -> None:
        console = Console(width=None if sys.stdout.isatty() else 150)
        sent = Table("sent", "number", "must be", "found", "", title="What was sent, and what became of it")
        sent.columns[1].justify = "right"
        for row in self.rows:
            sent.add_row(row.kind, str(row.sent), row.expected, row.found, _mark(row.problems))
        console.print(sent)
        guarantees = Table("", "promised", "counted", "", title="What was guaranteed")
        for check in self.checks:
            guarantees.add_row(check.guarantee, check.promise, check.counted, _mark(check.problems))
        console.print(guarantees)
        console.print(Text(LEGEND, style="dim"))
        for line in self._explanations():
            console.print(Text(line), soft_wrap=True)
        verdict = "all of it holds" if self.ok else "FAILED"
        console.print(Text(f"{verdict}, in {self.seconds:.0f} s", style="bold green" if self.ok else "bold red"))

    def _explanations(self) -> Iterator[str]:
        for name, problems in self._failing():
            yield f"✗ {name}:"
            yield from (f"    {problem}" for problem in problems[:PROBLEMS_SHOWN])
            if len(problems) > PROBLEMS_SHOWN:
                yield f"    and {len(problems) - PROBLEMS_SHOWN} more"
        if self.stalled:
            yield f"✗ {self.stalled}"
        if self.log_tail:
            yield self.log_tail
        if not self.ok:
            yield f"The service's logs: {self.logs}"

    def _failing(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield from ((row.kind, row.problems) for row in self.rows if row.problems)
        yield from ((f"{c.guarantee} {c.promise}", c.problems) for c in self.checks if c.problems)


@dataclass(frozen=True, slots=True)
class Teller:
    """Tells on stderr what is going on: lines, and a bar below them where it is a terminal."""

    progress: Progress

    def say(self, text: str) -> None:
        """Print a line."""
        self.progress.console.print(Text(f"  {text}"), soft_wrap=True)

    def advance(self, number: int) -> None:
        """Move the bar by so many messages."""
        self.progress.advance(self.progress.task_ids[0], number)


@contextmanager
def teller(messages: int) -> Iterator[Teller]:
    """Show progress towards so many messages."""
    console = Console(stderr=True)
    columns = (TextColumn("  published"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task("published", total=messages)
        yield Teller(progress)


def tell(text: str) -> None:
    """Print a line on stderr, as it is and unbroken, so that it can be copied."""
    Console(stderr=True).print(Text(text), soft_wrap=True)


def _mark(problems: tuple[str, ...]) -> Text:
    return Text("✗", style="red") if problems else Text("✓", style="green")
