"""Critic: values, advantages and updates, compared with their definitions."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlrun.algorithms import Objective
from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import CriticConfig, ModelConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch
from rlrun.protocol.files.failures import RoleError
from rlrun.trainer.learning.critic import (
    Critic,
    GaeOptions,
    critic_step,
    estimate_values,
    make_critic,
    row_values,
    to_critic,
    token_rewards,
)
from rlrun.trainer.learning.forward import Signals
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.step_buffer import micro_batch, micro_batches
from rlrun.trainer.modeling.shard import local_part, shard_model
from rlrun.trainer.proof.start_check import check_model
from rlrun.trainer.ranks.group import Group
from tests.support.sets import few_in_gate
from tests.tensors.trainer.companions import (
    GAE,
    LENGTHS,
    ROWS,
    SMOOTH,
    MakeBatch,
    MakeModel,
    critic_of,
    make_learner,
    weights,
    with_head,
)

GROUPS = (0, 1)


@pytest.mark.parametrize("tied", [False, True])
def test_fresh_critic_has_policy_body_and_zero_values(
    solo: Group,
    make_model: MakeModel,
    rewarded: MakeBatch,
    tied: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = make_model("qwen3", tied=tied)
    policy.save_pretrained(tmp_path)
    trainer = TrainerConfig(
        name="test",
        uid="uid",
        output_dir=str(tmp_path),
        model=ModelConfig(path=str(tmp_path)),
        max_steps=1,
        seq_len=32,
        seed=0,
        algorithm=AlgorithmConfig(),
        checkpoint=CheckpointConfig(),
    )
    module = make_critic(CriticConfig(), trainer, str(tmp_path), group=solo, check=check_model).module
    body = dict(module.model.named_parameters(prefix="model"))
    assert len(body) == len(list(policy.model.parameters()))
    assert all(torch.equal(p.full_tensor(), dict(policy.named_parameters())[name]) for name, p in body.items())
    assert module.lm_head.weight.shape == (1, policy.config.hidden_size)
    row = micro_batch(rewarded().samples, solo.device)
    assert not row_values(module, row).any()


def test_value_is_computed_from_tokens_before_it(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    batch = rewarded()
    module = shard_model(with_head(to_critic(make_model())), solo)
    found = row_values(module, micro_batch(batch.samples, solo.device)).detach().split(LENGTHS)
    plain = with_head(to_critic(make_model(attn="eager")))
    for sample, values in zip(batch.samples, found, strict=True):
        mask = torch.from_numpy(sample.loss_mask)
        hidden = plain.model(input_ids=torch.from_numpy(sample.input_ids).long()[None], use_cache=False)[0][0]
        expected = (hidden @ plain.lm_head.weight.T)[:-1, 0].detach()
        torch.testing.assert_close(values[mask], expected[mask[1:]], atol=1e-4, rtol=1e-4)
        assert not values[~mask].any()


def test_critic_advantages_and_returns_equal_the_definition(
    solo: Group, make_model: MakeModel, rewarded: MakeBatch
) -> None:
    """The definition is GAE backwards over each sample's loss tokens in float64, whitened over all of them."""
    batch = rewarded()
    module = shard_model(with_head(to_critic(make_model())), solo)
    samples = [[batch.samples[i] for i in row] for row in [*ROWS, ()]]
    rows = [micro_batch(members, solo.device) for members in samples]
    found = estimate_values(module, rows, samples, GaeOptions(**GAE), groups=GROUPS, group=solo)

    raw, targets, valued = [], [], []
    for row, values in zip(samples, found.values, strict=True):
        start = 0
        for sample in row:
            v = values[start : start + len(sample)][torch.from_numpy(sample.loss_mask)].double().tolist()
            start += len(sample)
            running, advantages = 0.0, []
            for k in reversed(range(len(v))):
                reward, following = (sample.reward, 0.0) if k == len(v) - 1 else (0.0, v[k + 1])
                running = reward + 0.95 * following - v[k] + 0.95 * 0.9 * running
                advantages.insert(0, running)
            raw += advantages
            targets += [a + w for a, w in zip(advantages, v, strict=True)]
            valued += v
    masks = [row.mask for row in rows]
    white = (np.array(raw) - np.mean(raw)) / (np.std(raw, ddof=1) + 1e-6)
    ours = torch.cat([a[m] for a, m in zip(found.advantages, masks, strict=True)])
    np.testing.assert_allclose(ours.numpy(), white, atol=1e-5)
    theirs = torch.cat([r[m] for r, m in zip(found.returns, masks, strict=True)])
    np.testing.assert_allclose(theirs.numpy(), targets, atol=1e-5)
    assert not any(a[~m].any() for a, m in zip(found.advantages, masks, strict=True))
    assert found.metrics["value_mean"] == pytest.approx(np.mean(valued), abs=1e-5)
    assert found.metrics["return_mean"] == pytest.approx(np.mean(targets), abs=1e-5)
    explained = 1 - np.var(np.array(targets) - valued) / np.var(targets)
    assert found.metrics["explained_variance"] == pytest.approx(explained, rel=1e-5)


