"""Team page in a real browser: login, own runs, logout; light and dark, phone, and accessibility."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import product
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from rlrun.ui.live import OF_ONE_MAX
from tests.browser.conftest import WAIT_MILLISECONDS
from tests.browser.served import Served, served_team
from tests.support.made_runs import made
from tests.support.sets import few_in_gate
from tests.support.team_cluster import ANN, BOB, TeamCluster, over_http, rlrun, two_teams


@dataclass
class Team:
    """A cluster and its page."""

    cluster: TeamCluster
    server: Served


@contextmanager
def _start_team(folder: Path) -> Iterator[Team]:
    """Start a page of two teams; one run of team-a has its claim mounted here."""
    cluster = two_teams()
    cluster.runs["team-a", "far"] = rlrun("team-a", "far", claim="elsewhere")
    made(folder / "volume" / "demo")
    account = folder / "account"
    account.mkdir()
    claim = f"team-a/data={folder / 'volume'}"
    with over_http(cluster) as url, served_team(account, url, "--claim", claim, "--root-path", "/rlrun") as server:
        yield Team(cluster, server)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with _start_team(tmp_path_factory.mktemp("team")) as found:
        yield found


@pytest.fixture
def team(shared: Team) -> Iterator[Team]:
    """The two teams; the cluster is reset after each test."""
    runs = dict(shared.cluster.runs)
    yield shared
    shared.cluster.runs, shared.cluster.down = runs, None


@pytest.fixture
def own_team(tmp_path: Path) -> Iterator[Team]:
    """Two separate teams for a test that counts the connections of a server."""
    with _start_team(tmp_path) as found:
        yield found


def log_in(page: Page, team: Team, token: str, path: str = "/") -> None:
    page.goto(team.server.at(path))
    expect(page.locator("h1")).to_have_text("Log in")
    page.get_by_label("Token").fill(token)
    page.get_by_label("Token").press("Enter")
    expect(page.get_by_role("button", name="Log out")).to_be_visible()


def test_team_user_logs_in_and_out(page: Page, team: Team) -> None:
    page.goto(team.server.url)
    expect(page.get_by_text("Log in with a token of the cluster")).to_be_visible()
    page.get_by_label("Token").fill("forged")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("The cluster refused this token")
    log_in(page, team, ANN)
    expect(page.locator(".user")).to_have_text("ann")
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.locator("main")).not_to_contain_text("team-b")
    expect(page.locator(".live")).to_have_text("live")
    page.get_by_role("link", name="team-a/demo").click()
    expect(page.locator("section:has(#conditions)")).to_contain_text("all pods of team-a-demo have nodes")
    expect(page.locator("section:has(#pods)")).to_contain_text("demo-trainer-1-0")
    expect(page.locator("section:has(#events)")).to_contain_text("attempt 1 of team-a-demo")
    expect(page.get_by_role("img", name=re.compile("^Reward: training and held out over steps"))).to_be_visible()
    expect(page.locator("section:has(#history)")).to_contain_text("Never edited: the run has had one attempt.")
    page.get_by_text("The RLRun as it is applied").click()
    expect(page.locator("section:has(#manifest) pre")).to_contain_text("maxSteps: 100")
    assert ANN not in page.url
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Log out").click()
    expect(page.locator("h1")).to_have_text("Log in")
    page.reload()
    expect(page.locator("h1")).to_have_text("Log in")


def test_missing_files_of_team_run_are_reported(page: Page, team: Team) -> None:
    log_in(page, team, ANN, "/run/team-a.far")
    expect(page.locator("main")).to_contain_text("rlrun rollouts far -n team-a")
    for part in ("curves", "history"):
        expect(page.locator(f"section:has(#{part})")).to_have_count(0)
    expect(page.locator("section:has(#conditions) table")).to_be_visible()


def test_run_of_another_team_is_not_found(page: Page, team: Team) -> None:
    log_in(page, team, BOB, "/run/team-a.demo")
    expect(page.get_by_role("alert")).to_contain_text("the run team-a.demo does not exist")


def test_team_page_updates_without_reload(page: Page, team: Team) -> None:
    log_in(page, team, ANN)
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.locator(".live")).to_have_text("live")
    team.cluster.runs["team-a", "new"] = rlrun("team-a", "new")
    expect(page.get_by_role("link", name="team-a/new")).to_be_visible()


def test_excess_page_of_a_user_is_reported(page: Page, own_team: Team) -> None:
    address = urlsplit(own_team.server.url)
    streams = [HTTPConnection(address.hostname or "", address.port or 0) for _ in range(OF_ONE_MAX)]
    try:
        for stream in streams:
            stream.request("GET", "/api/events", headers={"Authorization": f"Bearer {ANN}"})
            assert stream.getresponse().readline() == b"event: runs\n"
        log_in(page, own_team, ANN)
        expect(page.locator(".live")).to_contain_text(f"not live: you have {OF_ONE_MAX} open pages of this server")
        expect(page.locator("tbody tr")).to_have_count(2)
        page.set_viewport_size({"width": 360, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    finally:
        for stream in streams:
            stream.close()
    expect(page.locator(".live")).to_have_text("live")


def test_cluster_outage_is_reported(page: Page, team: Team) -> None:
    log_in(page, team, ANN)
    team.cluster.down = "connection refused"
    page.goto(team.server.at("/run/team-a.demo"))
    expect(page.get_by_role("alert")).to_contain_text(
        "the data is temporarily unavailable: the API server returned 503"
    )


@pytest.mark.parametrize(("width", "scheme"), few_in_gate(product((1200, 360), ("light", "dark")), [(360, "light")]))
def test_axe_finds_no_violations_on_team_pages(
    browser: Browser, team: Team, axe: str, scheme: Literal["light", "dark"], width: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(WAIT_MILLISECONDS)

    def check(name: str) -> None:
        found: Any = page.evaluate(f"{axe}; axe.run({{resultTypes: ['violations']}})")
        assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]] == [], name
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name} is wider than a window of {width}"

    try:
        page.goto(team.server.url)
        expect(page.locator("h1")).to_have_text("Log in")
        check("login")
        page.get_by_label("Token").fill("forged")
        page.get_by_label("Token").press("Enter")
        expect(page.get_by_role("alert")).to_be_visible()
        check("refused login")
        log_in(page, team, ANN)
        expect(page.locator("tbody tr")).to_have_count(2)
        check("runs")
        for run in ("demo", "far"):
            page.goto(team.server.at(f"/run/team-a.{run}"))
            expect(page.locator("section:has(#events) table")).to_be_visible()
            expect(page.get_by_text("Reading…")).to_have_count(0)
            check(run)
    finally:
        context.close()
