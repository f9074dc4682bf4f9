"""Programs, files and options of verl that change a run beyond its keys are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.cli.convert import read_sources
from rlrun.config.loading.problems import ConfigError
from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import Converted, convert_settings, read_settings
from rlrun.convert.readers.hydra import Setting

KEYS = "data.train_files=/d/train.parquet actor_rollout_ref.model.path=Qwen/Qwen3-8B algorithm.adv_estimator=grpo"
SFT: dict[str, Any] = {"data.train_files": "/d/train.parquet", "model.path": "Qwen/Qwen3-8B"}


def converted(command: str, *sources: str) -> Converted:
    settings = read_settings(f"{command} {KEYS} trainer.total_training_steps=7\n", "run.sh", {})
    return convert_settings(settings, Context("run"), [*sources, "run.sh"])


def fate(changes: dict[str, Any], base: dict[str, Any] | None = None) -> str:
    """Return the kind of fate of the changed key."""
    first = dict(word.split("=") for word in KEYS.split()) if base is None else base
    result = convert_settings([Setting(k, v, "t") for k, v in (first | changes).items()], Context("run", 70), ["t"])
    return next(one.kind for one in result.fates if one.setting.key in changes)


@pytest.mark.parametrize(
    "command",
    [
        "python3 -m recipe.flowrl.main_flowrl",
        "torchrun --nnodes=1 -m verl.experimental.other.main_ppo",
        "python3 recipe/prime/main_prime.py",
    ],
)
def test_custom_program_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match="is an unknown program of verl"):
        converted(command)


@pytest.mark.parametrize(
    "command",
    ["python3 -m verl.trainer.main_ppo", "python3 -m recipe.dapo.main_dapo", "python3 verl/trainer/main_ppo.py"],
)
def test_known_program_is_converted(command: str) -> None:
    assert converted(command).missing == []


def test_script_that_starts_another_names_it() -> None:
    with pytest.raises(ConfigError, match=r"rlrun convert recipe/run\.sh"):
        read_settings("echo start\nnvidia-smi\nbash recipe/run.sh\n", "job.sh", {})


def test_missing_named_configuration_is_requested() -> None:
    command = "python3 -m verl.trainer.main_ppo --config-path=config --config-name="
    assert any("rlrun convert search.yaml run.sh" in line for line in converted(f"{command}search").missing)
    assert converted(f"{command}search", "configs/search.yaml").missing == []
    assert converted(f"{command}ppo_megatron_trainer.yaml").missing == []
    own = "python3 -m verl.trainer.main_ppo --config-path=/srv/mine --config-name=ppo_trainer"
    assert any("--config-name=ppo_trainer" in line for line in converted(own).missing)


def test_missing_files_of_defaults_list_are_requested() -> None:
    keys = dict(word.split("=") for word in KEYS.split()) | {"trainer.total_training_steps": 7}
    for listed in ({"defaults": ["ppo_trainer", "search", "_self_"]}, {"defaults[0]": "search", "defaults[1].x": "y"}):
        found = convert_settings([Setting(*item, "t") for item in (keys | listed).items()], Context("run"), ["t"])
        assert [line.partition(":")[0].partition("=")[2] for line in found.missing] == ["search"]


def test_named_configuration_is_read_from_its_folder(tmp_path: Path) -> None:
    folders = [tmp_path / "examples" / name for name in ("conf", "scripts")]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {rollout: {n: 16}}\n")
    script = folders[1] / "run.sh"
    options = '--config-path="$(pwd)/examples/conf" --config-name=mine'
    script.write_text(f"python3 -m verl.trainer.main_ppo {options} {KEYS} trainer.total_training_steps=7\n")
    settings, sources = read_sources([str(script)])
    found = convert_settings(settings, Context("run"), sources)
    assert "groupSize: 16" in found.text
    assert found.missing == []
    assert [Path(source).name for source in read_sources([str(folders[0] / "mine.yaml"), str(script)])[1]] == [
        "mine.yaml",
        "run.sh",
    ]


def test_defaults_list_files_are_read_and_missing_ones_reported(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "defaults: [lost]\nactor: {path: Qwen/Qwen3-0.6B}\ntrain_dataset: {batch_size: 4}\n"
    )
    (tmp_path / "over.yaml").write_text("gconfig: {n_samples: 3}\n")
    (tmp_path / "dir").mkdir()
    mine = tmp_path / "dir" / "mine.yaml"
    mine.write_text(
        "defaults:\n  - ../base@_global_\n  - _self_\n  - ../over\n"
        "train_dataset: {batch_size: 8, path: openai/gsm8k}\ngconfig: {n_samples: 2}\n"
    )
    settings, sources = read_sources([str(mine)])
    assert [Path(source).name for source in sources] == ["base.yaml", "mine.yaml", "over.yaml"]
    found = convert_settings(settings, Context("run", 80), sources)
    assert "batchSize: 24" in found.text
    assert next(line for line in found.missing if "defaults=" in line).startswith("defaults=lost: ")


def test_images_of_rows_are_reported() -> None:
    for name in ("image", "video", "audio"):
        keys = dict(word.split("=") for word in KEYS.split()) | {f"data.{name}_key": f"{name}s"}
        found = convert_settings([Setting(*item, "t") for item in keys.items()], Context("run", 70), ["t"])
        assert any(f"data.{name}_key={name}s: no {name} of a row is read" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("key", "value", "fine"),
    [
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "tools.yaml", None),
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path", "user.yaml", None),
        ("actor_rollout_ref.rollout.multi_turn.function_tool_path", "tools.py", None),
        ("reward_model.reward_manager", "batch", "prime"),
        ("reward.reward_manager.name", "gdpo", "naive"),
        ("actor_rollout_ref.model.override_config.attention_dropout", 0.1, 0.0),
        ("actor_rollout_ref.model.override_config.max_position_embeddings", 32768, None),
    ],
)
def test_option_that_changes_the_run_is_refused(key: str, value: object, fine: object) -> None:
    assert fate({key: value}) == "refused"
    assert fate({key: fine}) in ("taken", "default", "dropped")


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("model", "hf_model", "dropped"),
        ("optim", "megatron", "dropped"),
        ("model.lora.rank", 16, "taken"),
        ("model.lora.dropout", 0.1, "refused"),
        ("model.custom_chat_template", "{{ x }}", "refused"),
        ("engine.override_transformer_config.moe_aux_loss_coeff", 0.01, "refused"),
        ("engine.override_transformer_config.mtp_num_layers", None, "default"),
    ],
)
def test_supervised_option(key: str, value: object, kind: str) -> None:
    assert fate({key: value}, SFT) == kind


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.actor.model_engine",
        "reward_model.use_reward_loop",
        "reward_model.inference.gpu_memory_utilization",
        "reward.reward_model.inference.name",
        "actor_rollout_ref.actor.megatron.override_transformer_config.sequence_parallel",
        "actor_rollout_ref.actor.megatron.override_transformer_config.use_fused_rmsnorm",
    ],
)
def test_option_of_speed_or_servers_is_dropped(key: str) -> None:
    assert fate({key: 1}) == "dropped"


def test_array_set_in_argument_branches_is_refused() -> None:
    branches = 'case "${1:-}" in\n a) M=(data.train_batch_size=16) ;;\n b) M=(data.train_batch_size=4) ;;\nesac\n'
    with pytest.raises(ConfigError, match="M is set only in branches"):
        converted(branches + 'python3 -m verl.trainer.main_ppo "${M[@]}"')
    assert converted('M=()\npython3 -m verl.trainer.main_ppo "${M[@]}" "${N[@]}"').missing == []


def test_empty_script_argument_is_not_a_key() -> None:
    assert not any("unknown key" in notice for notice in converted('python3 -m verl.trainer.main_ppo "${@:2}"').notices)


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.model.use_prefix_tree",
        "actor_rollout_ref.actor.megatron.override_transformer_config.multi_latent_attention",
        "trainer.balance_keep_minibatch",
        "actor_rollout_ref.actor.optim.use_layer_wise_param_layout",
    ],
)
def test_option_of_the_newest_state_is_dropped(key: str) -> None:
    assert fate({key: True}) == "dropped"


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("actor_rollout_ref.actor.megatron.router_replay.mode", "R3", "replay", "Rollout"),
        ("actor_rollout_ref.actor.veomni.router_replay.mode", "R2", "replay", "Step"),
        ("actor_rollout_ref.model.override_config.moe_config.freeze_moe_router", True, "freeze", True),
    ],
)
def test_router_option_becomes_a_field(key: str, value: object, field: str, expected: object) -> None:
    keys = dict(word.split("=") for word in KEYS.split()) | {key: value}
    found = convert_settings([Setting(*item, "t") for item in keys.items()], Context("run", 70), ["t"])
    assert yaml.safe_load(found.text)["spec"]["trainer"]["router"] == {field: expected}
