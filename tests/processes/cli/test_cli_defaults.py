"""`rlrun validate` with the defaults of a team."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlrun.cli import validate
from tests.unit.cli.test_cli_defaults import CONFIG_MAP, manifest, written


def test_validate_reports_used_defaults_and_locked_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = written(tmp_path, "d.yaml", CONFIG_MAP)
    run = manifest(tmp_path, environments=[{"id": "reverse-text", "groupSize": 8}])
    assert validate.run_validate(["--defaults", given, run]) == 0
    out = capsys.readouterr().out
    assert "run.yaml: valid: RLRun a" in out
    assert (
        "note: spec.trainer.image is team/trainer:1, from the defaults in ConfigMap rlrun-system/team; it is locked"
        in out
    )
    assert validate.run_validate(["--json", "--defaults", given, run, "--trainer.image", "mine:2"]) == 78
    (one,) = json.loads(capsys.readouterr().out)
    assert [problem["message"] for problem in one["problems"]] == [
        "trainer.image (mine:2) is locked by ConfigMap rlrun-system/team; remove it, or write team/trainer:1"
    ]
    assert yaml.safe_load(Path(run).read_text())["spec"].get("trainer") is None, "nothing is written"
