"""Command and environment of each role's process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.cli.role_commands import load_role, prepare_process
from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, TrainerConfig
from rlrun.config.models.run_config import RunConfig

KEY = {"RLRUN_API_KEY": "secret"}


@pytest.fixture
def run_json(tmp_path: Path) -> Path:
    spec = RLRunSpec.model_validate({"model": {"path": "m"}, "environments": [{"id": "x"}]})
    file = tmp_path / "run.json"
    file.write_text(resolve_spec(spec, name="r", uid="u", output_dir=str(tmp_path / "out")).model_dump_json())
    return file


def test_unchanged_file_is_passed_directly(run_json: Path) -> None:
    command, env = prepare_process("orchestrator", ["@", str(run_json)], KEY)
    assert command == [sys.executable, "-P", "-m", "rlrun.orchestrator", "--config", str(run_json)]
    assert env == {"RLRUN_API_KEY": "secret", "RLRUN_ATTEMPT": "1"}


def test_option_writes_new_file_with_all_roles(run_json: Path, tmp_path: Path) -> None:
    before = run_json.read_text()
    command, _ = prepare_process("trainer", ["@", str(run_json), "--optimizer.lr", "0.5"], KEY | {"RLRUN_ATTEMPT": "3"})
    file = tmp_path / "out" / "logs" / "attempt_0003" / "trainer" / "config.json"
    assert str(file) in command
    changed = RunConfig.model_validate_json(file.read_text())
    assert changed.trainer.optimizer.lr == 0.5
    assert changed.orchestrator == RunConfig.model_validate_json(before).orchestrator
    assert run_json.read_text() == before


def test_file_of_one_role_is_accepted(run_json: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(RunConfig.model_validate_json(run_json.read_text()).orchestrator.model_dump_json())
    command, _ = prepare_process("orchestrator", ["@", str(own)], KEY)
    written = load_file(OrchestratorConfig, Path(command[-1]), section="orchestrator")
    assert written == RunConfig.model_validate_json(run_json.read_text()).orchestrator


def test_trainer_starts_as_torchrun_group(run_json: Path) -> None:
    command, _ = prepare_process("trainer", ["@", str(run_json), "--replicas", "2"], KEY)
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert command[0] == sys.executable


def test_trainer_replays_existing_folder(run_json: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "rollouts"
    with pytest.raises(ConfigError, match="--replay: there is no folder"):
        prepare_process("trainer", ["@", str(run_json), "--replay", str(recorded)], KEY)
    recorded.mkdir()
    command, _ = prepare_process("trainer", ["@", str(run_json), "--replay", str(recorded), "--seed", "5"], KEY)
    assert command[-2:] == ["--replay", str(recorded)]
    written = load_file(TrainerConfig, Path(command[command.index("--config") + 1]), section="trainer")
    assert written.seed == 5


@pytest.mark.parametrize("role", ["trainer", "orchestrator", "inference"])
def test_missing_api_key_error_contains_command(run_json: Path, role: str) -> None:
    with pytest.raises(ConfigError, match=r"RLRUN_API_KEY: required, but not set.*export RLRUN_API_KEY="):
        prepare_process(role, ["@", str(run_json)], {})  # type: ignore[arg-type]


@pytest.mark.parametrize("attempt", ["0", "-1", "x", "", "1.5"])
def test_invalid_attempt_number_is_refused(run_json: Path, attempt: str) -> None:
    with pytest.raises(ConfigError, match=r"RLRUN_ATTEMPT: got .*, expected a whole number from 1"):
        prepare_process("inference", ["@", str(run_json)], KEY | {"RLRUN_ATTEMPT": attempt})


def test_option_error_is_reported_before_any_write(run_json: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--optimzer\.lr: unknown option \(did you mean --optimizer\.lr\?\)"):
        prepare_process("trainer", ["@", str(run_json), "--optimzer.lr", "1"], KEY)
    assert not (tmp_path / "out").exists()
    assert isinstance(load_file(TrainerConfig, run_json, section="trainer"), TrainerConfig)


def test_handwritten_trainer_file_needs_only_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "t.toml"
    own.write_text("max_steps = 5\noutput_dir = 'here'\n[model]\nname = 'a/b'\nseq_len = 64\n[optim]\nlr = 0.5\n")
    command, _ = prepare_process("trainer", ["@", str(own), "--model.ac", "--optim.weight-decay", "0.25"], KEY)
    config = load_file(TrainerConfig, tmp_path / "here" / "logs" / "attempt_0001" / "trainer" / "config.json")
    assert str(tmp_path / "here" / "logs" / "attempt_0001" / "trainer" / "config.json") in command
    assert (config.max_steps, config.seq_len, config.model.name) == (5, 64, "a/b")
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.activation_checkpointing) == (0.5, 0.25, "full")
    own.write_text("[vllm]\nmodel = 'a/b'\ntensor_parallel_size = 2\nblock_size = 16\n[server]\nport = 8000\n")
    engine, layer = load_role("inference", InferenceConfig, ["@", str(own)], {})
    assert (engine.tensor_parallel, engine.gpus_per_replica, engine.extra_args) == (2, 2, ["--block-size=16"])
    assert [notice.path for notice in layer.notices] == ["server"]
    own.write_text("max_steps = 5\n")
    with pytest.raises(ConfigError, match=r"model: required, but not set"):
        load_role("inference", InferenceConfig, ["@", str(own)], {})


def test_handwritten_environment_inherits_shared_sampling(tmp_path: Path) -> None:
    own = tmp_path / "o.toml"
    own.write_text("rollouts_per_example = 4\n[model]\nname = 'a/b'\n[sampling]\nmax_tokens = 9\n[[env]]\nid = 'x'\n")
    config, _ = load_role("orchestrator", OrchestratorConfig, ["@", str(own), "--batch-size", "8"], {})
    [environment] = config.environments
    assert (environment.id, environment.group_size, config.batch_size) == ("verifiers:x", 4, 8)
    assert environment.sampling is not None
    assert environment.sampling.max_tokens == 9


def test_each_role_is_a_subcommand() -> None:
    from rlrun.cli.main import COMMANDS

    assert {"rl", "sft", "trainer", "orchestrator", "inference"} <= COMMANDS.keys()
