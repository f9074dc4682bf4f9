"""Sums over the sequences of a row: equal to sums of slices, and without operations that add atomically on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlrun.algorithms import LOSSES, LossBatch, Mixture, Objective, Regularizers, gae, returns_to_go, value_loss
from rlrun.algorithms.aggregation import aggregation_weights
from rlrun.algorithms.loss_inputs import LossInputs, prepare_inputs
from rlrun.algorithms.losses import TokenLoss
from rlrun.trainer.learning.run_objective import normalize_tokens
from rlrun.trainer.ranks.group import Group

LENGTHS = [5, 1, 7, 3, 4]
ENVIRONMENTS = ["a", "b", "a", "b", "a"]
ATOMIC = {"index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_reduce",
          "index_reduce_", "embedding_dense_backward", "bincount", "histc", "put_"}  # fmt: skip
"""Operations whose CUDA kernels add in an order that changes from call to call."""
ACCUMULATING = {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
"""Operations that add if their argument `accumulate` is true."""


class AtomicSums(TorchDispatchMode):
    """Record operations, of forward and backward passes, that add floating-point numbers without a fixed order on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        name, options = func.overloadpacket.__name__, kwargs or {}
        accumulates = options.get("accumulate", len(args) > 3 and args[3])
        is_float_scan = name in ("cumsum", "cumprod") and args[0].is_floating_point()
        if name in ATOMIC or (name in ACCUMULATING and accumulates) or is_float_scan:
            self.found.append(name)
        return func(*args, **options)


def row(requires_grad: bool = True) -> tuple[Tensor, LossBatch]:
    generator = torch.Generator().manual_seed(3)

    def normal() -> Tensor:
        return torch.randn(sum(LENGTHS), generator=generator)

    sampled = -normal().abs()
    logprobs = (sampled + 0.3 * normal()).requires_grad_(requires_grad)
    mask = torch.rand(sum(LENGTHS), generator=generator) > 0.3
    mask[5] = False  # a sequence without loss tokens
    return logprobs, LossBatch(
        inference_logprobs=sampled,
        advantages=normal(),
        mask=mask,
        sequence_lengths=LENGTHS,
        entropy=normal().abs().requires_grad_(),
        reference_logprobs=sampled + 0.1 * normal(),
        proximal_logprobs=sampled + 0.1 * normal(),
    )


def own_loss(inputs: LossInputs) -> TokenLoss:
    """A user's loss with a gradient through both directions between tokens and sequences."""
    mean = inputs.sequence_sum(inputs.log_ratio) / inputs.sequence_tokens().clamp(min=1)
    return TokenLoss(-inputs.on_tokens(mean.exp()) * inputs.advantages)


def built_in(name: str) -> Objective:
    return Objective(name, proximal="recompute" if name == "decoupled_ppo" else "inference")


CORRECTIONS: list[dict[str, Any]] = [
    {"action": "mask", "level": "sequence", "reduce": reduce, "low": 0.5, "high": 3.0}
    for reduce in ("mean", "sum", "max")
] + [
    {"action": "clamp", "level": "sequence", "reduce": "mean", "low": 0.5, "high": 3.0},
    {"action": "mask", "low": 0.5, "high": 3.0, "weight": "geometric", "cap": 2.0},
    {"action": "mask", "low": 0.5, "high": 3.0, "weight": "sequence", "cap": 2.0},
]
OBJECTIVES: dict[str, Callable[[], Objective]] = {name: (lambda name=name: built_in(name)) for name in LOSSES} | {
    "gspo per sequence": lambda: Objective("gspo", aggregation="seq_mean_token_mean", regularizers=Regularizers(0.1, 0.1)),
    "masked_is by sequence": lambda: Objective("masked_is", {"ratio": "sequence", "teacher_tau": 0.5}),
    "own": lambda: Objective("tests.tensors.algorithms.test_segments:own_loss"),
} | {
    f"correction {index}": (lambda options=options: Objective("ppo", correction=options, proximal="recompute"))
    for index, options in enumerate(CORRECTIONS)
}  # fmt: skip


def traced(function: Callable[[], object]) -> AtomicSums:
    with AtomicSums() as sums:
        function()
    assert sums.operations > 0
    return sums


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_adds_no_numbers_atomically(name: str) -> None:
    mixture = Mixture(OBJECTIVES[name](), {"b": Objective("gspo")})
    logprobs, batch = row()
    divisors = mixture.divisors(batch.mask, LENGTHS, ENVIRONMENTS)
    found = traced(
        lambda: mixture(logprobs, batch, environments=ENVIRONMENTS, divisors=divisors).loss.backward()  # type: ignore[no-untyped-call]
    )
    assert logprobs.grad is not None
    assert not found.found


