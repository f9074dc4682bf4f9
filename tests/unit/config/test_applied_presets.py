"""`rlrun render` shows the parts of a preset. The objective stays the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.algorithm.names import PRESETS
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.run_config import RunConfig

_MODELS: dict[str, Any] = {"reference": {}, "critic": {}}
_PARTS = ("loss", "advantage", "aggregation", "proximal", "correction", "filters")
_OVERRIDES: dict[str, dict[str, Any]] = {
    "none": {},
    "loss": {"loss": {"name": "cispo"}},
    "loss_without_proximal": {"loss": {"name": "dppo"}},
    "sequence_loss": {"loss": {"name": "masked_is", "options": {"ratio": "sequence"}}},
    "recomputed": {"loss": {"name": "ppo"}, "proximal": "recompute"},
    "advantage": {"advantage": {"name": "rloo"}},
    "length": {"aggregation": "constant_length", "aggregationLength": 77},
    "correction_off": {"correction": {"action": "none"}},
    "filters": {"filters": {"zeroVariance": True}},
}


def objective(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return everything that trainer and orchestrator read of an algorithm."""
    return {
        "loss": algorithm.effective_loss,
        "advantage": algorithm.effective_advantage,
        "batch_advantage": algorithm.batch_advantage,
        "aggregation": algorithm.effective_aggregation,
        "length": algorithm.aggregation_length,
        "proximal": algorithm.effective_proximal,
        "correction": algorithm.effective_correction,
        "filters": algorithm.effective_filters,
        "regularizers": algorithm.regularizers,
    }


def resolve(run: dict[str, Any], environment: dict[str, Any]) -> RunConfig:
    spec = RLRunSpec.model_validate(
        {
            "model": {"name": "m"},
            "algorithm": run,
            "environments": [{"id": "reverse-text"}, {"id": "reverse-text", "name": "own", "algorithm": environment}],
        }
    )
    return resolve_spec(spec, name="r", uid="u", output_dir="/d")


def test_applied_preset_is_the_same_objective() -> None:
    compared = 0
    for preset, of_run, of_environment in itertools.product(PRESETS, _OVERRIDES, _OVERRIDES):
        if preset != "gspo" and "none" not in (of_run, of_environment):
            continue
        models = {name: value for name, value in _MODELS.items() if name == "reference" or preset == "ppo"}
        try:
            config = resolve({"preset": preset, **models, **_OVERRIDES[of_run]}, _OVERRIDES[of_environment])
        except ValueError:
            continue  # a combination that `rlrun validate` refuses
        applied = RunConfig.model_validate_json(config.with_presets_applied().model_dump_json())
        assert_same_objective(config.trainer.algorithm, applied.trainer.algorithm)
        assert_same_objective(config.orchestrator.algorithm, applied.orchestrator.algorithm)
        own, own_applied = (
            item.orchestrator.environments[1].algorithm.merged_over(item.orchestrator.algorithm)
            for item in (config, applied)
        )
        assert_same_objective(own, own_applied)
        assert config.trainer.environment_algorithms.keys() == applied.trainer.environment_algorithms.keys()
        assert applied.with_presets_applied() == applied
        compared += 1
    assert compared > 200


def assert_same_objective(before: AlgorithmConfig, after: AlgorithmConfig) -> None:
    assert all(getattr(after, part) is not None for part in _PARTS)
    left, right = objective(before), objective(after)
    assert left.pop("aggregation") in (None, right.pop("aggregation"))
    assert left == right


def test_environment_with_the_objective_of_the_run_stays_empty() -> None:
    applied = resolve({"preset": "dapo"}, {}).with_presets_applied()
    assert [item.algorithm for item in applied.orchestrator.environments] == [EnvironmentAlgorithm()] * 2
    assert applied.trainer.environment_algorithms == {}


@pytest.mark.parametrize(("preset", "aggregation"), [("aipo", "token_mean"), ("grpo", "seq_mean_token_mean")])
def test_applied_preset_names_its_aggregation(preset: str, aggregation: str) -> None:
    applied = resolve({"preset": preset}, {}).with_presets_applied()
    assert applied.trainer.algorithm.aggregation == aggregation
