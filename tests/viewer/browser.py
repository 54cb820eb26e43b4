"""Headless Chromium for tests of the page, and a viewer's server in a thread."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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

    async def main(ready: Callable[[str], None], ended: asyncio.Event) -> None:
        with closing(ViewerService([str(run) for run in runs], studio=studio)) as service:
            await serve(service, "127.0.0.1", 0, ready, ended)

    with in_thread(main) as address:
        yield address


@contextmanager
def proxied(server: str, path: str) -> Iterator[str]:
    """Forward requests below a path to a server, as nginx with `proxy_pass` does; yields the address of the path."""
    from aiohttp import ClientSession, web

    async def forward(request: web.Request) -> web.Response:
        headers = {**request.headers, "Host": urlsplit(server).netloc, "X-Forwarded-Host": request.headers["Host"]}
        target = server + request.path_qs.removeprefix(path)
        async with (
            ClientSession() as client,
            client.request(
                request.method, target, headers=headers, data=await request.read(), allow_redirects=False
            ) as answer,
        ):
            sent = {name: value for name, value in answer.headers.items() if name in ("Content-Type", "Location")}
            return web.Response(status=answer.status, body=await answer.read(), headers=sent)

    async def main(ready: Callable[[str], None], ended: asyncio.Event) -> None:
        app = web.Application()
        app.router.add_route("*", path + "{below:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready(f"http://127.0.0.1:{runner.addresses[0][1]}{path}")
        await ended.wait()
        await runner.cleanup()

    with in_thread(main) as address:
        yield address


@contextmanager
def in_thread(main: Callable[[Callable[[str], None], asyncio.Event], Coroutine[Any, Any, None]]) -> Iterator[str]:
    """Run a server in a thread until the block ends; yields the address that it reports."""
    ready, address = threading.Event(), []
    handles: list[Any] = []

    async def run() -> None:
        ended = asyncio.Event()
        handles.extend((asyncio.get_running_loop(), ended))

        def begun(where: str) -> None:
            address.append(where)
            ready.set()

        await main(begun, ended)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(SECONDS)
    try:
        yield address[0]
    finally:
        loop, ended = handles
        loop.call_soon_threadsafe(ended.set)
        thread.join(SECONDS)