def test_advantages_and_values_add_no_numbers_atomically(solo: Group) -> None:
    logprobs, batch = row()
    values = batch.advantages.clone().requires_grad_()

    def compute() -> None:
        found = gae(batch.advantages, values, mask=batch.mask, sequence_lengths=LENGTHS)
        loss = value_loss(values, returns=found.returns, old_values=logprobs, mask=batch.mask, clip=0.2)
        loss.loss.backward()  # type: ignore[no-untyped-call]
        returns_to_go(batch.advantages, mask=batch.mask, sequence_lengths=LENGTHS, gamma=0.9, whitened=True)
        aggregation_weights("seq_mean_token_mean", batch.mask, LENGTHS)
        ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)) % 2
        normalize_tokens([batch.advantages], [batch.mask], [ids], 2, mean="group", std="batch", group=solo)

    assert not traced(compute).found


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("index_add", lambda ids, values: torch.zeros(9).index_add(0, ids, values)),
        ("scatter_add", lambda ids, values: torch.zeros(9).scatter_add(0, ids, values)),
        ("scatter_reduce", lambda ids, values: torch.zeros(9).scatter_reduce(0, ids, values, "sum")),
        ("cumsum", lambda ids, values: values.cumsum(0)),
        ("_index_put_impl_", lambda ids, values: torch.autograd.grad(values[ids].sum(), values)),
        ("index_add", lambda ids, values: torch.autograd.grad(values.index_select(0, ids).sum(), values)),
        ("scatter_add", lambda ids, values: torch.autograd.grad(values.gather(0, ids).sum(), values)),
    ],
)
def test_trace_finds_atomic_operations(name: str, compute: Callable[[Tensor, Tensor], object]) -> None:
    values = torch.ones(4, requires_grad=True)
    found = traced(lambda: compute(torch.tensor([0, 0, 1, 3]), values)).found
    assert [one.strip("_") for one in found][:1] == [name.strip("_")] or "index_put" in found[0]


def checked_inputs(lengths: Sequence[int], seed: int) -> tuple[LossInputs, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=generator) > 0.4
    return prepare_inputs(values, LossBatch(values, values, mask, lengths)), values


@pytest.mark.parametrize("seed", range(5))
def test_sequence_sums_equal_sums_of_slices(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 9, size=7).tolist()
    inputs, values = checked_inputs(lengths, seed)
    values.requires_grad_()
    weights = torch.arange(1.0, 8.0, dtype=torch.float64)
    pairs = list(zip(values.split(lengths), inputs.mask.split(lengths), strict=True))
    sums = torch.stack([own[kept].sum() for own, kept in pairs])
    (expected,) = torch.autograd.grad((sums.square() * weights).sum(), values)
    found = inputs.sequence_sum(values)
    (gradient,) = torch.autograd.grad((found.square() * weights).sum(), values)
    torch.testing.assert_close(found, sums)
    torch.testing.assert_close(gradient, expected)
    largest = [own[kept].max().item() if kept.any() else -np.inf for own, kept in pairs]
    assert inputs.sequence_max(values).tolist() == largest
    counts = [int(kept.sum()) for _, kept in pairs]
    assert inputs.sequence_tokens().tolist() == counts
    assert inputs.sequence_sum(torch.ones(len(values), dtype=torch.long)).tolist() == counts


def test_values_of_sequences_are_repeated_with_their_gradient() -> None:
    inputs, values = checked_inputs([3, 1, 4], 0)
    per_sequence = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    found = inputs.on_tokens(per_sequence)
    assert found.tolist() == [1, 1, 1, 2, 3, 3, 3, 3]
    (gradient,) = torch.autograd.grad((found * values.detach()).sum(), per_sequence)
    torch.testing.assert_close(gradient, torch.stack([part.sum() for part in values.detach().split([3, 1, 4])]))


def test_sum_of_a_long_sequence_is_as_exact_as_a_sum() -> None:
    values = torch.rand(40_000, generator=torch.Generator().manual_seed(1)) - 0.3
    inputs = prepare_inputs(values, LossBatch(values, values, torch.ones(40_000, dtype=torch.bool), [100, 39_900]))
    exact = [values[:100].double().sum(), values[100:].double().sum()]
    torch.testing.assert_close(inputs.sequence_sum(values).double(), torch.stack(exact), rtol=2e-5, atol=0)
