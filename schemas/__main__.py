"""Write the JSON Schema of every message into a folder: `python -m schemas FOLDER`.

For those who do not read Python.
"""

import json
import sys
from pathlib import Path

from schemas import MESSAGES, InvoiceEvent, OrderEvent


def json_schema(message: type[OrderEvent | InvoiceEvent]) -> str:
    """Return the JSON Schema of a message, as the text of a file."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **message.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


def main() -> None:
    """Write the files; nothing else in the folder is touched."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):  # noqa: PLR2004 - the program and one argument
        sys.exit("usage: python -m schemas FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for message in MESSAGES:
        (folder / f"{message.TYPE}.v{message.VERSION}.json").write_text(json_schema(message))


if __name__ == "__main__":
    main()
