"""The golden examples: one body for each message and version, the same for tests, documentation and integrators."""

from importlib.resources import files


def example(event_type: str, version: int = 1) -> bytes:
    """Return the example body of an event type.

    Raises:
        FileNotFoundError: there is no such event type or version.
    """
    return files("schemas").joinpath("examples", f"{event_type}.v{version}.json").read_bytes()
