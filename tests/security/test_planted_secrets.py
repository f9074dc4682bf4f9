"""Planted secrets in all inputs of bundles, web page, trackers and logs: only ordinary values are shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rlrun.cli import copies, logs
from rlrun.cli.main import main
from rlrun.inspect.kubectl import Kubectl
from rlrun.runtime.process_logs import configure_log
from rlrun.tracking import worker
from rlrun.ui.static_files import StaticFiles
from tests.support.made_runs import Folder, client, made, rollout
from tests.support.planted import ORDINARY, PLANTED, Planted
from tests.support.tracked_run import TrackedFolder
from tests.unit.inspect.recorded import of_run, pod

COMMIT = "3f2a9c1d4e5b6a7980123456789abcdef0123456"
UID = "0b7c3a52-4f7e-4c8e-9b5d-2a1f6c3e9d10"
FREE = "xk-plain-words"
"""Secret without a recognizable format, under an inconspicuous name."""


@pytest.fixture
def static(tmp_path: Path) -> StaticFiles:
    """Page without files; only its API is used."""
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "index.html").write_text("<title>page</title>")
    return StaticFiles(tmp_path / "static")


def make_spec() -> dict[str, Any]:
    """Return manifest fields with each planted secret at each place that accepts text."""
    texts = [one.text for one in PLANTED]
    variables = [{"name": f"V{i}", "value": text} for i, text in enumerate([*texts, FREE])]
    return {
        "model": {"name": "Qwen/Qwen3-8B", "revision": COMMIT},
        "environments": [
            {
                "id": "mine",
                "args": {"opener": FREE, "deep": {"list": [{"note": text} for text in texts]}, "limit": 100},
            },
            {"id": "other", "args": {"notes": texts, "password": 73195286}},
        ],
        "trainer": {"env": variables, "podTemplate": {"metadata": {"annotations": {"example.com/a": FREE}}}},
        "inference": {"extraArgs": ["--token", "behind-a-flag", "--opener", FREE, "--max-num-seqs", "256"]},
    }


def make_containers() -> list[dict[str, Any]]:
    """Return containers of a pod with planted secrets."""
    return [
        {
            "name": "c",
            "env": [{"name": "OPENER", "value": FREE}],
            "args": ["--token", "behind-a-flag"],
            "command": ["sh", "-c", f"x {FREE}"],
        },
        *(
            {"name": f"c{i}", "env": [{"name": "NOTE", "value": one.text}], "args": [one.text]}
            for i, one in enumerate(PLANTED)
        ),
    ]


def find_shown_kinds(shown: str) -> list[str]:
    """Return the kinds of secrets that are visible in the text."""
    others = [Planted("free", FREE, ""), Planted("flag", "behind-a-flag", ""), Planted("number", "73195286", "")]
    return [
        one.kind
        for one in (*PLANTED, *others)
        for part in one.parts
        if any(line in shown for line in part.splitlines() if "-----" not in line)
    ]


def parts_of(file: Path) -> str:
    """Return all contents of a bundle."""
    with tarfile.open(file) as bundle:
        return "\n".join(bundle.extractfile(one).read().decode() for one in bundle.getmembers())  # type: ignore[union-attr]


def plant_secrets(folder: Folder) -> None:
    """Plant secrets in a run's folder."""
    folder.config(**make_spec(), uid=UID)
    log = "\n".join([*(one.text for one in PLANTED), *ORDINARY, ""])
    folder.write(
        "attempts/0001.json", {"attempt": 1, "base_step": 0, "started_at": 1.7e9, "uid": UID, "spec": make_spec()}
    )
    (folder.root / "logs/attempt_0001/orchestrator").mkdir(parents=True)
    (folder.root / "logs/attempt_0001/orchestrator/orchestrator.log").write_text(log)
    folder.write(
        "logs/attempt_0001/orchestrator/error.json",
        {"exit_code": 1, "message": "\n".join(one.text for one in PLANTED), "role": "orchestrator"},
    )
    lines = [{"step": 1, "attempt": 1, "time": 1.7e9, "note": one.text, one.secret: 1.0} for one in PLANTED[:46]]
    folder.lines("metrics.jsonl", lines)


def test_folder_bundle_shows_no_planted_secret(tmp_path: Path) -> None:
    folder = made(tmp_path / "runs" / "demo")
    plant_secrets(folder)
    assert main(["debug", str(folder.root), "--file", str(tmp_path / "b.tar.gz")]) == 0
    shown = parts_of(tmp_path / "b.tar.gz")
    assert find_shown_kinds(shown) == []
    assert [text for text in ORDINARY if text not in shown] == []
    assert {COMMIT, UID, "Qwen/Qwen3-8B", "256"} <= set(shown.replace('"', " ").replace(",", " ").split())


def test_cluster_bundle_shows_no_planted_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaky = pod("a-trainer-0", "trainer")
    leaky["spec"]["containers"] = make_containers()
    leaky["metadata"]["annotations"] = {
        "example.com/a": FREE,
        **{f"example.com/n{i}": one.text for i, one in enumerate(PLANTED)},
    }
    run = {
        "metadata": {"name": "a", "namespace": "team", "uid": UID},
        "spec": make_spec(),
        "status": {"phase": "Running", "attempt": 1},
    }
    events = {
        "items": [
            {"type": "Warning", "reason": "Failed", "message": one.text, "metadata": {}, "count": 1} for one in PLANTED
        ]
    }
    logged = "\n".join([*(one.text for one in PLANTED), *ORDINARY])
    cluster = of_run(
        run,
        ("logs", logged),
        ("get statefulsets", {"items": [leaky]}),
        ("get persist", {"items": []}),
        ("get events", events),
        pods=[leaky],
    )
    monkeypatch.setattr(copies, "cluster_client", lambda _options: cluster.kubectl())
    assert main(["debug", "a", "--file", str(tmp_path / "b.tar.gz")]) == 0
    shown = parts_of(tmp_path / "b.tar.gz")
    assert find_shown_kinds(shown) == []
    assert [text for text in ORDINARY if text not in shown] == []
    assert COMMIT in shown


