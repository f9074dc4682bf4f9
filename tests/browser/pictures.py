"""Pictures of the page for the documentation: `python -m tests.browser.pictures FOLDER` of runs that are there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Page, expect, sync_playwright

from rlrun.ui.registry import Registry
from tests.browser.served import served, served_team
from tests.support.team_cluster import over_http, two_teams

TARGET = Path(__file__).parents[2] / "docs/pictures"


def take(folder: Path, target: Path) -> None:
    """Take all pictures of the runs of a folder, of which the last by name has step 40 and its batch, and was edited."""
    ids = list(Registry([folder]).runs())
    shots = {
        "ui-runs.png": ("/", "light", "tbody tr", 1100, 420),
        "ui-run.png": (f"/run/{ids[-1]}?smooth=5", "dark", "section:has(#history) tbody tr", 1100, 1500),
        "ui-rollouts.png": (f"/run/{ids[-1]}/rollouts?order=worst", "light", "tbody tr", 1100, 760),
        "ui-rollout.png": (f"/run/{ids[-1]}/rollouts/0?step=40&by=logprob&other=1", "light", "ins", 1100, 1180),
        "ui-compare.png": (f"/compare?run={'&run='.join(ids)}&smooth=5", "light", ".chart canvas", 1100, 900),
        "ui-phone.png": (f"/run/{ids[-1]}?smooth=5", "light", ".chart canvas", 390, 844),
    }
    with served(folder) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, (path, scheme, ready, width, height) in shots.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
            page = context.new_page()
            page.goto(server.at(path))
            _settled(page, ready)
            page.screenshot(path=target / name)
            if name == "ui-run.png":
                page.locator("section:has(> .head #history)").screenshot(path=target / "ui-changed.png")
            context.close()


def take_of_a_team(target: Path) -> None:
    """Take the picture of the login."""
    made, started = TemporaryDirectory(), sync_playwright()
    with (
        made as account,
        over_http(two_teams()) as url,
        served_team(Path(account), url) as server,
        started as playwright,
    ):
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 330}, color_scheme="light")
        page.goto(server.url)
        expect(page.get_by_label("Token")).to_be_visible()
        page.screenshot(path=target / "ui-login.png")
        browser.close()


def _settled(page: Page, ready: str) -> None:
    expect(page.locator(ready).first).to_be_visible()
    expect(page.get_by_text("Reading…")).to_have_count(0)
    expect(page.locator(".live")).to_have_text("live")


if __name__ == "__main__":
    os.chdir(Path(sys.argv[1]).parent)  # so that the pages have no other folder's name
    TARGET.mkdir(exist_ok=True)
    take(Path(Path(sys.argv[1]).name), TARGET)
    take_of_a_team(TARGET)
