"""Settings: the contract's defaults, and wrong values told in one line without a secret."""

import traceback
from datetime import timedelta
from pathlib import Path

import pytest

from service.settings import Settings, SettingsError, load_settings

SECRET = "S3cr3t-pass"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start from nothing: no variables, no .env."""
    import os

    for name in [name for name in os.environ if name.startswith("BILLING_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))


def test_the_defaults_are_the_contracts() -> None:
    settings = load_settings()
    assert (settings.prefetch, settings.concurrency, settings.max_attempts) == (100, 20, 5)
    assert (settings.retry_strategy, settings.relay, settings.topology) == ("staged", "on", "declare")
    assert [delay.total_seconds() for delay in settings.retry_delays] == [5, 30, 120, 600]
    assert settings.handler_timeout == timedelta(seconds=30)
    assert settings.confirm_timeout == timedelta(seconds=5)
    assert settings.shutdown_timeout == timedelta(seconds=20)
    assert settings.relay_poll_interval == timedelta(seconds=1)
    assert (settings.relay_batch, settings.relay_window) == (500, 100)
    assert settings.inbox_retention == timedelta(days=30)
    assert settings.outbox_retention == timedelta(days=7)
    assert settings.replay_horizon == timedelta(days=14)
    assert settings.max_body_bytes == 16 * 1024 * 1024
    assert (settings.http_host, settings.http_port) == ("127.0.0.1", 8000)
    assert (settings.log_level, settings.log_format) == ("INFO", "console")
    assert (settings.parked_alarm, settings.outbox_alarm) == (1, timedelta(minutes=5))
    assert settings.rabbitmq_management_url is None
    assert settings.vhost == "billing"
    local = "billing:billing@127.0.0.1"
    assert settings.database_url.get_secret_value() == f"postgresql://{local}:5432/billing"
    assert settings.rabbitmq_url.get_secret_value() == f"amqp://{local}:5672/billing"


def test_durations_are_seconds_and_lists_are_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILLING_RETRY_DELAYS", "0.5, 10,3600")
    monkeypatch.setenv("BILLING_HANDLER_TIMEOUT", "2.5")
    monkeypatch.setenv("BILLING_INBOX_RETENTION", "60")
    monkeypatch.setenv("BILLING_REDACTED_FIELDS", " ")
    settings = load_settings()
    assert settings.redacted_fields == ()
    assert settings.retry_delays == (timedelta(seconds=0.5), timedelta(seconds=10), timedelta(hours=1))
    assert settings.handler_timeout == timedelta(seconds=2.5)
    assert settings.inbox_retention == timedelta(days=60)


def test_an_empty_management_address_is_none_and_the_virtual_host_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILLING_RABBITMQ_MANAGEMENT_URL", " ")
    monkeypatch.setenv("BILLING_RABBITMQ_URL", "amqp://h/a%2Fb,amqp://i/a%2Fb")
    settings = load_settings()
    assert (settings.rabbitmq_management_url, settings.vhost) == (None, "a/b")
    monkeypatch.setenv("BILLING_RABBITMQ_URL", "amqp://h")
    assert load_settings().vhost == "/"


def test_a_dotenv_file_is_read_and_the_environment_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("BILLING_PREFETCH=7\nBILLING_CONCURRENCY=3\nUNRELATED=1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BILLING_PREFETCH", "9")
    settings = load_settings()
    assert (settings.prefetch, settings.concurrency) == (9, 3)


WRONG = [
    ("PREFETCH", "0", "1 to 65535"),
    ("PREFETCH", "many", "1 to 65535"),
    ("CONCURRENCY", "0", "1 to 500"),
    ("MAX_ATTEMPTS", "0", "1 to 100"),
    ("RABBITMQ_MANAGEMENT_URL", "amqp://h:15672", "http:// or https://"),
    ("PARKED_ALARM", "-1", "messages in the parking queue"),
    ("OUTBOX_ALARM", "604801", "up to 604800"),
    ("RETRY_STRATEGY", "hope", "'staged', 'dead-letter' or 'broker'"),
    ("REDACTED_FIELDS", "email,,phone", "comma-separated"),
    ("RETRY_DELAYS", "", "comma-separated"),
    ("RETRY_DELAYS", "5,,6", "comma-separated"),
    ("RETRY_DELAYS", "-1", "comma-separated"),
    ("RETRY_DELAYS", "nan", "comma-separated"),
    ("RETRY_DELAYS", "1e300", "comma-separated"),
    ("HANDLER_TIMEOUT", "0", "seconds"),
    ("HANDLER_TIMEOUT", "1800", "up to 1200"),
    ("SHUTDOWN_TIMEOUT", "soon", "seconds"),
    ("RELAY", "yes", "'on' or 'off'"),
    ("TOPOLOGY", "guess", "'declare' or 'verify'"),
    ("HTTP_PORT", "65536", "0 to 65535"),
    ("LOG_LEVEL", "LOUD", "DEBUG"),
    ("DATABASE_URL", f"mysql://u:{SECRET}@h/x", "postgresql://"),
    ("DATABASE_URL", f"postgresql://u:{SECRET}@/x", "postgresql://"),
    ("DATABASE_URL", f"postgresql://u:{SECRET}@h:port/x", "postgresql://"),
    ("RABBITMQ_URL", f"amqp:/u:{SECRET}", "amqp://"),
    ("RABBITMQ_URL", SECRET, "amqp://"),
    ("RABBITMQ_MANAGEMENT_URL", f"amqp://u:{SECRET}@h", "https://"),
    ("RABBITMQ_MANAGEMENT_URL", f"http://u:{SECRET}@h/@", "percent-encode"),
    ("INBOX_RETENTION", "14", "BILLING_REPLAY_HORIZON"),
    ("PREFETCH", "-1", "1 to 65535"),
    ("PREFETCH", "65536", "1 to 65535"),
    ("PREFETCH", "", "1 to 65535"),
    ("CONCURRENCY", "501", "1 to 500"),
    ("MAX_ATTEMPTS", "true", "1 to 100"),
    ("RETRY_DELAYS", "5;30", "comma-separated"),
    ("RETRY_DELAYS", "[5, 30]", "comma-separated"),
    ("RETRY_DELAYS", "0.009", "from 0.01"),
    ("RETRY_DELAYS", "86401", "to 86400"),
    ("HANDLER_TIMEOUT", "inf", "seconds"),
    ("HANDLER_TIMEOUT", "30s", "seconds"),
    ("CONFIRM_TIMEOUT", "0", "up to 300"),
    ("CONFIRM_TIMEOUT", "301", "up to 300"),
    ("SHUTDOWN_TIMEOUT", "0.5", "1 to 3600"),
    ("RELAY_POLL_INTERVAL", "0", "0.05 to 10"),
    ("RELAY_POLL_INTERVAL", "11", "0.05 to 10"),
    ("RELAY_BATCH", "0", "1 to 10000"),
    ("RELAY_WINDOW", "1001", "1 to 1000"),
    ("INBOX_RETENTION", "-1", "days"),
    ("INBOX_RETENTION", "0", "days"),
    ("OUTBOX_RETENTION", "a week", "days"),
    ("OUTBOX_RETENTION", "0", "days"),
    ("REPLAY_HORIZON", "-1", "days"),
    ("REPLAY_HORIZON", "30", "BILLING_INBOX_RETENTION"),
    ("MAX_BODY_BYTES", "16MiB", "bytes, from 1024"),
    ("MAX_BODY_BYTES", "0", "bytes, from 1024"),
    ("HTTP_HOST", "", "an address"),
    ("HTTP_PORT", "-1", "0 to 65535"),
    ("LOG_FORMAT", "xml", "'console' or 'json'"),
    ("DATABASE_URL", "", "postgresql://"),
    ("DATABASE_URL", f"postgresql+asyncpg://u:{SECRET}@h/x", "postgresql://"),
    ("DATABASE_URL", f"postgresql://u:{SECRET}@h:0/x", "postgresql://"),
    ("DATABASE_URL", f"postgresql://u:{SECRET}/@h/x", "percent-encode"),
    ("DATABASE_URL", f"postgresql://u:[{SECRET}@h/x", "percent-encode"),
    ("RABBITMQ_URL", f"http://u:{SECRET}@h/v", "amqp://"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}#1@h/v", "percent-encode"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}?1@h/v", "percent-encode"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}@h:65536/v", "amqp://"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}@h/v,", "comma-separated"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}@h/v,,amqp://u:{SECRET}@h/v", "comma-separated"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}@h/v;amqp://u:{SECRET}@h/v", "comma-separated"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}@h/v,http://u:{SECRET}@h/v", "amqp://"),
    ("RABBITMQ_URL", f"amqp://u:1,{SECRET}@h/v", "percent-encode"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}@h/v?heartbeat=0", "heartbeat must be a whole number of seconds from 1 to 60"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}@h/v?heartbeat=61", "from 1 to 60"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}@h/v?heartbeat=", "from 1 to 60"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}@h/v?heartbeat=2.5", "from 1 to 60"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}@h/v?heartbeat=5&heartbeat=soon", "from 1 to 60"),
    ("RABBITMQ_URL", f"amqp://u:{SECRET}@h/v,amqp://u:{SECRET}@h/v?heartbeat=-5", "from 1 to 60"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_wrong_value_is_told_in_one_line_that_names_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(f"BILLING_{name}", value)
    with pytest.raises(SettingsError) as refused:
        load_settings()
    line = str(refused.value)
    assert f"BILLING_{name}" in line
    assert allowed in line
    assert "\n" not in line
    assert SECRET not in line
    assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_the_nodes_of_a_cluster_are_told_apart_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILLING_RABBITMQ_URL", "amqp://u:a%2Cb@one/v?heartbeat=60, amqps://u:p@two:5671/v")
    assert load_settings().rabbitmq_urls == ("amqp://u:a%2Cb@one/v?heartbeat=60", "amqps://u:p@two:5671/v")
    assert "a%2Cb" not in repr(load_settings())


def test_every_setting_has_a_wrong_value_among_those_tried() -> None:
    assert {name.lower() for name, _, _ in WRONG} == set(Settings.model_fields)


@pytest.mark.parametrize("name", ["OUTBOX_RETENTION", "INBOX_RETENTION", "REPLAY_HORIZON"])
def test_more_days_than_python_can_count_are_told_in_one_line_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The start ended in an OverflowError and a traceback."""
    monkeypatch.setenv(f"BILLING_{name}", "1000000000")
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert f"BILLING_{name}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_password_with_a_bare_at_sign_is_refused_for_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver splits at the first one: the service looked up half of the password as a host name, for ever."""
    monkeypatch.setenv("BILLING_DATABASE_URL", f"postgresql://u:p@{SECRET}@h/x")
    with pytest.raises(SettingsError, match="percent-encode") as refused:
        load_settings()
    assert "BILLING_DATABASE_URL" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_password_with_a_bare_slash_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With digits in front of it, they were taken for a port, and the rest of the password for the virtual host."""
    monkeypatch.setenv("BILLING_RABBITMQ_URL", f"amqp://u:12/{SECRET}@h/v")
    with pytest.raises(SettingsError, match="percent-encode") as refused:
        load_settings()
    assert SECRET not in str(refused.value)


def test_a_dotenv_file_in_another_encoding_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The start ended in a UnicodeDecodeError and a traceback."""
    (tmp_path / ".env").write_bytes(f"BILLING_RABBITMQ_URL=amqp://u:{SECRET}\xff@h/v\n".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert ".env" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_the_secrets_of_other_settings_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILLING_DATABASE_URL", f"postgresql://u:{SECRET}@h/x")
    monkeypatch.setenv("BILLING_RABBITMQ_URL", f"amqp://u:{SECRET}@h/v")
    assert SECRET not in repr(load_settings()) + str(load_settings().model_dump())
    monkeypatch.setenv("BILLING_INBOX_RETENTION", "1")
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    ("attempts", "delays", "retention", "agrees"),
    [
        ("5", "5,30,120,600", "14.1", True),
        ("5", "5,30,120,600", "14.008", False),  # 755 s are 0.00874 days
        ("5", "5,30,120,600", "14.009", True),
        ("1", "86400", "14", True),  # no retry, no wait
        ("3", "86400", "16", True),
        ("3", "86400", "15.9", False),
    ],
)
def test_the_inbox_remembers_for_as_long_as_a_message_may_come_back(
    monkeypatch: pytest.MonkeyPatch, attempts: str, delays: str, retention: str, agrees: bool
) -> None:
    """Horizon (14 days) and the waits of every attempt together; the last delay repeats."""
    monkeypatch.setenv("BILLING_MAX_ATTEMPTS", attempts)
    monkeypatch.setenv("BILLING_RETRY_DELAYS", delays)
    monkeypatch.setenv("BILLING_INBOX_RETENTION", retention)
    if agrees:
        load_settings()
    else:
        with pytest.raises(SettingsError, match=r"BILLING_INBOX_RETENTION must be at least BILLING_REPLAY_HORIZON"):
            load_settings()


def test_several_wrong_values_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILLING_PREFETCH", "0")
    monkeypatch.setenv("BILLING_RELAY", "maybe")
    monkeypatch.setenv("BILLING_RABBITMQ_URL", f"amqp://u:{SECRET}@h/v")
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert "BILLING_PREFETCH" in str(refused.value)
    assert "BILLING_RELAY" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_password_may_hold_an_at_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILLING_DATABASE_URL", "postgresql://u:p%40ss@h/x")
    assert load_settings().database_url.get_secret_value() == "postgresql://u:p%40ss@h/x"
    assert "p%40ss" not in repr(load_settings())


def test_every_setting_says_what_is_allowed() -> None:
    assert all(field.description for field in Settings.model_fields.values())
