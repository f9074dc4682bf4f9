"""Existing runs in folders and clusters: each method corresponds to the command of its name."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlrun import Run, RunError, RunFailedError, WaitTimeoutError
from rlrun.cli.main import main
from rlrun.runs import run_process
from rlrun.runs.blocks import ManifestError
from tests.unit.inspect.broken import BROKEN, NOW
from tests.unit.inspect.recorded import PODS, Recorded, of_run
from tests.unit.inspect.test_folder_commands import AGAIN, PROGRESS, Folder

HEALTHY = {
    "metadata": {"name": "a", "namespace": "team", "creationTimestamp": "2027-01-15T07:00:00Z"},
    "spec": {"maxSteps": 100},
    "status": {"phase": "Running", "progress": {"step": 7, "totalSteps": 100}, "attempt": 1},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    found = Folder(tmp_path / "runs" / "a")
    found.train(3)
    return found


def cluster(monkeypatch: pytest.MonkeyPatch, recorded: Recorded) -> Recorded:
    monkeypatch.setattr(run_process, "Kubectl", lambda flags=(): recorded.kubectl(flags))
    return recorded


def test_folder_run_is_shown_in_terminal_and_notebook(folder: Folder) -> None:
    folder.record(progress=PROGRESS, progress_time=time.time())
    run = Run.open("runs/a")
    assert repr(run) == "<Run a (runs/a): Running (Training), step 3/10, reward 0.300, ETA 1m00s>"
    page = run._repr_html_()
    assert "<svg" in page
    assert "step 3/10" in page
    assert (run.name, run.folder) == ("a", Path("runs/a"))


def test_notebook_view_shows_failure_and_escapes_text(folder: Folder) -> None:
    folder.write("logs/attempt_0001/trainer/error.json", {"message": "<script>x</script>", "exit_code": 78})
    folder.record(state="Failed", failed_role="trainer", exit_code=78)
    page = Run.open(folder.root)._repr_html_()
    assert "&lt;script&gt;x" in page
    assert "<script" not in page


def test_method_texts_equal_command_output(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.record(state="Interrupted")
    run = Run.open("runs/a")
    assert main(["why", "runs/a"]) == 0
    assert capsys.readouterr().out.strip() == str(run.why()) == repr(run.why())
    assert main(["rollouts", "runs/a", "--worst", "2"]) == 0
    assert capsys.readouterr().out.strip() == repr(run.rollouts(worst=2))
    assert main(["compare", "./runs/a", "./runs/a"]) == 0
    told = str(run.compare(run))
    assert told.endswith("the configurations are equal")
    assert capsys.readouterr().out.split()[0] == told.split()[0] == "reward/mean"


def test_rows_rollouts_and_curves_are_values(folder: Folder, tmp_path: Path) -> None:
    run = Run.open(folder.root)
    assert [row["step"] for row in run.metric_rows()] == [1, 2, 3]
    assert [row["reward"] for row in run.rollouts(3, best=1)] == [1.0]
    assert len(run.rollouts(environment="math")) == 2
    with pytest.raises(RunError, match=r"environment: unknown environment 'maths' \(did you mean math\?\)"):
        run.rollouts(environment="maths")
    with pytest.raises(RunError, match="the run has traces of steps 3 to 3"):
        run.rollouts(2)
    picture = run.plot(smooth=2)
    assert picture.title == "reward/mean"
    assert picture.save(tmp_path / "a.svg").read_text() == picture._repr_svg_()
    with pytest.raises(RunError, match="metric: a: unknown metric 'los'"):
        run.plot(metric="los")


def test_checkpoints_lists_only_complete_ones(folder: Folder) -> None:
    document = {"files": [{"size": 3}, {"size": 4}], "created_at": 5.0}
    folder.write("checkpoints/step_00000002.a0001/manifest.json", document)
    folder.write("checkpoints/step_00000009.a0001/trainer/part", "x")  # being written
    found = Run.open(folder.root).checkpoints()
    assert [(one.step, one.attempt, one.size, one.time) for one in found] == [(2, 1, 7, 5.0)]
    assert found[0].path == str(folder.root / "checkpoints/step_00000002.a0001")


def test_metrics_return_table_if_pandas_is_installed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = Run.open(folder.root)
    with pytest.raises(RunError, match=r"pip install 'pandas>=2\.2\.2', or use run\.metric_rows\(\)"):
        run.metrics()
    made: Any = ModuleType("pandas")
    made.DataFrame = lambda rows: SimpleNamespace(set_index=lambda name: (name, rows))
    monkeypatch.setitem(sys.modules, "pandas", made)
    assert run.metrics() == ("step", run.metric_rows())


def test_wait_returns_at_step_and_fails_if_unreachable(folder: Folder) -> None:
    folder.record(progress=PROGRESS, progress_time=time.time())
    run = Run.open(folder.root)
    assert run.wait(step=3) is run
    assert run.wait("Running") is run
    with pytest.raises(WaitTimeoutError, match=r"a is not Complete after 0\.01 s: Running, step 3/10; it continues"):
        run.wait(timeout=0.01)
    with pytest.raises(RunError, match="phase: got 'Done'; expected one of Pending, Starting"):
        run.wait("Done")
    folder.record(state="Interrupted")
    with pytest.raises(RunFailedError, match="a signal stopped the run"):
        run.wait(step=4)
    folder.write("logs/attempt_0001/trainer/error.json", {"message": "data.sources[0]: no rows", "exit_code": 65})
    folder.record(state="Failed", failed_role="trainer", exit_code=65)
    with pytest.raises(RunFailedError, match=r"data\.sources\[0\]: no rows"):
        run.wait()


def test_folder_run_is_suspended_through_its_launcher(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: asked.append((pid, number)))
    folder.record()
    run = Run.open(folder.root)
    run.suspend()
    assert asked == [(os.getpid(), signal.SIGINT)]
    folder.record(state="Interrupted")
    assert run.stop() is run
    with pytest.raises(RunError, match=AGAIN):
        run.resume()
    with pytest.raises(RunError, match=r"Run\.load\(FILE\)\.set"):
        run.set("maxSteps=5")
    with pytest.raises(RunError, match=r"Run\.load\(FILE\)\.local"):
        run.local(folder.root)
    with pytest.raises(RunError, match="has no manifest"):
        run.to_yaml()


def test_cluster_run_methods_use_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = HEALTHY | {"spec": {"maxSteps": 200, "suspend": True, "inference": {"minAvailable": 2}}}
    told = cluster(monkeypatch, of_run(HEALTHY, ("patch", patched), pods=PODS))
    run = Run.open("a", namespace="team", context="lab")
    assert all(command[1:3] == ["--namespace=team", "--context=lab"] for command in told.asked)
    assert repr(run).startswith("<Run a (namespace team): Running, step 7/100")
    run.suspend().set("maxSteps=200", inference={"min_available": 2})
    patches = [json.loads(word.partition("=")[2]) for command in told.asked for word in command if "--patch=" in word]
    assert patches[::2] == [
        {"spec": {"suspend": True}},
        {"spec": {"maxSteps": 200}},
        {"spec": {"inference": {"minAvailable": 2}}},
    ], "asked with --dry-run=server first, then made"
    with pytest.raises(RunError, match=r"spec\.maxStep: unknown field of the RLRun"):
        run.set("maxStep=200")
    with pytest.raises(ManifestError, match=r"inference\.replica: unknown field \(did you mean replicas\?\)"):
        run.set(inference={"replica": 2})
    assert "maxSteps: 100" in run.to_yaml()


def test_apply_sends_manifest_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    told = cluster(monkeypatch, Recorded(("apply -f", HEALTHY)))
    given: list[Any] = []
    start = told.start

    def read_file(command: Any, seconds: float) -> Any:
        if "apply" in command:
            given.append(json.loads(Path(command[command.index("-f") + 1]).read_text()))
        return start(command, seconds)

    monkeypatch.setattr(told, "start", read_file)
    Run("a", model={"path": "m"}, environments=[{"id": "reverse-text"}]).apply(namespace="team", context="lab")
    assert told.asked[0][1:3] == ["--namespace=team", "--context=lab"]
    assert given == [
        {
            "apiVersion": "rlrun.io/v1alpha1",
            "kind": "RLRun",
            "metadata": {"name": "a", "namespace": "team"},
            "spec": {"model": {"path": "m"}, "environments": [{"id": "reverse-text"}]},
        }
    ]


def test_missing_run_and_unreachable_cluster_raise_short_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster(monkeypatch, Recorded())
    with pytest.raises(RunError, match="nothing is recorded for"):
        Run.open("b", namespace="team")
    with pytest.raises(RunError, match="there is no folder"):
        Run.open("./nothere")


def test_wait_for_failed_cluster_run_raises_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(name for name, (run, *_) in BROKEN.items() if run["status"]["phase"] == "Failed")
    cluster(monkeypatch, of_run(BROKEN[name][0]))
    monkeypatch.setattr(time, "time", lambda: NOW)
    run = Run.open("a", namespace="team")
    with pytest.raises(RunFailedError) as caught:
        run.wait()
    assert str(caught.value) == str(run.why())
