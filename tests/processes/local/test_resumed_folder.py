"""Reads of `--resume` from the existing run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.cli.main import main
from rlrun.runtime import exit_codes

MANIFEST = """
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: demo}
spec: {model: {tiny: {}}, environments: [{id: arithmetic}]}
"""


def resume_run(tmp_path: Path, content: str) -> int:
    (tmp_path / "run.yaml").write_text(MANIFEST)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(content)
    return main(["local", str(tmp_path / "run.yaml"), "--output-dir", str(tmp_path / "out"), "--resume"])


def test_damaged_run_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume_run(tmp_path, '{"trainer": {"uid": ') == exit_codes.CONFIGURATION
    assert "run.json" in capsys.readouterr().err


def test_resume_with_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = RLRunSpec.model_validate({"model": {"path": "m"}, "environments": [{"id": "arithmetic"}]})
    before = resolve_spec(spec, name="demo", uid="u", output_dir=str(tmp_path / "out")).model_dump_json()
    assert resume_run(tmp_path, before) == exit_codes.CONFIGURATION
    assert "spec.model differs from the run in" in capsys.readouterr().err
    assert (tmp_path / "out" / "run.json").read_text() == before
