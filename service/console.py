"""What all commands share: reading settings, ending with an exit code, connecting to the broker.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings. Results go to stdout, messages for people to stderr.
"""

import sys
from collections.abc import Coroutine
from typing import Annotated, Any, NoReturn

import typer
import uvloop
from aio_pika.exceptions import AMQPError

from service.reliability.errors import ReliabilityError
from service.reliability.hosts import Hosts
from service.reliability.link import BrokerLink
from service.settings import Settings, load_settings
from service.telemetry import configure_logging

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def run_to_the_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; failures that a person can do something about become one line and exit code 1."""
    try:
        return uvloop.run(coroutine)
    except (ReliabilityError, AMQPError, OSError, TimeoutError) as error:
        fail(str(error) or type(error).__name__)


def read_settings(*, news: bool = False) -> Settings:
    """Read the settings and start logging; a command that says on stderr what it did logs no news beside it."""
    settings = load_settings()
    level = settings.log_level if news or settings.log_level != "INFO" else "WARNING"
    configure_logging(level, settings.log_format)
    return settings


def broker_link(settings: Settings, name: str) -> BrokerLink:
    """Return a link to the configured broker; nothing is opened yet."""
    return BrokerLink(Hosts(settings.rabbitmq_urls), name)


def fail(text: str, code: int = 1) -> NoReturn:
    """End with one line for a person."""
    print(f"billing: {text}", file=sys.stderr)
    raise SystemExit(code)