@pytest.mark.parametrize("bootstrap", [True, False])
def test_truncated_answer_bootstraps_from_its_final_value(
    solo: Group, make_model: MakeModel, rewarded: MakeBatch, bootstrap: bool
) -> None:
    """Expected values come from transformers' own pass and GAE in float64; truncated samples are at the end and in the
    middle of rows.
    """
    cut = (1, 2, 3)
    samples = [dataclasses.replace(s, truncated=i in cut) for i, s in enumerate(rewarded().samples)]
    samples[3].loss_mask[-1] = False  # the answer ends before the sequence
    samples[3].advantages[-1] = 0
    members = [[samples[i] for i in row] for row in [*ROWS, ()]]
    rows = [micro_batch(row, solo.device) for row in members]
    module = shard_model(with_head(to_critic(make_model())), solo)
    settings = GAE | {"bootstrap": bootstrap, "adv_mean": "none", "adv_std": "none"}
    found = estimate_values(module, rows, members, GaeOptions(**settings), groups=GROUPS, group=solo)
    plain = with_head(to_critic(make_model(attn="eager")))
    for row, values, advantages in zip(members, found.values, found.advantages, strict=True):
        start = 0
        for sample in row:
            ids = torch.from_numpy(sample.input_ids).long()[None]
            after = (plain.model(input_ids=ids, use_cache=False)[0][0] @ plain.lm_head.weight.T)[:, 0].double().tolist()
            own = slice(start, start + len(sample))
            start += len(sample)
            places = np.flatnonzero(sample.loss_mask)
            running, expected = 0.0, np.zeros(len(sample))
            following = after[places[-1]] if bootstrap and sample.truncated and len(places) else 0.0
            for k in reversed(places):
                reward = float(sample.advantages[k]) if k == places[-1] else 0.0
                running = reward + 0.95 * following - after[k - 1] + 0.95 * 0.9 * running
                expected[k], following = running, after[k - 1]
            np.testing.assert_allclose(advantages[own].numpy(), expected, rtol=1e-4, atol=1e-4)
            mask = torch.from_numpy(sample.loss_mask)
            np.testing.assert_allclose(values[own][mask].numpy(), [after[k - 1] for k in places], rtol=1e-4, atol=1e-4)
            assert not values[own][~mask].any()


