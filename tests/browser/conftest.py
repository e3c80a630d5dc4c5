"""Debian's chromium, headless, driven by playwright; and what every page must keep to, whatever a test does with it.

No page may ask another host, run a dialog that nobody expects, or meet the Content-Security-Policy: each test ends with
a look at what happened. The browser is that of the system, as CI installs it; without one the tests are skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jaxserve.config import ServerConfig
from tests.server.serving import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page, Request

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

SCREENSHOTS = Path(os.environ.get("JAXSERVE_SCREENSHOTS", Path(__file__).parents[2] / "build" / "screenshots"))

_COLLECT_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
    window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


@pytest.hookimpl(tryfirst=True)  # before those are left out that a mark leaves out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "open_page" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a file; each gets a profile of its own. While it runs, its loop bars others."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium (on Debian: apt install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Watch:
    """What a page did that a reader would not see."""

    hosts: set[str] = field(default_factory=set)
    dialogs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def refuse(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens an address in a fresh profile, with a script that runs first and options of ``new_context``.

    It is checked when the test ends.
    """
    opened: list[tuple[Page, Watch, str]] = []

    def open_page(url: str, init_script: str = "", **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(10_000)
        page, watch = context.new_page(), Watch()
        page.add_init_script(_COLLECT_VIOLATIONS + init_script)
        page.on("request", lambda request: watch.hosts.add(_host(request)))
        page.on("dialog", watch.refuse)
        page.on("pageerror", lambda error: watch.errors.append(str(error)))
        opened.append((page, watch, url))
        page.goto(url)
        return page

    yield open_page
    for page, watch, url in opened:
        watch.violations = page.evaluate("window.violations")
        page.context.close()
        assert watch.hosts <= {url.split("/")[2]}
        assert (watch.dialogs, watch.errors, watch.violations) == ([], [], [])


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serves an engine until the test ends, with settings of the server; gives the URL."""
    with ExitStack() as stack:
        yield lambda engine, **settings: stack.enter_context(served(engine, ServerConfig(port=0, **settings)))


@pytest.fixture
def screenshot() -> Callable[[Page, str], None]:
    """Keeps a picture of a page, for whoever wants to look."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)

    def screenshot(page: Page, name: str) -> None:
        page.screenshot(path=SCREENSHOTS / f"{name}.png")

    return screenshot


def _host(request: Request) -> str:
    return request.url.split("/")[2]
