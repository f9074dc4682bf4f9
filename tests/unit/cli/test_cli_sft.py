"""`sft` with a manifest, or with files and options as for `rl`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlrun.cli.main import main as command_line
from rlrun.cli.rl import read_rl_config
from rlrun.cli.run_layers import SftConfig
from rlrun.cli.sft import main
from rlrun.config.loading.problems import ConfigError
from rlrun.runtime import exit_codes

WHOLE = """
max_steps = 20
[model]
path = "m"
[data]
name = "org/chats"
split = "train"
seq_len = 512
batch_size = 8
[trainer.optimizer]
lr = 1e-5
[ckpt]
interval = 5
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(WHOLE)


def config(*argv: str) -> SftConfig:
    found = read_rl_config(argv, {}, SftConfig)[0]
    assert isinstance(found, SftConfig)
    return found


def test_sft_file_with_one_data_set_is_accepted() -> None:
    spec = config("@", "run.toml").spec()
    assert spec.data is not None
    assert (spec.task, spec.seq_len, spec.max_steps, spec.checkpoint.interval) == ("SFT", 512, 20, 5)
    assert [(source.name, source.split) for source in spec.data.sources] == [("org/chats", "train")]
    assert spec.data.batch_size == 8


def test_sft_command_line_overrides_file() -> None:
    spec = config("@", "run.toml", "--data.path", "a.jsonl", "--data.batch-size=4", "--max-steps", "7").spec()
    assert spec.data is not None
    assert [(source.path, source.name) for source in spec.data.sources] == [("a.jsonl", None)]
    assert (spec.data.batch_size, spec.max_steps) == (4, 7)


def test_missing_data_and_rl_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="data is not set, but task SFT needs it"):
        config("--model.path", "m")
    with pytest.raises(ConfigError, match=r"--data\.path: needs a value after it"):
        config("@", "run.toml", "--data.path", "--max-steps", "3")
    with pytest.raises(ConfigError, match=r"inference\.replicas \(2\) applies only to task RL"):
        config("@", "run.toml", "--inference.replicas", "2")


def test_sft_dry_run_prints_role_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["@", "run.toml", "--dry-run"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["inference"] is None
    assert resolved["trainer"]["algorithm"]["preset"] == "sft"
    assert resolved["orchestrator"]["data"]["batch_size"] == 8


def test_sft_manifest_is_validated(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("kind: RLRun\n")
    assert main(["run.yaml"]) == exit_codes.CONFIGURATION
    assert "apiVersion: required, but not set" in capsys.readouterr().err


def test_sft_manifest_is_benchmarked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = str(Path(__file__).parents[3] / "examples/sft.yaml")
    seen = []
    monkeypatch.setattr(
        "rlrun.cli.sft.run_bench", lambda config, options: seen.append((config.task, options.rows)) or 7
    )
    assert main([manifest, "--bench", "--bench.rows", "3"]) == 7
    assert seen == [("SFT", 3)]
    assert main([manifest, "--bench", "--plain"]) == exit_codes.USAGE
    assert "--plain: this option cannot be combined with --bench; remove it" in capsys.readouterr().err


def test_step_of_rl_manifest_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = str(Path(__file__).parents[3] / "examples/models/qwen3-4b-math.yaml")
    seen = []
    monkeypatch.setattr(
        "rlrun.cli.sft.run_bench",
        lambda config, options: seen.append((config.task, config.attention, options.rows)) or 7,
    )
    words = ["local", "--bench", manifest, "--trainer.attention", "flex", "--bench.rows", "3"]
    assert command_line(words) == 7
    assert seen == [("RL", "flex", 3)]
    assert command_line(["local", "--bench"]) == exit_codes.USAGE
    assert "--bench: needs a manifest: write RUN.yaml --bench" in capsys.readouterr().err
