"""API server requests of the team page: one connection, a rotated token, and outages."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.inspect.kubectl import ClusterError
from rlrun.ui.team.callers import Callers, Rights
from rlrun.ui.team.cluster_api import ApiServer, RefusedError, UnansweredError
from tests.support.team_cluster import ANN, over_http, two_teams

RUNS = "/apis/rlrun.io/v1alpha1/namespaces/team-a/rlruns"


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    return tmp_path


def test_requests_share_connection_and_send_newest_token(account: Path) -> None:
    cluster = two_teams()
    with over_http(cluster) as url:
        api = ApiServer(url, account)
        assert [run["metadata"]["name"] for run in api.get(RUNS)["items"]] == ["demo"]
        (account / "token").write_text("second\n")
        caller = Callers(api).identify_user(ANN, "1")
        assert Rights(api).allowed_runs(caller, [("team-a", "demo"), ("team-b", "demo")]) == {("team-a", "demo")}
        assert [bearer for bearer, _ in cluster.brought[:2]] == ["Bearer first", "Bearer second"]
        assert len({port for _, port in cluster.brought[:2]}) == 1


def test_refusals_and_outages_are_distinguished(account: Path) -> None:
    cluster = two_teams()
    with over_http(cluster) as url:
        api = ApiServer(url, account)
        with pytest.raises(RefusedError, match="not found") as refused:
            api.get(f"{RUNS}/none")
        assert refused.value.status == 404
        cluster.down = "etcd is gone"
        with pytest.raises(UnansweredError, match=r"503.*etcd is gone"):
            api.get(RUNS)
        cluster.down = None
        assert api.get(f"{RUNS}/demo")["metadata"]["name"] == "demo"
    with pytest.raises(UnansweredError, match="does not respond"):
        ApiServer(url, account).get(RUNS)


def test_closed_connection_is_reopened(account: Path) -> None:
    cluster = two_teams()
    cluster.closes = True
    with over_http(cluster) as url:
        api = ApiServer(url, account)
        for _ in range(3):
            assert api.get(RUNS)["items"]
    assert len({port for _, port in cluster.brought}) == 3


def test_missing_account_is_reported_as_outage(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="token"):
        ApiServer("https://127.0.0.1:1", tmp_path / "none").get(RUNS)


@pytest.mark.parametrize("url", ["http://10.0.0.1", "ftp://x", "10.0.0.1:443", "", "https://"])
def test_token_is_sent_only_over_tls(url: str, account: Path) -> None:
    with pytest.raises(ValueError, match="not a URL of an API server"):
        ApiServer(url, account)
