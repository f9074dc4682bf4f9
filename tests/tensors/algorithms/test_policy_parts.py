"""Proximal policy, correction, aggregation and regularizers: check values, refusals and effect on a loss."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rlrun.algorithms import (
    AGGREGATIONS,
    LossBatch,
    Objective,
    Regularizers,
    aggregation_count,
    aggregation_weights,
    correct_mismatch,
    policy_loss,
    proximal_logprobs,
)

T = torch.tensor([-0.5, -1, -2, -0.1, -3, -0.7, -0.2, -1.5])
I = torch.tensor([-0.6, -0.5, -2.5, -0.1, -0.4, -0.7, -1.9, -1.4])  # noqa: E741
MASK = torch.tensor([False, True, True, True, True, False, True, True])
LENGTHS = [5, 3]
BATCH: dict[str, Any] = {
    "inference_logprobs": I,
    "advantages": torch.tensor([0.5, -0.5]),
    "mask": MASK,
    "sequence_lengths": LENGTHS,
}


def loss_of(name: str, **changes: Any) -> tuple[float, Tensor]:
    t = T.clone().requires_grad_()
    arguments = BATCH | changes
    batch = {key: arguments.pop(key) for key in [*arguments] if key in LossBatch.__dataclass_fields__}
    loss = policy_loss(name, t, LossBatch(**batch), **arguments).loss
    (gradient,) = torch.autograd.grad(loss, t)
    return loss.item(), gradient


def test_sapo_matches_check_values_at_ratio_one() -> None:
    one = {"inference_logprobs": T, "mask": torch.arange(8) == 1}
    for advantages, expected in ((torch.ones(2), -2.0), (-torch.ones(2), 2 / 1.05)):
        value, gradient = loss_of("sapo", **one, advantages=advantages)
        assert value == pytest.approx(expected, abs=1e-5)
        assert gradient[1].item() == pytest.approx(-advantages[0].item(), abs=1e-5)
    own = {"inference_logprobs": I, "proximal_logprobs": T, "mask": torch.arange(8) == 1}
    assert loss_of("sapo", **own)[0] == pytest.approx(-1.0, abs=1e-5)  # 2·A at r = 1, for any ρ


@pytest.mark.parametrize("name", ["aipo", "dppo", "ipo", "masked_is", "sft", "ref_kl", "distill"])
def test_objective_refuses_unused_proximal_policy(name: str) -> None:
    for method in ("recompute", "log_linear"):
        message = (
            rf"proximal \({method}\) is not used by loss {name}.*; set it to inference, or use one of the losses ppo, "
        )
        with pytest.raises(ValueError, match=message):
            Objective(name, proximal=method)
        correction = {"action": "mask"}
        assert (
            Objective(name, proximal=method, correction=correction).proximal == method
        )  # a correction uses the proximal policy
    with pytest.raises(ValueError, match="unknown proximal 'recomputed'"):
        Objective("ppo", proximal="recomputed")


def test_correction_action_none_changes_nothing() -> None:
    assert Objective("ppo", correction={"action": "none"}) == Objective("ppo")
    found = correct_mismatch(T, I, mask=MASK, sequence_lengths=LENGTHS, action="none")
    assert found.weights.tolist() == MASK.float().tolist()
    assert not found.dropped.any()
    with pytest.raises(ValueError, match=r"correction: high \(3.0\) has no effect with action none; remove it"):
        correct_mismatch(T, I, mask=MASK, sequence_lengths=LENGTHS, action="none", high=3.0)


def test_loss_without_required_input_is_refused() -> None:
    with pytest.raises(ValueError, match="proximal_logprobs must be given for loss decoupled_ppo"):
        loss_of("decoupled_ppo")
    for name in ("ref_kl", "distill"):
        with pytest.raises(ValueError, match="reference_logprobs must be given"):
            loss_of(name)


def test_log_linear_proximal_policy_matches_check_values() -> None:
    i, t = torch.tensor([-1.0, -2, -3]), torch.tensor([-1.5, -2.5, -3.5], requires_grad=True)

    def proximal(versions: list[int], policy_version: int) -> list[float]:
        found = proximal_logprobs("log_linear", t, i, versions=torch.tensor(versions), policy_version=policy_version)
        assert not found.requires_grad
        return found.tolist()

    assert proximal([0, 0, 0], 2) == [-1.25, -2.25, -3.25]
    assert proximal([2, 1, -2], 2) == [-1.0, -2.0, -3.375]  # alpha is 0 for this version and the previous one, then 3/4
    assert proximal_logprobs("recompute", t, i).tolist() == t.tolist()
    assert proximal_logprobs("inference", t, i).tolist() == i.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "recomputed"}, r"unknown method 'recomputed' \(did you mean recompute\?\)"),
        ({"versions": None}, "versions must be given for method log_linear"),
        ({"policy_version": None}, "policy_version must be given"),
        ({"versions": torch.tensor([0, 3])}, r"versions must be at most policy_version \(2\), got 3"),
        ({"versions": torch.tensor([0])}, r"versions has shape \(1,\), logprobs has \(2,\)"),
        ({"inference_logprobs": torch.zeros(3)}, r"inference_logprobs has shape \(3,\), logprobs has \(2,\)"),
    ],
)
def test_proximal_policy_refuses_invalid_input(changes: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"method": "log_linear", "inference_logprobs": torch.zeros(2)} | {
        "versions": torch.tensor([0, 1]),
        "policy_version": 2,
    }
    call |= changes
    with pytest.raises(ValueError, match=message):
        proximal_logprobs(call.pop("method"), torch.zeros(2), call.pop("inference_logprobs"), **call)


def test_corrections_match_hand_calculation() -> None:
    def correct(**options: Any) -> tuple[list[float], list[bool]]:
        found = correct_mismatch(T, I, mask=MASK, sequence_lengths=LENGTHS, **options)
        return found.weights.tolist(), found.dropped.tolist()

    e = math.exp
    weights, dropped = correct()
    assert weights == pytest.approx([0, e(-0.5), e(0.5), 1, e(-2.6), 0, 2, e(-0.1)], abs=1e-6)
    assert dropped == [False] * 6 + [True, False]
    weights, _ = correct(level="sequence", high=10.0)
    assert weights == pytest.approx([0, *[e(-2.6 / 4)] * 4, 0, *[e(0.8)] * 2], abs=1e-6)
    weights, _ = correct(level="sequence", reduce="sum", high=3.0)
    assert weights == pytest.approx([0, *[e(-2.6)] * 4, 0, 3, 3], abs=1e-6)
    weights, _ = correct(action="mask", measure="k2", high=1.5)
    assert weights == [0, 1, 1, 1, 0, 0, 1, 1]  # 2.6²/2 is above 1.5, 1.7²/2 below
    weights, _ = correct(action="mask", measure="k1", high=0.55)
    assert weights == [0, 1, 1, 1, 0, 0, 0, 1]  # -x within ±0.55
    weights, _ = correct(action="mask", measure="k3", high=2.0, level="sequence", reduce="max")
    assert weights == [0, 1, 1, 1, 1, 0, 0, 0]  # e^1.7 - 2.7 = 2.77; e^-2.6 + 1.6 = 1.67


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hihg": 1.0}, r"unknown option of a correction 'hihg' \(did you mean high\?\)"),
        ({"measure": "k4"}, "correction: measure must be one of 'ratio', 'k1', 'k2', 'k3', got 'k4'"),
        ({"low": 3.0}, r"correction: low \(3.0\) must be at most high \(2.0\)"),
        ({"low": -1.0}, r"correction: low \(-1.0\) must be at least 0 for measure ratio"),
        ({"high": math.nan}, "correction: high must be a finite number, got nan"),
        ({"measure": "k3"}, "correction: action clamp needs measure ratio, got k3"),
    ],
)
def test_invalid_correction_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correct_mismatch(T, I, mask=MASK, sequence_lengths=LENGTHS, **options)
    with pytest.raises(ValueError, match=message):
        loss_of("ppo", proximal_logprobs=T, correction=options)


def test_misaligned_correction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inference_logprobs must have shape \[8\], got \[7\]"):
        correct_mismatch(T, I[1:], mask=MASK, sequence_lengths=LENGTHS)


VERL_X = [0.5, -0.2, 1.0, -1.5, 0.1, 0.05, -0.1, 0.02]
"""Values of o - i for sequences of 3, 2 and 3 tokens."""
VERL_WEIGHTS = {
    "token": [1.6487213, 0.8187308, 2.0, 0.2231302, 1.1051710, 1.0512711, 0.9048374, 1.0202013],
    "sequence": [2.0, 2.0, 2.0, 0.2465970, 0.2465970, 0.9704455, 0.9704455, 0.9704455],
}
"""Check values of verl 0.9.1: `compute_rollout_correction_weights` with `rollout_is_threshold` 2."""


@pytest.mark.parametrize("weight", VERL_WEIGHTS)
def test_rejection_keeps_weights_of_remaining_tokens(weight: str) -> None:
    x, mask, lengths = torch.tensor(VERL_X), torch.ones(8, dtype=torch.bool), [3, 2, 3]
    zeros = torch.zeros(8)
    weigh = partial(correct_mismatch, x, zeros, mask=mask, sequence_lengths=lengths, action="mask")
    # Equivalent of verl's rollout_rs seq_max_k2, which drops the second sequence, combined with rollout_is.
    found = weigh(level="sequence", measure="k2", reduce="max", high=1.0, weight=weight, cap=2.0)
    kept = torch.tensor([1.0, 1, 1, 0, 0, 1, 1, 1])
    torch.testing.assert_close(found.weights, torch.tensor(VERL_WEIGHTS[weight]) * kept)
    assert found.dropped.tolist() == (kept == 0).tolist()
    # Equivalent of AReaL's token mask: tokens above the bound are dropped, the others keep their own ratio as weight.
    found = weigh(high=2.0, weight=weight)
    expected = x.exp() if weight == "token" else torch.tensor([1.3] * 3 + [-1.4] * 2 + [-0.03] * 3).exp()
    torch.testing.assert_close(found.weights, torch.where(x.exp() > 2.0, 0, expected))


def test_geometric_weight_averages_all_loss_tokens_of_sequence() -> None:
    x, mask = torch.tensor([9.0, 0.5, 1.1, -0.4]), torch.tensor([False, True, True, True])
    found = correct_mismatch(
        x, torch.zeros(4), mask=mask, sequence_lengths=[4], action="mask", high=2.0, weight="geometric"
    )
    assert found.weights.tolist() == pytest.approx([0, math.exp(0.4), 0, math.exp(0.4)])


def test_correction_with_mask_and_weight_scales_ppo_loss() -> None:
    """The expected ppo loss is r·A·w for kept tokens, divided by the number of all loss tokens."""
    correction = {"action": "mask", "high": 3.0, "weight": "token", "cap": 1.5}
    proximal = T.detach() - 0.05
    weights = (proximal - I).exp()
    weights = torch.where(weights > 3.0, 0, weights.clamp(max=1.5))
    plain, _ = loss_of(
        "ppo", proximal_logprobs=proximal, advantages=torch.where(torch.arange(8) < 5, 0.5, -0.5) * weights
    )
    weighed, _ = loss_of("ppo", proximal_logprobs=proximal, correction=correction)
    assert weighed == pytest.approx(plain)
    assert weights.unique().numel() > 3


def test_correction_refuses_to_apply_weights_twice() -> None:
    for name in ("aipo", "dppo", "masked_is"):
        with pytest.raises(ValueError, match=f"twice, because loss {name} applies it already; use action mask"):
            loss_of(name, correction={})
    for name in ("ppo", "gspo", "cispo", "sapo"):
        with pytest.raises(ValueError, match=f"loss {name} applies it already without a proximal policy"):
            loss_of(name, correction={})
        assert loss_of(name, correction={}, proximal_logprobs=T) != loss_of(name, proximal_logprobs=T)


def test_rejected_token_stays_in_denominator() -> None:
    _, plain = loss_of("aipo")
    _, rejected = loss_of("aipo", correction={"action": "mask", "high": 1.2})  # drops the ratios 1.65 and 5.47
    assert rejected.tolist() == pytest.approx([0 if k in (2, 6) else g for k, g in enumerate(plain.tolist())], abs=1e-7)


def test_aggregations_match_hand_calculation() -> None:
    per_token = -torch.exp(T - I).clamp(max=8) * torch.tensor([0.5] * 5 + [-0.5] * 3)
    first, second = per_token[1:5].sum().item(), per_token[6:].sum().item()
    expected = {
        "token_mean": (first + second) / 6,
        "seq_mean_token_sum": (first + second) / 2,
        "seq_mean_token_mean": (first / 4 + second / 2) / 2,
        "constant_length": (first + second) / 2 / 10,
    }
    assert expected.keys() == AGGREGATIONS.keys()
    for aggregation, value in expected.items():
        length = 10 if aggregation == "constant_length" else None
        found = policy_loss(
            "aipo", T, LossBatch(**BATCH), aggregation=aggregation, aggregation_length=length
        ).loss.item()
        assert found == pytest.approx(value, abs=1e-6)
        weights = aggregation_weights(aggregation, MASK, LENGTHS)
        divisor = aggregation_count(aggregation, MASK, LENGTHS, length=length)
        assert ((weights * per_token).sum() / divisor).item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregation": "mean"}, "unknown aggregation 'mean'"),
        ({"aggregation": "constant_length"}, "aggregation_length must be given for aggregation constant_length"),
        ({"aggregation_length": 5}, r"aggregation_length \(5\) is not used by aggregation token_mean"),
        (
            {"aggregation": "constant_length", "aggregation_length": -1},
            "aggregation_length must be a positive number, got -1",
        ),
        ({"regularizers": Regularizers(kl=0.1)}, r"reference_logprobs must be given if regularizers\.kl > 0"),
        (
            {"regularizers": Regularizers(entropy=0.1)},
            r"entropy must be given with its gradient if regularizers\.entropy > 0",
        ),
        ({"regularizers": Regularizers(entropy=0.1), "entropy": T}, "entropy has no gradient"),
        (
            {"regularizers": Regularizers(entropy=0.1), "entropy": torch.zeros(3)},
            r"entropy must have shape \[8\], got \[3\]",
        ),
        (
            {"regularizers": Regularizers(entropy=0.1), "entropy": torch.full((8,), math.nan, requires_grad=True)},
            "entropy is not finite",
        ),
    ],
)
def test_invalid_aggregation_and_regularizers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_of("aipo", **changes)


def test_regularizers_refuse_values_out_of_range() -> None:
    with pytest.raises(ValueError, match="entropy must be a finite number of at least 0, got -1"):
        Regularizers(entropy=-1)
    with pytest.raises(ValueError, match="kl must be a finite number of at least 0, got inf"):
        Regularizers(kl=math.inf)
    with pytest.raises(ValueError, match="unknown regularizers: kl_kind 'k4'; known: k1, k1\\+, k2, k3"):
        Regularizers(kl_kind="k4")


def test_policy_loss_reports_metrics_of_each_term() -> None:
    entropy = torch.full((8,), 2.0, requires_grad=True)
    metrics = policy_loss(
        "aipo",
        T.clone().requires_grad_(),
        LossBatch(**BATCH, entropy=entropy, reference_logprobs=T - 1.0),
        regularizers=Regularizers(entropy=0.25, kl=0.5, kl_kind="k1+"),
        correction={"action": "mask", "high": 1.2},
    ).metrics
    assert metrics["entropy_bonus"].item() == pytest.approx(0.25 * 2 * 6)
    assert metrics["kl_penalty"].item() == pytest.approx(0.5 * 6)
    assert metrics["correction_weight"].item() == pytest.approx(4)
    assert metrics["corrected_fraction"].item() == pytest.approx(2)


def test_objective_computes_log_linear_proximal_policy() -> None:
    versions = torch.tensor([-1, 0, 0, 1, 2, -1, 2, 3])
    inside = torch.where(MASK, versions, 0)
    o = proximal_logprobs("log_linear", T, I, versions=inside, policy_version=3)
    expected = loss_of("decoupled_ppo", proximal_logprobs=o)
    t = T.clone().requires_grad_()
    objective = Objective("decoupled_ppo", proximal="log_linear")
    output = objective(t, LossBatch(**BATCH, versions=versions, policy_version=3))
    (gradient,) = torch.autograd.grad(output.loss, t)
    assert output.loss.item() == expected[0]
    assert torch.equal(gradient, expected[1])
    assert (
        objective(T, LossBatch(**BATCH, proximal_logprobs=I)).loss.item()
        == loss_of("decoupled_ppo", proximal_logprobs=I)[0]
    )
    assert objective.denominator(MASK, LENGTHS) == 6.0
    assert Objective("aipo", aggregation="constant_length", aggregation_length=9).denominator(MASK, LENGTHS) == 18.0
