"""Several passes over the samples of a step, compared with loops of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rlrun.algorithms import Objective, Regularizers
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.protocol.files.batch import Batch
from rlrun.trainer.learning.forward import logprobs_without_gradient
from rlrun.trainer.learning.learner import Learner
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.reference_model import FrozenReference
from rlrun.trainer.learning.repeated_passes import SampleSignals
from rlrun.trainer.learning.run_objective import Update, mini_batches
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group
from tests.tensors.trainer.companions import (
    GAE,
    SMOOTH,
    MakeBatch,
    MakeModel,
    critic_of,
    make_learner,
    plain_logprobs,
    weights,
    with_head,
)
from tests.tensors.trainer.test_recurrent import make_steps

LENGTHS = [9, 4, 13, 6]
CLOSE = {"atol": 2e-4, "rtol": 0}


def clipped_loss(model: nn.Module, part: Batch, proximal: dict[int, Tensor]) -> Tensor:
    """Return PPO's loss of a part, written out; `proximal` contains the log-probs of each sample."""
    total = torch.zeros(())
    for sample, t in zip(part.samples, plain_logprobs(model, part), strict=True):
        mask = torch.from_numpy(sample.loss_mask)[1:]
        a, ratio = torch.from_numpy(sample.advantages)[1:], (t - proximal[sample.rollout]).exp()
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
        loss = torch.where(a < 0, torch.minimum(loss, -a * 3.0), loss)
        total = total + loss[mask].sum() / part.loss_tokens
    return total


