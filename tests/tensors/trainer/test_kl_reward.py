"""KL in the reward: advantages of a step compared with the float64 equation, from configuration to update."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rlrun.algorithms import KlReward, Mixture, Objective
from rlrun.algorithms.objective_mixture import KlAdvantage
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.trainer.learning.critic import GaeOptions, estimate_values, to_critic
from rlrun.trainer.learning.run_objective import KlInputs, Update, bind_objective, kl_advantages, kl_token_rewards
from rlrun.trainer.learning.step_buffer import MicroBatch, micro_batch
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group
from tests.tensors.trainer.companions import (
    GAE,
    LENGTHS,
    ROWS,
    MakeBatch,
    MakeModel,
    critic_of,
    make_learner,
    plain_logprobs,
    weights,
)

GROUPS = (0, 1)


def bind_config(algorithm: dict[str, Any], environments: dict[str, dict[str, Any]] | None = None) -> Mixture:
    """Return the objective of a trainer with this configuration."""
    config = {"name": "test", "uid": "uid", "output_dir": "/out", "model": {"tiny": {}}, "max_steps": 1, "seq_len": 32}
    config |= {"seed": 0, "checkpoint": {}, "algorithm": algorithm, "environment_algorithms": environments or {}}
    return bind_objective(TrainerConfig.model_validate(config))


def rows_of(batch: Batch, group: Group) -> tuple[list[list[Sample]], list[MicroBatch]]:
    """Return three rows and an idle one."""
    members = [[batch.samples[i] for i in row] for row in [*ROWS, ()]]
    return members, [micro_batch(row, group.device) for row in members]


def draw_values(rows: Sequence[MicroBatch], seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.where(row.mask, -torch.rand(row.mask.shape), 0) for row in rows]


def returns(sample: Sample, difference: np.ndarray, weight: float, gamma: float) -> np.ndarray:
    """Return Σ over later loss tokens of γ^(tokens between)·(-weight·d), in float64."""
    found, following = np.zeros(len(sample)), 0.0
    for k in reversed(np.flatnonzero(sample.loss_mask)):
        following = -weight * difference[k] + gamma * following
        found[k] = following
    return found


def split(values: Sequence[torch.Tensor], members: Sequence[Sequence[Sample]]) -> dict[int, np.ndarray]:
    """Return the values of `ROWS` by sample number."""
    found = {}
    for row, own, numbers in zip(values, members, ROWS, strict=False):
        parts = row.double().split([len(sample) for sample in own])
        found |= dict(zip(numbers, (part.numpy() for part in parts), strict=True))
    return found


@pytest.mark.parametrize(
    ("algorithm", "gamma", "normalized"),
    [
        ({"advantage": {"name": "grpo"}}, 1.0, None),
        ({"advantage": {"name": "reinforce_pp", "options": {"gamma": 0.9}}}, 0.9, "batch"),
        ({"advantage": {"name": "grpo", "options": {"adv_mean": "group", "adv_std": "group"}}}, 1.0, "group"),
        ({"advantage": {"name": "rloo", "options": {"neg_clipped": True}}}, 1.0, "clipped"),
    ],
)
def test_kl_advantages_equal_the_equation(
    solo: Group, rewarded: MakeBatch, algorithm: dict[str, Any], gamma: float, normalized: str | None
) -> None:
    """Two environments in a run: `maths` has three times the weight, and all advantages share their settings."""
    samples = [
        dataclasses.replace(s, environment="maths" if i % 2 else "code") for i, s in enumerate(rewarded().samples)
    ]
    batch = dataclasses.replace(rewarded(), samples=tuple(samples))
    kl = {"regularizers": {"kl_reward": 0.1}, "reference": {}}
    loss = bind_config(algorithm | kl, {"maths": {"regularizers": {"kl_reward": 0.3}}})
    members, rows = rows_of(batch, solo)
    start, reference = draw_values(rows, 0), draw_values(rows, 1)
    inputs = KlInputs(loss, rows, members, start, reference)
    found = split(kl_advantages(inputs, groups=GROUPS, group=solo), members)

    differences = split([a - b for a, b in zip(start, reference, strict=True)], members)
    expected = {
        i: s.advantages.astype(np.float64) + returns(s, differences[i], 0.3 if i % 2 else 0.1, gamma)
        for i, s in enumerate(samples)
    }
    if normalized in ("batch", "group"):
        own = {g: [i for i, s in enumerate(samples) if normalized == "batch" or s.group == g] for g in GROUPS}
        changed = {}
        for i, s in enumerate(samples):
            tokens = np.concatenate([expected[j][samples[j].loss_mask] for j in own[s.group]])
            changed[i] = (expected[i] - tokens.mean()) / (tokens.std(ddof=1) + 1e-6)
        expected = changed
    for i, s in enumerate(samples):
        value = np.maximum(expected[i], 0) if normalized == "clipped" else expected[i]
        np.testing.assert_allclose(found[i], np.where(s.loss_mask, value, 0), rtol=1e-5, atol=1e-6)


def test_environment_without_kl_keeps_its_advantages(solo: Group, rewarded: MakeBatch) -> None:
    samples = [
        dataclasses.replace(s, environment="maths" if i % 2 else "code") for i, s in enumerate(rewarded().samples)
    ]
    batch = dataclasses.replace(rewarded(), samples=tuple(samples))
    loss = bind_config({"reference": {}}, {"maths": {"regularizers": {"kl_reward": 0.3}}})
    assert loss.rewards_kl
    assert loss.kl_rewards[0] is None
    members, rows = rows_of(batch, solo)
    inputs = KlInputs(loss, rows, members, draw_values(rows, 0), draw_values(rows, 1))
    found = split(kl_advantages(inputs, groups=GROUPS, group=solo), members)
    rewards = split(kl_token_rewards(inputs), members)
    for i, sample in enumerate(samples):
        assert np.array_equal(found[i], sample.advantages) is (i % 2 == 0)
        assert bool(rewards[i].any()) is (i % 2 == 1)


class Moved:
    """Reference with the log-probs of another model's own forward pass."""

    def __init__(self, model: torch.nn.Module, batch: Batch) -> None:
        self.logs = {id(s): plain for s, plain in zip(batch.samples, plain_logprobs(model, batch), strict=True)}
        self.members: list[list[Sample]] = []

    def logprobs(self, rows: Sequence[MicroBatch]) -> list[torch.Tensor]:
        found = []
        for row, members in zip(rows, self.members, strict=True):
            whole = torch.cat([torch.cat([torch.zeros(1), self.logs[id(s)].detach()]) for s in members])
            found.append(torch.where(row.mask, whole, 0))
        return found


