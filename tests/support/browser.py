"""A real Chromium, headless, that writes down what it asks for and what it complains about. Debian's packages."""

import json
import shutil
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    # Of its own accord it would ask its maker for updates and translations.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)


@dataclass(slots=True)
class Browser:
    """A window."""

    driver: webdriver.Chrome

    def hosts(self) -> set[str]:
        """Return the hosts that were asked for anything since the last call; the browser's own pages are none."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return {urlsplit(url).netloc for url in urls if not url.startswith(("data:", "blob:", "chrome:"))}

    def complaints(self) -> list[str]:
        """Return the errors and warnings of the console since the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def picture(self, file: Path) -> None:
        """Write a picture of the whole page."""
        whole = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        file.write_bytes(b64decode(whole["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start Chromium; a missing one is an error."""
    paths = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        raise RuntimeError(f"{' and '.join(missing)} not found: make test-longer installs Debian's packages")
    options = webdriver.ChromeOptions()
    options.binary_location = paths["chromium"] or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options, Service(paths["chromedriver"]))
    driver.set_page_load_timeout(60)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