def plain_training(model: nn.Module, passes: list[list[Batch]], *, moving: bool = False) -> tuple[Tensor, list[float]]:
    """Train with one AdamW step for each part, and return the parameters and losses.

    `moving` computes the proximal log-probs again before each pass.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SMOOTH.lr, betas=(0.9, 0.999), eps=SMOOTH.eps, weight_decay=0.0
    )
    losses, proximal = [], dict[int, Tensor]()
    for parts in passes:
        if moving or not proximal:
            with torch.no_grad():
                for part in parts:
                    proximal |= {s.rollout: t for s, t in zip(part.samples, plain_logprobs(model, part), strict=True)}
        for part in parts:
            loss = clipped_loss(model, part, proximal)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses


def ppo_learner(make_model: MakeModel, group: Group) -> Learner:
    policy = shard_model(make_model(), group)
    return make_learner(
        policy,
        group,
        loss=Objective("ppo", proximal="recompute"),
        optimizer=make_optimizer(policy, SMOOTH, group.device),
    )


def test_two_passes_of_one_update_equal_a_plain_loop(solo: Group, make_model: MakeModel, make_batch: MakeBatch) -> None:
    batch = make_batch(LENGTHS)
    learner = ppo_learner(make_model, solo)
    first = Update(batch, [(0, 2), (3, 1)])
    metrics = learner.step([first, replace(first, is_repeated=True)], lr=SMOOTH.lr)

    expected, losses = plain_training(make_model(attn="eager"), [[batch], [batch]])
    torch.testing.assert_close(weights(learner.model), expected, **CLOSE)
    assert metrics["loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    assert (metrics["loss_tokens"], metrics["tokens"]) == (batch.loss_tokens, batch.tokens)
    assert metrics["time/proximal"] > 0
    once, _ = plain_training(make_model(attn="eager"), [[batch]])
    moved, _ = plain_training(make_model(attn="eager"), [[batch], [batch]], moving=True)
    for wrong in (once, moved):
        assert float((wrong - expected).abs().max()) > 5 * CLOSE["atol"]


def test_two_passes_of_two_updates_equal_a_plain_loop_in_this_order(
    solo: Group, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    batch = make_batch(LENGTHS)
    passes = [mini_batches(batch, 2, seed=2, epoch=epoch) for epoch in range(2)]
    members = [[{s.rollout for s in part.samples} for part in parts] for parts in passes]
    assert members[0][0] not in members[1]
    learner = ppo_learner(make_model, solo)
    updates = [
        Update(part, [(0,), (1,)], is_repeated=epoch > 0) for epoch, parts in enumerate(passes) for part in parts
    ]
    metrics = learner.step(updates, lr=SMOOTH.lr)

    expected, losses = plain_training(make_model(attn="eager"), passes)
    torch.testing.assert_close(weights(learner.model), expected, **CLOSE)
    assert metrics["loss"] == pytest.approx(sum(losses) / 4, abs=1e-5)
    assert metrics["loss_tokens"] == batch.loss_tokens
    flipped, _ = plain_training(make_model(attn="eager"), [passes[0], passes[1][::-1]])
    assert float((flipped - expected).abs().max()) > 5 * CLOSE["atol"]


def test_later_passes_are_divided_differently_and_reproducibly(make_batch: MakeBatch) -> None:
    batch = make_batch([5] * 12)

    def members(step: int, epoch: int) -> tuple[tuple[int, ...], ...]:
        parts = mini_batches(replace(batch, step=step), 3, seed=4, epoch=epoch)
        return tuple(tuple(sample.rollout for sample in part.samples) for part in parts)

    drawn = [members(step, epoch) for step in (1, 2) for epoch in range(4)]
    assert len(set(drawn)) == 8
    for parts in drawn:
        assert sorted(number for part in parts for number in part) == list(range(12))
    assert members(2, 3) == drawn[-1]


def test_later_passes_use_the_signals_of_the_first_pass(
    solo: Group, make_model: MakeModel, rewarded: MakeBatch
) -> None:
    """Values, advantages, returns, reference and proximal log-probs of each token, on rows of another division."""
    batch = rewarded([9, 4, 13, 6, 3])
    first = [Update(part, [(0,), (1,)]) for part in mini_batches(batch, 2, seed=1)]
    learner = make_learner(
        shard_model(make_model(), solo),
        solo,
        loss=Objective("ppo", proximal="recompute", regularizers=Regularizers(kl=0.1)),
        gae=GAE,
        reference=FrozenReference(shard_model(with_head(make_model()), solo)),
        critic=critic_of(make_model(), solo),
    )
    with_head(learner.critic.module)  # type: ignore[union-attr]
    samples = [[part.batch.samples[i] for i in row] for part in first for row in part.rows]
    rows = [micro_batch(own, solo.device) for own in samples]
    signals, _, _ = learner._run_passes(first, 4, samples, rows, lambda: None)
    found = SampleSignals(first, signals, solo).of_row(
        [samples[3][0], samples[0][0]], len(rows[3].mask) + len(rows[0].mask)
    )
    for name in ("proximal_logprobs", "reference_logprobs", "advantages", "values", "returns"):
        expected = torch.cat([getattr(signals[3], name), getattr(signals[0], name)])
        assert expected.abs().sum() > 0
        assert torch.equal(getattr(found, name), expected), name
    empty = SampleSignals(first, signals, solo).of_row([], 2)
    assert empty.values is not None
    assert empty.values.tolist() == [0, 0]
    expected = logprobs_without_gradient(learner.model, [micro_batch(samples[3], solo.device)])[0]
    torch.testing.assert_close(found.proximal_logprobs[: len(expected)], expected)  # type: ignore[index]


def test_steps_repeat_the_samples_of_a_step(source: Path, make_batch: Callable[..., Batch], solo: Group) -> None:
    options = {"algorithm": AlgorithmConfig(preset="decoupled_ppo"), "updates_per_step": 2}
    batch = make_batch(LENGTHS)
    steps = make_steps(str(source), solo, None, epochs_per_step=3, **options)
    updates = steps.divide_batch(batch)
    assert [update.is_repeated for update in updates] == [False] * 2 + [True] * 4
    for number in range(3):
        rollouts = [s.rollout for update in updates[2 * number : 2 * number + 2] for s in update.batch.samples]
        assert sorted(rollouts) == [0, 1, 2, 3]
    metrics = steps.train(1, batch, lambda: None)
    assert (metrics["tokens"], metrics["loss_tokens"]) == (batch.tokens, batch.loss_tokens)
    seconds = metrics["time/forward_backward"] + metrics["time/optimizer"]
    assert metrics["perf/throughput"] == pytest.approx(3 * batch.tokens / seconds)
    one = make_steps(str(source), solo, None, **options)
    assert one.divide_batch(batch)[0].batch == updates[0].batch, "the first pass is the one of a single pass"
    same = make_steps(str(source), solo, None, epochs_per_step=2).divide_batch(batch)
    assert [update.is_repeated for update in same] == [False, True]
    assert same[0].rows == same[1].rows
