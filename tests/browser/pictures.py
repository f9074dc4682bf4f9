"""Pictures of the page for the documentation, with generated runs: `python -m tests.browser.pictures`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.served import Served, served, served_team
from tests.support.made_runs import Folder
from tests.support.pictured_runs import COMPLETE, RUNNING, TRACED, make_pictured_runs
from tests.support.team_cluster import over_http, two_teams

TARGET = Path(__file__).parents[2] / "docs/pictures"
SIZES = {"": (1440, 900), "-phone": (390, 844)}
"""Window sizes, by the suffix of the picture's name."""
_HIGH = 1240
"""Height of the window with the run, including its first row of small curves."""
_COLORS = 128


def list_addresses(runs: Mapping[str, Folder]) -> dict[str, tuple[str, str]]:
    """Return the address of each page, and the selector of an element that is visible once the page is complete."""
    run, other = runs[RUNNING].id, runs[COMPLETE].id
    return {
        "runs": ("/", ".spark svg >> nth=3"),
        "run": (f"/run/{run}", "section:has(#history) tbody tr"),
        "rollouts": (f"/run/{run}/rollouts", "tbody tr"),
        "rollout": (f"/run/{run}/rollouts/8?step={TRACED}&by=logprob&other=10", "ins"),
        "compare": (f"/compare?run={run}&run={other}", ".chart canvas >> nth=5"),
    }


def take(browser: Browser, server: Served, runs: Mapping[str, Folder], target: Path) -> None:
    """Take the pictures of all pages, each in a large and a small window."""
    for end, (width, height) in SIZES.items():
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="light")
        page = context.new_page()
        for name, (path, ready) in list_addresses(runs).items():
            page.set_viewport_size({"width": width, "height": _HIGH if name == "run" and not end else height})
            page.goto(server.at(path))
            _wait_until_complete(page, ready)
            _save_picture(page.screenshot(), target / f"ui-{name}{end}.png")
            if name == "run" and not end:
                section = page.locator("section:has(> .head #history)")
                _save_picture(section.screenshot(), target / "ui-changed.png")
        context.close()


def take_login(browser: Browser, target: Path) -> None:
    """Take the picture of the login."""
    with TemporaryDirectory() as account, over_http(two_teams()) as url, served_team(Path(account), url) as server:
        page = browser.new_page(viewport={"width": 1440, "height": 330}, color_scheme="light")
        page.goto(server.url)
        expect(page.get_by_label("Token")).to_be_visible()
        _save_picture(page.screenshot(), target / "ui-login.png")


def _wait_until_complete(page: Page, ready: str) -> None:
    expect(page.locator(ready).first).to_be_visible()
    expect(page.get_by_text("Reading…")).to_have_count(0)
    expect(page.locator(".live")).to_have_text("live")


def _save_picture(content: bytes, path: Path) -> None:
    """Save a picture with few colors: a fifth of the bytes, because the page has few colors."""
    path.write_bytes(content)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main() -> int:
    """Take all pictures; return the exit code."""
    TARGET.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        os.chdir(folder)  # Otherwise the pages would show another folder's name.
        runs = make_pictured_runs(Path("runs"))
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        with served(Path("runs")) as server:
            take(browser, server, runs, TARGET)
        take_login(browser, TARGET)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
