"""The command that continues a local run, as `rlrun local` recommends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlrun.api.run_manifest import parse_manifest
from rlrun.local import local_command as launcher
from rlrun.local.judge import Judged
from rlrun.local.launcher import without_folder
from rlrun.local.summary import continue_advice
from rlrun.runtime import exit_codes

MANIFEST = """
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: demo}
spec: {model: {tiny: {}}, environments: [{id: arithmetic}]}
"""


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["run.yaml", "--replay", "runs/a/rollouts"], ["run.yaml", "--replay", "runs/a/rollouts"]),
        (["run.yaml", "--output-dir", "runs/b", "--share-gpus"], ["run.yaml", "--share-gpus"]),
        (["run.yaml", "--output-dir=runs/b", "--max-steps", "5"], ["run.yaml", "--max-steps", "5"]),
        (["run.yaml", "--resume", "--take-over", "--trainer-gpu-ids", "2,3"], ["run.yaml", "--trainer-gpu-ids", "2,3"]),
    ],
)
def test_without_folder_removes_only_folder_words(words: list[str], kept: list[str]) -> None:
    assert without_folder(words) == kept


def test_continue_command_keeps_start_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `--replay`, a run on recorded batches would sample new ones."""
    started: list[str] = []

    def record(*_: Any, command: str, **__: Any) -> int:
        started.append(command)
        return exit_codes.OK

    file = tmp_path / "run.yaml"
    file.write_text(MANIFEST)
    judged = Judged(parse_manifest(MANIFEST, "run.yaml")[0], (), ())
    monkeypatch.setattr(launcher, "judge_manifest", lambda *_, **__: judged)
    monkeypatch.setattr(launcher, "run_spec", record)
    assert launcher.main([str(file), "--replay", "old/rollouts", "--output-dir", "runs/b", "--max-steps", "5"]) == 0
    assert started == [f"rlrun local {file} --replay old/rollouts --max-steps 5"]


def test_continue_advice_raises_steps_at_their_source() -> None:
    root = Path("/runs/my run")
    ends = "--output-dir '/runs/my run' --resume`"
    assert (
        continue_advice("rlrun local run.yaml", root)
        == f"Continue: raise maxSteps and run `rlrun local run.yaml {ends}"
    )
    for option in ("--max-steps 5", "--max-steps=5", "--maxSteps 5"):
        command = f"rlrun local run.yaml {option}"
        assert continue_advice(command, root) == f"Continue: raise --max-steps in `{command} {ends}"
