"""Conversion of `rl` role files to the specification of a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlrun.cli.rl import main, read_rl_config
from rlrun.cli.run_layers import RlConfig, read_layer
from rlrun.config.algorithm.tables import LOSS_ENTRIES
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.problems import ConfigError

TRAINER = 'max_steps = 20\n[model]\npath = "m"\n[optimizer]\nlr = 1e-4\n[ckpt]\ninterval = 5\n'
ORCHESTRATOR = 'batch_size = 32\nmax_steps = 20\nseq_len = 512\nrollouts_per_example = 4\n[[environments]]\nid = "x"\n'
INFERENCE = "max_num_seqs = 4\n"
WHOLE = """
name = "toml"
output_dir = "out"
[model]
path = "m"
[trainer.optimizer]
lr = 1e-4
[orchestrator]
batch_size = 16
seq_len = 512
[[environments]]
id = "x"
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"t": TRAINER, "o": ORCHESTRATOR, "i": INFERENCE, "run": WHOLE}.items():
        Path(f"{name}.toml").write_text(text)


def config(*argv: str, env: dict[str, str] | None = None) -> RlConfig:
    return read_rl_config(argv, env or {})[0]


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        config(*argv)
    return str(error.value).splitlines()


ROLES = ["--trainer", "@", "t.toml", "--orchestrator", "@", "o.toml", "--inference", "@", "i.toml"]


def test_role_files_are_merged_into_one_specification() -> None:
    spec = config(*ROLES).spec()
    assert (spec.max_steps, spec.seq_len, spec.model.path) == (20, 512, "m")
    assert (spec.trainer.optimizer.lr, spec.orchestrator.batch_size, spec.inference.max_num_seqs) == (1e-4, 32, 4)
    assert (spec.checkpoint.interval, spec.environments[0].group_size) == (5, 4)


def test_single_file_configures_all_roles() -> None:
    whole = config("@", "run.toml")
    assert (whole.name, whole.output_dir, whole.seq_len, whole.trainer.optimizer.lr) == ("toml", "out", 512, 1e-4)


def test_command_line_overrides_files_and_accepts_ckpt() -> None:
    changed = config(
        *ROLES, "--max-steps", "3", "--ckpt.keep-last", "7", "--trainer.optimizer.lr=1", env={"RLRUN_SEED": "4"}
    )
    assert (changed.max_steps, changed.checkpoint.keep_last, changed.checkpoint.interval, changed.seed) == (3, 7, 5, 4)
    assert changed.trainer.optimizer.lr == 1


def test_conflicting_shared_fields_of_files_name_both_lines() -> None:
    Path("o.toml").write_text(ORCHESTRATOR.replace("20", "21"))
    assert problems(*ROLES) == [
        "o.toml:2: max_steps: got 21, but t.toml:1 sets max_steps to 20; the roles share it, remove one"
    ]
    assert problems(*ROLES, "--max-steps", "3") != []


def test_conflicting_shared_fields_of_one_file_name_both_lines() -> None:
    Path("run.toml").write_text("seq_len = 1024\n" + WHOLE)
    assert problems("@", "run.toml") == [
        "run.toml:11: orchestrator.seq_len: got 512, but run.toml:1 sets seq_len to 1024; the roles share it, remove one"
    ]


def test_rollouts_per_example_sets_unset_group_size() -> None:
    Path("o.toml").write_text(ORCHESTRATOR + '[[environments]]\nid = "y"\ngroup_size = 8\n')
    assert problems(*ROLES) == [
        "o.toml:4: rollouts_per_example: got 4, but o.toml:9 sets environments[1].group_size to 8; remove one"
    ]
    Path("o.toml").write_text("rollouts_per_example = 4\n")
    assert [(one.id, one.group_size) for one in config(*ROLES).environments] == [("verifiers:reverse-text", 4)]


DEBUG = {
    "train": 'max_steps = 5\n[model]\nname = "PrimeIntellect/Qwen3-0.6B"\n[data.fake]\n'
    "batch_size = 16\nmicro_batch_size = 8\nseq_len = 128\n",
    "orch": "max_steps = 5\nmax_inflight_groups = 16\n[sampling]\nmax_tokens = 16\n",
    "infer": "[vllm]\nenforce_eager = true\n",
}
"""Values of PRIME-RL's files configs/debug/rl/train.toml, orch.toml and infer.toml."""


def write_debug() -> list[str]:
    for name, text in DEBUG.items():
        Path(f"{name}.toml").write_text(text)
    return ["--orchestrator", "@", "orch.toml", "--inference", "@", "infer.toml"]


def test_prime_rl_files_get_their_defaults_with_notice() -> None:
    layer = read_layer(write_debug(), {}).layer
    found = validate_layer(RlConfig, layer)
    algorithm, optimizer = found.algorithm, found.trainer.optimizer
    assert (algorithm.effective_loss.name, dict(algorithm.effective_loss.options)) == ("dppo", {})
    defaults = {name: option.default for name, option in LOSS_ENTRIES["dppo"].options.items()}
    assert defaults == {"mask_low": 0.2, "mask_high": 0.2, "kl_tau": 1e-3}
    assert (optimizer.weight_decay, algorithm.filters.zero_variance) == (0.01, True)
    assert [one.id for one in found.environments] == ["verifiers:reverse-text"]
    assert len([notice for notice in layer.notices if "PRIME-RL's own defaults" in notice.message]) == 1


