"""Environments with their own objectives in the trainer: one step, several updates and configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rlrun.algorithms import Mixture, Objective, Regularizers
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.models.learning import AlgorithmConfig, LossConfig, RegularizerConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.packing.micro_batches import Row
from rlrun.trainer.learning.learner import combine_updates
from rlrun.trainer.learning.run_objective import Update, bind_objective
from rlrun.trainer.learning.train_step import train_step
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group
from tests.tensors.trainer.companions import LENGTHS, MakeBatch, MakeModel, make_learner, weights

MATHS = Objective("sft", aggregation="seq_mean_token_mean", regularizers=Regularizers(entropy=0.1))


def assign_environments(batch: Batch) -> Batch:
    """Assign every second sample to `maths`."""
    samples = [dataclasses.replace(s, environment="maths" if i % 2 else "code") for i, s in enumerate(batch.samples)]
    return dataclasses.replace(batch, samples=tuple(samples))


def step(
    model: nn.Module, group: Group, batch: Batch, rows: list[Row], environments: dict[str, Objective]
) -> tuple[dict[str, float], torch.Tensor]:
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    found = train_step(
        model,
        sgd,
        Update(batch, rows),
        group=group,
        loss=Mixture(Objective(), environments),
        lr=1.0,
        max_grad_norm=None,
    )
    return found, weights(model)


def test_loss_does_not_depend_on_rows(solo: Group, make_model: Callable[..., nn.Module], make_batch: MakeBatch) -> None:
    """The rows contain one environment, both, or no sample."""
    batch = assign_environments(make_batch(LENGTHS))
    whole, together = step(shard_model(make_model(), solo), solo, batch, [(0, 1, 2, 3, 4)], {"maths": MATHS})
    cut, apart = step(shard_model(make_model(), solo), solo, batch, [(3, 1), (), (0, 2), (4,)], {"maths": MATHS})
    torch.testing.assert_close(apart, together, atol=1e-5, rtol=1e-5)
    assert cut.keys() == whole.keys()
    same = [name for name in whole if not name.startswith("time/")]
    assert [cut[name] for name in same] == pytest.approx([whole[name] for name in same], rel=1e-4, abs=1e-6)
    assert {"objective/maths/loss", "objective/maths/entropy", "objective/maths/entropy_bonus"} <= whole.keys()
    assert "objective/code/loss" not in whole
    _, plain = step(shard_model(make_model(), solo), solo, batch, [(0, 1, 2, 3, 4)], {})
    assert float((plain - together).abs().max()) > 1e-3


def test_environment_objective_uses_policy_at_step_start(
    solo: Group, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    batch = assign_environments(make_batch([9, 4, 8, 6]))
    one, two = (
        dataclasses.replace(batch, samples=batch.samples[i::2]) for i in (0, 1)
    )  # the first half is code, the second half is maths
    own = {"maths": Objective("decoupled_ppo", proximal="recompute")}
    learner = make_learner(shard_model(make_model(), solo), solo, environments=own)
    metrics = learner.step([Update(one, [(0, 1)]), Update(two, [(0, 1)])], lr=0.01)
    assert metrics["time/proximal"] > 0
    assert metrics["objective/maths/loss_tokens"] == two.loss_tokens
    assert metrics["loss_tokens"] == batch.loss_tokens
    # The weight exp(o - i) uses the policy before the first update, which has already changed at the second update.
    first = make_learner(shard_model(make_model(), solo), solo, environments=own).step([Update(two, [(0, 1)])], lr=0.01)
    assert metrics["objective/maths/weight"] == pytest.approx(first["objective/maths/weight"], rel=1e-5)
    assert metrics["objective/maths/ratio"] != pytest.approx(first["objective/maths/ratio"], rel=1e-5)


def test_metrics_of_absent_environment_are_skipped() -> None:
    one = {"loss": 1.0, "objective/a/loss": 3.0, "objective/a/loss_tokens": 4.0}
    assert combine_updates([{"loss": 2.0}, one, one]) == {
        "loss": pytest.approx(4 / 3),
        "objective/a/loss": 3.0,
        "objective/a/loss_tokens": 8.0,
    }


def config(**own: object) -> TrainerConfig:
    return TrainerConfig(
        name="a",
        uid="u",
        output_dir="/data",
        model={"path": "m"},
        max_steps=1,
        seq_len=64,
        seed=0,
        algorithm=AlgorithmConfig(preset="dr_grpo", aggregation_length=9),
        checkpoint={},
        environment_algorithms={"maths": EnvironmentAlgorithm(**own)},  # type: ignore[arg-type]
    )


def test_environment_objective_overrides_only_its_own_fields() -> None:
    found = bind_objective(
        config(loss=LossConfig(name="ppo"), regularizers=RegularizerConfig(entropy=0.5))
    ).environments
    assert found == {
        "maths": Objective(
            "ppo", aggregation="constant_length", aggregation_length=9, regularizers=Regularizers(entropy=0.5)
        )
    }
    runs = Objective("ppo", {"dual_clip": None}, aggregation="token_mean")
    assert bind_objective(config(aggregation="token_mean")).environments["maths"] == runs
    assert bind_objective(config(aggregation="constant_length")).environments["maths"].aggregation_length == 64
    assert bind_objective(config(loss=LossConfig(name="decoupled_ppo"))).environments["maths"].proximal == "recompute"


def test_environment_loss_that_fails_to_import_is_refused() -> None:
    with pytest.raises(RoleError, match=r"environmentAlgorithms\.maths\.loss.*no_such_module"):
        bind_objective(config(loss=LossConfig(name="no_such_module:loss")))
