"""Policy losses of random packed batches, compared with the written-out definition and with other packings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlrun.algorithms import LossBatch, Regularizers, add_metric_sums, denominator_count, objective_means, policy_loss


@dataclass(frozen=True)
class Batch:
    t: Tensor
    i: Tensor
    o: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: list[int]

    def sequences(self) -> list[Batch]:
        """Return one batch per sequence."""
        parts = [x.split(self.lengths) for x in (self.t, self.i, self.o, self.ref, self.advantages, self.mask)]
        return [
            Batch(t, i, o, ref, advantages, mask, [len(t)])
            for t, i, o, ref, advantages, mask in zip(*parts, strict=True)
        ]

    @staticmethod
    def pack(parts: list[Batch]) -> Batch:
        return Batch(
            t=torch.cat([part.t for part in parts]),
            i=torch.cat([part.i for part in parts]),
            o=torch.cat([part.o for part in parts]),
            ref=torch.cat([part.ref for part in parts]),
            advantages=torch.cat([part.advantages for part in parts]),
            mask=torch.cat([part.mask for part in parts]),
            lengths=[length for part in parts for length in part.lengths],
        )

    def loss(self, name: str, denominator: float | Tensor | None, options: dict[str, Any]) -> Any:
        return policy_loss(
            name,
            self.t,
            LossBatch(
                inference_logprobs=self.i,
                advantages=self.advantages,
                mask=self.mask,
                sequence_lengths=self.lengths,
                proximal_logprobs=self.o,
                reference_logprobs=self.ref,
                denominator=denominator,
                entropy=torch.sigmoid(self.t),
            ),
            **options,
        )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw ratios from nearly 1 to far outside of every clip, with some sequences without loss tokens and some
    advantages of 0.
    """
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.0, 1e-3, 0.1, 1.0, 3.0]))
    total = sum(lengths)

    def normal() -> Tensor:
        return torch.randn(total, generator=generator, dtype=torch.float64)

    i = -normal().abs() - 1e-3
    t = i + scale * normal()
    mask = torch.rand(total, generator=generator) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    advantages = normal() * (torch.rand(total, generator=generator) < 0.9)
    if draw(st.booleans()):
        advantages = advantages[: len(lengths)].repeat_interleave(torch.tensor(lengths))
    return Batch(t, i, t - 0.3 * scale * normal(), i - 0.2 * normal(), advantages, mask, lengths)


def token_loss(name: str, batch: Batch, t: Tensor, k: int, on: list[int], options: dict[str, Any]) -> Tensor:
    """Return the loss of token `k` from the table of the design; `on` lists the loss tokens of its sequence."""
    a, i, o = batch.advantages[k], batch.i, batch.o
    low, high = options.get("eps_low", 0.2), options.get("eps_high", 0.2)
    rho = torch.exp(t[k] - i[k])
    fixed, d = rho.item(), (t[k].exp() - i[k].exp()).item()
    kl = options.get("kl_tau", 0.0) * torch.log(rho) ** 2
    match name:
        case "aipo":
            return -min(fixed, options["delta"]) * a * (1 + t[k] - t[k].item())
        case "ppo" | "decoupled_ppo":
            r = torch.exp(t[k] - o[k])
            term = max(-a * r, -a * r.clamp(1 - low, 1 + high))
            term = min(term, -a * options["dual_clip"]) if a < 0 else term
            if name == "ppo":
                return term
            weight = math.exp((o[k] - i[k]).item())
            too_large = weight > options["cap"]
            return term * (0.0 if too_large and options["cap_mode"] == "mask" else min(weight, options["cap"]))
        case "gspo":
            s = math.exp(sum((t[j] - o[j]).item() for j in on) / len(on))
            token = s * torch.exp(t[k] - t[k].item())
            return max(-a * token, -a * token.clamp(1 - low, 1 + high))
        case "cispo":
            return -min(max(math.exp((t[k] - o[k]).item()), 1 - low), 1 + high) * a * t[k]
        case "sapo":
            tau = options["tau_positive"] if a > 0 else options["tau_negative"]
            return -4 / tau / (1 + torch.exp(-tau * (torch.exp(t[k] - o[k]) - 1))) * a
        case "dppo":
            drop = d > options["mask_high"] if a > 0 else d < -options["mask_low"]
            return (0.0 if drop else -a * rho) + kl
        case "ipo":
            return (0.0 if abs(d) > options["thr"] else -a * rho) + kl
        case "ref_kl" | "distill":
            return (0.0 if d < -options["mask_low"] else -(batch.ref[k] - t[k].item()) * rho) + kl
        case "sft":
            return -a * t[k]
    ratios = [math.exp((t[j] - i[j]).item()) for j in on]
    geometric = math.exp(sum(map(math.log, ratios)) / len(on))
    drop = not 0.125 <= fixed <= 8 or not 0.1 <= geometric <= 10 or max(ratios) > 100
    pull = options["adv_tau"] * a - options["kl_tau"] * math.log(fixed)
    pull = pull + options["teacher_tau"] * (batch.ref[k] - t[k].item())
    weight = fixed
    if options["ratio"] == "sequence":
        weight = min(math.exp(min(sum(map(math.log, ratios)), 10.0)), 10.0)
    return torch.zeros((), dtype=t.dtype) if drop else -weight * pull * t[k]


