"""`billing parking`: an order that makes no sense is refused before anything is asked of a server."""

import re

import pytest
from typer.testing import CliRunner

from service.parking import app


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("replay",), "say which messages"),
        (("replay", "--all", "--type", "order.paid"), "--all goes with nothing else"),
        (("replay", "--reason", "bad-luck"), "is no reason; reasons are unreadable, "),
        (("replay", "--older-than", "soon", "--all"), "is not a time such as 90s"),
        (("replay", "--all", "--body", "-"), "--body is for exactly one ID"),
        (("replay", "m-1", "--body", "/nowhere"), "No such file"),
        (("replay", "--all", "--rate", "0"), "than or equal to 0.1"),
        (("discard", "--all"), "--why"),
        (("discard", "--all", "--why", " "), "must say why"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(
    arguments: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.console.configure_logging", lambda *_: None)  # it would be the other tests', too
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in re.sub(r"[\s│]+", " ", done.stderr)
