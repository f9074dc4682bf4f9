"""Learner steps with several updates, proximal policy, reference and critic."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rlrun.algorithms import Objective, Regularizers
from rlrun.trainer.checkpoints import dcp
from rlrun.trainer.checkpoints.async_saver import Saver
from rlrun.trainer.checkpoints.dcp import Part, Progress
from rlrun.trainer.learning.forward import logprobs_without_gradient
from rlrun.trainer.learning.learner import Learner, combine_updates
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.reference_model import FrozenReference
from rlrun.trainer.learning.run_objective import Update, mini_batches
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.learning.train_step import parameter_checksum
from rlrun.trainer.modeling.shard import local_part, shard_model
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.trained_run import trained_parts
from tests.tensors.trainer.companions import (
    GAE,
    ROWS,
    SMOOTH,
    MakeBatch,
    MakeModel,
    critic_of,
    make_learner,
    plain_logprobs,
    weights,
)


def test_mini_batches_contain_every_trained_sample_once(rewarded: MakeBatch) -> None:
    batch = rewarded([9, 4, 13, 6, 3, 2])  # the last sample has no loss token
    parts = mini_batches(batch, 3, seed=7)
    assert [len(part.samples) for part in parts] == [2, 2, 1]
    held = sorted(sample.task_id for part in parts for sample in part.samples)
    assert held == [sample.task_id for sample in batch.samples[:5]]
    again = mini_batches(batch, 3, seed=7)
    assert [[s.task_id for s in part.samples] for part in again] == [
        [s.task_id for s in part.samples] for part in parts
    ]
    drawn = {
        tuple(s.task_id for s in mini_batches(dataclasses.replace(batch, step=step), 3, seed=7)[0].samples)
        for step in range(8)
    }
    assert len(drawn) > 2
    assert len(mini_batches(batch, 99, seed=7)) == 5
    assert mini_batches(batch, 1, seed=7)[0] is batch


def test_several_updates_use_the_policy_at_step_start(
    solo: Group, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    """The expected result uses PPO's ratio to the first policy and one plain AdamW step on each half."""
    batch = make_batch([9, 4, 13, 6])
    halves = mini_batches(batch, 2, seed=0)
    policy = shard_model(make_model(), solo)
    learner = make_learner(
        policy,
        solo,
        loss=Objective("ppo", proximal="recompute"),
        optimizer=make_optimizer(policy, SMOOTH, solo.device),
    )
    metrics = learner.step([Update(half, [(0,), (1,)]) for half in halves], lr=SMOOTH.lr)

    model = make_model(attn="eager")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SMOOTH.lr, betas=(0.9, 0.999), eps=SMOOTH.eps, weight_decay=0.0
    )
    with torch.no_grad():
        proximal = [plain_logprobs(model, half) for half in halves]
    losses = []
    for half, old in zip(halves, proximal, strict=True):
        total = torch.zeros(())
        for sample, t, o in zip(half.samples, plain_logprobs(model, half), old, strict=True):
            mask = torch.from_numpy(sample.loss_mask)[1:]
            a, ratio = torch.from_numpy(sample.advantages)[1:], (t - o).exp()
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            loss = torch.where(a < 0, torch.minimum(loss, -a * 3.0), loss)
            total = total + loss[mask].sum() / half.loss_tokens
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    assert metrics["loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    plain = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights(learner.model), plain, atol=2e-4, rtol=0)
    assert metrics["time/proximal"] > 0
    assert metrics["loss_tokens"] == batch.loss_tokens


def test_single_update_skips_the_proximal_pass(
    solo: Group, make_model: MakeModel, rewarded: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = Objective("decoupled_ppo", proximal="recompute")
    found = []
    for forced in (False, True):
        if forced:
            monkeypatch.setattr(Learner, "_needs_proximal_pass", lambda self, updates: True)
        learner = make_learner(shard_model(make_model(), solo), solo, loss=objective)
        metrics = learner.step([Update(rewarded(), ROWS)], lr=0.01)
        assert ("time/proximal" in metrics) is forced
        found.append((metrics["loss"], metrics["grad_norm"], parameter_checksum(learner.model)))
    assert found[0] == found[1]


def test_overflowing_policy_skips_all_updates(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    model = shard_model(make_model(), solo)
    with torch.no_grad():
        local_part(model.lm_head.weight)[0, 0] = float("inf")
    before = parameter_checksum(model)
    learner = make_learner(model, solo, loss=Objective("ppo", proximal="recompute"))
    metrics = learner.step([Update(part, [(0, 1)]) for part in mini_batches(rewarded([9, 4, 8, 6]), 2, seed=0)], lr=0.1)
    assert metrics["skipped"] == 2.0
    assert parameter_checksum(model) == before


def test_step_can_be_abandoned_until_its_first_update(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    updates = [Update(part, [(0,), (1,)]) for part in mini_batches(rewarded([9, 4, 8, 6]), 2, seed=0)]
    asked: list[None] = []

    class StopError(Exception):
        pass

    def check_stop() -> None:
        asked.append(None)
        if len(asked) == limit:
            raise StopError

    limit = 0
    learner = make_learner(shard_model(make_model(), solo), solo, loss=Objective("ppo", proximal="recompute"))
    before = parameter_checksum(learner.model)
    learner.step(updates, lr=0.01, check_stop=check_stop)
    assert len(asked) == 3  # the proximal pass and the two rows of the first update
    assert parameter_checksum(learner.model) != before

    asked.clear()
    limit = 3
    learner = make_learner(shard_model(make_model(), solo), solo, loss=Objective("ppo", proximal="recompute"))
    with pytest.raises(StopError):
        learner.step(updates, lr=0.01, check_stop=check_stop)
    assert parameter_checksum(learner.model) == before


def test_metrics_of_several_updates_are_combined() -> None:
    one = {"loss": 1.0, "tokens": 10.0, "ratio_max": 2.0, "skipped": 0.0, "time/optimizer": 0.5}
    two = {"loss": 3.0, "tokens": 30.0, "ratio_max": 1.0, "skipped": 1.0, "time/optimizer": 0.25}
    assert combine_updates([one, two]) == {
        "loss": 2.0,
        "tokens": 40.0,
        "ratio_max": 2.0,
        "skipped": 1.0,
        "time/optimizer": 0.75,
    }
    assert combine_updates([one]) == one


def test_learner_with_critic_resumes_bit_for_bit(
    tmp_path: Path, solo: Group, make_model: MakeModel, rewarded: MakeBatch
) -> None:
    def fresh() -> tuple[Learner, dict[str, Part]]:
        critic = critic_of(make_model(), solo, clip=0.2)
        learner = make_learner(
            shard_model(make_model(), solo),
            solo,
            loss=Objective("ppo", proximal="recompute", regularizers=Regularizers(kl=0.1)),
            reference=FrozenReference(shard_model(make_model().requires_grad_(False), solo)),
            critic=critic,
            gae=GAE,
        )
        return learner, trained_parts(learner)

    def train(learner: Learner, steps: range) -> list[tuple[float, ...]]:
        found = []
        for step in steps:
            updates = [Update(part, [(0, 1)]) for part in mini_batches(rewarded([9, 5, 8, 6], step=step), 2, seed=1)]
            metrics = learner.step(updates, lr=0.01, critic_lr=0.02)
            assert learner.critic is not None
            sums = (parameter_checksum(learner.model), parameter_checksum(learner.critic.module))
            found.append((*sums, metrics["loss"], metrics["value_loss"], metrics["reference_kl"]))
        return found

    learner, parts = fresh()
    train(learner, range(1, 2))
    Saver(parts, solo, background=False).save(Progress(1), tmp_path / "step")
    uninterrupted = train(learner, range(2, 4))
    again, others = fresh()
    assert dcp.load_parts(others, tmp_path / "step") == Progress(1)
    assert train(again, range(2, 4)) == uninterrupted
    assert len({line[1] for line in uninterrupted}) == 2


def test_pass_without_gradient_does_not_change_next_step(
    solo: Group, make_model: MakeModel, rewarded: MakeBatch
) -> None:
    checks = []
    for passes in (0, 2):
        model = shard_model(make_model(), solo)
        for _ in range(passes):
            row = micro_batch(rewarded().samples, solo.device)
            assert not logprobs_without_gradient(model, [row])[0].requires_grad
        learner = make_learner(model, solo)
        learner.step([Update(rewarded(), ROWS)], lr=0.01)
        checks.append(parameter_checksum(model))
    assert checks[0] == checks[1]
