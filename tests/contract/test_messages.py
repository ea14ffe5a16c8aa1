"""The published messages: golden examples stay readable and writable."""

import json
from pathlib import Path

import pytest

from schemas import MESSAGES, OUTGOING, InvoiceEvent, OrderEvent

EXAMPLES = Path(__file__).parents[2] / "schemas" / "examples"


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_has_an_example_that_is_read_and_written_again(message: type[OrderEvent | InvoiceEvent]) -> None:
    text = (EXAMPLES / f"{message.TYPE}.v{message.VERSION}.json").read_text()
    again = message.model_validate_json(text).model_dump_json()
    assert message.model_validate_json(again) == message.model_validate_json(text)
    assert json.loads(again).keys() == json.loads(text).keys()


@pytest.mark.parametrize("message", OUTGOING)
def test_an_outgoing_example_is_written_exactly_as_it_stands(message: type[InvoiceEvent]) -> None:
    text = (EXAMPLES / f"{message.TYPE}.v{message.VERSION}.json").read_text()
    assert json.loads(message.model_validate_json(text).model_dump_json()) == json.loads(text)


def test_every_example_belongs_to_a_message() -> None:
    names = {f"{message.TYPE}.v{message.VERSION}.json" for message in MESSAGES}
    assert {path.name for path in EXAMPLES.iterdir()} == names
