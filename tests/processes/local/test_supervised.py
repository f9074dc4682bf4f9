"""Local supervised fine-tuning: processes, refused configurations and final summary."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.run_config import RunConfig
from rlrun.local.local_command import main
from rlrun.local.process_plan import Ports, plan_processes, split_gpus, with_endpoints
from rlrun.local.read_inputs import check_data
from rlrun.local.summary import print_summary
from rlrun.runtime import exit_codes


def make_config(**data: Any) -> RunConfig:
    sources = {"sources": [{"path": "chats.jsonl"}]}
    document = {"task": "SFT", "model": {"tiny": {}}, "data": sources | data}
    return resolve_spec(RLRunSpec.model_validate(document), name="run", uid="u", output_dir="/runs/run")


def test_sft_run_has_trainer_and_orchestrator() -> None:
    ports = Ports(1, 2, 3, ())
    configs = with_endpoints(make_config(), ports, None)
    assert RunConfig.model_validate_json(configs[0].model_dump_json()) == configs[0]
    started = plan_processes(
        configs,
        [Path("run.json")],
        attempt=1,
        api_key="k",
        launch_id="l",
        ports=ports,
        trainer_gpus=[],
        inference_gpus=[],
    )
    assert [process.role for process in started] == ["trainer", "orchestrator"]
    assert split_gpus(make_config(), [], None, None) == ([], [])


def test_missing_data_is_reported_before_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**data: Any) -> list[str]:
        return [
            f"{finding.key}: {finding.message}"
            for finding in check_data(make_config(**data).orchestrator.data, here=True)
        ]

    monkeypatch.chdir(tmp_path)
    (absent,) = said()
    assert "('data', 'sources', 0, 'path'): no file or folder chats.jsonl" in absent
    Path("chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert said() == []
    (held,) = said(validation={"path": "held"})
    assert "('data', 'validation', 'path'): no file or folder held" in held


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--replay", "."], "--replay works only for task RL"),
        (["--inference-port", "8000"], "--inference-port has 1 ports, but task SFT runs no engine; remove it"),
    ],
)
def test_rl_options_are_refused_for_sft(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("run.yaml").write_text(
        "apiVersion: rlrun.io/v1alpha1\nkind: RLRun\nmetadata: {name: run}\n"
        "spec: {task: SFT, model: {tiny: {}}, data: {sources: [{path: chats.jsonl}]}}\n"
    )
    assert main(["run.yaml", *options]) == exit_codes.CONFIGURATION
    assert problem in capsys.readouterr().err


def test_replay_refuses_inference_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        "apiVersion: rlrun.io/v1alpha1\nkind: RLRun\nmetadata: {name: run}\n"
        "spec: {model: {tiny: {}}, maxSteps: 1, environments: [{id: reverse-text}]}\n"
    )
    assert main(["run.yaml", "--replay", ".", "--inference-port", "8000"]) == exit_codes.CONFIGURATION
    assert (
        "--inference-port has 1 ports, but --replay without spec.evaluation runs no engine" in capsys.readouterr().err
    )


def test_summary_shows_losses(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "validation/loss": 4.5},
        {"step": 1, "loss": 4.25},
        {"step": 2, "loss": 0.5, "validation/loss": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = io.StringIO()
    print_summary(Console(file=said, width=200), tmp_path, elapsed_seconds=61.0, command="sft run.yaml")
    assert "loss 4.2500 → 0.5000 (steps 1 and 2)" in said.getvalue()
    assert "validation loss 4.5000 (step 0) → 0.7500 (step 2)" in said.getvalue()
    assert "Complete in 1 min 1 s" in said.getvalue()
    assert "traces/" not in said.getvalue()
