"""Access rights on the page of a team, tested on every route."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from rlrun.protocol.files.batch import Batch, write_batch
from rlrun.ui.guard import Redactor
from rlrun.ui.live import Feed
from rlrun.ui.static_files import StaticFiles
from rlrun.ui.team.callers import Caller, Rights, SignedOutError
from rlrun.ui.team.cluster_runs import ClusterRuns, TeamRuns, Volumes
from rlrun.ui.team.gate import Gate
from rlrun.ui.team.team_server import Settings, make_team_app
from tests.support.made_runs import SECRET, Client, Folder, Reply, made, sample
from tests.support.team_cluster import ANN, BOB, ENDLESS, TeamCluster, place, query, rlrun, routes, two_teams

RUNS = ["team-a.demo", "team-b.demo"]


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
def teams(tmp_path: Path) -> TeamCluster:
    made(tmp_path / "a" / "demo")
    made(tmp_path / "b" / "demo")
    return two_teams()


@pytest.fixture
def gate(teams: TeamCluster, tmp_path: Path, static: StaticFiles) -> Gate:
    claims = {("team-a", "data"): tmp_path / "a", ("team-b", "data"): tmp_path / "b"}
    app = make_team_app(teams, Settings(claims=claims), static, Redactor({"MY_PASSWORD": SECRET}))
    assert isinstance(app, Gate)
    return app


@pytest.fixture
def asked(gate: Gate) -> Client:
    return Client(gate)


def reply(asked: Client, route: APIRoute, run: str, token: str | None) -> Reply:
    return asked.get(place(route, run), headers=bearer(token) if token else {}, **query(RUNS))


def test_gate_has_expected_routes(gate: Gate) -> None:
    paths = {route.path for route in routes(gate)}
    assert len(paths) >= 13
    assert {"/api/runs", "/api/runs/{run}", "/api/runs/{run}/rollouts", "/api/compare"} <= paths


def test_routes_hide_runs_of_other_teams(gate: Gate, asked: Client) -> None:
    for route in routes(gate):
        about_one = "{run}" in route.path or route.path == "/api/compare"
        for token, other, word in ((ANN, "team-b.demo", b"team-b"), (BOB, "team-a.demo", b"team-a")):
            found = reply(asked, route, other, token)
            assert found.status == (404 if about_one else 200), (route.path, found.body)
            assert word not in found.body.replace(other.encode(), b""), route.path


def test_routes_require_valid_token(gate: Gate, asked: Client) -> None:
    for path in [*(place(route, "team-a.demo") for route in routes(gate)), ENDLESS, "/api/x", "/api", "/api/"]:
        for headers in (
            {},
            bearer("forged"),
            {"authorization": "Basic YW5uOmFubg=="},
            {"cookie": "__Host-rlrun=forged"},
        ):
            found = asked.get(path, headers=headers, **query(RUNS))
            assert (found.status, found.json["login"]) == (401, True), (path, headers)
            assert b"demo" not in found.body


def test_user_sees_only_permitted_runs(gate: Gate, asked: Client) -> None:
    for token, namespace in ((ANN, "team-a"), (BOB, "team-b")):
        rows = asked.get("/api/runs", headers=bearer(token)).json["runs"]
        assert [(row["id"], row["where"]) for row in rows] == [(f"{namespace}.demo", f"{namespace}/demo")]
        for route in routes(gate):
            if "{run}" in route.path and not route.path.endswith(("/tokens", "/diff/{other}")):
                assert reply(asked, route, f"{namespace}.demo", token).status == 200, route.path
    view = asked.get("/api/runs/team-a.demo", headers=bearer(ANN)).json
    assert (view["place"], view["files"], view["lastStep"], view["unread"]) == ("cluster", True, 10, [])
    assert view["conditions"][0]["message"] == "all pods of team-a-demo have nodes"
    assert view["events"][0]["message"] == "attempt 1 of team-a-demo"
    assert [(pod["name"], pod["node"]) for pod in view["processes"]] == [("demo-trainer-1-0", "node-team-a-demo")]


def test_behind_no_gate_no_route_answers(gate: Gate) -> None:
    """A route that the gate does not protect has no user, and therefore no access to a run."""
    for route in routes(gate):
        assert reply(Client(gate._app), route, "team-a.demo", ANN).status == 401, route.path


def test_files_need_a_right_of_their_own(teams: TeamCluster, gate: Gate, asked: Client) -> None:
    teams.rights.discard(("ann", "team-a", "*", "files"))
    view = asked.get("/api/runs/team-a.demo", headers=bearer(ANN)).json
    assert (view["files"], view["metrics"], view["run"]["progress"]["step"]) == (False, [], 11)
    assert "rlruns/files in namespace team-a" in view["unread"][0]
    for path in (
        "curves",
        "history",
        "timeline",
        "staleness",
        "traces",
        "rollouts",
        "rollouts/0",
        "rollouts/0/tokens",
        "rollouts/0/diff/1",
    ):
        found = asked.get(f"/api/runs/team-a.demo/{path}", headers=bearer(ANN), **query(RUNS))
        assert (found.status, b"rlruns/files" in found.body) == (403, True), path
    empty = {"title": "", "steps": [], "values": [], "last": None}
    assert asked.get("/api/runs/team-a.demo/sparkline", headers=bearer(ANN)).json == empty


def test_run_on_unmounted_claim_explains_missing_files(teams: TeamCluster, asked: Client) -> None:
    teams.runs["team-a", "demo"]["status"]["storage"]["claimName"] = "other"
    view = asked.get("/api/runs/team-a.demo", headers=bearer(ANN)).json
    assert (view["files"], view["run"]["phase"]) == (False, "Running")
    for word in ("claim other of namespace team-a", "ui.claims", "rlrun rollouts demo -n team-a"):
        assert word in view["unread"][0]
    assert b"ui.claims" in asked.get("/api/runs/team-a.demo/curves", headers=bearer(ANN), metric="loss").body


def test_rollout_commands_name_a_local_folder(asked: Client, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "a" / "demo")
    folder.paths.rollouts.mkdir()
    write_batch(folder.paths.batch(3, 1), Batch(3, 1, (sample(0, 0, [1, 2, 3, 4]),)))
    found = asked.get("/api/runs/team-a.demo/rollouts/0/reasons", headers=bearer(ANN), step=3).json
    assert found["fetch"] == "rlrun pull demo run -n team-a --to demo"
    assert found["commands"]
    assert all("/" not in one["command"].split("--sample")[0] for one in found["commands"])


def test_lineage_hides_runs_without_permission(teams: TeamCluster, asked: Client, tmp_path: Path) -> None:
    teams.runs["team-a", "demo"]["metadata"]["uid"] = "u"
    for folder in ("a", "b"):
        made(tmp_path / folder / "fork").forked(Folder(tmp_path / "a" / "demo"), 3)
        teams.runs[f"team-{folder}", "fork"] = rlrun(f"team-{folder}", "fork")
    told = asked.get("/api/runs/team-a.demo/lineage", headers=bearer(ANN)).json
    assert [one["id"] for one in told["forks"]] == ["team-a.fork"]
    assert asked.get("/api/runs/team-a.fork/lineage", headers=bearer(ANN)).json["origin"]["id"] == "team-a.demo"
    assert asked.get("/api/runs/team-b.fork/lineage", headers=bearer(BOB)).json["origin"]["id"] is None


def test_lineage_requires_permission_for_files(teams: TeamCluster, asked: Client, tmp_path: Path) -> None:
    teams.runs["team-a", "demo"]["metadata"]["uid"] = "u"
    teams.runs["team-a", "fork"] = rlrun("team-a", "fork")
    made(tmp_path / "a" / "fork").forked(Folder(tmp_path / "a" / "demo"), 3)
    teams.rights.discard(("ann", "team-a", "*", "files"))
    for run in ("demo", "fork"):
        told = asked.get(f"/api/runs/team-a.{run}/lineage", headers=bearer(ANN)).json
        assert told == {"origin": None, "forks": []}


@pytest.mark.parametrize("path", ["/data/../../b/demo", "/etc", "/data/../b", "/database/demo", ""])
def test_status_path_outside_claim_is_refused(teams: TeamCluster, asked: Client, path: str) -> None:
    teams.runs["team-a", "demo"]["status"]["storage"]["path"] = path
    view = asked.get("/api/runs/team-a.demo", headers=bearer(ANN)).json
    assert view["files"] is False
    assert "is not below" in view["unread"][0]


@pytest.mark.parametrize("sub", ["{b}", "/", "../b", "x/../../b"])
def test_specification_path_outside_claim_is_refused(
    teams: TeamCluster, asked: Client, tmp_path: Path, sub: str
) -> None:
    made(tmp_path / "b" / "demo")
    teams.runs["team-a", "demo"]["spec"].setdefault("storage", {})["subPath"] = sub.format(b=tmp_path / "b")
    view = asked.get("/api/runs/team-a.demo", headers=bearer(ANN)).json
    assert view["files"] is False
    assert "is not a folder of the claim" in view["unread"][0]


def test_link_to_files_of_another_run_is_refused(teams: TeamCluster, asked: Client, tmp_path: Path) -> None:
    made(tmp_path / "a" / "hers")
    teams.runs["team-a", "demo"]["status"]["storage"]["path"] = "/data/link"
    (tmp_path / "a" / "link").symlink_to(tmp_path / "a" / "hers")
    assert "is a link" in asked.get("/api/runs/team-a.demo", headers=bearer(ANN)).json["unread"][0]
    teams.runs["team-a", "demo"]["status"]["storage"]["path"] = "/data/demo"
    metrics = tmp_path / "a" / "demo" / "metrics.jsonl"
    metrics.unlink()
    metrics.symlink_to(tmp_path / "a" / "hers" / "metrics.jsonl")
    assert "is a link to a target outside" in asked.get("/api/runs/team-a.demo", headers=bearer(ANN)).json["unread"][0]


def test_manifest_response_contains_no_secret(asked: Client) -> None:
    text = asked.get("/api/runs/team-a.demo/manifest", headers=bearer(ANN)).json["text"]
    assert "maxSteps: 100" in text
    assert "hunter2" not in text
    assert "managedFields" not in text
    assert "status" not in text


def test_role_may_name_a_single_run(teams: TeamCluster, asked: Client) -> None:
    teams.runs["team-b", "shared"] = {
        **teams.runs["team-b", "demo"],
        "metadata": {"name": "shared", "namespace": "team-b"},
    }
    teams.rights.add(("ann", "team-b", "shared", ""))
    rows = asked.get("/api/runs", headers=bearer(ANN)).json["runs"]
    assert [row["id"] for row in rows] == ["team-a.demo", "team-b.shared"]
    assert asked.get("/api/runs/team-b.demo", headers=bearer(ANN)).status == 404


@pytest.mark.parametrize(
    "run", ["team-a", "team-a.", ".demo", "team-a.demo/../x", "TEAM-A.demo", "team-a.demo,x", "team-c.demo"]
)
def test_invalid_run_id_is_unknown(asked: Client, run: str) -> None:
    assert asked.get(f"/api/runs/{run}", headers=bearer(ANN)).status == 404


def test_unserved_namespaces_are_hidden(teams: TeamCluster, static: StaticFiles) -> None:
    teams.rights.add(("ann", "team-b", "*", ""))
    asked = Client(make_team_app(teams, Settings(namespaces=("team-a",)), static, Redactor({})))
    assert [row["id"] for row in asked.get("/api/runs", headers=bearer(ANN)).json["runs"]] == ["team-a.demo"]
    assert asked.get("/api/runs/team-b.demo", headers=bearer(ANN)).status == 404


def test_user_without_permissions_sees_no_names(teams: TeamCluster, asked: Client) -> None:
    teams.rights.clear()
    answer = asked.get("/api/runs", headers=bearer(ANN))
    assert answer.json["runs"] == []
    assert "kubectl auth can-i get rlruns" in answer.json["nothing"]
    assert b"team-" not in answer.body


def test_api_server_outage_hides_all_runs(teams: TeamCluster, gate: Gate, asked: Client) -> None:
    assert asked.get("/api/runs", headers=bearer(ANN)).status == 200
    teams.down = "connection refused"
    gate._app.state.runs_of = _older(gate)  # type: ignore[attr-defined]
    for path in ("/api/runs", "/api/runs/team-a.demo", "/api/runs/team-a.demo/curves"):
        found = asked.get(path, headers=bearer(ANN), **query(RUNS))
        assert (found.status, b"connection refused" in found.body, b"trains" in found.body) == (503, True, False), path
    assert asked.get("/api/runs", headers=bearer(BOB)).status == 503
    assert asked.get("/").status == 200, "the page, which says it"


def _older(gate: Gate) -> Any:
    """Return runs whose cached list has expired."""
    before = gate._app.state.runs_of  # type: ignore[attr-defined]

    def runs_of(request: Any) -> Any:
        found = before(request)
        found._runs._listed = None
        return found

    return runs_of


async def test_events_cover_permitted_runs_and_end_with_token(teams: TeamCluster) -> None:
    asks = {"ann": Caller("ann")}

    def again() -> Caller:
        if "ann" not in asks:
            raise SignedOutError("it has expired")
        return asks["ann"]

    clock = [0.0]
    rights = Rights(teams, 30.0, lambda: clock[0])
    runs = TeamRuns(ClusterRuns(teams, (), Volumes({})), rights, Caller("ann"), again)
    every = {"team-a.demo": "1", "team-b.demo": "2"}
    heard = Feed(lambda: dict(every), 0.001).stream_events(runs.visible_fingerprints)
    async with asyncio.timeout(30):
        assert json.loads((await anext(heard)).split("data: ")[1]) == {"team-a.demo": "1"}
        every["team-b.demo"] = "3"
        every["team-a.demo"] = "4"
        while (told := json.loads((await anext(heard)).split("data: ")[1])) != {"team-a.demo": "4"}:
            assert set(told) == {"team-a.demo"}
        asks.clear()
        every["team-a.demo"] = "5"
        assert [event async for event in heard] == []


async def test_events_end_if_token_belongs_to_another_user(teams: TeamCluster) -> None:
    runs = TeamRuns(ClusterRuns(teams, (), Volumes({})), Rights(teams), Caller("ann"), lambda: Caller("bob"))
    async with asyncio.timeout(30):
        assert [
            event async for event in Feed(lambda: {"team-a.demo": "1"}, 0.001).stream_events(runs.visible_fingerprints)
        ] == []
