"""KL to a reference in the loss and in the reward, compared with float64 equations and exact expectations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from rlrun.algorithms import KlReward, LossBatch, Regularizers, kl_estimate, policy_loss
from rlrun.config.algorithm.names import KL_KINDS

DTYPE = torch.float64


def written_out(kind: str, t: float, ref: float, i: float) -> tuple[float, float]:
    """Value of an estimate and its derivative by t: k1 to k3 of Schulman's note, `+` of verl, unbiased of
    DeepSeek-V3.2.
    """
    d, rho = t - ref, math.exp(t - i)
    k3 = math.exp(-d) - 1 + d
    return {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (k3, 1 - math.exp(-d)),
        "k1+": (d, d),
        "k3+": (k3, d),
        "k3_unbiased": (rho * k3, rho * k3 + rho * (1 - math.exp(-d))),
    }[kind]


@pytest.mark.parametrize("kind", list(KL_KINDS))
def test_kl_estimate_equals_its_equation(kind: str) -> None:
    t = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=DTYPE, requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -0.5, -2.2], dtype=DTYPE, requires_grad=True)
    i = torch.tensor([-0.9, -2.5, -0.5, -2.0], dtype=DTYPE, requires_grad=True)
    found = kl_estimate(kind, t, ref, inference_logprobs=i)
    found.sum().backward()
    expected = [written_out(kind, *numbers) for numbers in zip(t.tolist(), ref.tolist(), i.tolist(), strict=True)]
    assert t.grad is not None
    assert found.tolist() == pytest.approx([value for value, _ in expected], rel=1e-12, abs=1e-14)
    assert t.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-12, abs=1e-14)
    assert (ref.grad, i.grad) == (None, None)


def test_unbiased_kl_requires_inference_logprobs() -> None:
    with pytest.raises(ValueError, match="inference_logprobs must be given for KL estimate k3_unbiased"):
        kl_estimate("k3_unbiased", torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"inference_logprobs has shape \(3,\), logprobs has \(2,\)"):
        kl_estimate("k3_unbiased", torch.zeros(2), torch.zeros(2), inference_logprobs=torch.zeros(3))


def policies() -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of policy, reference and sampling policy over 6 arms."""
    torch.manual_seed(0)
    policy, reference, sampling = torch.randn(3, 6, dtype=DTYPE)
    return policy.requires_grad_(), reference, sampling


def divergence_slope(logits: Tensor, reference: Tensor) -> tuple[float, Tensor]:
    p = logits.log_softmax(-1)
    kl = (p.exp() * (p - reference.log_softmax(-1))).sum()
    return kl.item(), torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize(
    ("kind", "on_policy", "has_value", "has_slope"),
    [
        ("k1", True, True, False),
        ("k2", True, False, True),
        ("k3", True, True, False),
        ("k1+", True, True, True),
        ("k3+", True, True, True),
        ("k3_unbiased", True, True, True),
        ("k3_unbiased", False, True, True),
        ("k3+", False, False, False),
    ],
)
def test_kl_expectation_matches_divergence_for_unbiased_kinds(
    kind: str, on_policy: bool, has_value: bool, has_slope: bool
) -> None:
    """Compare the exact expectation over the sampled arms with the divergence and its gradient."""
    logits, reference, sampling = policies()
    t, ref = logits.log_softmax(-1), reference.log_softmax(-1)
    i = t.detach() if on_policy else sampling.log_softmax(-1)
    expectation = (i.exp() * kl_estimate(kind, t, ref, inference_logprobs=i)).sum()
    (slope,) = torch.autograd.grad(expectation, logits)
    kl, expected = divergence_slope(logits, reference)
    assert math.isclose(expectation.item(), kl, rel_tol=1e-10) is has_value
    assert torch.allclose(slope, expected, rtol=1e-10, atol=1e-12) is has_slope
    if kind == "k1":
        assert slope.abs().max() < 1e-15


def test_kl_k1_is_refused_as_loss() -> None:
    with pytest.raises(
        ValueError, match="kl_kind k1 has an expected gradient of 0 as a loss; use k2, or subtract it from the reward"
    ):
        Regularizers(kl=0.1, kl_kind="k1")
    assert Regularizers(kl_kind="k1").kl == 0


