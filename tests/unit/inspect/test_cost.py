"""`rlrun cost` of cluster runs and of folders."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlrun.cli import run_options, show_runs
from rlrun.cli.main import main
from rlrun.inspect.folder_reader import read_folder
from rlrun.inspect.gpu_cost import NO_GPUS, cost_table, of_folder, of_snapshot, sum_uses
from rlrun.inspect.kubectl import Answer
from rlrun.inspect.snapshot import CostRow
from rlrun.protocol.files.launcher_record import new_record, write_record
from rlrun.protocol.files.metrics_line import FURTHEST
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import ForkedFrom, fork_document
from tests.unit.inspect.recorded import Recorded

HOUR = 3600
BEGAN = 1_700_000_000.0


def an_rlrun(name: str, namespace: str, **more: Any) -> dict[str, Any]:
    attempts = [
        {"attempt": 0, "role": "trainer", "gpuSeconds": {"trained": HOUR}},
        {"attempt": 7, "role": "trainer", "gpuSeconds": {"trained": 2 * HOUR, "waitedForRollouts": HOUR}},
        {"attempt": 7, "role": "inference", "gpuSeconds": {"trained": 3 * HOUR, "startup": HOUR}},
    ]
    cost = {"gpuHours": 8.0, "attempts": attempts, "trained": {"tokens": 8000, "samples": 80}}
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"maxSteps": 10, "budget": {"gpuHours": 16}},
        "status": {"phase": "Running", "attempt": 7, "cost": cost} | more,
    }


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorded:
    runs = [an_rlrun("a", "one"), an_rlrun("b", "one"), an_rlrun("c", "two")]
    recorded = Recorded(
        ("get rlruns.rlrun.io a ", runs[0]),
        ("get pods", {"items": []}),
        ("get leases", {}),
        ("get rlruns.rlrun.io", {"items": runs}),
    )
    monkeypatch.setattr(run_options, "Kubectl", recorded.kubectl)
    monkeypatch.chdir(tmp_path)
    return recorded


def test_runs_are_rows_and_namespaces_sums(cluster: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "-A"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["RUN", "one/a", "one/b", "two/c", "one/all"]
    assert lines[1][1:4] == ["8.00", "16", "(50"]
    assert lines[1][5] == "75", "of training"
    assert lines[4][3] == "16.00"


def test_attempts_and_roles_are_there_in_json(cluster: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "-A", "-o", "json"]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)
    assert first["gpuHours"] == 8.0
    assert first["gpuSeconds"] == {"trained": 6 * HOUR, "waitedForRollouts": HOUR, "startup": HOUR}
    assert [(row["attempt"], row["role"]) for row in first["attempts"]] == [
        (0, "trainer"),
        (7, "trainer"),
        (7, "inference"),
    ]
    assert first["budget"] == {"gpuHours": 16}
    assert first["perGpuHour"] == {"tokens": 1000.0, "samples": 10.0}


def test_wide_has_a_line_per_attempt_and_role(cluster: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "a", "-o", "wide"]) == 0
    out = capsys.readouterr().out
    assert "  earlier attempts, trainer" in out
    assert "  attempt 7, inference" in out


def a_folder(root: Path, gpus: dict[str, int]) -> Path:
    paths = RunPaths(root)
    paths.attempts.mkdir(parents=True)
    paths.run_json.write_text(json.dumps({"trainer": {"name": "a", "max_steps": 10}}))
    for number, began in ((1, BEGAN), (2, BEGAN + 500)):
        paths.attempt_file(number).write_text(json.dumps({"attempt": number, "started_at": began}))
    lines = [
        {"step": n, "attempt": 1, "time": BEGAN + 100 + 20 * n, "time/step": 20.0, "time/wait_for_batch": 5.0}
        | {"batch/tokens": 1000.0, "batch/samples": 8.0}
        for n in range(1, 11)
    ]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_record(paths.launcher, new_record("a", 9, "again", gpus))
    return root


def test_folder_cost_is_divided_by_metrics(tmp_path: Path) -> None:
    found = of_folder(a_folder(tmp_path / "a", {"trainer": 2, "inference": 1}), time.time())
    by_role = {row.role: dict(row.seconds) for row in found.rows}
    assert by_role["trainer"] == {"trained": 270, "waitedForRollouts": 90, "startup": 240}, (
        "the first step is its last part"
    )
    assert by_role["inference"] == {"trained": 180, "startup": 120}
    assert (found.gpus, found.seconds) == (True, 3 * 300)
    assert (found.tokens, found.samples) == (10_000, 80)


def line(step: int, attempt: int, at: float, **more: float) -> dict[str, float]:
    return {"step": step, "attempt": attempt, "time": BEGAN + at, "time/step": 10.0, "batch/tokens": 100.0, **more}


def test_folder_cost_includes_lost_repeated_and_stopping_time(tmp_path: Path) -> None:
    paths = RunPaths(a_folder(tmp_path / "a", {"trainer": 1, "inference": 1}))
    again = {FURTHEST: 4.0}
    lines = [line(1, 1, 110, **{"time/start_imports": 60.0}), line(2, 1, 120)]
    lines += [line(3, 2, 560, **again), line(4, 2, 570, **again), line(5, 2, 580), line(6, 2, 590)]
    paths.metrics.write_text("".join(json.dumps(one) + "\n" for one in lines))
    log = paths.root / "logs" / "attempt_0001" / "trainer" / "trainer.log"
    log.parent.mkdir(parents=True)
    log.write_text("")
    os.utime(log, (BEGAN + 140, BEGAN + 140))
    ended = replace(new_record("a", 2, "again", {"trainer": 1, "inference": 1}), state="Complete")
    write_record(paths.launcher, replace(ended, began=BEGAN + 490, time=BEGAN + 595))
    rows = {row.attempt: dict(row.seconds) for row in of_folder(paths.root, time.time()).rows if row.role == "trainer"}
    assert rows[1] == {"startup": 110, "trained": 30}, "steps 3 and 4, that were lost, were trained first"
    assert rows[2] == {"startup": 70, "repeated": 10, "trained": 20, "stopping": 5}


def test_fork_cost_excludes_source_run(tmp_path: Path) -> None:
    root = a_folder(tmp_path / "a", {})
    RunPaths(root).fork.write_text(fork_document(ForkedFrom("b", "u", 10, 1, "/b")))
    found = of_folder(root, time.time())
    assert (found.seconds, found.tokens, found.samples) == (0, None, None)


def test_folder_without_gpus_reports_machine_hours(tmp_path: Path) -> None:
    found = of_folder(a_folder(tmp_path / "a", {}), time.time())
    assert (found.gpus, found.seconds, found.rows[0].role) == (False, 300, "machine")
    assert NO_GPUS in cost_table([found], wide=True)


def test_status_shows_throughput_per_gpu_hour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = a_folder(tmp_path / "a", {"trainer": 2, "inference": 1})
    assert main(["status", str(root)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cost")]
    assert re.fullmatch(
        r"cost +[0-9.]+ GPU-hours; [0-9,]+ tokens and [0-9,]+ samples per GPU-hour; see `rlrun cost`", line
    )
    RunPaths(root).metrics.unlink()
    assert main(["status", str(root)]) == 0
    assert "per GPU-hour" not in capsys.readouterr().out, "nothing was trained"


def test_damaged_folder_has_zero_cost(tmp_path: Path) -> None:
    root = a_folder(tmp_path / "a", {})
    RunPaths(root).attempt_file(1).write_text("{")
    RunPaths(root).metrics.write_text('{"step": 1, "attempt": 1, "time": "x", "time/step": true}\n{"st')
    assert of_folder(root, time.time()).seconds == 0


def test_unknown_use_of_newer_release_is_summed() -> None:
    rows = (CostRow(1, "trainer", (("new", 5), ("trained", 1))),)
    assert sum_uses(rows) == {"trained": 1, "new": 5}


def test_folder_snapshot_without_cost_reports_zero(tmp_path: Path) -> None:
    assert of_snapshot(read_folder(a_folder(tmp_path / "a", {}), time.time())).seconds == 0


def test_misspelled_run_name_gets_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = 'Error from server (NotFound): rlruns.rlrun.io "quickstar" not found'
    listed = {"items": [{"metadata": {"name": "quickstart", "namespace": "one"}}]}
    gone = Answer(1, "", missing)
    for module in (show_runs, run_options):
        cluster = Recorded(("get rlruns.rlrun.io quickst", gone), ("get rlruns.rlrun.io -o", listed))
        monkeypatch.setattr(module, "cluster_client", lambda _options, at=cluster: at.kubectl())
    monkeypatch.chdir(tmp_path)
    assert main(["status", "quickstar"]) == 64
    assert "(did you mean quickstart?)" in capsys.readouterr().err
    a_folder(tmp_path / "runs" / "quickstart", {})
    assert main(["status", "quickstart"]) == 64
    assert "a run with this name is in runs/quickstart" in capsys.readouterr().err
    assert main(["status", "runs/quickstar"]) == 64
    assert "there is no folder runs/quickstar (did you mean runs/quickstart?); " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["cost", "get"])
def test_machine_output_is_empty_without_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert main([command]) == 0
    told = capsys.readouterr()
    assert (told.out, "no runs" in told.err) == ("", True)
