"""Temperatures of log-probs in a step: policy, proximal policy and reference use the sampling temperature of each
token.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from rlrun.algorithms import Objective, Regularizers, kl_estimate
from rlrun.protocol.files.batch import Batch
from rlrun.trainer.learning.batch_step import validate_batch
from rlrun.trainer.learning.forward import logprobs_without_gradient
from rlrun.trainer.learning.reference_model import FrozenReference
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.step_buffer import micro_batch
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
    with_head,
)

TEMPERATURES = [0.5, 1.7, 0.8, 1.0, 2.5]


@pytest.fixture
def batch(rewarded: MakeBatch) -> Batch:
    """Return samples of several temperatures, two of them in one row."""
    samples = zip(rewarded().samples, TEMPERATURES, strict=True)
    return Batch(1, 1, tuple(dataclasses.replace(sample, temperature=t) for sample, t in samples))


def on_policy(batch: Batch, model: nn.Module) -> Batch:
    """Return the batch with the model's own log-probs at each sample's temperature."""
    with torch.no_grad():
        found = plain_logprobs(model, batch)
    samples = []
    for sample, own in zip(batch.samples, found, strict=True):
        logprobs = torch.cat([torch.zeros(1), own]).where(torch.from_numpy(sample.loss_mask), 0)
        samples.append(dataclasses.replace(sample, logprobs=logprobs.numpy()))
    return dataclasses.replace(batch, samples=tuple(samples))


def other(make_model: MakeModel, **options: object) -> nn.Module:
    model = make_model(**options)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def of_loss_tokens(batch: Batch, values: list[Tensor]) -> Tensor:
    return torch.cat([v[torch.from_numpy(s.loss_mask)[1:]] for s, v in zip(batch.samples, values, strict=True)])


def test_no_grad_pass_uses_sample_temperatures(solo: Group, make_model: MakeModel, batch: Batch) -> None:
    """Compare the shared pass of proximal policy and reference with transformers' own."""
    model = make_model(attn="eager")
    rows = [micro_batch([batch.samples[i] for i in row], solo.device) for row in ROWS]
    for found in (
        logprobs_without_gradient(shard_model(make_model(), solo), rows),
        FrozenReference(shard_model(make_model().requires_grad_(False), solo).eval()).logprobs(rows),
    ):
        ours = torch.cat([logprobs[row.mask] for logprobs, row in zip(found, rows, strict=True)])
        torch.testing.assert_close(
            ours, of_loss_tokens(batch, plain_logprobs(model, batch)).detach(), atol=1e-5, rtol=1e-4
        )


def test_on_policy_batch_has_no_mismatch(solo: Group, make_model: MakeModel, batch: Batch) -> None:
    learner = make_learner(shard_model(make_model(), solo), solo)
    found = learner.step([Update(on_policy(batch, make_model(attn="eager")), ROWS)], lr=0.0)
    assert found["mismatch_kl_max"] == pytest.approx(0.0, abs=1e-6)
    assert found["ratio"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("updates", [1, 2])
def test_recomputed_proximal_policy_uses_sample_temperatures(
    solo: Group, make_model: MakeModel, batch: Batch, updates: int
) -> None:
    """Without updates, the ratio to the policy is 1 and the weight follows from transformers' own log-probs."""
    sampled = on_policy(batch, other(make_model, attn="eager"))
    options = {"cap": None, "eps_low": 1.0, "eps_high": 100.0}
    loss = Objective("decoupled_ppo", options, proximal="recompute")
    learner = make_learner(shard_model(make_model(), solo), solo, loss=loss)
    found = learner.step([Update(sampled, ROWS)] * updates, lr=0.0)
    assert found["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert found["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    ours, theirs = (
        of_loss_tokens(batch, plain_logprobs(model, batch)).detach()
        for model in (make_model(attn="eager"), other(make_model, attn="eager"))
    )
    assert found["weight"] == pytest.approx(float((ours - theirs).exp().mean()), rel=1e-4)


def test_reference_kl_uses_sample_temperatures(solo: Group, make_model: MakeModel, batch: Batch) -> None:
    reference = FrozenReference(shard_model(other(make_model), solo).eval())
    learner = partial(make_learner, group=solo, reference=reference)
    with_kl, without = (
        learner(shard_model(make_model(), solo), loss=Objective(regularizers=Regularizers(kl=kl, kl_kind="k2"))).step(
            [Update(batch, ROWS)], lr=0.0
        )
        for kl in (0.5, 0.0)
    )
    ours, theirs = (
        of_loss_tokens(batch, plain_logprobs(model, batch)).detach()
        for model in (make_model(attn="eager"), other(make_model, attn="eager"))
    )
    expected = {kind: float(kl_estimate(kind, ours, theirs).mean()) for kind in ("k2", "k3")}
    assert with_kl["reference_kl"] == pytest.approx(expected["k3"], rel=1e-4)
    assert with_kl["loss"] - without["loss"] == pytest.approx(0.5 * expected["k2"], rel=1e-3)


def test_validation_loss_uses_sample_temperatures(solo: Group, make_model: MakeModel, batch: Batch) -> None:
    found = validate_batch(shard_model(make_model(), solo), batch, ROWS, group=solo)
    logprobs = of_loss_tokens(batch, plain_logprobs(make_model(attn="eager"), batch)).detach()
    weights = of_loss_tokens(batch, [torch.from_numpy(sample.advantages)[1:] for sample in batch.samples])
    assert found["validation/loss"] == pytest.approx(-float((weights * logprobs).mean()), rel=1e-4)


def test_critic_values_ignore_temperature(solo: Group, make_model: MakeModel, batch: Batch) -> None:
    cold = dataclasses.replace(batch, samples=tuple(dataclasses.replace(s, temperature=1.0) for s in batch.samples))
    outcomes = []
    for given in (batch, cold):
        critic = critic_of(make_model(), solo)
        with_head(critic.module)
        learner = make_learner(shard_model(make_model(), solo), solo, critic=critic, gae=GAE)
        outcomes.append(learner.step([Update(given, ROWS)], lr=0.0, critic_lr=0.01))
    assert len(LENGTHS) == len(TEMPERATURES)
    for name in ("value_mean", "return_mean", "value_loss", "critic_grad_norm"):
        assert outcomes[0][name] == pytest.approx(outcomes[1][name], rel=1e-6), name
