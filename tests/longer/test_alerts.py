"""The alert rules in Prometheus' own hands: promtool of `scripts/promtool`."""

import subprocess
from pathlib import Path

RULES = Path(__file__).parents[2] / "deploy/prometheus"


def promtool(*arguments: str) -> None:
    """Run it; a failure is an error with what it said."""
    done = subprocess.run(["promtool", *arguments], cwd=RULES, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_rules() -> None:
    promtool("check", "rules", "alerts.yml")


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", "alerts_test.yml")
