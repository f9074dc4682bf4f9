"""Conversion of verl settings to equivalent fields."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import parse_manifest
from rlrun.config.loading.problems import ConfigError
from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import Converted, convert_settings, read_settings
from rlrun.convert.readers.hydra import Setting, read_override

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
BASE = {
    "data.train_files": "/srv/data/gsm8k/train.parquet",
    "data.val_files": "/srv/data/gsm8k/test.parquet",
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    "algorithm.adv_estimator": "grpo",
    "trainer.total_training_steps": 7,
}


def settings(**changes: Any) -> list[Setting]:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return [Setting(key, value, "test") for key, value in (BASE | named).items() if value is not ...]


def result(changes: dict[str, Any], rows: int | None = None) -> Converted:
    return convert_settings(settings(**changes), Context("run", rows), ["test"])


def spec(changes: dict[str, Any], rows: int | None = None) -> RLRunSpec:
    return parse_manifest(result(changes, rows).text, "test")[0].spec


def refusal(found: Converted, key: str) -> str:
    """Return the reason for the refusal of a key."""
    return next(one.note for one in found.refused if one.setting.key == key)


def test_batch_size_is_prompts_times_answers() -> None:
    found = spec({"data.train_batch_size": 1024, R + "n": 5, A + "ppo_mini_batch_size": 256})
    assert (found.orchestrator.batch_size, found.trainer.updates_per_step, found.environments[0].group_size) == (
        5120,
        4,
        5,
    )
    assert (found.max_steps, found.algorithm.max_async_level) == (7, 0)


def test_passes_over_a_batch_are_converted() -> None:
    found = spec({A + "ppo_epochs": 3, A + "ppo_mini_batch_size": 256, "data.train_batch_size": 1024})
    assert (found.trainer.epochs_per_step, found.trainer.updates_per_step) == (3, 4)
    assert "epochsPerStep" not in result({A + "ppo_epochs": 1}).text


def test_lengths() -> None:
    lengths = spec({"data.max_prompt_length": 100, "data.max_response_length": 200, R + "response_length": 300})
    assert (lengths.seq_len, lengths.sampling.max_tokens) == (300, 200)
    assert spec({"data.max_prompt_length": 100, R + "response_length": 300}).sampling.max_tokens == 300


def test_chat_template_arguments_are_converted() -> None:
    start = "data.apply_chat_template_kwargs"
    found = spec({f"{start}.reasoning_effort": "medium", f"{start}.style.form": "xml"})
    assert found.sampling.chat_template_arguments == {"reasoning_effort": "medium", "style": {"form": "xml"}}
    assert spec({start: {"enable_thinking": False}}).sampling.chat_template_arguments == {"enable_thinking": False}
    assert spec({start: {}}).sampling.chat_template_arguments == {}


def test_epochs_become_steps_if_row_count_is_known() -> None:
    epochs = {"trainer.total_training_steps": ..., "trainer.total_epochs": 15, "data.train_batch_size": 100}
    assert spec(epochs, rows=1050).max_steps == 150
    unknown = result(epochs | {"data.train_files": "/srv/data/x/train.parquet"})
    assert [line.partition(":")[0] for line in unknown.missing] == ["spec.maxSteps"]
    assert "--rows N" in unknown.missing[0]


def test_trainer_and_engines_have_the_same_gpus() -> None:
    found = spec({"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8, R + "tensor_model_parallel_size": 4})
    assert found.placement.colocate
    assert (found.trainer.replicas, found.trainer.gpus_per_replica) == (2, 8)
    assert (found.inference.tensor_parallel, found.inference.data_parallel) == (4, 2)


def test_verl_defaults_are_written_if_they_differ() -> None:
    found = spec({})
    assert found.trainer.optimizer.weight_decay == 0.01
    assert found.inference.gpu_memory_utilization == 0.5
    assert found.algorithm.effective_loss.options["dual_clip"] == 3.0
    assert found.algorithm.effective_aggregation == "token_mean"
    assert found.trainer.activation_checkpointing == "full"


@pytest.mark.parametrize(
    ("changes", "advantage", "loss"),
    [
        (
            {"algorithm.adv_estimator": "gae", "algorithm.lam": 0.95},
            ("gae", {"gamma": 1.0, "lam": 0.95, "bootstrap": False}),
            "ppo",
        ),
        ({"algorithm.norm_adv_by_std_in_grpo": False}, ("grpo", {"std": "none"}), "ppo"),
        ({"algorithm.adv_estimator": "rloo"}, ("rloo", {}), "ppo"),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, ("reinforce_pp", {"gamma": 1.0}), "ppo"),
        ({A + "policy_loss.loss_mode": "gspo"}, ("grpo", {"std": "group"}), "gspo"),
        ({A + "policy_loss.loss_mode": "cispo", A + "clip_ratio_low": 10}, ("grpo", {"std": "group"}), "cispo"),
        ({A + "policy_loss.loss_mode": "sapo"}, ("grpo", {"std": "group"}), "sapo"),
        ({A + "policy_loss.loss_mode": "dppo_tv"}, ("grpo", {"std": "group"}), "dppo"),
    ],
)
def test_objectives(changes: dict[str, Any], advantage: tuple[str, dict[str, Any]], loss: str) -> None:
    algorithm = spec(changes).algorithm
    assert (algorithm.effective_advantage.name, algorithm.effective_advantage.options) == advantage
    assert algorithm.effective_loss.name == loss
    assert algorithm.effective_proximal == ("inference" if loss == "dppo" else "recompute")
    assert algorithm.effective_correction is None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("mse", "k2"), ("k2+", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+"), ("k3+", "k3+"), ("kl+", "k1+")],
)
def test_kl_in_the_loss(theirs: str, ours: str) -> None:
    found = spec({A + "use_kl_loss": True, A + "kl_loss_coef": 0.01, A + "kl_loss_type": theirs}).algorithm
    assert (found.regularizers.kl, found.regularizers.kl_kind, found.regularizers.kl_reward) == (0.01, ours, 0.0)
    assert found.reference is not None
    assert spec({A + "kl_loss_coef": 0.01}).algorithm.reference is None


def test_kl_without_a_gradient_is_refused() -> None:
    for theirs, reason in (("kl", "its expected gradient is 0"), ("k1", "use mse"), ("abs", "known: mse")):
        found = result({A + "use_kl_loss": True, A + "kl_loss_coef": 0.01, A + "kl_loss_type": theirs})
        assert reason in refusal(found, A + "kl_loss_type")


def test_kl_in_the_reward() -> None:
    in_reward = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.002}
    for theirs, ours in ((..., "k1"), ("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3")):
        found = spec(in_reward | {"algorithm.kl_penalty": theirs, "algorithm.adv_estimator": "gae"}).algorithm
        terms = found.regularizers
        assert (terms.kl_reward, terms.kl_reward_kind, terms.kl) == (0.002, ours, 0.0)
    both = spec(in_reward | {A + "use_kl_loss": True, A + "kl_loss_coef": 0.01}).algorithm
    assert (both.regularizers.kl, both.regularizers.kl_kind, both.regularizers.kl_reward) == (0.01, "k3", 0.002)
    assert "known: kl, kl+" in refusal(result(in_reward | {"algorithm.kl_penalty": "full"}), "algorithm.kl_penalty")
    by_token = result(in_reward | {"algorithm.adv_estimator": "reinforce_plus_plus"})
    assert not any("after the group's mean" in notice for notice in by_token.notices)
    assert any("after the group's mean" in notice for notice in result(in_reward).notices)


C = "algorithm.rollout_correction."


def correction(changes: dict[str, Any]) -> dict[str, Any]:
    found = spec({C + key: value for key, value in changes.items()}).algorithm.effective_correction
    return {} if found is None else found.model_dump(exclude_defaults=True)


def test_corrections() -> None:
    assert correction({}) == {}
    assert correction({"rollout_is": "token", "rollout_is_threshold": 3.0}) == {"high": 3.0}
    product = {"level": "sequence", "reduce": "sum"}
    assert correction({"rollout_is": "sequence"}) == product
    icepop = {"action": "mask", "low": 0.5, "high": 5.0}
    assert correction({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}) == icepop | {"weight": "token"}
    by_sequence = icepop | product | {"weight": "sequence"}
    assert correction({"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"}) == by_sequence
    both = {"rollout_is": "sequence", "rollout_is_threshold": 4.0, "rollout_rs": "seq_max_k2"}
    assert correction(both | {"rollout_rs_threshold": 2.5}) == {
        "action": "mask",
        "level": "sequence",
        "measure": "k2",
        "reduce": "max",
        "high": 2.5,
        "weight": "sequence",
        "cap": 4.0,
    }
    bypass = {"bypass_mode": True, "rollout_is": "token", "rollout_rs": "token_k3", "rollout_rs_threshold": 0.1}
    assert correction(bypass) == {"action": "mask", "measure": "k3", "high": 0.1}
    assert correction({"rollout_is": "token", "bypass_mode": True}) == {}


def test_self_weighted_loss_gets_no_second_correction() -> None:
    found = spec({A + "policy_loss.loss_mode": "dppo_tv", C + "rollout_is": "token"}).algorithm
    assert (found.effective_loss.name, found.effective_correction) == ("dppo", None)


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"rollout_rs": "token_k1"}, "rollout_rs", "rollout_rs_threshold is missing; add"),
        (
            {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": 2},
            "rollout_rs",
            "2 criteria; algorithm.correction supports one",
        ),
        ({"rollout_rs": "binary_kl", "rollout_rs_threshold": 2}, "rollout_rs", "KPop"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "rollout_rs", "known: token_k1"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1_2"}, "rollout_rs_threshold", "has only an upper bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "rollout_rs_threshold", "is above the upper one"),
        (
            {"rollout_is": "token", "rollout_is_threshold": "5_0.5"},
            "rollout_is_threshold",
            "or two numbers such as 0.5_5.0",
        ),
        ({"rollout_is": "token", "rollout_is_threshold": "low_2"}, "rollout_is_threshold", "is not a positive number"),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.5_5", "rollout_rs": "token", "rollout_rs_threshold": 2},
            "rollout_rs",
            "a second rejection",
        ),
        ({"rollout_is": "token", "rollout_is_batch_normalize": True}, "rollout_is_batch_normalize", "their mean"),
        ({"bypass_mode": True, "loss_type": "reinforce"}, "loss_type", "algorithm.loss aipo"),
    ],
)
def test_corrections_without_a_counterpart_are_refused(changes: dict[str, Any], key: str, reason: str) -> None:
    assert reason in refusal(result({C + name: value for name, value in changes.items()}), C + key)


def test_corrections_of_older_releases_are_refused() -> None:
    found = result({"algorithm.rollout_is": True, "algorithm.rollout_is_threshold": 2.0})
    assert "write algorithm.rollout_correction.rollout_is" in refusal(found, "algorithm.rollout_is")


OVERLONG = {
    "reward_model.overlong_buffer.enable": True,
    "reward_model.overlong_buffer.len": 128,
    "data.max_response_length": 512,
}


def test_overlong_penalty_is_scaled_to_rewards() -> None:
    for file, penalty, reason in (
        ("dapo-math-17k.parquet", 0.5, "because rows with data_source"),
        ("aime-2024.parquet", 0.5, "because rows with data_source"),
        ("numina.parquet", 1.0, "overlongPenalty: 0.5"),
    ):
        found = result(OVERLONG | {"data.train_files": f"/srv/data/{file}"})
        filters = parse_manifest(found.text, "test")[0].spec.algorithm.effective_filters
        assert (filters.overlong_penalty, filters.overlong_buffer) == (penalty, 0.25)
        assert any(reason in notice for notice in found.notices)
    own = {"custom_reward_function.path": "r.py", "data.train_files": "/srv/data/dapo-math-17k.parquet"}
    found = result(OVERLONG | own)
    assert parse_manifest(found.text, "test")[0].spec.algorithm.effective_filters.overlong_penalty == 1.0
    assert not any("rewards" in notice for notice in found.notices)


def test_other_reward_scale_is_reported_if_relevant() -> None:
    signed = {"data.train_files": "/srv/data/dapo-math-17k.parquet"}
    half = "advantages are half as large"
    for changes, told in (
        ({}, False),
        ({"algorithm.norm_adv_by_std_in_grpo": False}, True),
        ({"algorithm.adv_estimator": "rloo"}, True),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, False),
    ):
        assert any(half in notice for notice in result(signed | changes).notices) == told
    assert any("chooses a score by data_source" in notice for notice in result({}).notices)
    filtered = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "seq_final_reward"}
    assert any("before the penalty" in notice for notice in result(signed | OVERLONG | filtered).notices)


def test_dapo() -> None:
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg."
    found = spec(
        {
            "algorithm.filter_groups.enable": True,
            A + "clip_ratio_high": 0.28,
            "data.max_response_length": 2000,
            overlong + "enable": True,
            overlong + "len": 500,
            overlong + "penalty_factor": 0.5,
        }
    ).algorithm
    filters = found.effective_filters
    assert (found.preset, filters.zero_variance, filters.overlong_penalty, filters.overlong_buffer) == (
        "dapo",
        True,
        0.5,
        0.25,
    )
    assert found.effective_loss.options["eps_high"] == 0.28


def test_files_of_one_folder_are_one_environment() -> None:
    environment = spec({}).environments[0]
    assert environment.args | {} == {
        "path": "/srv/data/gsm8k",
        "train_split": "train.parquet",
        "eval_split": "test.parquet",
        "reward": "math",
    }
    several = spec(
        {
            "data.train_files": ["/srv/data/gsm8k/train.parquet", "/srv/data/math/train.parquet"],
            "data.val_files": ["/srv/data/math/test.parquet", "/srv/data/gsm8k/test.parquet"],
        }
    ).environments
    assert [(each.name, each.args["path"]) for each in several] == [
        ("gsm8k", "/srv/data/gsm8k"),
        ("math", "/srv/data/math"),
    ]


def test_validation_file_in_other_folder_is_reported() -> None:
    apart = {"data.train_files": "/data/train.parquet", "data.val_files": "/other/test.parquet"}
    assert any("one row in eight" in one for one in result(apart).notices)
    assert not any("one row in eight" in one for one in result({}).notices)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("algorithm.adv_estimator", "remax", "nearest: rloo"),
        (A + "policy_loss.loss_mode", "geo_mean", "nearest: gspo"),
        (R + "multi_turn.enable", True, "write an environment"),
        ("actor_rollout_ref.model.path", "Qwen/Qwen2.5-VL-7B-Instruct", "vision-language"),
    ],
)
def test_unsupported_setting_is_refused_with_nearest_alternative(key: str, value: Any, reason: str) -> None:
    refused = result({key: value}).refused
    assert [fate.setting.key for fate in refused] == [key]
    assert reason in refused[0].note


def test_deviations_are_reported_and_unknown_keys_refused() -> None:
    found = result(
        {R + "top_p": 0.9, "trainer.foo": 3, "datta.train_files": "x", R + "name": "sglang", "ray_init.x": 1}
    )
    assert any(R + "top_p=0.9" in notice for notice in found.notices)
    refused = {fate.setting.key: fate.note for fate in found.refused}
    assert set(refused) == {"trainer.foo", "datta.train_files"}
    assert "did you mean data.train_files" in refused["datta.train_files"]
    assert any("ray_init.x=1" in notice for notice in found.notices)
    assert any("replaced by vllm" in notice for notice in found.notices)
    assert "datta.train_files=x: refused" in found.text


def test_unset_variable_is_reported_missing() -> None:
    word = read_override("trainer.n_gpus_per_node=", "run.sh", 3, ("WORKER_GPU",))
    assert word is not None
    found = convert_settings([*settings(), word], Context("run"), ["run.sh"])
    assert any("WORKER_GPU has no known value" in line for line in found.missing)


def test_unknown_dialect_is_refused() -> None:
    with pytest.raises(ConfigError, match="no key of verl"):
        convert_settings([Setting("model.name", "x", "a.yaml")], Context("run"), ["a.yaml"])
    with pytest.raises(ConfigError, match="no command with key=value"):
        read_settings("echo hello\n", "a.sh", {})


def test_engines_on_gpus_of_their_own() -> None:
    apart = {
        "trainer.n_gpus_per_node": 4,
        "rollout.n_gpus_per_node": 4,
        "rollout.nnodes": 2,
        R + "tensor_model_parallel_size": 2,
    }
    one_step = spec(apart)
    assert (one_step.inference.replicas, one_step.inference.gpus_per_replica, one_step.trainer.gpus_per_replica) == (
        4,
        2,
        4,
    )
    assert (one_step.placement.colocate, one_step.algorithm.max_async_level) == (False, 1)
    stream = {
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.staleness_threshold": 0.5,
        A + "ppo_mini_batch_size": 32,
        R + "n": 8,
        "rollout.total_rollout_steps": 1280,
        "trainer.total_training_steps": ...,
        "data.train_batch_size": 0,
    }
    found = result(apart | stream)
    run = parse_manifest(found.text, "t")[0].spec
    assert (run.orchestrator.batch_size, run.trainer.updates_per_step, run.max_steps) == (1024, 4, 10)
    assert (run.algorithm.max_async_level, run.algorithm.max_off_policy_steps) == (1, 1)
    assert found.missing == []


def test_trackers_and_custom_reward_function_are_converted() -> None:
    changes = {
        "trainer.logger": ["console", "wandb", "tensorboard"],
        "trainer.project_name": "gsm8k",
        "custom_reward_function.path": "/root/my-rewards/scores.py",
        "custom_reward_function.name": "strict",
    }
    converted = result(changes)
    run = spec(changes)
    assert run.tracking is not None
    assert run.tracking.trackers == ["wandb", "tensorboard"]
    assert run.tracking.wandb is not None
    assert run.tracking.wandb.project == "gsm8k"
    assert run.environments[0].args["reward"] == "scores:strict"
    assert any("make /root/my-rewards/scores.py importable" in line for line in converted.missing)
    assert spec({"trainer.logger": "console"}).tracking is None
    assert spec({"custom_reward_function.path": "a.py"}).environments[0].args["reward"] == "a:compute_score"


def test_reward_model_requires_missing_server() -> None:
    model = {"reward_model.enable": True, "reward_model.model.path": "org/rm", "reward_model.micro_batch_size": 16}
    converted = result(model)
    (environment,) = parse_manifest(converted.text, "t")[0].spec.environments
    assert environment.args["reward"] == "reward-model"
    assert environment.args["reward_args"] == {"base_url": "http://reward-model:8000", "model": "org/rm"}
    assert any("start the reward model's server (vllm serve org/rm" in line for line in converted.missing)
    fates = {fate.setting.key: (fate.kind, fate.note) for fate in converted.fates}
    assert fates["reward_model.model.path"][0] == "mapped"
    assert fates["reward_model.micro_batch_size"][1].startswith("a reward model has a separate server")
    own = result(model | {"custom_reward_function.path": "a.py"})
    assert any("the reward is only a.py" in notice for notice in own.notices)
    assert {fate.setting.key: fate.kind for fate in result({"reward_model.enable": False}).fates}[
        "reward_model.enable"
    ] == "taken"


def test_dppo_drops_kl_term_and_reports_ratio_cap() -> None:
    changes = {A + "policy_loss.loss_mode": "dppo_tv", A + "clip_ratio_low": 0.15, A + "clip_ratio_c": 10000.0}
    assert dict(spec(changes).algorithm.effective_loss.options).items() >= {"mask_low": 0.15, "kl_tau": 0.0}.items()
    assert not any("clip_ratio_c" in notice for notice in result(changes).notices)
    assert any("does not cap the ratio" in notice for notice in result({**changes, A + "clip_ratio_c": 3.0}).notices)


def test_computed_value_is_reported_missing() -> None:
    word = read_override(R + "n=", "run.sh", 3, ("N (line 2)",))
    assert word is not None
    found = convert_settings([*settings(), word], Context("run"), ["run.sh"])
    assert f"{R}n: N (line 2) has no known value; add {R}n=VALUE" in found.missing


def test_dppo_reports_a_ratio_to_another_policy_than_verls() -> None:
    loss, bypass = {A + "policy_loss.loss_mode": "dppo_tv"}, {"algorithm.rollout_correction.bypass_mode": True}
    assert any("uses the engine's log-probs for the ratio" in one for one in result(loss).notices)
    found = result(loss | bypass)
    assert not any("engine's log-probs" in one for one in found.notices)
    assert "always uses the ratio to the engine" in found.text
    assert not any("engine's log-probs" in one for one in result(bypass).notices)


@pytest.mark.parametrize("key", ["data.val_max_samples", "trainer.val_max_samples"])
def test_validation_task_count_is_converted(key: str) -> None:
    found = result({"trainer.test_freq": 5, key: 32})
    assert parse_manifest(found.text, "test")[0].spec.evaluation.num_tasks == 32
    assert not any("val_max_samples" in one for one in found.notices)