@pytest.mark.parametrize(
    ("mean", "std"),
    few_in_gate(
        itertools.product(("none", "group", "batch"), repeat=2),
        [("none", "none"), ("group", "batch"), ("batch", "group")],
    ),
)
def test_advantages_are_normalized_at_the_configured_levels(
    solo: Group, make_model: MakeModel, rewarded: MakeBatch, mean: str, std: str
) -> None:
    """Statistics run over loss tokens, and groups span rows; the std is around the subtracted mean."""
    batch = rewarded()
    members = [dataclasses.replace(sample, group=i % 2) for i, sample in enumerate(batch.samples)]
    samples = [[members[i] for i in row] for row in [*ROWS, ()]]
    rows = [micro_batch(row, solo.device) for row in samples]
    module = shard_model(with_head(to_critic(make_model())), solo)

    def estimated(adv_mean: str, adv_std: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        made = estimate_values(
            module,
            rows,
            samples,
            GaeOptions(gamma=0.95, lam=0.9, bootstrap=True, adv_mean=adv_mean, adv_std=adv_std),
            groups=GROUPS,
            group=solo,
        ).advantages
        return torch.cat([values[row.mask] for values, row in zip(made, rows, strict=True)]).double().numpy()

    values, result = estimated("none", "none"), estimated(mean, std)
    ids = np.concatenate([np.full(int(s.loss_mask.sum()), s.group) for row in samples for s in row])
    parts: dict[str, list[Any]] = {"none": [], "group": [ids == 0, ids == 1], "batch": [ids >= 0]}
    centred = values.copy()
    for part in parts[mean]:
        centred[part] -= values[part].mean()
    expected = centred.copy()
    for part in parts[std]:
        expected[part] /= np.sqrt((centred[part] ** 2).sum() / (part.sum() - 1)) + 1e-6
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_reward_is_placed_on_the_last_loss_token(solo: Group, rewarded: MakeBatch) -> None:
    batch = rewarded([5, 2, 4])  # the second sample has no loss token
    mask = np.array([False, True, True, False])
    last = dataclasses.replace(batch.samples[2], loss_mask=mask, advantages=np.float32([0, 2, 2, 0]))
    first = dataclasses.replace(batch.samples[0], advantages=np.float32([0, 0, 7, 7, 7]))
    samples = [first, batch.samples[1], last]
    assert token_rewards(samples, micro_batch(samples, solo.device)).tolist() == [0, 0, 0, 0, 7, 0, 0, 0, 0, 2, 0]


def test_critic_update_does_not_depend_on_rows(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    batch = rewarded()
    outcomes = []
    for rows in ([(0, 1, 2, 3, 4)], [(3,), (), (0, 2), (4, 1)]):
        module = shard_model(with_head(to_critic(make_model())), solo)
        critic = Critic(module, make_optimizer(module, SMOOTH, solo.device), 0.2, None)
        samples = [[batch.samples[i] for i in row] for row in rows]
        found = estimate_values(
            module,
            [micro_batch(s, solo.device) for s in samples],
            samples,
            GaeOptions(**GAE),
            groups=GROUPS,
            group=solo,
        )
        signals = [
            Signals(values=v + 0.5, returns=r, advantages=a)
            for v, r, a in zip(found.values, found.returns, found.advantages, strict=True)
        ]
        inputs = micro_batches([[batch.samples[i] for i in row] for row in rows], solo.device)
        outcomes.append((critic_step(critic, batch, inputs, signals, group=solo, lr=SMOOTH.lr), weights(module)))
    (one, before), (other, after) = outcomes
    for name in ("value_loss", "critic_grad_norm", "value_clip_fraction"):
        assert other[name] == pytest.approx(one[name], rel=1e-4), name
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)

    plain = with_head(to_critic(make_model(attn="eager")))
    total = torch.zeros(())
    start = 0
    values, returns = found_of_one_row(batch, make_model, solo)
    for sample in batch.samples:
        hidden = plain.model(input_ids=torch.from_numpy(sample.input_ids).long()[None], use_cache=False)[0][0]
        v = (hidden @ plain.lm_head.weight.T)[:-1, 0]
        part, mask = slice(start + 1, start + len(sample)), torch.from_numpy(sample.loss_mask)[1:]
        near = (values[part] + 0.5) + (v - values[part] - 0.5).clamp(-0.2, 0.2)
        total = total + torch.maximum((v - returns[part]) ** 2, (near - returns[part]) ** 2)[mask].sum() / 2
        start += len(sample)
    (total / batch.loss_tokens).backward()
    norm = torch.stack([p.grad.square().sum() for p in plain.parameters() if p.grad is not None]).sum().sqrt()
    assert one["value_loss"] == pytest.approx(float(total.detach()) / batch.loss_tokens, rel=1e-4)
    assert one["critic_grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def found_of_one_row(batch: Batch, make_model: MakeModel, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    module = shard_model(with_head(to_critic(make_model())), group)
    row = micro_batch(batch.samples, group.device)
    found = estimate_values(module, [row], [batch.samples], GaeOptions(**GAE), groups=GROUPS, group=group)
    return found.values[0], found.returns[0]


def test_policy_trains_on_critic_advantages(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    batch = rewarded()
    learner = make_learner(
        shard_model(make_model(), solo), solo, loss=Objective("ppo"), critic=critic_of(make_model(), solo), gae=GAE
    )
    found = learner.step([Update(batch, ROWS)], lr=0.01, critic_lr=0.01)
    assert found["critic_lr"] == 0.01
    assert found["critic_skipped"] == 0.0
    assert found["value_mean"] == 0.0  # value of the critic at the start of the step

    members = [[batch.samples[i]] for i in range(len(LENGTHS))]
    rows = [micro_batch(row, solo.device) for row in members]
    made = estimate_values(
        shard_model(to_critic(make_model()), solo), rows, members, GaeOptions(**GAE), groups=GROUPS, group=solo
    ).advantages
    filled = [dataclasses.replace(s, advantages=a.numpy()) for s, a in zip(batch.samples, made, strict=True)]
    plain = make_learner(shard_model(make_model(), solo), solo, loss=Objective("ppo"))
    expected = plain.step([Update(dataclasses.replace(batch, samples=tuple(filled)), ROWS)], lr=0.01)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_critic_learns_to_predict_rewards(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    learner = make_learner(
        shard_model(make_model(), solo),
        solo,
        loss=Objective("ppo"),
        critic=critic_of(make_model(), solo),
        gae=GAE | {"gamma": 1.0},
    )
    found = [learner.step([Update(rewarded(), ROWS)], lr=1e-5, critic_lr=0.02) for _ in range(8)]
    assert found[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found[-1]["explained_variance"] > 0.5
    assert found[-1]["value_loss"] < found[0]["value_loss"] / 2


def test_critic_with_nan_values_is_refused(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    critic = critic_of(make_model(), solo)
    with torch.no_grad():
        local_part(critic.module.lm_head.weight)[0, 0] = float("nan")
    learner = make_learner(shard_model(make_model(), solo), solo, critic=critic, gae=GAE)
    with pytest.raises(RoleError, match=r"algorithm\.critic: the values are not finite"):
        learner.step([Update(rewarded(), ROWS)], lr=0.01, critic_lr=0.01)


def test_critic_uses_its_own_learning_rate(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    batch, moved = rewarded(), []
    for rate in (0.0, 1e-3, 2e-3):
        module = shard_model(with_head(to_critic(make_model())), solo)
        critic = Critic(module, make_optimizer(module, OptimizerConfig(name="sgd", lr=0.7), solo.device))
        learner = make_learner(shard_model(make_model(), solo), solo, critic=critic, gae=GAE)
        before = weights(module)
        metrics = learner.step([Update(batch, ROWS)], lr=0.5, critic_lr=rate)
        assert metrics["critic_lr"] == rate
        moved.append(weights(module) - before)
    assert not moved[0].any()
    assert moved[1].abs().max() > 0
    torch.testing.assert_close(moved[2], 2 * moved[1], atol=1e-6, rtol=1e-3)
