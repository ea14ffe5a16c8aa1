"""The golden examples: one body for each message and version, the same for tests, documentation and integrators."""

from importlib.resources import files


def example(event_type: str, version: int = 1) -> bytes:
    """Return the example body of an event type.

    Raises:
        FileNotFoundError: there is no such event type or version.
    """
    name = f"{event_type}.v{version}.json"
    try:
        return files("schemas").joinpath("examples", name).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no example schemas/examples/{name}") from None