def test_page_shows_no_planted_secret(tmp_path: Path, static: StaticFiles) -> None:
    folder = made(tmp_path / "runs" / "demo")
    plant_secrets(folder)
    messages = [{"role": "user", "content": " ".join(one.text for one in PLANTED[:46])}]
    folder.lines("traces/step_00000003.jsonl", [rollout(0, 0, messages=messages)])
    asked = client(folder.root.parent, static=static)[0]
    paths = [
        "/api/runs",
        *(f"/api/runs/{folder.id}{one}" for one in ("", "/manifest", "/history", "/lineage", "/traces")),
    ]
    shown = b"\n".join(asked.get(path).body for path in paths).decode()
    read = asked.get(f"/api/runs/{folder.id}/rollouts/0", step="3").body.decode()
    assert find_shown_kinds(shown) == []
    assert [one.kind for one in PLANTED[:46] if any(part in read for part in one.parts)] == []
    assert COMMIT in shown


@pytest.mark.parametrize("place", ["configuration", "samples"])
def test_tracker_gets_no_planted_secret(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = TrackedFolder(
        tmp_path / "run", {"mlflow": {"uri": "http://tracker.example.org"}, "samples": {"interval": 1, "count": 64}}
    )
    document = json.loads(folder.paths.run_json.read_text())
    if place == "configuration":
        for environment in document["orchestrator"]["environments"]:
            environment["args"] = {"opener": FREE, "deep": [{"note": one.text} for one in PLANTED], "limit": 100}
        folder.paths.run_json.write_text(json.dumps(document))
    folder.step(1)
    kept = PLANTED if place == "configuration" else PLANTED[:46]  # In texts of a model only these secrets are removed.
    if place == "samples":
        rows = [json.loads(line) for line in folder.paths.trace(1).read_text().splitlines()]
        lines = [
            rows[0] | {"messages": [{"role": "user", "content": one.text}], "completion": one.text, "task_id": one.text}
            for one in kept
        ]
        folder.paths.trace(1).write_text("".join(json.dumps(line) + "\n" for line in lines))
    sent: list[bytes] = []
    answers = {
        "experiment": {"experiment_id": "1"},
        "run": {"info": {"run_id": "r", "artifact_uri": "mlflow-artifacts:/1/r"}},
    }

    class Answer:
        def __enter__(self) -> Answer:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def read(self) -> bytes:
            return json.dumps(answers).encode()

    def answer(_self: object, request: urllib.request.Request, *_: object, **__: object) -> Answer:
        sent.append(request.full_url.encode() + b" " + (request.data or b""))  # type: ignore[operator]
        return Answer()

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", answer)
    assert worker.main(["--config", str(folder.paths.run_json), "--tracker", "mlflow", "--once"], {}) == 0
    shown = b"\n".join(sent).decode()
    assert len(sent) > 3
    assert place == "configuration" or shown.count("<removed>") >= len(kept)
    assert [kind for kind in find_shown_kinds(shown) if kind in {one.kind for one in kept} | {"free"}] == []
    assert "reverse-text" in shown


def test_logs_show_no_planted_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "runs" / "demo")
    plant_secrets(folder)
    assert main(["logs", str(folder.root), "--tail", "2000"]) == 0
    shown = capsys.readouterr().out
    assert set(find_shown_kinds(shown)) <= {
        "split",
        "split-backslash",
        "yaml-block",
        "json-next-line",
        "free",
        "flag",
        "number",
    }
    assert [text for text in ORDINARY if text not in shown] == []


def test_pod_logs_pass_the_same_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log"
    file.write_text("\n".join([*(one.text for one in PLANTED[:46]), "turned \u202e around", *ORDINARY]))
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\ncat {file}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert Kubectl().run_attached(["logs", "a"]) == 0
    shown = capfd.readouterr().out
    assert [kind for kind in find_shown_kinds(shown) if kind in {one.kind for one in PLANTED[:46]}] == []
    assert "turned \\u202e around" in shown
    assert [text for text in ORDINARY if text not in shown] == []
    assert logs.logs_parser()  # Command that uses the filter.


def test_role_log_holds_no_planted_secret(tmp_path: Path) -> None:
    program = f"""
import json, sys
from pathlib import Path
from loguru import logger
from {configure_log.__module__} import configure_log
configure_log(Path(sys.argv[1]), "{{message}}")
for line in json.load(sys.stdin):
    logger.info(line)
"""
    texts = [*(one.text for one in PLANTED), "with correct-horse inside", *ORDINARY]
    environ = {**os.environ, "TEAM_PASSWORD": "correct-horse"}
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "log")],
        input=json.dumps(texts),
        text=True,
        env=environ,
        check=True,
    )
    shown = (tmp_path / "log").read_text()
    assert find_shown_kinds(shown) == []
    assert "correct-horse" not in shown
    assert [text for text in ORDINARY if text not in shown] == []
