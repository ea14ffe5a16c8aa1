"""docs/guarantees.md and the tests that carry a guarantee's mark say the same."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBERS = [f"G{number}" for number in range(1, 12)]


def documented() -> set[tuple[str, str]]:
    """Return guarantee and test of each line of the page."""
    sections = re.split(r"^## (G\d+) ", (ROOT / "docs" / "guarantees.md").read_text(), flags=re.MULTILINE)[1:]
    return {
        (number, test)
        for number, text in zip(sections[::2], sections[1::2], strict=True)
        for test in re.findall(r"^- `(tests/\S+::\w+)`$", text, re.MULTILINE)
    }


def marked() -> set[tuple[str, str]]:
    """Return guarantee and test of each `@pytest.mark.guarantee("…")`."""
    return {
        (str(argument.value), f"{path.relative_to(ROOT)}::{function.name}")
        for path in (ROOT / "tests").rglob("test_*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.guarantee"
        for argument in decorator.args
        if isinstance(argument, ast.Constant)
    }


def test_each_guarantee_names_the_tests_that_carry_its_mark() -> None:
    assert documented() - marked() == set(), "named on the page, not marked"
    assert marked() - documented() == set(), "marked, not named on the page"


def test_each_guarantee_has_a_mechanism_tests_and_what_would_break_it() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    assert re.findall(r"^## (G\d+) ", text, re.MULTILINE) == NUMBERS
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert "**How.**" in section, section[:40]
        assert "\n- `tests/" in section, section[:40]
        assert "**What would break it" in section, section[:40]


def test_the_failure_modes_name_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "failure-modes.md").read_text()))
    named |= set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "versions.md").read_text()))
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert {test for test in named if f"def {test}(" not in sources} == set()
    assert len(named) > 20
