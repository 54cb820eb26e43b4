"""Headless Chromium for tests of the page, and a viewer's server in a thread."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlsdk.viewer.service import ViewerService, serve
from rlsdk.viewer.studio.studio import Studio

SECONDS = 240.0
"""Time limit of what a test waits for; machines that run tests are slow at times."""
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Browser:
    """A page in headless Chromium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the page, a phone's where it is narrow, and its colours."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, address: str) -> None:
        """Open an address from the beginning."""
        self.driver.get("about:blank")
        self.driver.get(address)

    def wait(self, found: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
        """Wait until a function returns something true, and return it."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        wait = WebDriverWait(self.driver, seconds, 0.1, ignored_exceptions=[StaleElementReferenceException])
        return wait.until(lambda _: found(), f"{what}; the page says:\n{self.text()[:1500]}")

    def all(self, selector: str) -> list[Any]:
        """Return all elements of a selector."""
        return list(self.driver.find_elements("css selector", selector))

    def see(self, selector: str, text: str = "", seconds: float = SECONDS) -> Any:
        """Wait for an element that is shown and contains a text, and return it."""

        def found() -> Any:
            return next((e for e in self.all(selector) if e.is_displayed() and text in e.text), None)

        return self.wait(found, f"no {selector!r} with {text!r}", seconds)

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element of a selector that contains a text."""
        self.see(selector, text).click()

    def keys(self, keys: str) -> None:
        """Type keys into the page."""
        self.driver.find_element("css selector", "body").send_keys(keys)

    def text(self) -> str:
        """Return the text of the page."""
        return str(self.driver.execute_script("return document.body ? document.body.innerText : ''"))

    def run(self, script: str) -> Any:
        """Run JavaScript, and return its result."""
        return self.driver.execute_script(script)

    def screenshot(self, name: str) -> None:
        """Save a picture where RLSDK_SCREENSHOTS says; nothing happens without it."""
        if folder := os.environ.get("RLSDK_SCREENSHOTS"):
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))

    def errors(self) -> list[str]:
        """Return the page's logged errors, including violations of its security policy."""
        found = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        here = self.driver.execute_script("return location.origin")
        # The page of an earlier test asks its stopped server until another page is opened.
        return [each for each in found if "ERR_CONNECTION_REFUSED" not in each or each.startswith(here)]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium with an empty profile; the test is skipped where it or Selenium is not installed."""
    selenium = pytest.importorskip(
        "selenium.webdriver", reason="needs selenium, of the extra test", exc_type=ImportError
    )
    binary, server = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or server is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    profile = tempfile.mkdtemp(prefix="rlsdk-chromium-")
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(server))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)


@contextmanager
def served(*runs: Path, studio: Studio | None = None) -> Iterator[str]:
    """Serve runs in a thread; yields the address."""
    ready, address = threading.Event(), []
    handles: list[Any] = []

    async def main() -> None:
        ended = asyncio.Event()
        handles.extend((asyncio.get_running_loop(), ended))

        def begun(where: str) -> None:
            address.append(where)
            ready.set()

        with closing(ViewerService([str(run) for run in runs], studio=studio)) as service:
            await serve(service, "127.0.0.1", 0, begun, ended)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(SECONDS)
    try:
        yield address[0]
    finally:
        loop, ended = handles
        loop.call_soon_threadsafe(ended.set)
        thread.join(SECONDS)
