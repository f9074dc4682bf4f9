"""Conversion of AReaL settings and allocations."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import parse_manifest
from rlrun.config.layout_rules import Allocation, Part, parse_allocation
from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import Converted, convert_settings, read_settings
from rlrun.convert.readers.hydra import Setting

BASE: dict[str, Any] = {
    "allocation_mode": "vllm:d4+fsdp:d4",
    "actor.path": "Qwen/Qwen3-0.6B",
    "actor.kl_ctl": 0.0,
    "train_dataset.path": "openai/gsm8k",
    "train_dataset.batch_size": 64,
    "gconfig.n_samples": 4,
    "gconfig.max_new_tokens": 1024,
    "total_train_steps": 7,
}


def result(changes: dict[str, Any]) -> Converted:
    found = [Setting(key, value, "test") for key, value in (BASE | changes).items()]
    return convert_settings(found, Context("run"), ["test"])


def spec(changes: dict[str, Any]) -> RLRunSpec:
    return parse_manifest(result(changes).text, "test")[0].spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm:d4t2+fsdp:d8", Allocation(Part("vllm", d=4, t=2), Part("fsdp", d=8), colocated=False)),
        ("sglang.d4p1t1+d4p1t1", Allocation(Part("sglang", d=4), Part("", d=4), colocated=False)),
        ("sglang[rollout]:d8|fsdp[actor]:d8", Allocation(Part("sglang", d=8), Part("fsdp", d=8), colocated=True)),
        (
            "sglang:d4t4+megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)",
            Allocation(Part("sglang", d=4, t=4), Part("megatron", d=4, p=2, t=2, c=2, e=2), colocated=False),
        ),
        ("fsdp:d8", Allocation(None, Part("fsdp", d=8), colocated=False)),
        ("vllm:d4 + eval", Allocation(Part("vllm", d=4), None, colocated=False)),
    ],
)
def test_allocations(text: str, expected: Allocation) -> None:
    assert parse_allocation(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("vllm:x4+fsdp:d8", "x4"),
        ("vllm:d4d4+fsdp:d8", "at most once"),
        ("trt:d4+fsdp:d8", "not a known backend"),
        ("vllm:d0+fsdp:d8", "at least 1"),
        ("vllm:d4+sglang:d4", "expected one of each"),
        ("four engines", "is not a part"),
    ],
)
def test_wrong_allocation_names_part_and_expected_form(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_allocation(text)
    refused = result({"allocation_mode": text}).refused
    assert [fate.setting.key for fate in refused] == ["allocation_mode"]


def test_allocation_sets_engines_and_trainer() -> None:
    found = spec({"allocation_mode": "vllm:d4t2+fsdp:d4t2c2", "cluster.n_gpus_per_node": 8})
    assert (found.inference.replicas, found.inference.gpus_per_replica, found.inference.tensor_parallel) == (4, 2, 2)
    assert (found.trainer.replicas, found.trainer.gpus_per_replica) == (2, 8)
    assert (found.trainer.parallelism.tp, found.trainer.parallelism.cp) == (2, 2)


def test_shared_allocation_becomes_synchronous_colocation() -> None:
    found = spec({"allocation_mode": "vllm:d8|fsdp:d8", "rollout.max_head_offpolicyness": 3})
    assert found.placement.colocate
    assert found.algorithm.max_async_level == 0
    assert (found.inference.gpus_per_replica, found.inference.data_parallel) == (8, 8)


def test_sglang_is_read_as_vllm_with_a_notice() -> None:
    found = result({"allocation_mode": "sglang:d4+fsdp:d4"})
    assert any("sglang is replaced by vllm" in notice for notice in found.notices)


def test_backends_of_two_keys_are_an_allocation() -> None:
    without = {key: value for key, value in BASE.items() if key != "allocation_mode"}
    parts = {"rollout.backend": "vllm:d2t2", "actor.backend": "megatron:(attn:d2p2t1|ffn:d2p2e2)"}
    found = convert_settings([Setting(k, v, "t") for k, v in (without | parts).items()], Context("run"), ["t"])
    run = parse_manifest(found.text, "t")[0].spec
    assert (run.inference.replicas, run.trainer.gpus_per_replica, run.trainer.parallelism.ep) == (2, 4, 2)
    assert run.trainer.parallelism.pp == 2


def result_of_backends(backends: dict[str, Any]) -> Converted:
    found = {key: value for key, value in BASE.items() if key != "allocation_mode"} | backends
    return convert_settings([Setting(key, value, "test") for key, value in found.items()], Context("run"), ["test"])


@pytest.mark.parametrize(
    ("backends", "refused", "problem"),
    [
        ({"rollout.backend": "vllm:x4", "actor.backend": "fsdp:d8"}, ["rollout.backend"], "x4 in 'vllm:x4'"),
        ({"rollout.backend": "vllm:d4", "actor.backend": "fsdp:x8"}, ["actor.backend"], "x8 in 'fsdp:x8'"),
        ({"rollout.backend": "trt:d4"}, ["rollout.backend"], "not a known backend"),
        ({"rollout.backend": "vllm:d0", "actor.backend": "fsdp"}, ["rollout.backend"], "at least 1"),
        (
            {"rollout.backend": "fsdp:d4", "actor.backend": "fsdp:d8"},
            ["rollout.backend", "actor.backend"],
            "0 parts for engines and 2 for trainers",
        ),
    ],
)
def test_wrong_backend_is_refused_under_its_own_key(backends: dict[str, str], refused: list[str], problem: str) -> None:
    found = result_of_backends(backends).refused
    assert [fate.setting.key for fate in found] == refused
    assert all(problem in fate.note for fate in found)


def test_unusable_trainer_size_names_the_trainer_backend() -> None:
    found = result_of_backends({"rollout.backend": "vllm:d2", "actor.backend": "fsdp:d9"})
    assert any(line.startswith("actor.backend: 9 GPUs of the trainer") for line in found.missing), found.missing


def test_invalid_value_names_the_key_in_the_spelling_of_the_file() -> None:
    found = result({"actor.behave_imp_weight_cap": "five", "actor.use_decoupled_loss": True})
    assert [line for line in found.missing if "expected a number" in line] == [
        "actor.behave_imp_weight_cap: got 'five', expected a number"
    ]


def test_decoupled_loss_is_converted() -> None:
    algorithm = spec(
        {
            "actor.use_decoupled_loss": True,
            "actor.eps_clip": 0.4,
            "actor.behav_imp_weight_cap": 5.0,
            "actor.reward_norm.mean_level": "group",
            "actor.reward_norm.std_level": "group",
            "actor.adv_norm.mean_level": "batch",
            "actor.adv_norm.std_level": "batch",
            "rollout.max_head_offpolicyness": 4,
        }
    ).algorithm
    assert (algorithm.preset, algorithm.effective_proximal, algorithm.max_async_level) == (
        "decoupled_ppo",
        "recompute",
        4,
    )
    assert algorithm.effective_loss.options == {
        "eps_low": 0.4,
        "eps_high": 0.4,
        "dual_clip": None,
        "cap": 5.0,
        "cap_mode": "mask",
    }
    assert algorithm.effective_advantage.options == {
        "mean": "group",
        "std": "group",
        "adv_mean": "batch",
        "adv_std": "batch",
    }


def test_critic_settings_are_converted() -> None:
    algorithm = spec(
        {"critic.path": "x", "critic.eps_clip": 0.5, "actor.optimizer.lr": 1e-5, "actor.gae_lambda": 0.9}
    ).algorithm
    assert algorithm.critic is not None
    assert (algorithm.critic.lr, algorithm.critic.value_clip) == (1e-5, 0.5)
    assert algorithm.effective_advantage.options["lam"] == 0.9


@pytest.mark.parametrize(
    ("changes", "loss", "proximal"),
    [
        ({"actor.importance_sampling_level": "sequence", "actor.recompute_logprob": True}, "gspo", "recompute"),
        ({"actor.use_sapo_loss": True}, "sapo", "inference"),
        ({"actor.use_sapo_loss": True, "actor.recompute_logprob": True}, "sapo", "recompute"),
        ({"actor.recompute_logprob": True}, "ppo", "recompute"),
        ({}, "ppo", "inference"),
        ({"actor.use_decoupled_loss": True, "actor.prox_logp_method": "loglinear"}, "ppo", "log_linear"),
    ],
)
def test_losses(changes: dict[str, Any], loss: str, proximal: str) -> None:
    algorithm = spec(changes).algorithm
    assert (algorithm.effective_loss.name, algorithm.effective_proximal) == (loss, proximal)


def test_discount_without_critic_is_reported() -> None:
    found = result({"actor.discount": 0.99, "actor.gae_lambda": 1.0})
    assert [notice.partition(":")[0] for notice in found.notices] == ["actor.discount=0.99"]


def test_kl_is_in_the_reward() -> None:
    found = result({"actor.kl_ctl": 0.05, "actor.kl_estimator": "k3"})
    terms = parse_manifest(found.text, "test")[0].spec.algorithm.regularizers
    assert (terms.kl_reward, terms.kl_reward_kind, terms.kl) == (0.05, "k3", 0.0)
    assert not any("KL" in notice for notice in found.notices)


def test_intervals_of_epochs_are_steps() -> None:
    epochs = {
        "total_train_epochs": 2,
        "saver.freq_epochs": 1,
        "evaluator.freq_steps": 5,
        "valid_dataset.path": "openai/gsm8k",
    }
    found = convert_settings(
        [Setting(k, v, "t") for k, v in ({k: v for k, v in BASE.items() if k != "total_train_steps"} | epochs).items()],
        Context("run", 640),
        ["t"],
    )
    run = parse_manifest(found.text, "t")[0].spec
    assert (run.max_steps, run.checkpoint.export.interval) == (20, 10)
    assert run.evaluation is not None
    assert run.evaluation.interval == 5


def test_interval_of_no_epoch_is_reported() -> None:
    text = result({"saver.freq_epochs": 0}).text
    assert "saver.freq_epochs=0: dropped: an interval has at least one epoch" in text


def test_adapters_of_megatron_have_names_of_transformers() -> None:
    found = spec({"actor.use_lora": True, "actor.lora_rank": 8, "actor.target_modules": ["linear_qkv", "lm_head"]})
    assert found.trainer.lora is not None
    assert found.trainer.lora.targets == ["q_proj", "k_proj", "v_proj", "lm_head"]


def test_rewards_of_a_script_are_noticed() -> None:
    found = result({"train_dataset.path": "org/data"})
    assert any("AReaL computes rewards in Python of its script" in notice for notice in found.notices)


def test_launcher_command_names_its_configuration_file() -> None:
    script = "python3 -m areal.launcher.local train.py --config a.yaml allocation_mode=vllm:d1+fsdp:d1 actor.path=Qwen/Qwen3-0.6B"
    found = convert_settings(
        read_settings(script + " gconfig.n_samples=2\npython3 -m areal.x y=1\n", "run.sh", {}), Context("a"), ["run.sh"]
    )
    assert any(notice.startswith("--config=a.yaml: not read") for notice in found.notices)
    assert any(notice.startswith("run.sh:2: the command areal.x is ignored") for notice in found.notices)
    assert any(notice.startswith("train.py=None") for notice in found.notices)


def test_yaml_with_interpolations_is_read() -> None:
    text = "actor: {path: Qwen/Qwen3-0.6B, kl_ctl: 0.0}\ngconfig: {n_samples: 2}\ntokenizer_path: ${actor.path}\n"
    text += "allocation_mode: vllm:d1+fsdp:d1\ntotal_train_steps: 3\ntrain_dataset: {path: openai/gsm8k, type: rl}\n"
    found = convert_settings(read_settings(text, "a.yaml", {}), Context("a"), ["a.yaml"])
    assert {fate.setting.key: fate.setting.value for fate in found.fates}["tokenizer_path"] == "Qwen/Qwen3-0.6B"
    assert parse_manifest(found.text, "a")[0].metadata.name == "a"


DECOUPLED = {"actor.use_decoupled_loss": True, "actor.recompute_logprob": True}
R = "actor.rejection_sampling."


@pytest.mark.parametrize(
    ("changes", "loss", "correction"),
    [
        ({R + "upper": 5.0, R + "action": "mask"}, {"cap": 5.0, "cap_mode": "mask"}, None),
        ({R + "upper": 2.0, R + "action": "clamp"}, {"cap": 2.0, "cap_mode": "clamp"}, None),
        ({R + "level": "token"}, {"cap": 5.0, "cap_mode": "mask"}, None),
        (
            {R + "upper": 5.0, R + "lower": 0.5},
            None,
            {"action": "mask", "level": "token", "weight": "token", "low": 0.5, "high": 5.0},
        ),
        (
            {R + "action": "clamp", R + "upper": 2.0, R + "lower": 0.5},
            None,
            {"action": "clamp", "level": "token", "low": 0.5, "high": 2.0},
        ),
        (
            {R + "level": "sequence", R + "agg": "sum", R + "upper": 2.0},
            None,
            {"action": "mask", "level": "sequence", "reduce": "sum", "weight": "geometric", "high": 2.0},
        ),
        (
            {R + "metric": "kl_k2", R + "upper": 0.5},
            None,
            {"action": "mask", "level": "token", "measure": "k2", "weight": "token", "high": 0.5},
        ),
        (
            {R + "metric": "kl_k1", R + "upper": 0.5, R + "lower": -0.25},
            None,
            {"action": "mask", "level": "token", "measure": "k1", "weight": "token", "low": -0.5, "high": 0.25},
        ),
    ],
)
def test_rejection_sampling(
    changes: dict[str, Any], loss: dict[str, Any] | None, correction: dict[str, Any] | None
) -> None:
    algorithm = spec(DECOUPLED | changes).algorithm
    assert algorithm.effective_loss.name == ("decoupled_ppo" if loss else "ppo")
    assert dict(algorithm.effective_loss.options).items() >= (loss or {}).items()
    found = algorithm.correction.model_dump(exclude_unset=True) if algorithm.correction is not None else None
    assert found == correction
    assert algorithm.effective_proximal == "recompute"


def test_decoupled_loss_without_rejection_sampling_has_no_weights() -> None:
    algorithm = spec(DECOUPLED).algorithm
    assert (algorithm.effective_loss.name, algorithm.effective_proximal) == ("ppo", "recompute")
    assert spec(DECOUPLED | {"actor.behav_imp_weight_cap": 5.0}).algorithm.effective_loss.options["cap"] == 5.0


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({R + "metric": "kl_k3"}, R + "metric", "nearest: metric: kl_k2"),
        ({R + "metric": "kl_k1"}, R + "metric", "add lower: -5"),
        ({R + "metric": "kpop"}, R + "metric", "known: ratio"),
        ({R + "level": "sequence", R + "action": "clamp", R + "agg": "max"}, R + "agg", "write agg: mean"),
        ({R + "action": "clamp", R + "metric": "kl_k2"}, R + "action", "write action: mask"),
        ({"actor.use_sapo_loss": True}, "actor.use_sapo_loss", "set use_decoupled_loss: false"),
        ({"teacher.path": "Qwen/Qwen3-8B"}, "teacher.path", "preset distill"),
        ({"mopd.loss.rl_coefficient": 0.0}, "mopd.loss.rl_coefficient", "preset distill"),
        ({"train_dataset.sources[0].path": "a/b"}, "train_dataset.sources[0].path", "one of environments[]"),
        ({"valid_dataset.datasets[1].name": "b"}, "valid_dataset.datasets[1].name", "one of environments[]"),
        ({"rollout.agent.mode": "subproc"}, "rollout.agent.mode", "docs/environments.md"),
        ({"scheduler.reward_model_path": "org/rm"}, "scheduler.reward_model_path", "args.reward"),
        ({"gconfig.use_beam_search": True}, "gconfig.use_beam_search", "samples"),
        ({"actor.path": "Qwen/Qwen2.5-VL-3B-Instruct"}, "actor.path", "vision"),
    ],
)
def test_unsupported_objective_is_refused_with_reason(changes: dict[str, Any], key: str, reason: str) -> None:
    refused = {fate.setting.key: fate.note for fate in result(DECOUPLED | changes).refused}
    assert list(refused) == [key]
    assert reason in refused[key]


def test_defaults_are_areals() -> None:
    optimizer = spec({}).trainer.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.beta1, optimizer.beta2) == (1e-3, 0.01, 0.9, 0.999)
    assert (optimizer.eps, optimizer.max_grad_norm) == (1e-8, 1.0)
    assert spec({}).seed == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.openai.mode", "inline"),
        ("rollout.agent.mode", "subproc"),
        ("rollout.agent.export_style", "concat"),
        ("rollout.agent.prefix_matcher", "examples.matcher"),
        ("workflow", "areal.workflow.openai.math_agent.MathAgent"),
        ("eval_workflow", "areal.workflow.openai.math_agent.MathAgent"),
        ("econfig.domain", "airline"),
        ("agent_run_args.max_turns", 2),
        ("export_style", "concat"),
        ("n_trajs", 4),
        ("max_tokens_per_trajectory", 40000),
    ],
)
def test_agent_of_a_script_is_refused_with_its_counterpart(key: str, value: object) -> None:
    refused = {fate.setting.key: fate.note for fate in result({key: value}).refused}
    assert refused.keys() == {key}
    assert "docs/environments.md" in refused[key]


def test_workflow_of_one_answer_is_converted() -> None:
    workflow = "areal.workflow.rlvr.RLVRWorkflow"
    assert not result({"workflow": workflow, "eval_workflow": workflow, "n_trajs": 1}).refused


def test_old_precision_keys_are_read_as_current_ones() -> None:
    found = result(
        {"actor.megatron.fp8": "hybrid", "actor.megatron.fp8_param": True, "actor.megatron.fp8_recipe": "blockwise"}
    )
    assert not found.refused
    assert any(notice.startswith("actor.megatron.fp8=hybrid: training is in model.dtype") for notice in found.notices)


def test_data_processing_script_is_refused_with_counterpart() -> None:
    found = result({"train_dataset.type": "sft", "swe.filter_errors": True})
    refused = {fate.setting.key: fate.note for fate in found.refused}
    assert "docs/sft.md" in refused["swe.filter_errors"]


def test_secrets_of_a_file_stay_out_of_the_manifest() -> None:
    variables = "actor.scheduling_spec[0].env_vars.WANDB_API_KEY"
    found = result({"rollout.admin_api_key": "key-one-two", variables: "key-three-four"})
    assert "rollout.admin_api_key=" in found.text
    assert "key-one-two" not in found.text
    assert "key-three-four" not in found.text


def test_default_agent_of_every_file_is_reported() -> None:
    agent = {"mode": "inline", "export_style": "individual", "turn_discount": 1.0, "admin_api_key": "k"}
    found = result({f"rollout.agent.{key}": value for key, value in agent.items()})
    assert found.refused == []
    assert any("one answer per prompt" in notice for notice in found.notices)


def test_warmup_in_steps_goes_before_its_share() -> None:
    share = {"actor.optimizer.warmup_steps_proportion": 0.5}
    assert spec(share | {"actor.optimizer.warmup_steps": 1}).trainer.scheduler.warmup_steps == 1
    assert spec(share | {"actor.optimizer.warmup_steps": 0}).trainer.scheduler.warmup_steps == 0


def test_proximal_policy_of_each_update_is_refused() -> None:
    reuse = {"actor.use_decoupled_loss": True, "actor.prox_logp_method": "reuse_train_logp"}
    assert spec(reuse | {"actor.ppo_n_minibatches": 1}).algorithm.effective_proximal == "recompute"
    for changes, reason in (({"actor.ppo_n_minibatches": 4}, "write prox_logp_method: recompute"),):
        (refused,) = result(reuse | changes).refused
        assert reason in refused.note
    (refused,) = result(reuse | {"actor.prox_logp_method": "other"}).refused
    assert "known: recompute, loglinear" in refused.note


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("actor.enable_icepop", True, "rejection_sampling.lower and .upper"),
        ("actor.enable_kpop", True, "kl_k3"),
        ("actor.megatron.moe_router_bias_update_rate", 1e-3, "a bias of the router"),
    ],
)
def test_unsupported_new_key_is_refused_with_counterpart(key: str, value: object, reason: str) -> None:
    (refused,) = result({key: value}).refused
    assert reason in refused.note


def test_replayed_experts_of_the_policy_are_those_of_the_engines() -> None:
    replayed = {"actor.megatron.enable_router_replay": True, "rollout.return_routed_experts": True}
    assert spec(replayed | {"cluster.n_gpus_per_node": 8}).trainer.router.replay == "Rollout"
    assert spec({"actor.megatron.enable_router_replay": False}).trainer.router.replay == "Off"


SHARED = {"rollout.backend": "sglang:d2t4p1", "actor.backend": "megatron:d2p1t4"}


@pytest.mark.parametrize(
    ("changes", "colocated"),
    [
        ({"cluster.n_nodes": 2}, False),
        ({"cluster.n_nodes": 1}, True),
        ({"rollout.scheduling_strategy.type": "colocation", "rollout.scheduling_strategy.target": "actor"}, True),
        ({"rollout.scheduling_strategy.type": "separation"}, False),
    ],
)
def test_engines_share_the_trainers_gpus_by_strategy_or_size(changes: dict[str, Any], colocated: bool) -> None:
    keys = {key: value for key, value in BASE.items() if key != "allocation_mode"} | SHARED | changes
    text = convert_settings(
        [Setting(*item, "test") for item in (keys | {"cluster.n_gpus_per_node": 8}).items()], Context("run"), ["t"]
    )
    found = parse_manifest(text.text, "test")[0].spec
    assert found.placement.colocate == colocated
    assert (found.inference.replicas, found.inference.tensor_parallel) == (1 if colocated else 2, 4)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("actor.enable_mtp_training", 0, "taken"),
        ("actor.enable_mtp_training", False, "taken"),
        ("actor.enable_mtp_training", True, "refused"),
        ("critic.enable_mtp_training", 1, "refused"),
        ("actor.megatron.virtual_pipeline_parallel_size", 1, "taken"),
        ("actor.megatron.virtual_pipeline_parallel_size", 2, "dropped"),
        ("ref.optimizer_dtype", "float32", "taken"),
        ("ref.optimizer_dtype", "bfloat16", "dropped"),
        ("actor.init_from_scratch", True, "refused"),
    ],
)
def test_engine_key_has_effect_only_with_other_values(key: str, value: object, kind: str) -> None:
    fates = {fate.setting.key: fate.kind for fate in result({key: value}).fates}
    assert fates[key] == kind
