"""Team page behind a real nginx with TLS and below a path, as documented."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPSConnection

import pytest
from playwright.sync_api import Browser, expect

from rlrun.local.preflight import free_port
from tests.browser import ingress
from tests.browser.conftest import WAIT_MILLISECONDS, cannot
from tests.browser.served import served_team
from tests.cluster.errors import ClusterError
from tests.support.made_runs import made
from tests.support.team_cluster import ANN, TeamCluster, over_http, rlrun, two_teams


@dataclass
class Behind:
    """A page behind nginx.

    Attributes:
        cluster: cluster shown by the page.
        kept: port of the server that keeps the path.
        taken: port of the server that removes the path.
    """

    cluster: TeamCluster
    kept: int
    taken: int


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    try:
        nginx = ingress.program()
    except ClusterError as error:
        cannot(str(error))
    folder, cluster = tmp_path_factory.mktemp("ingress"), two_teams()
    made(folder / "volume" / "demo")
    for name in ("account", "nginx"):
        (folder / name).mkdir()
    words = ("--claim", f"team-a/data={folder / 'volume'}", "--root-path", "/rlrun", "--trusted-proxy", "127.0.0.1")
    with over_http(cluster) as url, served_team(folder / "account", url, *words) as server:
        target = server.url.removesuffix("/rlrun/")
        kept, taken = free_port(), free_port()
        with ingress.started(nginx, folder / "nginx", {kept: target, taken: f"{target}/"}):
            yield Behind(cluster, kept, taken)


@pytest.mark.parametrize("path", ["kept", "taken"])
def test_user_logs_in_and_out_behind_nginx(browser: Browser, behind: Behind, path: str) -> None:
    context = browser.new_context(ignore_https_errors=True)  # The test created the certificate.
    page = context.new_page()
    page.set_default_timeout(WAIT_MILLISECONDS)
    try:
        page.goto(f"https://localhost:{getattr(behind, path)}/rlrun/")
        page.get_by_label("Token").fill(ANN)
        page.get_by_label("Token").press("Enter")
        expect(page.locator(".user")).to_have_text("ann")
        expect(page.locator(".live")).to_have_text("live")
        (cookie,) = context.cookies()
        assert (cookie["name"], cookie["path"]) == ("__Secure-rlrun", "/rlrun/")
        assert (cookie["secure"], cookie["httpOnly"]) == (True, True)
        behind.cluster.runs["team-a", path] = rlrun("team-a", path)
        expect(page.get_by_role("link", name=f"team-a/{path}")).to_be_visible()  # This fails if nginx buffers events.
        page.get_by_role("link", name="team-a/demo").click()
        expect(page.locator("section:has(#history)")).to_contain_text("Never edited")
        page.get_by_role("button", name="Log out").click()
        expect(page.locator("h1")).to_have_text("Log in")
        assert context.cookies() == []
    finally:
        context.close()


def test_refused_tokens_are_counted_per_client_address(behind: Behind) -> None:
    """The limit is ten, plus one every six seconds: on a slow machine some more pass."""
    assert count_guesses(behind, "127.0.0.2") >= 10
    assert count_guesses(behind, "127.0.0.2", **{"X-Forwarded-For": "192.0.2.1"}) < 10, "nginx says who it is"
    assert log_in(behind, "127.0.0.3", "guess-y") == 401


def count_guesses(behind: Behind, source: str, **headers: str) -> int:
    """Return the number of refused tokens from an address before the rate limit."""
    for number in range(100):
        status = log_in(behind, source, f"guess-{number}-{len(headers)}", **headers)
        if status == 429:
            return number
        assert status == 401
    raise AssertionError("nobody is slowed down")


def log_in(behind: Behind, source: str, token: str, **headers: str) -> int:
    """Return the status of a login from an address of this machine."""
    trusting = ssl._create_unverified_context()
    connection = HTTPSConnection("127.0.0.1", behind.kept, source_address=(source, 0), context=trusting)
    own = {"Content-Type": "application/json", "Origin": f"https://127.0.0.1:{behind.kept}"}
    try:
        connection.request("POST", "/rlrun/api/login", json.dumps({"token": token}), own | headers)
        return connection.getresponse().status
    finally:
        connection.close()
