"""Settings from the environment (prefix `BILLING_`) and `.env`: read once at the start, passed down as values.

Durations are seconds and retentions are days, as each description says; lists are comma-separated. A wrong value stops
the start with one line that names the setting and what is allowed, and never shows a value, since it may be a secret.
"""

import os
from datetime import timedelta
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

from dotenv import dotenv_values
from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

PREFIX = "BILLING_"

LONGEST_HEARTBEAT = 60
"""Seconds; it takes the client more than three of them to notice a silent host."""

SHORTEST_DELAY, LONGEST_DELAY = timedelta(milliseconds=10), timedelta(days=1)


def _seconds(value: Any) -> Any:
    return timedelta(seconds=_number(value, most=1_000_000)) if isinstance(value, (str, int, float)) else value


def _days(value: Any) -> Any:
    return timedelta(days=_number(value, most=36_500)) if isinstance(value, (str, int, float)) else value


def _number(value: str | float, *, most: int) -> float:
    """Return a number from 0 to `most`: neither nan nor infinity nor what a timedelta cannot hold."""
    try:
        number = float(value)
    except ValueError:
        raise ValueError("must be a number") from None
    if not 0 <= number <= most:
        raise ValueError(f"must be a number from 0 to {most}")
    return number


Seconds = Annotated[timedelta, BeforeValidator(_seconds)]
Days = Annotated[timedelta, BeforeValidator(_days)]


class SettingsError(Exception):
    """A setting is wrong; the text is one line for the person who starts the service."""


class Settings(BaseSettings):
    """Everything that can be configured, with units, ranges and defaults."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_file=".env", extra="ignore", hide_input_in_errors=True, frozen=True
    )

    database_url: SecretStr = Field(
        SecretStr("postgresql://billing:billing@127.0.0.1:5432/billing"),
        description="postgresql://user:password@host:port/database",
    )
    rabbitmq_url: SecretStr = Field(
        SecretStr("amqp://billing:billing@127.0.0.1:5672/billing"),
        description="amqp:// or amqps://user:password@host:port/vhost, ?heartbeat=1 to 60 s; the nodes of a cluster "
        "comma-separated",
    )
    rabbitmq_management_url: SecretStr | None = Field(
        None,
        description="http:// or https://user:password@host:port of the broker's management interface, or empty: then "
        "what the broker tells only there is not known",
    )
    prefetch: int = Field(
        100,
        ge=1,
        le=65535,
        description="unsettled deliveries the broker may send ahead, 1 to 65535: 100 to 300 for throughput, 1 is the "
        "cautious extreme; measure",
    )
    concurrency: int = Field(
        20, ge=1, le=500, description="handlers at once, 1 to 500; the connection pool is sized from it"
    )
    max_attempts: int = Field(
        5, ge=1, le=100, description="executions of a failing message before it is parked, 1 to 100"
    )
    retry_strategy: Literal["staged", "dead-letter", "broker"] = Field(
        "staged",
        description="'staged', 'dead-letter' or 'broker' (RabbitMQ 4.3 and later): see docs/strategies.md",
    )
    retry_delays: Annotated[tuple[Seconds, ...], NoDecode] = Field(
        (timedelta(seconds=5), timedelta(seconds=30), timedelta(seconds=120), timedelta(seconds=600)),
        description="seconds before each further attempt, comma-separated, each from 0.01 to 86400; the last repeats. "
        "'dead-letter' and 'broker' take the first for every attempt",
    )
    handler_timeout: Seconds = Field(
        timedelta(seconds=30),
        gt=timedelta(0),
        le=timedelta(minutes=20),
        description="seconds, up to 1200: below the broker's 30 minutes",
    )
    confirm_timeout: Seconds = Field(
        timedelta(seconds=5), gt=timedelta(0), le=timedelta(minutes=5), description="seconds, up to 300"
    )
    shutdown_timeout: Seconds = Field(
        timedelta(seconds=20), ge=timedelta(seconds=1), le=timedelta(hours=1), description="seconds, 1 to 3600"
    )
    relay: Literal["on", "off"] = Field("on", description="'on' or 'off'")
    relay_poll_interval: Seconds = Field(
        timedelta(seconds=1), ge=timedelta(milliseconds=50), le=timedelta(seconds=10), description="seconds, 0.05 to 10"
    )
    relay_batch: int = Field(500, ge=1, le=10_000, description="events read at once, 1 to 10000")
    relay_window: int = Field(100, ge=1, le=1000, description="publishes in flight at once, 1 to 1000")
    inbox_retention: Days = Field(timedelta(days=30), gt=timedelta(0), description="days")
    outbox_retention: Days = Field(timedelta(days=7), gt=timedelta(0), description="days")
    replay_horizon: Days = Field(timedelta(days=14), ge=timedelta(0), description="days")
    topology: Literal["declare", "verify"] = Field("declare", description="'declare' or 'verify'")
    parked_alarm: int = Field(
        1, ge=0, le=1_000_000_000, description="messages in the parking queue, from which on it is told; 0: never"
    )
    outbox_alarm: Seconds = Field(
        timedelta(minutes=5),
        ge=timedelta(0),
        le=timedelta(days=7),
        description="seconds, up to 604800, of the oldest unsent event, from which on 'billing status' fails; 0: never",
    )
    redacted_fields: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode] = Field(
        ("customer_id", "payment_reference"),
        description="comma-separated names of JSON fields and headers that 'billing parking show' leaves out",
    )
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="bytes, from 1024")
    http_host: str = Field("127.0.0.1", min_length=1, description="an address to listen on")
    http_port: int = Field(8000, ge=0, le=65535, description="0 to 65535, 0 takes a free one")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: Literal["console", "json"] = Field("console", description="'console' or 'json'")

    @field_validator("retry_delays", "redacted_fields", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return [part.strip() for part in value.split(",")] if value.strip() else []

    @field_validator("retry_delays")
    @classmethod
    def _in_range(cls, delays: tuple[timedelta, ...]) -> tuple[timedelta, ...]:
        if not delays or not all(SHORTEST_DELAY <= delay <= LONGEST_DELAY for delay in delays):
            raise ValueError("a delay is out of range")
        return delays

    @field_validator("database_url")
    @classmethod
    def _is_database(cls, url: SecretStr) -> SecretStr:
        _require_address(url.get_secret_value(), "postgresql")
        return url

    @field_validator("rabbitmq_url")
    @classmethod
    def _are_hosts(cls, urls: SecretStr) -> SecretStr:
        for url in _addresses(urls):
            _require_address(url, "amqp", "amqps")
            for seconds in parse_qs(urlsplit(url).query, keep_blank_values=True).get("heartbeat", ()):
                if not seconds.isdecimal() or not 1 <= int(seconds) <= LONGEST_HEARTBEAT:
                    raise ValueError(f"heartbeat must be a whole number of seconds from 1 to {LONGEST_HEARTBEAT}")
        return urls

    @field_validator("rabbitmq_management_url")
    @classmethod
    def _is_management(cls, url: SecretStr | None) -> SecretStr | None:
        if url is None or not url.get_secret_value().strip():
            return None
        _require_address(url.get_secret_value(), "http", "https")
        return url

    @model_validator(mode="after")
    def _retentions_agree(self) -> Self:
        longest_retry = sum((self.delay(n) for n in range(1, self.max_attempts)), timedelta())
        if self.inbox_retention < self.replay_horizon + longest_retry:
            raise ValueError(
                f"{PREFIX}INBOX_RETENTION must be at least {PREFIX}REPLAY_HORIZON plus the longest retry "
                f"({longest_retry.total_seconds():g} s): a replay after the inbox forgot would have a second effect"
            )
        return self

    @property
    def rabbitmq_urls(self) -> tuple[str, ...]:
        """The addresses of the broker's nodes, in the order given."""
        return _addresses(self.rabbitmq_url)

    @property
    def vhost(self) -> str:
        """The virtual host, the same at each node."""
        return unquote(urlsplit(self.rabbitmq_urls[0]).path[1:]) or "/"

    @property
    def delays(self) -> tuple[timedelta, ...]:
        """The delays that the strategy keeps: all, or the first one for all attempts."""
        return self.retry_delays if self.retry_strategy == "staged" else self.retry_delays[:1]

    def delay(self, attempt: int) -> timedelta:
        """Return the delay after the given attempt."""
        return self.delays[min(attempt, len(self.delays)) - 1]


