"""Wrong words and files of new users: one message with the word and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.cli.main import main
from rlrun.cli.role_commands import load_role
from rlrun.cli.run_layers import RlConfig, read_layer
from rlrun.config.loading.examine import validate_layer
from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, TrainerConfig

WHOLE = """max_steps = 3
[model]
name = "org/model"
[trainer.optim]
lr = 0.5
[orchestrator]
batch_size = 8
rollouts_per_example = 4
[[orchestrator.env]]
id = "reverse-text"
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(WHOLE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rl @ --max-steps 3", "command line: @: needs a file after it"),
        ("rl --trainer @ --max-steps 3", "command line: --trainer @: needs a file after it"),
        ("rl --trainer run.toml", 'command line: --trainer run.toml: write a file as "--trainer @ run.toml"'),
        ("rl --trainer=run.toml", 'command line: --trainer run.toml: write a file as "--trainer @ run.toml"'),
        ("rl @ run", "run: has no suffix, so that its format is unknown; known: .toml, .yaml, .yml, .json"),
        ("rl @ run.ini", "run.ini: unknown format '.ini'; known: .toml"),
        ("rl @ run.toml -max-steps 3", '-max-steps: is not an option; options start with "--" (did you mean --max-steps?)'),
        ("rl @ run.toml --max-steps 3 4", "4: is not an option; options start with"),
        ("rl @ run.toml --max-steps 3 4", "; --max-steps takes one value"),
        ("rl @ run.toml --model-name x/y", "--model-name: unknown option (did you mean --model.name?)"),
        ("rl @ run.toml --trainer-optimizer-lr 1", "--trainer-optimizer-lr: unknown option (did you mean --trainer.optimizer.lr?)"),
        ("rl @ run.toml --trainer_optimizer_lr 1", "--trainer_optimizer_lr: unknown option (did you mean --trainer.optimizer.lr?)"),
        ("rl @ run.toml --orchestrator.tran.env 3", "--orchestrator.tran.env: unknown option; known: "),
        ("rl @ run.toml --environmnts.0.args.n 3", "--environmnts.0.args.n: unknown option (did you mean --environments.0.args.n?)"),
        ("rl @ run.toml --policies.steps 1", "--policies.from-run: required, but not set: "),
        ("rl @ run.toml --client.base-url https://x/v1", "--client.base-url: only for eval and synthesize: training needs token ids"),
        ("rl @ run.toml --orchestrator.client.base-url https://x/v1", "training needs token ids"),
        ("synthesize @ run.toml --output d.jsonl", "synthesize: the files set no server; set client.base_url"),
        ("init --list quickstart2", "--list prints all names; remove 'quickstart2' or --list"),
    ],
)  # fmt: skip
def test_command_line_mistake_is_reported_with_fix(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *rest = words.split()
    assert main([command, *rest, *(["--dry-run"] if command == "rl" else [])]) in (64, 78)
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("option", "ids"),
    [
        ("--orchestrator.env", ["verifiers:a"]),
        ("--orchestrator.train.env", ["verifiers:a"]),
    ],
)
def test_inline_environment_list_replaces_list_of_file(option: str, ids: list[str]) -> None:
    layer = read_layer(["@", "run.toml", option, '[{"id": "a", "args": {"n": 3}}]'], {}).layer
    run = validate_layer(RlConfig, layer)
    assert [one.id for one in run.environments] == ids
    assert run.environments[0].args == {"n": 3}
    own = read_layer(["@", "run.toml", "--orchestrator.env", '[{"name": "A", "value": "b"}]'], {}).layer
    assert validate_layer(RlConfig, own).orchestrator.env[0].value == "b"


def test_eval_dry_run_accepts_each_model_option(capsys: pytest.CaptureFixture[str]) -> None:
    for model in ("--model", "--model.name", "-m"):
        assert main(["eval", model, "org/model", "--env", '[{"id": "a"}]', "--dry-run"]) == 0
        assert '"verifiers:a"' in capsys.readouterr().out


@pytest.mark.parametrize("role", ["trainer", "inference", "orchestrator"])
def test_role_reads_its_section_of_run_file(role: str) -> None:
    models = {"trainer": TrainerConfig, "inference": InferenceConfig, "orchestrator": OrchestratorConfig}
    config, _ = load_role(role, models[role], ["@", "run.toml"], {})  # type: ignore[arg-type, type-var]
    assert config.model.name == "org/model"
    assert config.max_steps == 3
    if isinstance(config, TrainerConfig):
        assert config.optimizer.lr == 0.5
    if isinstance(config, OrchestratorConfig):
        assert (config.batch_size, config.environments[0].group_size) == (8, 4)
