"""Settings: the contract's defaults, and wrong values told in one line without a secret."""

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


def test_durations_are_seconds_and_lists_are_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILLING_RETRY_DELAYS", "0.5, 10,3600")
    monkeypatch.setenv("BILLING_HANDLER_TIMEOUT", "2.5")
    monkeypatch.setenv("BILLING_INBOX_RETENTION", "60")
    settings = load_settings()
    assert settings.retry_delays == (timedelta(seconds=0.5), timedelta(seconds=10), timedelta(hours=1))
    assert settings.handler_timeout == timedelta(seconds=2.5)
    assert settings.inbox_retention == timedelta(days=60)


def test_a_dotenv_file_is_read_and_the_environment_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("BILLING_PREFETCH=7\nBILLING_CONCURRENCY=3\nUNRELATED=1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BILLING_PREFETCH", "9")
    settings = load_settings()
    assert (settings.prefetch, settings.concurrency) == (9, 3)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("PREFETCH", "0", "1 to 65535"),
        ("PREFETCH", "many", "1 to 65535"),
        ("CONCURRENCY", "0", "1 to 500"),
        ("MAX_ATTEMPTS", "0", "1 to 100"),
        ("RETRY_STRATEGY", "broker", "'staged'"),
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
        ("INBOX_RETENTION", "14", "BILLING_REPLAY_HORIZON"),
    ],
)
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
