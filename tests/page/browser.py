"""A headless Chromium that asks nobody but loopback."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from tests.processes import wait_for

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1280,800", "--force-device-scale-factor=1"),
)
PATIENCE = 30.0


class Browser:
    """Selenium's driver and what the tests ask of a page."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load the page anew and wait for its first round, without what the log had before."""
        self.driver.get("about:blank")
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.driver.get(url)
        self.wait("performance.getEntriesByName('round').length > 0")

    def js(self, expression: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression; arguments[0] and so on are the arguments."""
        return self.driver.execute_script(f"return {expression}", *arguments)

    def wait(self, expression: str, *arguments: Any) -> Any:
        """Its first true value; AssertionError if there is none in time."""
        try:
            return wait_for(lambda: self.js(expression, *arguments), PATIENCE, 0.02)
        except AssertionError:
            raise AssertionError(f"never {expression}; {self.text('body')}") from None

    def round(self) -> None:
        """Wait for another answer to be shown."""
        before = self.js("performance.getEntriesByName('round').length")
        # The one under way may have asked before the test changed the answer.
        self.wait("performance.getEntriesByName('round').length > arguments[0] + 1", before)

    def text(self, selector: str) -> str:
        return str(self.js("document.querySelector(arguments[0]).innerText", selector))

    def texts(self, selector: str) -> list[str]:
        script = "[...document.querySelectorAll(arguments[0])].map((e) => e.innerText)"
        return list(self.js(script, selector))

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """What the system says of light and dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def requests(self) -> list[str]:
        """URLs asked for since the page was opened or this was called."""
        entries = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        sent = [entry for entry in entries if entry["method"] == "Network.requestWillBeSent"]
        return [entry["params"]["request"]["url"] for entry in sent]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console."""
        return [entry["message"] for entry in self.log("browser")]

    def log(self, kind: str) -> list[Any]:
        return list(self.driver.get_log(kind))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="dps", ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        driver = Chrome(options, Service(DRIVER))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
