"""Loss of several objectives in one batch, for any packing, order and split into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlrun.algorithms import LossBatch, Mixture, Objective, Regularizers

NAMES = ("a", "b", "c")
CHOICES = (
    Objective(),
    Objective("aipo", {"delta": 1.1}, regularizers=Regularizers(entropy=0.1, kl=0.2)),
    Objective("ppo", {"eps_high": 0.28}, aggregation="seq_mean_token_sum", proximal="recompute"),
    Objective("gspo", {"eps_low": 0.2, "eps_high": 0.3}, aggregation="seq_mean_token_mean"),
    Objective("decoupled_ppo", aggregation="constant_length", aggregation_length=7, proximal="log_linear"),
    Objective("sapo", correction={"action": "mask", "level": "sequence", "high": 3.0}),
    Objective("masked_is", {"ratio": "sequence"}),
    Objective("distill", regularizers=Regularizers(kl=0.1, kl_kind="k3_unbiased")),
    Objective("sft", aggregation="constant_length", aggregation_length=3),
)


@dataclass(frozen=True)
class Sequences:
    """One batch; `columns` is `[T, 6]`: t, i, o, ref, advantage, version."""

    columns: Tensor
    mask: Tensor
    lengths: list[int]
    environments: list[str]

    def take(self, order: list[int]) -> Sequences:
        columns, masks = self.columns.split(self.lengths), self.mask.split(self.lengths)
        return Sequences(
            torch.cat([columns[i] for i in order]),
            torch.cat([masks[i] for i in order]),
            [self.lengths[i] for i in order],
            [self.environments[i] for i in order],
        )

    def of(self, name: str) -> Sequences:
        """Return the batch with the loss tokens of one environment only; the other sequences keep no loss token."""
        own = torch.tensor([own == name for own in self.environments])
        return replace(self, mask=self.mask & own.repeat_interleave(torch.tensor(self.lengths)))


@st.composite
def batches(draw: st.DrawFn) -> Sequences:
    """Draw batches in which some sequences have no loss token and some environments have no sequence."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    environments = draw(st.lists(st.sampled_from(NAMES), min_size=len(lengths), max_size=len(lengths)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    noise = torch.randn(sum(lengths), 6, generator=generator, dtype=torch.float64)
    i = -noise[:, 1].abs() - 1e-3
    t = i + 0.3 * noise[:, 0]
    version = (noise[:, 5] > 0).double()
    columns = torch.stack([t, i, t - 0.2 * noise[:, 2], i - 0.2 * noise[:, 3], noise[:, 4], version], dim=1)
    mask = torch.rand(sum(lengths), generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    return Sequences(columns, mask, lengths, environments)


def evaluate_rows(
    objective: Objective | Mixture, batch: Sequences, t: Tensor, rows: list[list[int]] | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a batch that is split into `rows` of sequences, and the metrics if it is a mixture."""
    total = t.new_zeros(())
    starts = torch.tensor([0, *batch.lengths]).cumsum(0).tolist()
    parts: list[dict[str, Tensor]] = []
    mixture = objective if isinstance(objective, Mixture) else Mixture(objective)
    divisors = mixture.divisors(batch.mask, batch.lengths, batch.environments)
    for row in rows or [list(range(len(batch.lengths)))]:
        here = batch.take(row)
        policy = torch.cat([t[starts[s] : starts[s + 1]] for s in row])
        shared = {
            "inference_logprobs": here.columns[:, 1],
            "advantages": here.columns[:, 4],
            "mask": here.mask,
            "sequence_lengths": here.lengths,
            "reference_logprobs": here.columns[:, 3],
            "entropy": torch.sigmoid(policy),
            "versions": here.columns[:, 5].long(),
            "policy_version": 2,
        }
        if isinstance(objective, Mixture):
            output = objective(
                policy,
                LossBatch(proximal_logprobs=here.columns[:, 2], **shared),
                environments=here.environments,
                divisors=divisors,
            )
            parts.append(output.metrics)
        else:
            o = here.columns[:, 2] if objective.proximal == "recompute" else None
            denominator = objective.denominator(batch.mask, batch.lengths)
            output = objective(policy, LossBatch(denominator=denominator, proximal_logprobs=o, **shared))
        total = total + output.loss
    if not isinstance(objective, Mixture):
        return total, {}
    return total, objective.reported_means(
        {name: float(value) for name, value in objective.add_metrics(parts, reference=True).items()}, divisors
    )


def with_gradient(
    objective: Objective | Mixture, batch: Sequences, rows: list[list[int]] | None = None
) -> tuple[Tensor, Tensor, dict[str, float]]:
    t = batch.columns[:, 0].clone().requires_grad_()
    loss, metrics = evaluate_rows(objective, batch, t, rows)
    (gradient,) = torch.autograd.grad(loss, t)
    return loss.detach(), gradient, metrics


objectives = st.sampled_from(CHOICES)


@settings(max_examples=25, deadline=None)
@given(batches(), objectives)
def test_mixture_of_equal_objectives_equals_single_objective(batch: Sequences, objective: Objective) -> None:
    loss, gradient, _ = with_gradient(Mixture(objective, {"a": objective, "b": objective}), batch)
    undivided, expected, _ = with_gradient(objective, batch)
    torch.testing.assert_close(loss, undivided, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)


@settings(max_examples=25, deadline=None)
@given(batches(), objectives, objectives, objectives)
def test_mixture_loss_sums_objectives_by_batch_share(
    batch: Sequences, a: Objective, b: Objective, c: Objective
) -> None:
    loss, gradient, metrics = with_gradient(Mixture(c, {"a": a, "b": b}), batch)
    total, whole = torch.zeros(()).double(), torch.zeros_like(gradient)
    for name, objective in {"a": a, "b": b, "c": c}.items():
        own = batch.of(name)
        if not own.mask.any():
            assert f"objective/{name}/loss" not in metrics
            continue
        alone, gradient_alone, _ = with_gradient(objective, own)
        share = objective.denominator(own.mask, own.lengths) / objective.denominator(batch.mask, batch.lengths)
        total, whole = total + share * alone, whole + share * gradient_alone
        if name != "c":
            assert metrics[f"objective/{name}/loss"] == pytest.approx(float(alone), abs=1e-9)
            assert metrics[f"objective/{name}/loss_tokens"] == int(own.mask.sum())
    torch.testing.assert_close(loss, total, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gradient, whole, atol=1e-9, rtol=1e-9)
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-9)
    assert metrics["loss_tokens"] == int(batch.mask.sum())


@settings(max_examples=25, deadline=None)
@given(batches(), objectives, objectives, st.randoms(use_true_random=False))
def test_mixture_does_not_depend_on_packing_or_order(
    batch: Sequences, a: Objective, b: Objective, random: object
) -> None:
    mixture = Mixture(CHOICES[0], {"a": a, "b": b})
    order = list(range(len(batch.lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    cut = len(order) // 2
    loss, gradient, metrics = with_gradient(mixture, batch)
    again, same, cut_metrics = with_gradient(mixture, batch, [row for row in (order[:cut], order[cut:]) if row])
    torch.testing.assert_close(again, loss, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(same, gradient, atol=1e-9, rtol=1e-9)
    assert cut_metrics == pytest.approx(metrics, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(batches(), objectives, objectives, objectives)
def test_environment_objective_leaves_other_gradients_unchanged(
    batch: Sequences, own: Objective, one: Objective, other: Objective
) -> None:
    untouched = torch.tensor([name != "a" for name in batch.environments]).repeat_interleave(
        torch.tensor(batch.lengths)
    )
    found = [with_gradient(Mixture(own, {"a": objective}), batch)[1][untouched] for objective in (one, other)]
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


def test_mixture_metric_averages_over_its_objectives_tokens() -> None:
    batch = Sequences(
        torch.tensor([[-1.0, -1.0, -1.0, -1.0, 1.0, 0.0]] * 6).double(), torch.ones(6).bool(), [4, 2], ["a", "b"]
    )
    batch.columns[4, 0] = 0.5  # the ratio of one of b's two tokens is clipped
    _, _, metrics = with_gradient(Mixture(Objective("sft"), {"b": Objective("ppo")}), batch)
    assert metrics["clip_fraction"] == metrics["objective/b/clip_fraction"] == 0.5
    assert metrics["objective/b/loss_tokens"] == 2
    assert metrics["loss_tokens"] == 6
    assert metrics["objective/b/sequences"] == 1
    assert metrics["entropy"] == pytest.approx(float(torch.sigmoid(batch.columns[:, 0]).mean()))


def test_environment_without_objective_uses_run_objective() -> None:
    batch = Sequences(torch.tensor([[-1.0, -2.0, -1.0, -1.0, 1.0, 0.0]] * 3).double(), torch.ones(3).bool(), [3], ["z"])
    mixture = Mixture(Objective("aipo"), {"a": Objective("sft")})
    loss, _, metrics = with_gradient(mixture, batch)
    assert float(loss) == float(with_gradient(Objective("aipo"), batch)[0])
    assert not [name for name in metrics if name.startswith("objective/")]