def correction_weight(batch: Batch, k: int, on: list[int], options: dict[str, Any]) -> float:
    """Return the factor that a correction applies to the loss of token `k`."""
    chosen = {
        "action": "clamp",
        "level": "token",
        "measure": "ratio",
        "reduce": "mean",
        "low": 0.0,
        "high": 2.0,
    } | options
    if chosen["measure"] == "k1":
        chosen["low"] = -chosen["high"]

    def measure(x: float) -> float:
        return {"ratio": math.exp(x), "k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[chosen["measure"]]

    xs = {j: (batch.o[j] - batch.i[j]).item() for j in on}
    if chosen["level"] == "token":
        value = measure(xs[k])
    elif chosen["reduce"] == "max":
        value = max(map(measure, xs.values()))
    else:
        count = len(on) if chosen["reduce"] == "mean" else 1
        is_ratio = chosen["measure"] == "ratio"
        value = math.exp(sum(xs.values()) / count) if is_ratio else sum(map(measure, xs.values())) / count
    if chosen["action"] == "clamp":
        return min(max(value, chosen["low"]), chosen["high"])
    return float(chosen["low"] <= value <= chosen["high"])


def definition(name: str, batch: Batch, t: Tensor, options: dict[str, Any]) -> tuple[Tensor, float]:
    """Return the summed loss and its default denominator, computed token by token."""
    by_sequence = "seq_mean_token_mean" if options.get("ratio") == "sequence" else "token_mean"
    aggregation = options.get("aggregation", by_sequence)
    terms = options.get("regularizers", Regularizers())
    total, denominator = t.sum() * 0.0, 0.0
    starts = [sum(batch.lengths[:k]) for k in range(len(batch.lengths))]
    for start, length in zip(starts, batch.lengths, strict=True):
        on = [k for k in range(start, start + length) if batch.mask[k]]
        if not on:
            continue
        of_sequence = t.sum() * 0.0
        for k in on:
            loss = token_loss(name, batch, t, k, on, options)
            if "correction" in options:
                loss = loss * correction_weight(batch, k, on, options["correction"])
            d = t[k] - batch.ref[k]
            estimate = {"k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}.get(terms.kl_kind)
            if estimate is None:  # k3_unbiased
                estimate = torch.exp(t[k] - batch.i[k]) * (torch.exp(-d) - 1 + d)
            of_sequence = of_sequence + loss + terms.kl * estimate - terms.entropy * torch.sigmoid(t[k])
        total = total + (of_sequence / len(on) if aggregation == "seq_mean_token_mean" else of_sequence)
        denominator += {"token_mean": len(on), "constant_length": options.get("aggregation_length")}.get(aggregation, 1)
    return total, denominator


CLIP = {"eps_low": 0.2, "eps_high": 0.28}
PPO = CLIP | {"dual_clip": 1.1}
IS = {"adv_tau": 1.0, "teacher_tau": 0.0, "kl_tau": 0.0, "ratio": "token"}
AIPO = {"delta": 1.2}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("aipo", {"delta": 8.0}),
    ("aipo", AIPO),
    ("ppo", CLIP | {"dual_clip": 3.0}),
    ("ppo", PPO),
    ("decoupled_ppo", PPO | {"cap": 5.0, "cap_mode": "clamp"}),
    ("decoupled_ppo", PPO | {"cap": 1.1, "cap_mode": "clamp"}),
    ("decoupled_ppo", PPO | {"cap": 1.1, "cap_mode": "mask"}),
    ("gspo", {"eps_low": 3e-4, "eps_high": 4e-4}),
    ("gspo", CLIP | {"aggregation": "seq_mean_token_mean"}),
    ("cispo", {"eps_low": 1.0, "eps_high": 5.0}),
    ("cispo", CLIP),
    ("cispo", CLIP | {"correction": {"high": 1.1}}),
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05, "correction": {"high": 1.1}}),
    ("sapo", {"tau_positive": 3.0, "tau_negative": 0.5, "correction": {"action": "mask", "high": 1.2}}),
    ("dppo", {"mask_low": 0.2, "mask_high": 0.2, "kl_tau": 1e-3}),
    ("dppo", {"mask_low": 0.01, "mask_high": 0.03, "kl_tau": 0.5}),
    ("ipo", {"thr": 0.1, "kl_tau": 1e-3}),
    ("ipo", {"thr": 0.01, "kl_tau": 0.5}),
    ("ref_kl", {"mask_low": 0.2, "kl_tau": 1e-3}),
    ("distill", {"mask_low": 0.01, "kl_tau": 0.5}),
    ("sft", {}),
    ("masked_is", IS),
    ("masked_is", IS | {"adv_tau": 0.5, "teacher_tau": 0.3, "kl_tau": 0.2}),
    ("masked_is", IS | {"ratio": "sequence"}),
    ("masked_is", IS | {"ratio": "sequence", "aggregation": "token_mean"}),
    ("aipo", AIPO | {"aggregation": "seq_mean_token_sum"}),
    ("aipo", AIPO | {"aggregation": "seq_mean_token_mean"}),
    ("aipo", AIPO | {"aggregation": "constant_length", "aggregation_length": 7}),
    ("aipo", AIPO | {"regularizers": Regularizers(entropy=0.3, kl=0.2, kl_kind="k3_unbiased")}),
    ("cispo", CLIP | {"regularizers": Regularizers(kl=0.2, kl_kind="k2"), "aggregation": "seq_mean_token_mean"}),
    ("sft", {"regularizers": Regularizers(entropy=0.1, kl=0.2, kl_kind="k3")}),
    ("ppo", PPO | {"correction": {"high": 1.1, "low": 0.8}}),
    ("ppo", PPO | {"correction": {"level": "sequence", "high": 1.1}}),
    ("gspo", CLIP | {"correction": {"level": "sequence", "reduce": "sum", "high": 1.5}}),
    ("ppo", PPO | {"correction": {"action": "mask", "level": "sequence", "reduce": "max", "high": 1.3}}),
    ("aipo", AIPO | {"correction": {"action": "mask", "measure": "k1", "high": 0.05}}),
    ("aipo", AIPO | {"correction": {"action": "mask", "measure": "k2", "high": 0.05, "level": "sequence"}}),
    (
        "dppo",
        {"mask_low": 0.2, "mask_high": 0.2, "kl_tau": 1e-3}
        | {"correction": {"action": "mask", "measure": "k3", "high": 0.05, "level": "sequence", "reduce": "sum"}},
    ),
]
each_variant = pytest.mark.parametrize(("name", "options"), VARIANTS)
PATHS = [
    ("decoupled_ppo", PPO | {"cap": 1.1, "cap_mode": "mask"}),
    ("gspo", CLIP | {"aggregation": "seq_mean_token_mean"}),
    ("masked_is", IS | {"adv_tau": 0.5, "teacher_tau": 0.3, "kl_tau": 0.2}),
    ("masked_is", IS | {"ratio": "sequence"}),
    (
        "sapo",
        {"aggregation": "seq_mean_token_sum", "correction": {"action": "mask", "level": "sequence", "reduce": "max"}},
    ),
    (
        "dppo",
        {"aggregation": "constant_length", "aggregation_length": 7, "regularizers": Regularizers(entropy=0.3, kl=0.2)},
    ),
]
each_path = pytest.mark.parametrize(("name", "options"), PATHS)
"""Options that cover every dependency between tokens of a sequence and between a sequence and its batch."""
a_few = settings(max_examples=12, deadline=None)
COUNTED = ("ratio", "aggregation", "aggregation_length")


