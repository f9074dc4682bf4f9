"""Fused LM head: accuracy against float64, passes over logits and paths to its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlrun.trainer.learning.head.fused import EagerKernel, FusedHead, Plan
from rlrun.trainer.learning.lm_head import KEPT_BYTES, head_statistics, weighted_logprobs
from tests.support.heads import Found, computed, definition, inputs, near

ALL = 10**9


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    chunk=st.integers(1, 10),
    kept=st.sampled_from([0, 150, ALL]),
    known=st.booleans(),
    frozen=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fused_head_float32_error_is_below_one_millionth(
    tokens: int, vocabulary: int, chunk: int, kept: int, known: bool, frozen: bool, seed: int
) -> None:
    of = inputs(tokens, 5, vocabulary, seed=seed)
    with mock.patch.dict(KEPT_BYTES, cpu=kept):
        found = computed(of, known=known, chunk=chunk, frozen=frozen)
    near(found, definition(of), values=1e-6, gradients=1e-6)


def test_logprob_of_underflowing_probability_is_exact() -> None:
    of = inputs(6, 8, 30, scale=300.0)
    expected = definition(of)
    assert expected.logprobs.min() < -200
    near(computed(of, known=False, chunk=4), expected, values=3e-5, gradients=1e-5)


def test_fused_head_values_do_not_need_gradient() -> None:
    of = inputs(7, 8, 30)
    with torch.no_grad():
        logprobs, entropy = head_statistics(
            of.hidden.float(), of.weight.float(), of.targets, of.temperatures.float(), chunk_tokens=3
        )
    near(Found(logprobs, entropy, None, None), definition(of), values=1e-6, gradients=0)


class Passes(TorchDispatchMode):  # type: ignore[misc]
    """Counter of reads and writes of tensors with one element per logit of a chunk, in units of logits."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.reads, self.writes = vocabulary, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.name in (
            "aten::empty",
            "aten::empty_like",
            "aten::new_empty",
            "aten::new_full",
            "aten::gather",
        ):
            return result
        written = [id(value) for value in tree_leaves(result)]
        if func._schema.name == "aten::scatter_add_":  # accesses one element per row
            return result
        for value in tree_leaves((args, {k: v for k, v in (kwargs or {}).items() if k != "out"})):
            self.reads += self._logits(value)
        for value in tree_leaves(result):
            self.writes += self._logits(value) if id(value) in written else 0
        return result

    def _logits(self, value: Any) -> int:
        wide = isinstance(value, Tensor) and value.dim() == 2 and self.vocabulary in value.shape
        return value.numel() if wide and value.shape[0] + value.shape[1] < self.vocabulary + 64 else 0


def count_passes(run: Callable[[], object], *, tokens: int, vocabulary: int) -> tuple[float, float]:
    """Return reads and writes per logit."""
    with Passes(vocabulary) as counted:
        run()
    return counted.reads / (tokens * vocabulary), counted.writes / (tokens * vocabulary)


@pytest.mark.parametrize(
    ("how", "kept", "reads", "writes"),
    [
        ("policy", ALL, 5, 2),  # max, softmax, max, product; the weight's product
        ("policy", 0, 6, 4),  # also the softmax of recomputed logits
        ("known", 0, 5, 2),
        ("frozen", 0, 4, 2),
        ("nothing", 0, 3, 2),
        ("before", ALL, 9, 6),
        ("before", 0, 10, 8),
    ],
)
def test_fused_head_limits_passes_over_logits(how: str, kept: int, reads: int, writes: int) -> None:
    """`before` is the general path, which every head took earlier: 15 and 18 passes instead of 7 and 10 or fewer."""
    tokens, vocabulary = 12, 2000
    of = inputs(tokens, 70, vocabulary)
    hidden = of.hidden.float().requires_grad_(how != "nothing")
    weight = of.weight.float().requires_grad_(how not in ("frozen", "nothing"))
    rest = of.targets, of.temperatures.float()

    def run() -> None:
        if how == "known":
            given = weighted_logprobs(hidden, weight, *rest, of.coefficients.float(), chunk_tokens=4)
            assert given is not None
            given[0].backward()
            return
        options: dict[str, Any] = {"before": {"entropy": "gradient"}, "nothing": {"entropy": "none"}}
        logprobs, _ = head_statistics(hidden, weight, *rest, chunk_tokens=4, **options.get(how, {}))
        if how != "nothing":
            logprobs.sum().backward()

    with mock.patch.dict(KEPT_BYTES, cpu=kept):
        assert count_passes(run, tokens=tokens, vocabulary=vocabulary) == (reads, writes)


def test_fused_head_holds_one_chunk_of_logits() -> None:
    tokens, vocabulary, chunk = 60, 4000, 4
    of = inputs(tokens, 8, vocabulary)
    hidden, weight = of.hidden.float().requires_grad_(), of.weight.float().requires_grad_()

    class Largest(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.made: list[int] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func._schema.name == "aten::empty":
                self.made.append(result.numel())
            return result

    with mock.patch.dict(KEPT_BYTES, cpu=0), Largest() as largest:
        logprobs, _ = head_statistics(hidden, weight, of.targets, of.temperatures.float(), chunk_tokens=chunk)
        logprobs.sum().backward()
    assert largest.made.count(chunk * vocabulary) == 2  # forward and backward


class LateHidden(EagerKernel):
    """Kernel that computes the product of residual and weight in the backward pass, like Triton's, and counts logits."""

    forms_hidden_first = False

    def __init__(self) -> None:
        self.made = 0

    def logits(self, hidden: Tensor, weight: Tensor, temperatures: Tensor, memory: Tensor | None) -> Tensor:
        self.made += 1
        return super().logits(hidden, weight, temperatures, None)


@pytest.mark.parametrize(("chunks", "made"), [(0, 8), (1, 7), (4, 4)])
def test_kept_residuals_do_not_change_gradients(chunks: int, made: int) -> None:
    torch.manual_seed(0)
    tokens, vocabulary, chunk = 16, 50, 4
    hidden, weight = torch.randn(tokens, 8), torch.randn(vocabulary, 8)
    targets, temperatures = torch.randint(vocabulary, (tokens,)), 0.5 + torch.rand(tokens)
    found = []
    for kept in (0, chunks * chunk * vocabulary * 4):
        kernel = LateHidden()
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        plan = Plan(kernel, chunk, kept, entropy=False, reuses_memory=False)
        logprobs, _, _ = FusedHead.apply(*leaves, targets, temperatures, None, plan)
        gradients = torch.autograd.grad((logprobs * torch.arange(tokens)).sum(), leaves)
        found.append((logprobs.detach(), *gradients))
    assert kernel.made == made
    assert all(map(torch.equal, *found))
