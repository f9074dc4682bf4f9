"""Documentation of the Python API: its code runs, and a user script is typed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun import Run
from rlrun.inspect.source import FolderRun
from rlrun.runs import run_process
from tests.unit.inspect.recorded import Recorded, of_run
from tests.unit.inspect.test_folder_commands import Folder
from tests.unit.runs import typed_user

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text().partition("\n## Runs from Python\n")[2]
RUN = {
    "metadata": {"name": "letters", "namespace": "team-a", "creationTimestamp": "2027-01-15T07:00:00Z"},
    "spec": {"maxSteps": 60, "suspend": False},
    "status": {"phase": "Running", "progress": {"step": 7, "totalSteps": 60}, "attempt": 1},
}


def finished(run: Run, folder: str | Path | None = None, **_: Any) -> Run:
    """Replacement of `Run.local`: the run is complete immediately."""
    made = Folder(Path(folder or "runs/a"))
    made.train(3)
    made.record(state="Complete")
    run._place = FolderRun(made.root)
    return run


def answers() -> Recorded:
    return of_run(
        RUN,
        ("--dry-run=server", RUN | {"spec": {"maxSteps": 60, "suspend": True}}),
        ("patch", "patched"),
        ("apply -f", RUN),
        ("get rlruns.rlrun.io letters", RUN),
    )


def test_python_page_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "local", finished)
    recorded = answers()
    monkeypatch.setattr(run_process, "Kubectl", lambda flags=(): recorded.kubectl(flags))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    space: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/cli.md", "exec"), space)
    told = capsys.readouterr().out
    assert "orchestrator.batchSize (7) must be divisible by environments[0].groupSize (8); set batchSize to 8" in told
    assert "Run.set: trainer.replicas: got 0, expected a whole number" in told
    assert yaml.safe_load(Path("letters.yaml").read_text())["spec"]["trainer"]["processesPerReplica"] == 2
    assert (space["again"].name, len(space["worst"]), len(space["rows"])) == ("letters-2", 2, 3)
    assert Path("reward.svg").read_text().startswith("<svg")


def test_typed_script_builds_and_follows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = typed_user.manifest("a")
    assert yaml.safe_load(run.to_yaml())["spec"]["trainer"] == {"replicas": 1}
    finished(run)
    assert typed_user.follow(run) == [], "the recorded manifest of its checkpoint is empty"


def test_run_methods_are_on_reference_page() -> None:
    reference = (Path(__file__).parents[3] / "docs" / "reference" / "python.md").read_text()
    methods = [name for name in vars(Run) if not name.startswith("_")]
    assert len(methods) > 15
    assert [name for name in methods if f".{name}(" not in reference and f"`{name}`" not in reference] == []