def test_unbiased_kl_regularizer_uses_importance_ratio() -> None:
    t = torch.tensor([-1.0, -2.0, -0.5], dtype=DTYPE, requires_grad=True)
    i, ref = torch.tensor([-0.8, -2.5, -0.5], dtype=DTYPE), torch.tensor([-1.5, -1.0, -0.7], dtype=DTYPE)
    output = policy_loss(
        "sft",
        t,
        LossBatch(
            inference_logprobs=i,
            advantages=torch.zeros(1, dtype=DTYPE),
            mask=torch.tensor([False, True, True]),
            sequence_lengths=[3],
            reference_logprobs=ref,
        ),
        regularizers=Regularizers(kl=0.5, kl_kind="k3_unbiased"),
    )
    output.loss.backward()
    expected = [written_out("k3_unbiased", *x) for x in zip(t.tolist(), ref.tolist(), i.tolist(), strict=True)][1:]
    assert output.loss.item() == pytest.approx(0.5 * sum(value for value, _ in expected) / 2, rel=1e-12)
    assert t.grad is not None
    assert t.grad.tolist() == pytest.approx([0, *(0.5 * slope / 2 for _, slope in expected)], rel=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_kl_reward_equals_its_equation(kind: str, gamma: float) -> None:
    torch.manual_seed(1)
    lengths, mask = [5, 3, 4], torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0, 0], dtype=torch.bool)
    t, ref = -torch.rand(2, 12, dtype=DTYPE) * 3
    kl = KlReward(0.3, kind, gamma)
    rewards = [
        -0.3 * written_out(kind, a, b, a)[0] if m else 0.0
        for a, b, m in zip(t.tolist(), ref.tolist(), mask, strict=True)
    ]
    assert kl.rewards(t, ref, mask).tolist() == pytest.approx(rewards, rel=1e-12)
    expected = [0.0] * 12
    for start, length in zip((0, 5, 8), lengths, strict=True):
        following = 0.0
        for k in reversed(range(start, start + length)):
            if mask[k]:
                following = rewards[k] + gamma * following
                expected[k] = following
    found = kl.returns(t, ref, mask=mask, sequence_lengths=lengths)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_kl_reward_gradient_equals_sequence_divergence_gradient() -> None:
    """Enumerate all nine answers of two tokens over three words, each weighted by its probability."""
    torch.manual_seed(2)
    first, second = torch.randn(3, dtype=DTYPE, requires_grad=True), torch.randn(3, 3, dtype=DTYPE, requires_grad=True)
    ref_first, ref_second = torch.randn(3, dtype=DTYPE).log_softmax(-1), torch.randn(3, 3, dtype=DTYPE).log_softmax(-1)
    kl, loss = torch.zeros((), dtype=DTYPE), torch.zeros((), dtype=DTYPE)
    for a, b in itertools.product(range(3), repeat=2):
        t = torch.stack([first.log_softmax(-1)[a], second.log_softmax(-1)[a, b]])
        ref = torch.stack([ref_first[a], ref_second[a, b]])
        probability = t.sum().exp()
        kl = kl + probability * (t - ref).sum()
        returns = KlReward(1.0).returns(t, ref, mask=torch.ones(2), sequence_lengths=[2])
        loss = loss - probability.detach() * (returns * t).sum()
    expected = torch.autograd.grad(kl, (first, second), retain_graph=True)
    found = torch.autograd.grad(loss, (first, second))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_kl_reward_refuses_values_out_of_range() -> None:
    with pytest.raises(ValueError, match="weight must be a finite number of at least 0, got -1"):
        KlReward(-1.0)
    with pytest.raises(ValueError, match=r"unknown kind 'k3\+'"):
        KlReward(1.0, "k3+")
    with pytest.raises(ValueError, match="gamma must be at least 0 and at most 1"):
        KlReward(1.0, gamma=2.0).returns(torch.zeros(2), torch.zeros(2), mask=torch.ones(2), sequence_lengths=[2])
