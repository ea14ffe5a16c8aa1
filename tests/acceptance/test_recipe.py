"""CONTRIBUTING.md's new subscriber: its text makes an application that runs, with every guarantee inherited."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas import example
from tests.support.process import ServiceProcess
from tests.support.rabbit import Rabbit
from tests.support.recipe import apply_to_copy
from tests.support.waiting import eventually

EXCEEDED = (
    "order.exceeded",
    b'{"order_id": "7a6d7c1e-5f0b-4b1d-9a63-0d9c4f3f7a11", "exceeded_at": "2026-05-18T08:00:00Z"}',
)


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """A copy of the code with the recipe applied."""
    folder = tmp_path / "application"
    folder.mkdir()
    added = apply_to_copy(folder)
    code = {line for line in added if line.strip() and not line.startswith(("from ", "import ", "{"))}
    assert len(code) == 15, "".join(code)  # a name that is imported twice and registered counts once
    return folder


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the application's code."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_its_own_test_passes_and_its_contract_shows_the_message(application: Path) -> None:
    tested = python(application, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_order_exceeded.py")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "1 passed" in tested.stdout
    linted = python(application, "-m", "ruff", "check", ".")
    assert linted.returncode == 0, linted.stdout
    documented = python(application, "-m", "service", "asyncapi").stdout
    assert "Void the order's invoice, unless it was paid, and publish `invoice.voided`." in documented


async def test_it_inherits_every_guarantee_on_a_real_broker(
    application: Path, rabbit: Rabbit, environment: dict[str, str], tmp_path: Path
) -> None:
    """A failure (the order is not known yet) is retried, a duplicate has no second effect, a poison is parked."""
    await rabbit.collect_events()
    service = await ServiceProcess(environment, tmp_path / "log", folder=application).start().ready()
    await rabbit.publish(*EXCEEDED, message_id="m-1")
    await service.logged("message_retried")
    await rabbit.publish("order.placed", example("order.placed"))
    await rabbit.publish("order.exceeded", b'{"order_id": "x"}', message_id="m-2")
    events: list[Any] = []

    async def collect() -> list[str]:
        events.extend(await rabbit.events())
        return [event.type for event in events]

    await eventually(collect, lambda types: "invoice.voided" in types)
    await rabbit.publish(*EXCEEDED, message_id="m-1")
    await service.logged("delivery_settled", times=3)
    assert service.records("delivery_settled")[-1]["outcome"] == "duplicate"
    await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)
    [parked] = await rabbit.take("orders.parking")
    assert (parked.message_id, parked.headers["x-parked-reason"]) == ("m-2", "invalid")
    assert parked.headers["x-exception-message"].startswith("order_id: ")
    assert sorted(await collect()) == ["invoice.created", "invoice.voided"]
    [voided] = [event for event in events if event.type == "invoice.voided"]
    assert voided.headers["causation-id"] == "m-1"
    assert json.loads(voided.body)["reason"] == "not paid in time"
    assert await service.stop() == 0
