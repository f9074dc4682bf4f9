"""Real Chromium (from Debian) with pages of `rlrun ui`; missing programs are installed, or the tests are skipped with a reason.

Chromium comes with `apt-get install chromium`; Playwright's Python package is in the lock, and its own browsers are not used.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Error,
    Page,
    Request,
    ViewportSize,
    expect,
    sync_playwright,
)

from tests.browser.served import Served, served
from tests.cluster.errors import ClusterError
from tests.cluster.packages import install
from tests.support.made_runs import Folder, trained_long
from tests.support.slow import patience
from tests.support.waiting import PATIENCE_SECONDS
from tools.ui_bundle import BundleError, modules

WAIT_MILLISECONDS = 1000 * PATIENCE_SECONDS * patience()
"""Longest wait for a page, measured by Playwright in wall time."""
VIEWPORT: ViewportSize = {"width": 1200, "height": 900}
expect.set_options(timeout=WAIT_MILLISECONDS)


def cannot(why: str) -> None:
    """Skip with a reason; fail in CI, where each tier must run."""
    if os.environ.get("CI"):
        pytest.fail(f"the browser tests cannot run: {why}", pytrace=False)
    pytest.skip(f"the browser tests cannot run: {why}")


def _find_program() -> str | None:
    return next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser program."""
    if (found := _find_program()) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        try:
            install(["chromium", "fonts-dejavu-core"])
        except ClusterError as error:
            cannot(str(error))
        found = _find_program()
    if found is None:
        cannot("there is no chromium; install it: sudo apt-get install -y chromium")
    assert found is not None
    return found


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """Source of axe-core in the version of the page's lock."""
    try:
        return (modules() / "axe-core" / "axe.min.js").read_text()
    except BundleError as error:
        cannot(str(error))
    raise AssertionError


@pytest.fixture(scope="session")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Server with two runs that do not change."""
    folder = tmp_path_factory.mktemp("shown") / "runs"
    demo = trained_long(folder / "demo")
    demo.began(1, 0)
    demo.began(2, 60, max_steps=400)
    demo.lives(step=120, max_steps=400, eta_seconds=600.0)
    other = trained_long(folder / "other", steps=80, optimizer={"lr": 2e-5})
    other.write(
        "logs/attempt_0001/trainer/error.json",
        {"exit_code": 65, "message": "data/train.jsonl, line 7: no field `prompt`"},
    )
    other.ends("Failed")
    other.forked(demo, 30, "trainer.optimizer.lr 1e-05 -> 2e-05")
    with served(folder) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    """A run that a test may change."""
    return trained_long(tmp_path / "runs" / "mine", steps=10)


@pytest.fixture(scope="session")
def tab(browser: Browser) -> Iterator[Page]:
    """Shared window of most tests. A new window needs a process that compiles the page again: 1.5 s of CPU time."""
    context = browser.new_context(viewport=VIEWPORT)
    yield context.new_page()
    context.close()


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    """Window in its initial state, without cookies and stored values; errors of the page fail the test."""
    tab.set_viewport_size(VIEWPORT)
    tab.emulate_media(color_scheme="light")
    try:
        with _without_complaints(tab):
            yield tab
    finally:
        with suppress(Error):  # The error page of the network stores nothing.
            tab.evaluate("localStorage.clear(); sessionStorage.clear()")
        tab.context.clear_cookies()
        tab.goto("about:blank")


@pytest.fixture
def own_page(browser: Browser) -> Iterator[Page]:
    """Separate window for a test that leaves scripts or listeners in it; errors of the page fail the test."""
    context = browser.new_context(viewport=VIEWPORT)
    page = context.new_page()
    try:
        with _without_complaints(page):
            yield page
    finally:
        context.close()


@contextmanager
def _without_complaints(page: Page) -> Iterator[None]:
    """Fail at the end if the page reports an error, or loads a resource from another host."""
    page.set_default_timeout(WAIT_MILLISECONDS)
    complaints: list[str] = []

    def told(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def failed(error: Error) -> None:
        complaints.append(f"{error} {error.stack}")

    def asked(request: Request) -> None:
        if not _is_own_url(request.url):
            complaints.append(request.url)

    listeners: dict[Any, Any] = {"console": told, "pageerror": failed, "request": asked}
    for event, listener in listeners.items():
        page.on(event, listener)
    yield
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    assert [one for one in complaints if re.search(_OF_THE_BROWSER, one) is None] == []


_OF_THE_BROWSER = "^Failed to load resource: (the server responded with a status of (40[14]|429|503)|net::ERR_)"
"""Reports of the browser itself about an error response or an ended server; the page explains these in words."""


def _is_own_url(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "blob:"))