@pytest.mark.parametrize("updates", [1, 2])
def test_step_trains_on_advantages_with_kl(
    solo: Group, make_model: MakeModel, rewarded: MakeBatch, updates: int
) -> None:
    """The update equals that of a batch with these advantages, computed from transformers' own log-probs."""
    batch = rewarded()
    torch.manual_seed(3)
    other = make_model(attn="eager")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    reference = Moved(other, batch)
    parts = [ROWS] if updates == 1 else [[(0, 1), (2,)], [(0, 1)]]
    halves = (
        [batch]
        if updates == 1
        else [
            dataclasses.replace(batch, samples=batch.samples[:3]),
            dataclasses.replace(batch, samples=batch.samples[3:]),
        ]
    )
    reference.members = [
        [half.samples[i] for i in row] for half, rows in zip(halves, parts, strict=True) for row in rows
    ]
    learner = make_learner(shard_model(make_model(), solo), solo, loss=Objective("ppo"), reference=reference)
    learner = dataclasses.replace(learner, loss=Mixture(Objective("ppo"), kl_rewards=(KlAdvantage(KlReward(0.5)),)))
    found = learner.step([Update(half, rows) for half, rows in zip(halves, parts, strict=True)], lr=0.01)

    plain = make_model(attn="eager")
    filled: list[Sample] = []
    penalty, tokens = 0.0, 0
    for sample, t in zip(batch.samples, plain_logprobs(plain, batch), strict=True):
        d = np.concatenate([[0.0], (t - reference.logs[id(sample)]).detach().double().numpy()])
        penalty, tokens = penalty - 0.5 * d[sample.loss_mask].sum(), tokens + int(sample.loss_mask.sum())
        made = np.where(sample.loss_mask, sample.advantages + returns(sample, d, 0.5, 1.0), 0).astype(np.float32)
        filled.append(dataclasses.replace(sample, advantages=made))
    whole = iter(filled)
    changed = [dataclasses.replace(half, samples=tuple(next(whole) for _ in half.samples)) for half in halves]
    same = make_learner(shard_model(make_model(), solo), solo, loss=Objective("ppo"))
    expected = same.step([Update(half, rows) for half, rows in zip(changed, parts, strict=True)], lr=0.01)
    assert found["kl_reward"] == pytest.approx(penalty / tokens, rel=1e-4)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    without = make_learner(shard_model(make_model(), solo), solo, loss=Objective("ppo")).step(
        [Update(batch, ROWS)], lr=0.01
    )
    assert abs(found["loss"] - without["loss"]) > 1e-3
    assert weights(learner.model).isfinite().all()


