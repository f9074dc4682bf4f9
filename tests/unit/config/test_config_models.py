"""Configuration models: defaults, limits and error messages."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from rlrun.api import kubernetes_types
from rlrun.api.resource import RLRunSpec
from rlrun.config.algorithm.names import (
    AGGREGATIONS,
    CORRECTION_OPTIONS,
    KL_KINDS,
    KL_REWARD_KINDS,
    PRESETS,
    PROXIMAL_METHODS,
)
from rlrun.config.loading.schema import describe_expected, field_meaning, field_shapes, find_field, shape_of
from rlrun.config.models.checkpoint import CheckpointConfig, ResumeConfig
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.models.language_models import ModelConfig, ReferenceConfig, TinyModelConfig
from rlrun.config.models.learning import (
    Aggregation,
    AlgorithmConfig,
    CorrectionConfig,
    FilterConfig,
    LossConfig,
    OptimizerConfig,
    Proximal,
    RegularizerConfig,
)
from rlrun.config.models.roles import InferenceSpec, OrchestratorSpec, TrainerSpec
from rlrun.config.models.rollout import EnvironmentConfig, SamplingConfig


def validation_message(model: type[BaseModel], **values: Any) -> str:
    with pytest.raises(ValidationError) as error:
        model(**values)
    return str(error.value)


def test_defaults_that_users_rely_on() -> None:
    algorithm, checkpoint = AlgorithmConfig(), CheckpointConfig()
    assert (algorithm.preset, algorithm.max_async_level, algorithm.max_off_policy_steps) == ("aipo", 2, 8)
    assert checkpoint.enabled
    assert checkpoint.resume.policy == "Latest"
    assert not ModelConfig(name="x").trust_remote_code
    assert OptimizerConfig().lr == 1e-6


@pytest.mark.parametrize(
    ("model", "name", "low", "high"),
    [
        (OptimizerConfig, "lr", 1e-30, 10),
        (OptimizerConfig, "beta1", 0, 0.999),
        (SamplingConfig, "temperature", 0.01, 10),
        (SamplingConfig, "max_tokens", 1, 1_048_576),
        (InferenceSpec, "gpu_memory_utilization", 0.01, 1),
        (OrchestratorSpec, "max_error_ratio", 0.01, 1),
        (TinyModelConfig, "layers", 1, 32),
        (AlgorithmConfig, "max_async_level", 0, 8),
        (CheckpointConfig, "interval", 1, 10**9),
    ],
)
def test_bounds_admit_their_ends(model: type[BaseModel], name: str, low: float, high: float) -> None:
    assert getattr(model(**{name: low}), name) == low
    assert getattr(model(**{name: high}), name) == high


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (OptimizerConfig, {"lr": 0}),
        (OptimizerConfig, {"lr": float("nan")}),
        (OptimizerConfig, {"beta2": 1.0}),
        (SamplingConfig, {"temperature": 0}),
        (SamplingConfig, {"temperature": float("inf")}),
        (EnvironmentConfig, {"id": ""}),
        (EnvironmentConfig, {"id": "a", "ratio": 0}),
        (TinyModelConfig, {"hidden_size": 20}),
        (ModelConfig, {"name": "a", "dtype": "int8"}),
        (TrainerSpec, {"replicas": 0}),
        (TrainerSpec, {"unknown": 1}),
    ],
)
def test_values_outside_of_the_bounds_are_refused(model: type[BaseModel], values: dict[str, Any]) -> None:
    assert f"\n{list(values)[-1]}\n" in validation_message(model, **values)


@pytest.mark.parametrize(
    ("values", "got"),
    [({}, "none of them"), ({"name": "a", "path": "b"}, "name and path"), ({"path": "b", "tiny": {}}, "path and tiny")],
)
def test_model_needs_exactly_one_source(values: dict[str, Any], got: str) -> None:
    assert f"exactly one of name, path and tiny; got {got}" in validation_message(ModelConfig, **values)


def test_model_revision_requires_hub_name() -> None:
    assert "revision (main) needs name" in validation_message(ModelConfig, path="m", revision="main")


def test_resume_step_is_required_only_by_policy_step() -> None:
    assert "policy Step needs step; set step" in validation_message(ResumeConfig, policy="Step")
    assert "step (4)" in validation_message(ResumeConfig, step=4)
    assert ResumeConfig(policy="Step", step=4).step == 4


def test_resume_from_other_run_excludes_own_step() -> None:
    assert "set fromRun" in validation_message(ResumeConfig, from_step=4)
    assert "set only one of them" in validation_message(ResumeConfig, from_run="other", policy="Step", step=4)
    assert ResumeConfig(from_run="other", from_step=4, policy="Never").from_step == 4


def test_max_off_policy_steps_must_reach_max_async_level() -> None:
    message = validation_message(AlgorithmConfig, max_async_level=4, max_off_policy_steps=3)
    assert "maxOffPolicySteps (3) must be at least maxAsyncLevel (4)" in message
    assert "raise maxOffPolicySteps or lower maxAsyncLevel" in message


def test_unknown_preset_error_lists_names_with_suggestion() -> None:
    message = validation_message(AlgorithmConfig, preset="grop")
    assert "did you mean grpo?" in message
    assert all(name in message for name in PRESETS)


def test_unknown_loss_or_option_gets_suggestion_unless_import_path() -> None:
    assert "did you mean aipo?" in validation_message(LossConfig, name="aipoo")
    assert "did you mean delta?" in validation_message(LossConfig, name="aipo", options={"dleta": 1.0})
    assert LossConfig(name="my.losses:robust", options={"anything": 1}).options == {"anything": 1}
    validation_message(LossConfig, name="my.losses:robust\n")


def test_configuration_is_immutable() -> None:
    with pytest.raises(ValidationError):
        OptimizerConfig().lr = 1.0  # type: ignore[misc]


def test_configuration_fields_have_descriptions() -> None:
    missing, models = [], [RLRunSpec]
    for model in models:
        for name, shape in field_shapes(model).items():
            if not field_meaning(model, name):
                missing.append(f"{model.__name__}.{name}")
            inner = shape.parts[0] if shape.kind == "list" else shape
            # Kubernetes documents its own types, and the CRD has no room for their descriptions.
            if inner.model and inner.model.__module__ != kubernetes_types.__name__ and inner.model not in models:
                models.append(inner.model)
    assert missing == []


@pytest.mark.parametrize("key", ["batchSize", "batch_size", "batch-size", "BATCH_SIZE"])
def test_field_is_found_in_each_spelling(key: str) -> None:
    assert find_field(OrchestratorSpec, key) == "batch_size"
    assert (find_field(OrchestratorSpec, key, camel_only=True) is not None) == (key == "batchSize")


def test_expected_values_are_described_in_words() -> None:
    assert describe_expected(field_shapes(OptimizerConfig)["lr"]) == "a number greater than 0 and at most 10"
    assert describe_expected(field_shapes(OptimizerConfig)["max_grad_norm"]) == "a number greater than 0, or null"
    assert (
        describe_expected(field_shapes(TinyModelConfig)["hidden_size"])
        == "a whole number from 16 to 1024, a multiple of 8"
    )
    assert describe_expected(field_shapes(ModelConfig)["dtype"]) == '"float32", "bfloat16" or "float16"'
    assert (
        describe_expected(field_shapes(LossConfig)["options"].parts[0])
        == "true or false, a whole number, a number or a string, or null"
    )
    assert describe_expected(shape_of(dict[str, int])) == "a mapping"


def test_algorithm_options_replace_preset_options() -> None:
    dapo = AlgorithmConfig(preset="dapo")
    assert dapo.effective_filters.zero_variance
    assert dapo.effective_filters.overlong_penalty == 1.0
    assert dapo.effective_loss.options == {"eps_high": 0.28, "dual_clip": None}
    assert not AlgorithmConfig(preset="dapo", filters=FilterConfig()).effective_filters.zero_variance
    assert AlgorithmConfig(preset="gspo").effective_aggregation == "seq_mean_token_mean"
    assert AlgorithmConfig(preset="gspo", aggregation="token_mean").effective_aggregation == "token_mean"
    assert AlgorithmConfig(preset="decoupled_ppo").effective_proximal == "recompute"
    assert (
        AlgorithmConfig(loss=LossConfig(name="decoupled_ppo"), proximal="log_linear").effective_proximal == "log_linear"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "decoupled_ppo", "proximal": "inference"}, "use recompute or log_linear"),
        ({"preset": "aipo", "proximal": "recompute"}, "proximal (recompute) is not used by loss aipo"),
        ({"preset": "masked_is", "proximal": "log_linear"}, "proximal (log_linear) is not used by loss masked_is"),
        (
            {"correction": {"action": "mask", "reduce": "sum"}},
            "reduce (sum) has no effect with level token; remove it or set",
        ),
        (
            {"loss": {"name": "masked_is", "options": {"sequence_clip": 5.0}}},
            "sequence_clip (5.0) has no effect with ratio token; remove it or set ratio to sequence",
        ),
        (
            {"loss": {"name": "decoupled_ppo", "options": {"cap_mode": "mask", "cap": None}}, "proximal": "recompute"},
            "cap_mode (mask) needs a cap, and cap is null; set cap, or remove cap_mode",
        ),
        ({"correction": {"action": "none", "high": 3.0}}, "high (3.0) has no effect with action none; remove it"),
        ({"aggregation_length": 5}, "aggregationLength (5) needs aggregation constant_length; remove it"),
        (
            {"preset": "cispo", "correction": {}},
            "loss cispo applies it already without a proximal policy; use action mask",
        ),
        ({"preset": "ppo", "correction": {}}, "loss ppo applies it already without a proximal policy"),
        ({"preset": "ppo", "correction": {"low": 3.0}}, "low (3.0) must be at most high (2.0)"),
        ({"correction": {"weight": "token"}}, "weight (token) needs action mask, because clamp weights already"),
        ({"correction": {"action": "mask", "cap": 2.0}}, "cap (2.0) needs a weight; set weight to token or sequence"),
        ({"correction": {"action": "mask", "weight": "token", "cap": 0.0}}, "greater than 0"),
        (
            {"correction": {"action": "mask", "weight": "sequence"}},
            "weight sequence would apply the ratio of trainer and engine twice, because loss aipo applies it already; set weight to none",
        ),
        ({"preset": "ppo"}, "advantage gae needs a critic model"),
        (
            {"loss": {"name": "ppo", "options": {"eps_high": None}}},
            "eps_high must not be null; remove it to use the default (0.2)",
        ),
        ({"loss": {"name": "ppo", "options": {"dual_clip": 1}}}, "dual_clip must be greater than 1, or null, got 1"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(values: dict[str, Any], message: str) -> None:
    assert message in validation_message(AlgorithmConfig, **values)


def test_gspo_preset_recomputes_policy_and_applies_correction() -> None:
    gspo = AlgorithmConfig(preset="gspo")
    assert (gspo.effective_proximal, gspo.effective_correction) == ("recompute", CorrectionConfig())
    wider = LossConfig(name="gspo", options={"eps_high": 5e-4})
    assert AlgorithmConfig(preset="gspo", loss=wider).effective_correction == CorrectionConfig()
    own = CorrectionConfig(action="mask")
    assert AlgorithmConfig(preset="gspo", correction=own).effective_correction == own
    for without in (
        AlgorithmConfig(preset="gspo", proximal="inference"),  # the engine's ratio is in the loss: as before
        AlgorithmConfig(preset="gspo", correction=CorrectionConfig(action="none")),
        AlgorithmConfig(preset="gspo", loss=LossConfig(name="ppo")),
        AlgorithmConfig(preset="grpo", loss=wider),
    ):
        assert without.effective_correction is None
    assert AlgorithmConfig(preset="grpo", loss=wider).effective_proximal == "recompute"
    assert AlgorithmConfig(preset="gspo", loss=LossConfig(name="ppo")).effective_proximal == "inference"


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({"preset": "gspo"}, None),
        ({"preset": "grpo"}, None),
        ({"preset": "grpo", "loss": {"name": "my.module:loss"}}, None),
        ({"preset": "dppo"}, None),
        (
            {"preset": "gspo", "proximal": "inference"},
            "loss gspo measures eps_low (0.0003), eps_high (0.0004) from the engine's log-probs (proximal: inference), whose "
            "rounding alone moves tokens outside the band and removes their gradient; "
            "set proximal to recompute, or eps_low to 0.01 or more",
        ),
        ({"preset": "gspo", "proximal": "log_linear"}, "(proximal: log_linear)"),
        ({"loss": {"name": "ppo", "options": {"eps_high": 0.005}}}, "loss ppo measures eps_high (0.005) from"),
        ({"loss": {"name": "ipo", "options": {"thr": 0.001}}}, "removes their gradient; set thr to 0.01 or more"),
    ],
)
def test_clip_band_below_rounding_causes_warning(values: dict[str, Any], warning: str | None) -> None:
    found = AlgorithmConfig.model_validate(values).band_warning
    assert found is None if warning is None else warning in (found or "")


def test_environment_drops_proximal_policy_unused_by_its_loss() -> None:
    run = AlgorithmConfig(preset="grpo", proximal="recompute")
    assert EnvironmentAlgorithm(loss=LossConfig(name="aipo")).merged_over(run).effective_proximal == "inference"
    assert EnvironmentAlgorithm(loss=LossConfig(name="cispo")).merged_over(run).effective_proximal == "recompute"
    with pytest.raises(ValueError, match=r"proximal \(recompute\) is not used by loss aipo"):
        EnvironmentAlgorithm(loss=LossConfig(name="aipo"), proximal="recompute").merged_over(run)


def test_correction_is_valid_with_recomputed_proximal_policy() -> None:
    correction = CorrectionConfig(level="sequence", high=3.0)
    assert AlgorithmConfig(preset="grpo", proximal="recompute", correction=correction).correction == correction
    assert correction.options == {
        "action": "clamp",
        "weight": "none",
        "level": "sequence",
        "measure": "ratio",
        "reduce": "mean",
        "high": 3.0,
    }


@pytest.mark.parametrize(
    ("values", "what", "need"),
    [
        ({"preset": "distill"}, "loss distill", "reference"),
        ({"loss": {"name": "ref_kl"}}, "loss ref_kl", "reference"),
        (
            {"loss": {"name": "masked_is", "options": {"teacher_tau": 0.1}}},
            "teacher_tau (0.1) of loss masked_is",
            "reference",
        ),
        ({"regularizers": {"kl": 0.1}}, "regularizers.kl (0.1)", "reference"),
        ({"preset": "ppo", "advantage": {"name": "gae"}}, "advantage gae", "critic"),
    ],
)
def test_missing_critic_or_reference_model_is_refused(values: dict[str, Any], what: str, need: str) -> None:
    assert f"{what} needs a {need} model" in validation_message(AlgorithmConfig, **values)


def test_manifest_choices_equal_algorithm_tables() -> None:
    assert set(get_args(Aggregation)) == set(AGGREGATIONS)
    assert set(get_args(Proximal)) == set(PROXIMAL_METHODS)
    assert set(get_args(RegularizerConfig.model_fields["kl_kind"].annotation)) == set(KL_KINDS)
    assert get_args(RegularizerConfig.model_fields["kl_reward_kind"].annotation) == KL_REWARD_KINDS
    for name, option in CORRECTION_OPTIONS.items():
        field = CorrectionConfig.model_fields[name]
        assert field.default == option.default or (name, field.default) == ("low", None)
        if option.choices:
            assert set(get_args(field.annotation)) == set(option.choices)
    for name in PRESETS:
        filters = PRESETS[name].filters
        assert filters.keys() <= FilterConfig.model_fields.keys()
        assert (PRESETS[name].correction or {}).keys() <= CorrectionConfig.model_fields.keys()


def test_critic_and_reference_are_allowed_only_if_used() -> None:
    assert "critic is not used by advantage grpo" in validation_message(AlgorithmConfig, critic={})
    assert "advantage gae needs a critic model" in validation_message(AlgorithmConfig, advantage={"name": "gae"})
    assert "regularizers.kl (0.1) needs a reference model" in validation_message(
        AlgorithmConfig, regularizers={"kl": 0.1}
    )
    assert "regularizers.klReward (0.1) needs a reference model" in validation_message(
        AlgorithmConfig, regularizers={"kl_reward": 0.1}
    )
    assert (
        "klKind (k1) has an expected gradient of 0 in the loss; set klKind to k2, or set klReward to 0.1"
        in validation_message(RegularizerConfig, kl=0.1, kl_kind="k1")
    )
    assert "regularizers.klReward (0.1) is not used by loss distill, which reads no rewards" in validation_message(
        AlgorithmConfig, preset="distill", reference={}, regularizers={"kl_reward": 0.1}
    )
    assert "loss distill needs a reference model" in validation_message(AlgorithmConfig, preset="distill")
    whole = AlgorithmConfig.model_validate(
        {"preset": "ppo", "advantage": {"name": "gae"}, "critic": {}, "reference": {}, "regularizers": {"kl": 0.1}}
    )
    assert whole.provided_inputs == {"critic", "reference"}


def test_reference_resolves_to_own_model_folder_or_repository() -> None:
    policy = ModelConfig(path="/models/policy")
    assert ReferenceConfig().resolve_model(policy) is policy
    assert ReferenceConfig(model="/models/teacher").resolve_model(policy) == ModelConfig(path="/models/teacher")
    found = ReferenceConfig(model="org/teacher", revision="v1").resolve_model(policy)
    assert (found.name, found.revision, found.path) == ("org/teacher", "v1", None)
    for model in ("initial", "/models/teacher"):
        with pytest.raises(ValidationError, match=f"model is {model}; remove revision"):
            ReferenceConfig(model=model, revision="v1")


def test_paths_of_a_container_stay_below_the_volume() -> None:
    good = ["datasets/words", "a.jsonl", "..b/c.."]
    assert EnvironmentConfig(id="x", image="x:1", volume_paths=good).volume_paths == good
    for path in ("/etc", "datasets/", "../other", "a/../b", "a/./b", "a//b", "", "a\nb", "a:b"):
        assert "volume_paths.0" in validation_message(EnvironmentConfig, id="x", image="x:1", volume_paths=[path]), path
    assert "set image or remove volumePaths" in validation_message(EnvironmentConfig, id="x", volume_paths=["a"])
