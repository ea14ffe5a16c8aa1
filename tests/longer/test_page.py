"""The contract as people see it: in a real Chromium, without a network beyond the service itself."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from schemas import INCOMING, MESSAGES
from service.app import published_contract
from service.health import Health
from service.http import serve, web_application
from service.telemetry import Metrics
from tests.support.browser import Browser, chromium


@contextmanager
def serving(document: str) -> Iterator[str]:
    """Run the HTTP side of the service in a thread of its own; yield its address."""
    started, stop, port = Event(), Event(), 0

    async def nothing_to_refresh() -> None:
        return

    async def run() -> None:
        nonlocal port
        metrics = Metrics()
        application = web_application(Health(metrics), metrics, nothing_to_refresh, lambda: document)
        async with serve(application, "127.0.0.1", 0) as port:
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(10)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join(10)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The HTTP side with the contract as it is."""
    with serving(published_contract()) as url:
        yield url


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium."""
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(window: Browser, address: str) -> Browser:
    """The contract's page, loaded anew; what was asked and complained before is forgotten."""
    window.driver.get("about:blank")
    window.hosts()
    window.complaints()
    window.driver.get(f"{address}/asyncapi")
    WebDriverWait(window.driver, 30).until(lambda _: "order.placed" in text(window))
    return window


def text(page: Browser) -> str:
    """Return what a person reads."""
    return page.driver.find_element(By.TAG_NAME, "body").text


def unfold(page: Browser) -> None:
    """Click what opens payloads, headers and bindings."""
    for button in page.driver.find_elements(By.XPATH, "//button[text()='Expand all']"):
        page.driver.execute_script("arguments[0].click()", button)


def test_the_page_shows_every_message_and_the_rules(page: Browser, tmp_path: Path) -> None:
    folded = text(page)
    for rule in ("Money is a JSON string", "at least once", "message-id-conflict", "orders.parking"):
        assert rule in folded
    page.picture(Path(os.environ.get("PICTURES", tmp_path)) / "asyncapi.png")
    unfold(page)
    read = text(page)
    for message in MESSAGES:
        assert message.TYPE in read
        for field in message.model_fields:
            assert field in read, f"{message.TYPE}: {field}"
    for detail in ("causation-id", "traceparent", "schema-version", "x-dead-letter-strategy", "manual, after"):
        assert detail in read
    assert read.count("orders.work") == len(INCOMING)


def test_the_money_rule_is_bold(page: Browser) -> None:
    bold = [element.text for element in page.driver.find_elements(By.CSS_SELECTOR, "#asyncapi strong")]
    assert any(each.startswith("Money is a JSON string") for each in bold)


def test_the_pages_own_parser_finds_nothing_wrong(page: Browser, address: str) -> None:
    """It is the official parser and says what it finds; that it would is seen with a document that lacks a version."""
    assert "Error" not in text(page)
    with serving("asyncapi: 3.0.0\ninfo:\n  title: Billing\n") as broken:
        page.driver.get(f"{broken}/asyncapi")
        WebDriverWait(page.driver, 30).until(lambda _: "Error" in text(page))


def test_nothing_is_asked_of_any_other_host_and_nothing_is_complained_of(page: Browser, address: str) -> None:
    assert page.hosts() == {urlsplit(address).netloc}
    assert page.complaints() == []


def test_another_host_and_a_complaint_would_be_noticed(page: Browser, address: str) -> None:
    page.driver.get(f"{address}/livez")
    page.driver.execute_script("console.error('broken'); fetch('http://localhost:1/').catch(() => 0)")
    WebDriverWait(page.driver, 10).until(lambda _: "localhost:1" in page.hosts())
    assert any("broken" in each for each in page.complaints())


def test_nothing_can_be_published_from_the_page(page: Browser, address: str) -> None:
    status = page.driver.execute_async_script(
        "const done = arguments[0]; fetch('/asyncapi/try', {method: 'POST'}).then(r => done(r.status))"
    )
    assert status == 404
