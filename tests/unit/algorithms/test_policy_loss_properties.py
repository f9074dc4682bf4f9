"""Policy losses on random packed batches: equal to the written-out definition, and independent of packing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlrun.algorithms import denominator_count, mean_metrics, merge_metrics, policy_loss


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
        """One batch per sequence."""
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
            inference_logprobs=self.i,
            advantages=self.advantages,
            mask=self.mask,
            sequence_lengths=self.lengths,
            proximal_logprobs=self.o,
            reference_logprobs=self.ref,
            denominator=denominator,
            **options,
        )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ratios from nearly 1 to far outside every clip, some sequences without a loss token, some advantages 0."""
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


def definition(name: str, batch: Batch, t: Tensor, options: dict[str, Any]) -> tuple[Tensor, int]:
    """Sum of the loss and its default denominator, token by token from the table of the design."""
    total, denominator = t.sum() * 0.0, 0
    starts = [sum(batch.lengths[:k]) for k in range(len(batch.lengths))]
    for start, length in zip(starts, batch.lengths, strict=True):
        on = [k for k in range(start, start + length) if batch.mask[k]]
        if not on:
            continue
        a, i, o = batch.advantages, batch.i, batch.o
        terms = []
        for k in on:
            rho, fixed = torch.exp(t[k] - i[k]), torch.exp(t[k] - i[k]).item()
            if name == "aipo":
                cap = options["delta"]
                terms.append(-min(fixed, cap) * a[k] * (1 + t[k] - t[k].item()))
            elif name == "ppo":
                r = torch.exp(t[k] - o[k])
                term = max(-a[k] * r, -a[k] * r.clamp(1 - options["eps_low"], 1 + options["eps_high"]))
                terms.append(min(term, -a[k] * options["dual_clip"]) if a[k] < 0 else term)
            elif name == "gspo":
                s = math.exp(sum((t[j] - o[j]).item() for j in on) / len(on))
                token = s * torch.exp(t[k] - t[k].item())
                terms.append(max(-a[k] * token, -a[k] * token.clamp(1 - options["eps_low"], 1 + options["eps_high"])))
            elif name == "cispo":
                terms.append(-min(max(fixed, 1 - options["eps_low"]), 1 + options["eps_high"]) * a[k] * t[k])
            elif name == "dppo":
                d = (t[k].exp() - i[k].exp()).item()
                drop = d > options["mask_high"] if a[k] > 0 else d < -options["mask_low"]
                terms.append((0.0 if drop else -a[k] * rho) + options["kl_tau"] * torch.log(rho) ** 2)
            else:
                ratios = [math.exp((t[j] - i[j]).item()) for j in on]
                geometric = math.exp(sum(map(math.log, ratios)) / len(on))
                drop = not 0.125 <= fixed <= 8 or not 0.1 <= geometric <= 10 or max(ratios) > 100
                pull = options["adv_tau"] * a[k] - options["kl_tau"] * math.log(fixed)
                pull = pull + options["teacher_tau"] * (batch.ref[k] - t[k].item())
                weight = fixed
                if options["ratio"] == "sequence":
                    weight = min(math.exp(min(sum(map(math.log, ratios)), 10.0)), 10.0) / len(on)
                terms.append(torch.zeros(()) if drop else -weight * pull * t[k])
        total = total + sum(terms)
        denominator += 1 if options.get("ratio") == "sequence" else len(on)
    return total, denominator


CLIP = {"eps_low": 0.2, "eps_high": 0.28}
IS = {"adv_tau": 1.0, "teacher_tau": 0.0, "kl_tau": 0.0, "ratio": "token"}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("aipo", {"delta": 8.0}),
    ("aipo", {"delta": 1.2}),
    ("ppo", CLIP | {"dual_clip": 3.0}),
    ("ppo", CLIP | {"dual_clip": 1.1}),
    ("gspo", {"eps_low": 3e-4, "eps_high": 4e-4}),
    ("gspo", CLIP),
    ("cispo", {"eps_low": 1.0, "eps_high": 5.0}),
    ("cispo", CLIP),
    ("dppo", {"mask_low": 0.2, "mask_high": 0.2, "kl_tau": 1e-3}),
    ("dppo", {"mask_low": 0.01, "mask_high": 0.03, "kl_tau": 0.5}),
    ("masked_is", IS),
    ("masked_is", IS | {"adv_tau": 0.5, "teacher_tau": 0.3, "kl_tau": 0.2}),
    ("masked_is", IS | {"ratio": "sequence"}),
]
each_variant = pytest.mark.parametrize(("name", "options"), VARIANTS)
each_path = pytest.mark.parametrize(("name", "options"), [VARIANTS[k] for k in (1, 3, 5, 7, 9, 11, 12)])
"""One variant per loss and code path, the one that clips or drops most."""
a_few = settings(max_examples=12, deadline=None)


def value_and_gradient(batch: Batch, name: str, denominator: Any, options: dict[str, Any]) -> tuple[float, Tensor]:
    batch = replace(batch, t=batch.t.clone().requires_grad_())
    loss = batch.loss(name, denominator, options).loss
    (gradient,) = torch.autograd.grad(loss, batch.t)
    return loss.item(), gradient


@each_variant
@a_few
@given(batch=batches())
def test_value_and_gradient_equal_the_written_out_definition(name: str, options: dict[str, Any], batch: Batch) -> None:
    t = batch.t.clone().requires_grad_()
    total, denominator = definition(name, batch, t, options)
    expected = total / max(denominator, 1)
    (slope,) = torch.autograd.grad(expected, t)
    value, gradient = value_and_gradient(batch, name, None, options)
    assert value == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-9)
    assert denominator_count(name, batch.mask, batch.lengths, **options).item() == denominator


@each_path
@a_few
@given(batch=batches(), data=st.data())
def test_order_of_the_sequences_does_not_matter(
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
def test_micro_batches_add_up_to_the_batch(name: str, options: dict[str, Any], batch: Batch, cut: int) -> None:
    parts = batch.sequences()
    groups = [group for group in (parts[:cut], parts[cut:]) if group]
    micro = [Batch.pack(group) for group in groups]
    denominator = sum(denominator_count(name, part.mask, part.lengths, **options) for part in micro)
    whole = batch.loss(name, None, options)
    outputs = [part.loss(name, denominator, options) for part in micro]
    assert sum(output.loss.item() for output in outputs) == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-9)
    merged = mean_metrics(merge_metrics([output.metrics for output in outputs]))
    assert merged == pytest.approx(mean_metrics(whole.metrics), rel=1e-9, abs=1e-9)


@each_path
@a_few
@given(batch=batches(), noise=st.sampled_from([1.0, 1e3, 1.5e308]))
def test_masked_tokens_change_nothing(name: str, options: dict[str, Any], batch: Batch, noise: float) -> None:
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
    assert mean_metrics(other.loss(name, None, options).metrics) == mean_metrics(
        batch.loss(name, None, options).metrics
    )


@each_path
@a_few
@given(batch=batches())
def test_one_advantage_per_sequence_is_that_of_each_token(name: str, options: dict[str, Any], batch: Batch) -> None:
    per_sequence = torch.stack([part.advantages[0] for part in batch.sequences()])
    per_token = per_sequence.repeat_interleave(torch.tensor(batch.lengths))
    short = value_and_gradient(replace(batch, advantages=per_sequence), name, None, options)
    long = value_and_gradient(replace(batch, advantages=per_token), name, None, options)
    assert short[0] == long[0]
    assert torch.equal(short[1], long[1])