def test_critic_advantages_include_kl_rewards(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    """A fresh critic has values of 0, so γ = λ = 1 gives the reward plus the KL of later tokens."""
    batch = rewarded()
    loss = bind_config(
        {
            "preset": "ppo",
            "advantage": {"name": "gae", "options": {"adv_mean": "none", "adv_std": "none"}},
            "critic": {},
            "reference": {},
            "regularizers": {"kl_reward": 0.2},
        }
    )
    members, rows = rows_of(batch, solo)
    start, reference = draw_values(rows, 0), draw_values(rows, 1)
    more = kl_token_rewards(KlInputs(loss, rows, members, start, reference))
    critic = shard_model(to_critic(make_model()), solo)
    assert loss.gae is not None
    made = estimate_values(critic, rows, members, GaeOptions(**loss.gae), groups=GROUPS, group=solo, more_rewards=more)
    found = split(made.advantages, members)
    differences = split([a - b for a, b in zip(start, reference, strict=True)], members)
    for i, sample in enumerate(batch.samples):
        reward = sample.advantages[sample.loss_mask][-1:].sum()
        value = np.where(sample.loss_mask, reward + returns(sample, differences[i], 0.2, 1.0), 0)
        np.testing.assert_allclose(found[i], value, rtol=1e-5, atol=1e-6)


def test_step_with_critic_reports_kl_reward(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    batch = rewarded()
    reference = Moved(make_model(attn="eager"), batch)
    reference.members = [[batch.samples[i] for i in row] for row in ROWS]
    for log in reference.logs.values():
        log.data -= 1.0  # d = 1 for every token
    learner = make_learner(
        shard_model(make_model(), solo), solo, critic=critic_of(make_model(), solo), reference=reference
    )
    kls = (KlAdvantage(KlReward(0.25)),)
    learner = dataclasses.replace(learner, loss=Mixture(Objective("ppo"), gae=GAE, kl_rewards=kls))
    found = learner.step([Update(batch, ROWS)], lr=0.01, critic_lr=0.01)
    assert found["kl_reward"] == pytest.approx(-0.25, rel=1e-4)
    plain = make_learner(shard_model(make_model(), solo), solo, critic=critic_of(make_model(), solo), gae=GAE)
    without = plain.step([Update(batch, ROWS)], lr=0.01, critic_lr=0.01)
    assert found["return_mean"] < without["return_mean"] - 0.25
    assert len(LENGTHS) == len(batch.samples)
