"""The entry point of each role: which process it becomes, with which configuration."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlrun.api.resolve import resolve
from rlrun.api.resource import RLRunSpec
from rlrun.cli.roles import prepare
from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import OrchestratorConfig, TrainerConfig
from rlrun.config.models.run import RunConfig

KEY = {"RLRUN_API_KEY": "secret"}


@pytest.fixture
def run_json(tmp_path: Path) -> Path:
    spec = RLRunSpec.model_validate({"model": {"path": "m"}, "environments": [{"id": "x"}]})
    file = tmp_path / "run.json"
    file.write_text(resolve(spec, name="r", uid="u", output_dir=str(tmp_path / "out")).model_dump_json())
    return file


def test_the_given_file_is_handed_on_when_nothing_changes_it(run_json: Path) -> None:
    command, env = prepare("orchestrator", ["@", str(run_json)], KEY)
    assert command == [sys.executable, "-m", "rlrun.orchestrator", "--config", str(run_json)]
    assert env == {"RLRUN_API_KEY": "secret", "RLRUN_ATTEMPT": "1"}


def test_an_option_makes_a_new_file_of_all_roles(run_json: Path, tmp_path: Path) -> None:
    before = run_json.read_text()
    command, _ = prepare("trainer", ["@", str(run_json), "--optimizer.lr", "0.5"], KEY | {"RLRUN_ATTEMPT": "3"})
    file = tmp_path / "out" / "logs" / "attempt_0003" / "trainer" / "config.json"
    assert str(file) in command
    changed = RunConfig.model_validate_json(file.read_text())
    assert changed.trainer.optimizer.lr == 0.5
    assert changed.orchestrator == RunConfig.model_validate_json(before).orchestrator
    assert run_json.read_text() == before


def test_a_file_of_one_role_alone(run_json: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(RunConfig.model_validate_json(run_json.read_text()).orchestrator.model_dump_json())
    command, _ = prepare("orchestrator", ["@", str(own)], KEY)
    written = load_file(OrchestratorConfig, Path(command[-1]), section="orchestrator")
    assert written == RunConfig.model_validate_json(run_json.read_text()).orchestrator


def test_the_trainer_is_a_torchrun_group(run_json: Path) -> None:
    command, _ = prepare("trainer", ["@", str(run_json), "--replicas", "2"], KEY)
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert command[0] == sys.executable


def test_the_trainer_replays_a_folder_that_is_there(run_json: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "rollouts"
    with pytest.raises(ConfigError, match="--replay: there is no folder"):
        prepare("trainer", ["@", str(run_json), "--replay", str(recorded)], KEY)
    recorded.mkdir()
    command, _ = prepare("trainer", ["@", str(run_json), "--replay", str(recorded), "--seed", "5"], KEY)
    assert command[-2:] == ["--replay", str(recorded)]
    written = load_file(TrainerConfig, Path(command[command.index("--config") + 1]), section="trainer")
    assert written.seed == 5


@pytest.mark.parametrize("role", ["trainer", "orchestrator", "inference"])
def test_the_key_is_required_and_the_message_makes_one(run_json: Path, role: str) -> None:
    with pytest.raises(ConfigError, match=r"RLRUN_API_KEY: required, but not set.*export RLRUN_API_KEY="):
        prepare(role, ["@", str(run_json)], {})  # type: ignore[arg-type]


@pytest.mark.parametrize("attempt", ["0", "-1", "x", "", "1.5"])
def test_a_wrong_attempt(run_json: Path, attempt: str) -> None:
    with pytest.raises(ConfigError, match=r"RLRUN_ATTEMPT: got .*, expected a whole number from 1"):
        prepare("inference", ["@", str(run_json)], KEY | {"RLRUN_ATTEMPT": attempt})


def test_problems_come_before_anything_is_written(run_json: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--optimzer\.lr: unknown option \(did you mean --optimizer\.lr\?\)"):
        prepare("trainer", ["@", str(run_json), "--optimzer.lr", "1"], KEY)
    assert not (tmp_path / "out").exists()
    assert isinstance(load_file(TrainerConfig, run_json, section="trainer"), TrainerConfig)
