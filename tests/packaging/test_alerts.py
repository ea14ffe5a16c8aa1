"""The alert rules fit the service and its documents; that they fire is promtool's business, in tests/longer."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from prometheus_client import generate_latest

from service.cli import app
from service.telemetry import Metrics

PROJECT = Path(__file__).parents[2]
RULES = PROJECT / "deploy/prometheus"
RUNBOOK = (PROJECT / "docs/runbook.md").read_text()
ALERTS = [rule for group in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
NAMES = [alert["alert"] for alert in ALERTS]


def anchor(heading: str) -> str:
    """Return what GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


ENTRIES = {anchor(part.splitlines()[0]): part for part in re.split(r"^## ", RUNBOOK, flags=re.MULTILINE)[1:]}


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_each_alert_is_about_metrics_that_the_service_has(alert: dict[str, Any]) -> None:
    page = generate_latest(Metrics().registry).decode()
    known = set(re.findall(r"^# TYPE (\w+)", page, flags=re.MULTILINE))
    asked = set(re.findall(r"\bbilling_\w+", alert["expr"]))
    assert asked
    assert asked <= known


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_each_alert_says_how_bad_it_is_what_it_means_and_where_to_read_on(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"warning", "critical"}
    annotations = alert["annotations"]
    assert all(annotations[name] for name in ("summary", "description"))
    page, _, name = annotations["runbook"].partition("#")
    assert page == "docs/runbook.md"
    assert f"`{alert['alert']}`" in ENTRIES[name].partition("**Alert.**")[2]


@pytest.mark.parametrize("alert", NAMES)
def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(alert: str) -> None:
    cases = [
        bool(case["exp_samples"])
        for test in yaml.safe_load((RULES / "alerts_test.yml").read_text())["tests"]
        for case in test["promql_expr_test"]
        if f'"{alert}"' in case["expr"]
    ]
    assert set(cases) == {True, False}


def test_the_runbook_names_no_alert_that_there_is_not_and_links_to_entries_that_exist() -> None:
    assert set(re.findall(r"`(Billing\w+)`", RUNBOOK)) == set(NAMES)
    assert set(re.findall(r"\]\(#([\w-]+)\)", RUNBOOK)) <= set(ENTRIES)


COMMANDS = re.findall(r"^\$ billing (.+)$", RUNBOOK, flags=re.MULTILINE)


def test_the_runbook_has_commands() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("line", sorted(set(COMMANDS)))
def test_each_command_of_the_runbook_is_one_that_the_command_line_takes(line: str) -> None:
    """Options, their values and what is required are checked; nothing is run."""
    import shlex

    command: Any = typer.main.get_command(app)
    arguments = shlex.split(line)
    context = None
    while hasattr(command, "commands"):
        context = command.make_context(arguments[0], [], parent=context, resilient_parsing=True)
        command, arguments = command.commands[arguments[0]], arguments[1:]
    command.make_context(line, arguments, parent=context)