def _addresses(urls: SecretStr) -> tuple[str, ...]:
    return tuple(url.strip() for url in urls.get_secret_value().split(","))


def _require_address(url: str, *schemes: str) -> None:
    """Refuse what is no address of one of these schemes, or what a driver would split elsewhere."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in schemes and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        # A bare @ or / in the password: the drivers would take a part of it for a name, and log that.
        valid = valid and parts.netloc.count("@") <= 1 and "@" not in parts.path
    except ValueError:
        valid = False
    if not valid:
        raise ValueError("not such an address; percent-encode special characters of the password, a comma too")


def default_settings() -> Settings:
    """Return the defaults, whatever the environment says."""
    return Settings.model_construct(**{name: field.default for name, field in Settings.model_fields.items()})


def unknown_settings() -> dict[str, str | None]:
    """Return the names in the environment and `.env` that begin like settings and are none, with the nearest one."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    given = {name.upper() for name in (*os.environ, *dotenv_values(".env")) if name.upper().startswith(PREFIX)}
    return {name: next(iter(get_close_matches(name, known, 1)), None) for name in sorted(given - known)}


def load_settings() -> Settings:
    """Read the settings from the environment and `.env`.

    Raises:
        SettingsError: in one line, every setting that is wrong and what is allowed.
    """
    try:
        return Settings()
    except UnicodeDecodeError:
        raise SettingsError(".env cannot be read: it must be UTF-8") from None
    except ValidationError as error:
        problems = [_problem(e) for e in error.errors(include_input=False, include_url=False, include_context=False)]
        raise SettingsError("; ".join(dict.fromkeys(problems))) from None


def _problem(error: Any) -> str:
    message: str = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    allowed = Settings.model_fields[name].description
    return f"{PREFIX}{name.upper()}: {message}; allowed: {allowed}"
