"""`eval` and `synthesize`: each mistake is one line with option, value and fix, before any start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.cli.main import main
from rlrun.config.models.language_models import TinyModelConfig
from tests.support.stub.model import make_model
from tests.support.stub.script import PolicyScript


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLRUN_API_KEY", raising=False)
    make_model(tmp_path / "model", TinyModelConfig(), PolicyScript())
    return write_manifest(tmp_path / "run.yaml", {})


def write_manifest(path: Path, changes: dict[str, Any]) -> Path:
    spec = {
        "model": {"path": "model"},
        "maxSteps": 10,
        "seqLen": 64,
        "environments": [{"id": "reverse-text", "name": "words"}, {"id": "arithmetic"}],
        "sampling": {"maxTokens": 8},
    }
    document = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "r"}, "spec": spec | changes}
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("command", "options", "code", "message"),
    [
        (
            "eval",
            ["--environment-ids", "words,arithmetik"],
            64,
            "eval: --environment-ids: got 'arithmetik' (did you mean arithmetic?); the manifest's environments are: words, arithmetic",
        ),
        ("eval", ["--environment-ids", ","], 64, "got ',', expected names, separated by commas"),
        ("eval", ["--steps", "10,x"], 64, "argument --steps: got '10,x', expected whole numbers"),
        ("eval", ["--steps", "10"], 64, "eval: no policy of step 10; the steps in {cwd}/runs/r are: none"),
        ("eval", ["--samples-per-task", "0"], 64, "got '0', expected a whole number from 1"),
        ("eval", ["--stps", "10"], 64, "eval: unknown option --stps (did you mean --steps?)"),
        ("eval", ["--run-dir", "nowhere"], 64, "--run-dir: {cwd}/nowhere has no run.json"),
        ("eval", ["--weights-dir", "nowhere"], 65, "eval: --weights-dir: the folder {cwd}/nowhere does not exist"),
        ("eval", ["--engine-url", "http://127.0.0.1:1"], 64, "--engine-url needs RLRUN_API_KEY in the environment"),
        ("synthesize", ["--output", "data.csv"], 64, "--output: got data.csv; expected a name that ends in .jsonl or"),
        ("synthesize", ["--output", "run.yaml"], 64, "--output: got run.yaml; expected"),
        ("synthesize", [], 64, "the following arguments are required: --output"),
        (
            "synthesize",
            ["--output", "d.jsonl"],
            64,
            "synthesize: no policy in {cwd}/runs/r; evaluate the base model with --base",
        ),
        ("synthesize", ["--output", "d.jsonl", "--base", "--step", "3"], 64, "--base and --step name two policies"),
    ],
)
def test_eval_mistake_is_reported_in_one_line(
    manifest: Path, capsys: pytest.CaptureFixture[str], command: str, options: list[str], code: int, message: str
) -> None:
    assert main([command, str(manifest), *options]) == code
    err = capsys.readouterr().err
    assert message.format(cwd=manifest.parent) in err
    assert len(err.splitlines()) == 1
    assert {path.name for path in manifest.parent.iterdir()} == {"model", "run.yaml"}, "nothing is made"


def test_run_without_environments_is_refused_by_eval(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"sources": [{"path": "d.jsonl"}]}
    write_manifest(manifest, {"task": "SFT", "environments": [], "sampling": {}, "data": data})
    assert main(["eval", str(manifest)]) == 78
    assert "spec.environments is empty (task SFT)" in capsys.readouterr().err


def test_eval_validates_the_manifest(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_manifest(manifest, {"maxSteps": 0})
    assert main(["eval", str(manifest)]) == 78
    assert "spec.maxSteps: got 0" in capsys.readouterr().err


def test_unreachable_engine_is_reported_with_fix(
    manifest: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLRUN_API_KEY", "key")
    options = ["--base", "--engine-url", "http://127.0.0.1:1", "--environment-ids", "words"]
    assert main(["eval", str(manifest), *options]) == 69
    err = capsys.readouterr().err
    assert "eval: --engine-url: no engine answers at http://127.0.0.1:1" in err
    assert "start one with `inference @ RUN_FOLDER/run.json`" in err
    assert "Traceback" not in err