def test_file_values_override_prime_rl_defaults() -> None:
    Path("orch.toml").write_text("[[env]]\nid = 'x'\n")
    Path("train.toml").write_text("[optim]\nweight_decay = 0.1\n[loss]\ntype = 'ipo'\n")
    found = config("--trainer", "@", "train.toml", "--orchestrator", "@", "orch.toml")
    assert (found.algorithm.effective_loss.name, found.trainer.optimizer.weight_decay) == ("ipo", 0.1)
    ours = config(
        "--orchestrator", "@", "orch.toml", "--algorithm.preset", "grpo", "--algorithm.filters.zero-variance", "false"
    )
    assert (ours.algorithm.preset, ours.algorithm.effective_loss.name, ours.algorithm.filters.zero_variance) == (
        "grpo",
        "ppo",
        False,
    )


def test_rlrun_file_gets_rlrun_defaults() -> None:
    found = config("@", "run.toml")
    assert (found.algorithm.effective_loss.name, found.trainer.optimizer.weight_decay) == ("aipo", 0.0)


def test_prime_rl_debug_files_form_a_run() -> None:
    found = config("--trainer", "@", "train.toml", *write_debug())
    assert (found.data, found.model.name, found.max_steps) == (None, "PrimeIntellect/Qwen3-0.6B", 5)


@pytest.mark.parametrize(("gpus", "options", "expected"), [
    (2, (), (1, 1)), (8, (), (1, 1)), (1, (), (0, 0)), (0, (), (0, 0)), (8, ("--trainer.gpus-per-replica", "4"), (4, 0)),
])  # fmt: skip
def test_default_layout_uses_one_gpu_per_role(gpus: int, options: tuple[str, ...], expected: tuple[int, int]) -> None:
    layer = read_layer([*write_debug(), *options], {}, gpus=gpus).layer
    found = validate_layer(RlConfig, layer)
    assert (found.trainer.gpus_per_replica, found.inference.gpus_per_replica) == expected
    assert len([one for one in layer.notices if "one GPU for training" in one.message]) == (expected == (1, 1))


def test_invalid_group_size_is_reported_under_written_name() -> None:
    Path("o.toml").write_text(ORCHESTRATOR.replace("= 4", "= 0"))
    assert problems(*ROLES) == ["o.toml:4: rollouts_per_example: got 0, expected a whole number from 1 to 4096"]


def test_unknown_fields_are_reported_as_written() -> None:
    Path("t.toml").write_text(TRAINER.replace("[optimizer]", "[optmizer]"))
    Path("run.toml").write_text(WHOLE.replace("batch_size", "btach_size"))
    assert problems(*ROLES) == ["t.toml:4: optmizer: unknown field (did you mean optimizer?)"]
    assert problems("@", "run.toml") == [
        "run.toml:9: orchestrator.btach_size: unknown field (did you mean batch_size?)"
    ]


def test_invalid_value_is_reported_with_role_file_line() -> None:
    Path("t.toml").write_text(TRAINER.replace("1e-4", '"fast"'))
    assert problems(*ROLES)[0].startswith('t.toml:5: optimizer.lr: got "fast" (a string)')


def test_missing_role_file_is_reported() -> None:
    assert problems("--trainer", "@", "none.toml") == ["none.toml: no such file"]
    assert problems("--trainer", "@") == ["command line: --trainer @: needs a file after it"]


def test_invalid_cluster_name_is_refused() -> None:
    assert "is not an RFC 1035 label" in problems(*ROLES, "--name", "My_Run")[0]


@pytest.fixture
def _nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of model and environments, which do not exist here; `test_cli_one_round` covers it."""
    monkeypatch.setattr("rlrun.local.judge.find_problems", lambda *_, **__: [])


@pytest.mark.usefixtures("_nothing_is_looked_at")
def test_main_hands_the_specification_to_the_local_run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import rlrun.local.local_command as local

    called: dict[str, Any] = {}

    def run_spec(spec: Any, **kwargs: Any) -> int:
        called.update(kwargs, spec=spec)
        return 5

    monkeypatch.setattr(local, "run_spec", run_spec)
    assert main([*ROLES, "--resume", "--output-dir", "here", "--max-steps", "2"]) == 5
    assert (called["spec"].max_steps, called["name"], called["options"].resume) == (2, "rl", True)
    assert called["options"].output_dir == "here"
    assert main(["@", "run.toml"]) == 5
    assert called["options"].output_dir == "out"


@pytest.mark.usefixtures("_nothing_is_looked_at")
def test_main_prints_and_refuses_without_starting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ROLES, "--dry-run"]) == 0
    assert '"max_steps": 20' in capsys.readouterr().out
    assert main([*ROLES, "--max-stps", "3"]) == 64
    assert "did you mean --max-steps?" in capsys.readouterr().err
    assert main([*ROLES, "--help"]) == 0
    assert "--output-dir" in capsys.readouterr().out
    Path("t.toml").write_text(TRAINER.replace("1e-4", "0"))
    assert main(ROLES) == 78


def test_misspelled_local_run_option_gets_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--trainer-prot", "5"])
    assert "--trainer-prot: unknown option (did you mean --trainer-port?)" in capsys.readouterr().err
    main(["--traner.optimizer.lr", "5"])
    assert "did you mean --trainer.optimizer.lr?" in capsys.readouterr().err
