"""compose.yaml and what it mounts, compared with what the service and scripts/servers rely on."""

import base64
import hashlib
import json
import re
from typing import Any

import pytest
import yaml

from service.settings import Settings
from tests.support.wheels import PROJECT

COMPOSE = yaml.safe_load((PROJECT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def seconds(text: str) -> float:
    """Return a duration; only seconds are written in the file."""
    return float(text.removesuffix("s"))


def test_the_servers_have_the_names_that_scripts_servers_starts() -> None:
    """And each of them tells when it can be used."""
    started = re.findall(r"use_compose (\w+)", (PROJECT / "scripts/servers").read_text())
    assert sorted(started) == ["postgresql", "rabbitmq"]
    assert all("healthcheck" in SERVICES[name] for name in started)


@pytest.mark.parametrize(
    ("name", "ports"),
    [
        ("postgresql", ["127.0.0.1:5432:5432"]),
        ("rabbitmq", ["127.0.0.1:5672:5672", "127.0.0.1:15672:15672"]),
        ("billing", ["127.0.0.1:8000:8000"]),
        ("migrate", []),
    ],
)
def test_no_port_is_open_to_other_machines(name: str, ports: list[str]) -> None:
    """The passwords are public."""
    assert SERVICES[name].get("ports", []) == ports


def test_the_data_survives_its_container() -> None:
    """RabbitMQ finds its data by its host's name."""
    assert "postgresql-data:/var/lib/postgresql/data" in SERVICES["postgresql"]["volumes"]
    assert "rabbitmq-data:/var/lib/rabbitmq" in SERVICES["rabbitmq"]["volumes"]
    assert set(COMPOSE["volumes"]) == {"postgresql-data", "rabbitmq-data"}
    assert SERVICES["rabbitmq"]["hostname"] == "rabbitmq"


def test_what_is_mounted_from_here_is_here_and_is_only_read() -> None:
    """Docker would make a folder in place of a missing file."""
    mounted = [v for service in SERVICES.values() for v in service.get("volumes", []) if v.startswith(".")]
    assert len(mounted) == 3
    for volume in mounted:
        source, _, mode = volume.split(":")
        assert (PROJECT / source).is_file()
        assert mode == "ro"


def test_the_service_starts_after_the_schema_and_the_broker() -> None:
    """Once the schema is there, no instance of it runs on."""
    migrate, billing = SERVICES["migrate"], SERVICES["billing"]
    assert migrate["command"] == ["migrate"]
    assert migrate["restart"] == "no"
    assert migrate["image"] == billing["image"]
    assert migrate["depends_on"] == {"postgresql": {"condition": "service_healthy"}}
    assert billing["depends_on"] == {
        "migrate": {"condition": "service_completed_successfully"},
        "rabbitmq": {"condition": "service_healthy"},
    }


def test_the_service_can_stop_in_order_and_comes_back_after_a_crash() -> None:
    """Docker's SIGKILL must not come before the service's own end."""
    billing = SERVICES["billing"]
    budget = seconds(billing["environment"]["BILLING_SHUTDOWN_TIMEOUT"])
    assert seconds(billing["stop_grace_period"]) >= budget + 5
    assert billing["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", ["migrate", "billing"])
def test_the_service_is_given_nothing_but_its_servers(name: str) -> None:
    """Its settings are valid; its container can change nothing and become nobody."""
    service = SERVICES[name]
    environment = {key.removeprefix("BILLING_").lower(): value for key, value in service["environment"].items()}
    assert set(environment) <= set(Settings.model_fields)
    settings = Settings(_env_file=None, **environment)
    assert settings.database_url.get_secret_value() == "postgresql://billing:billing@postgresql:5432/billing"
    assert settings.rabbitmq_url.get_secret_value() == "amqp://billing:billing@rabbitmq:5672/billing"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_broker_has_the_user_and_both_virtual_hosts() -> None:
    """The hash is that of the password `billing`."""
    definitions = json.loads((PROJECT / "deploy/compose/rabbitmq.json").read_text())
    (user,) = definitions["users"]
    assert user["name"] == "billing"
    salted = base64.b64decode(user["password_hash"])
    assert hashlib.sha256(salted[:4] + b"billing").digest() == salted[4:]
    assert [vhost["name"] for vhost in definitions["vhosts"]] == ["billing", "billing-demo"]
    everything = {"user": "billing", "configure": ".*", "write": ".*", "read": ".*"}
    assert definitions["permissions"] == [everything | {"vhost": name} for name in ("billing", "billing-demo")]


def test_the_database_has_the_role_and_both_databases() -> None:
    """The role makes databases, as the tests do, and is no superuser."""
    statements = (PROJECT / "deploy/compose/postgresql.sql").read_text()
    for statement in (
        "create role billing login createdb password 'billing';",
        "create database billing owner billing;",
    ):
        assert statement in statements
    assert "superuser" not in statements
