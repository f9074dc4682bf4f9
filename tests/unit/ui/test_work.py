"""Limits on the work for large runs, counted in read lines and sent points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import pytest

from rlrun.ui.static_files import StaticFiles
from rlrun.ui.traces import TraceIndex
from tests.support.made_runs import Folder, client, made, metrics_line, rollout

STEPS = 100_000
ROLLOUTS = 10_000


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    return made(tmp_path / "runs" / "demo")


def test_long_metrics_are_read_once_and_thinned(run: Folder, static: StaticFiles) -> None:
    text = '{"step": %d, "attempt": 1, "reward/mean": %d, "time/step": 1}\n'
    run.write("metrics.jsonl", "".join(text % (step, step % 997) for step in range(1, STEPS + 1)))
    asked, registry = client(run.root.parent, static=static)
    path = f"/api/runs/{run.id}"
    whole = asked.get(f"{path}/curves", metric="reward/mean", points=1000)
    (curve,) = whole.json["curves"]
    assert (curve["measured"], curve["steps"][0], curve["steps"][-1]) == (STEPS, 1, STEPS)
    assert len(curve["steps"]) <= 1000
    assert (max(curve["values"]), min(curve["values"])) == (996, 0)
    near = asked.json(f"{path}/curves", metric="reward/mean", first=50_000, last=50_100)["curves"][0]
    assert near["steps"] == list(range(50_000, 50_101)), "near by, every step is there"
    assert len(asked.json(f"{path}/timeline", spans=80)["first"]) == 80
    asked.json(path)
    index = registry.get(run.id).read_steps()
    assert index.lines_read == STEPS
    run.lines("metrics.jsonl", [metrics_line(STEPS + 1)], more=True)
    assert asked.json(path)["lastStep"] == STEPS + 1
    assert index.lines_read == STEPS + 1, "only what was added"
    assert len(whole.body) < 64 * 1024


def test_many_rollouts_are_indexed_once_and_paged(
    run: Folder, static: StaticFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_indexes: list[TraceIndex] = []

    def index_of(file: BinaryIO) -> TraceIndex:
        made_indexes.append(TraceIndex(file))
        return made_indexes[-1]

    monkeypatch.setattr("rlrun.ui.run_registry.TraceIndex", index_of)
    rows = [rollout(number // 8, number % 8, number / ROLLOUTS) for number in range(ROLLOUTS)]
    run.lines("traces/step_00000003.jsonl", rows)
    asked, _ = client(run.root.parent, static=static)
    path = f"/api/runs/{run.id}/rollouts"
    for offset in (0, 5000, 9950):
        page = asked.get(path, step=3, order="best", offset=offset)
        assert len(page.json["rows"]) == 50
        assert len(page.body) < 64 * 1024
    assert asked.json(path, step=3, order="worst", limit=1)["rows"][0]["number"] == 0
    asked.json(f"{path}/7777", step=3)
    asked.json(f"/api/runs/{run.id}/staleness", step=3)
    assert [index.lines_read for index in made_indexes] == [ROLLOUTS], "one index for all pages and rollouts"


def test_rewritten_trace_is_indexed_again(run: Folder, static: StaticFiles) -> None:
    asked, _ = client(run.root.parent, static=static)
    path = f"/api/runs/{run.id}/rollouts"
    assert asked.json(path, step=3)["total"] == 16
    run.lines("traces/step_00000003.jsonl", [rollout(0, m, attempt=2) for m in range(3)], more=True)
    assert asked.json(path, step=3)["total"] == 3, "the rollouts of the newest attempt"
    assert asked.json(f"{path}/16", step=3)["row"]["number"] == 16


def test_ended_runs_are_not_read_again(run: Folder, static: StaticFiles) -> None:
    for number in range(20):
        made(run.root.parent / f"run-{number:02d}", steps=2).ends()
    run.lives()
    asked, registry = client(run.root.parent, static=static)
    first = asked.json("/api/runs")
    read = registry.snapshots_read
    assert read == 21
    assert asked.json("/api/runs") == first
    assert registry.snapshots_read == read + 1, "the one that lives"
    made(run.root.parent / "run-07", steps=3)
    asked.json("/api/runs")
    assert registry.snapshots_read == read + 3


def test_memory_for_unbounded_metric_names_is_limited(run: Folder, static: StaticFiles) -> None:
    run.lines("metrics.jsonl", [{"step": step, f"env/a/{step}": 1.0} for step in range(3000)])
    asked, _ = client(run.root.parent, static=static)
    assert len(asked.json(f"/api/runs/{run.id}")["metrics"]) == 2000


def test_overlong_trace_line_is_skipped(run: Folder, static: StaticFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlrun.ui.traces._LINE_MAX", 4096)
    rows = [rollout(0, 0), rollout(0, 1, completion="x" * 20_000), rollout(0, 2)]
    run.lines("traces/step_00000003.jsonl", rows)
    asked, _ = client(run.root.parent, static=static)
    found = asked.json(f"/api/runs/{run.id}/rollouts", step=3)["rows"]
    assert [row["rollout"] for row in found] == [0, 2]
    assert asked.json(f"/api/runs/{run.id}/rollouts/1", step=3)["row"]["rollout"] == 2
    assert json.dumps(found)