def count(name: str, part: Batch, options: dict[str, Any]) -> float:
    chosen = {key: value for key, value in options.items() if key in COUNTED}
    return float(denominator_count(name, part.mask, part.lengths, **chosen))


def value_and_gradient(batch: Batch, name: str, denominator: Any, options: dict[str, Any]) -> tuple[float, Tensor]:
    batch = replace(batch, t=batch.t.clone().requires_grad_())
    loss = batch.loss(name, denominator, options).loss
    (gradient,) = torch.autograd.grad(loss, batch.t)
    return loss.item(), gradient


@each_variant
@a_few
@given(batch=batches())
def test_policy_loss_equals_written_out_definition(name: str, options: dict[str, Any], batch: Batch) -> None:
    t = batch.t.clone().requires_grad_()
    total, denominator = definition(name, batch, t, options)
    expected = total / max(denominator, 1)
    (slope,) = torch.autograd.grad(expected, t)
    value, gradient = value_and_gradient(batch, name, None, options)
    assert value == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-9)
    assert count(name, batch, options) == denominator


@each_path
@a_few
@given(batch=batches(), data=st.data())
def test_policy_loss_ignores_sequence_order(
    name: str, options: dict[str, Any], batch: Batch, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(batch.lengths))))
    parts = batch.sequences()
    value, gradient = value_and_gradient(batch, name, None, options)
    shuffled_value, shuffled = value_and_gradient(Batch.pack([parts[k] for k in order]), name, None, options)
    assert shuffled_value == pytest.approx(value, rel=1e-9, abs=1e-9)
    by_sequence = gradient.split(batch.lengths)
    torch.testing.assert_close(shuffled, torch.cat([by_sequence[k] for k in order]))


