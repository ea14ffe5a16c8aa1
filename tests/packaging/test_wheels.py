"""Both distributions as wheels, installed away from the repository."""

import tomllib
from pathlib import Path

import asyncpg
import pytest

from tests.support.databases import new_database, url_of
from tests.support.wheels import PROJECT, install, run

CONSUMER = """
from decimal import Decimal
from schemas import InvoiceCreated
event: InvoiceCreated = InvoiceCreated.model_validate_json(b"{}")
total: Decimal = event.total
reveal_type(event.currency)
"""

READ_EXAMPLE = """
from importlib.resources import files
from schemas import InvoiceCreated
example = files("schemas") / "examples" / "invoice.created.v1.json"
print(InvoiceCreated.model_validate_json(example.read_bytes()).total, example)
"""


def names(folder: Path) -> set[str]:
    """Return the names of the files in a folder, but for what running it makes."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}


@pytest.fixture(scope="module")
def consumer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of somebody who installed billing-schemas."""
    return install(PROJECT / "schemas", tmp_path_factory.mktemp("schemas"))


def test_a_consumer_reads_an_example_with_the_schemas_alone(consumer: Path) -> None:
    """Isolated from environment and working folder; what is imported is what was installed."""
    total, example = run(str(consumer), "-I", "-c", READ_EXAMPLE).split()
    assert total == "19.90"
    assert Path(example).is_relative_to(consumer.parents[1])


def test_a_consumer_has_every_file_of_the_package(consumer: Path) -> None:
    """Modules, examples and JSON Schemas; a new kind of file has to be named in schemas/pyproject.toml."""
    (installed,) = consumer.parents[1].glob("lib/python*/site-packages/schemas")
    assert names(installed) == names(PROJECT / "schemas") - {"pyproject.toml"}


def test_a_consumer_s_types_are_checked_against_the_schemas(consumer: Path, tmp_path: Path) -> None:
    """Strictly: without `py.typed` in the wheel, mypy would refuse to look into it."""
    (tmp_path / "consumer.py").write_text(CONSUMER)
    mypy = ("-m", "mypy", "--strict", "--config-file=", f"--python-executable={consumer}", "consumer.py")
    said = run(str(consumer), "-I", *mypy, folder=tmp_path)
    assert 'Revealed type is "str"' in said.replace("builtins.", "")


def test_the_schemas_have_the_version_and_the_dependencies_of_the_service() -> None:
    """The two files are written by hand; a release changes both."""
    service, schemas = (
        tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (PROJECT, PROJECT / "schemas")
    )
    assert schemas["version"] == service["version"]
    assert schemas["requires-python"] == service["requires-python"]
    assert [name.partition(">")[0] for name in schemas["dependencies"]] == ["iso4217", "pydantic"]
    assert set(schemas["dependencies"]) <= set(service["dependencies"])


async def test_the_service_s_wheel_brings_its_migrations(tmp_path: Path) -> None:
    """`billing migrate` finds them where there is no checkout."""
    python = install(PROJECT, tmp_path)
    async with new_database() as name:
        run(str(python), "-I", "-m", "service", "migrate", environment={"BILLING_DATABASE_URL": url_of(name)})
        connection = await asyncpg.connect(url_of(name))
        assert await connection.fetchval("select to_regclass('outbox_messages') is not null")
        await connection.close()