@each_path
@a_few
@given(batch=batches(), cut=st.integers(0, 6))
def test_micro_batch_losses_sum_to_batch_loss(name: str, options: dict[str, Any], batch: Batch, cut: int) -> None:
    parts = batch.sequences()
    groups = [group for group in (parts[:cut], parts[cut:]) if group]
    micro = [Batch.pack(group) for group in groups]
    denominator = sum(count(name, part, options) for part in micro)
    whole = batch.loss(name, None, options)
    outputs = [part.loss(name, denominator, options) for part in micro]
    assert sum(output.loss.item() for output in outputs) == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-9)
    merged = objective_means(add_metric_sums([output.metrics for output in outputs]))
    assert merged == pytest.approx(objective_means(whole.metrics), rel=1e-9, abs=1e-9)


@each_path
@a_few
@given(batch=batches(), noise=st.sampled_from([1.0, 1e3, 1.5e308]))
def test_masked_tokens_do_not_affect_loss(name: str, options: dict[str, Any], batch: Batch, noise: float) -> None:
    def disturbed(values: Tensor, sign: float) -> Tensor:
        return torch.where(batch.mask, values, values + sign * noise)

    other = replace(
        batch,
        t=disturbed(batch.t, 1.0),
        i=disturbed(batch.i, -1.0),
        o=disturbed(batch.o, -1.0),
        ref=disturbed(batch.ref, 1.0),
        advantages=disturbed(batch.advantages, 1.0),
    )
    value, gradient = value_and_gradient(batch, name, None, options)
    other_value, other_gradient = value_and_gradient(other, name, None, options)
    assert other_value == value
    assert torch.equal(other_gradient, gradient)
    assert not gradient[~batch.mask].any()
    assert objective_means(other.loss(name, None, options).metrics) == objective_means(
        batch.loss(name, None, options).metrics
    )


@each_path
@a_few
@given(batch=batches())
def test_sequence_advantage_equals_repeated_token_advantage(name: str, options: dict[str, Any], batch: Batch) -> None:
    per_sequence = torch.stack([part.advantages[0] for part in batch.sequences()])
    per_token = per_sequence.repeat_interleave(torch.tensor(batch.lengths))
    short = value_and_gradient(replace(batch, advantages=per_sequence), name, None, options)
    long = value_and_gradient(replace(batch, advantages=per_token), name, None, options)
    assert short[0] == long[0]
    assert torch.equal(short[1], long[1])


@each_variant
def test_batch_without_loss_tokens_gives_differentiable_zero(name: str, options: dict[str, Any]) -> None:
    numbers = torch.linspace(-3.0, -1.0, 5)
    silent = Batch(numbers, numbers + 0.5, numbers, numbers, numbers, torch.zeros(5, dtype=torch.bool), [2, 3])
    nothing = Batch(*[torch.empty(0)] * 5, torch.empty(0, dtype=torch.bool), [])
    for batch in (silent, nothing):
        for denominator in (None, 0.0, 7.0):
            value, gradient = value_and_gradient(batch, name, denominator, options)
            assert value == 0.0
            assert gradient.tolist() == [0.0] * len(batch.t)
