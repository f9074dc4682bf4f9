"""Operations that each mode runs again in backward, counted; the attention is torch's variable-length operator with a kernel for CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from rlrun.protocol.files.batch import Sample
from rlrun.trainer.learning.forward import micro_batch, token_statistics
from rlrun.trainer.modeling import activation_checkpointing, packed_attention
from rlrun.trainer.modeling.activation_checkpointing import keep_activations
from rlrun.trainer.modeling.shard import decoder_layers

CPU = torch.device("cpu")
LAYERS = 2
MODES = ("none", "selective", "attention", "full", "offload")


class Counts(TorchDispatchMode):  # type: ignore[misc]
    """How often each operation computes; one whose result is kept is not computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def _segments(boundaries: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each sequence's part of `tensors` `[T, heads, D]`, as `[heads, tokens, D]`."""
    edges = boundaries.tolist()
    for first, last in pairwise(edges):
        yield tuple(tensor[first:last].transpose(0, 1) for tensor in tensors)


def _probabilities(query: Tensor, key: Tensor, scale: float) -> Tensor:
    scores = (query * scale) @ key.transpose(1, 2)
    return scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf).softmax(-1)


def _forward(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, scale: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    parts = []
    for q, k, v in _segments(boundaries, query, key, value):
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        parts.append((_probabilities(q, k, scale) @ v).transpose(0, 1))
    return torch.cat(parts)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, scale: float
) -> tuple[Tensor, ...]:
    groups = query.shape[1] // key.shape[1]
    found: list[list[Tensor]] = [[], [], []]
    for g, q, k, v in _segments(boundaries, grad, query, key, value):
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        p = _probabilities(q, k, scale)
        dp = g @ v.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        of_heads = (ds.transpose(1, 2) @ q, p.transpose(1, 2) @ g)
        dk, dv = (t.unflatten(0, (-1, groups)).sum(1) for t in of_heads)
        for parts, part in zip(found, (ds @ k, dk, dv), strict=True):
            parts.append(part.transpose(0, 1))
    return tuple(torch.cat(parts) for parts in found)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A kernel of the operator for CPUs; the list gets an element per call of its forward pass."""
    calls: list[int] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        calls.append(1)
        lse = torch.zeros(q.shape[1], q.shape[0])
        return _forward(q, k, v, boundaries, rest[4]), lse, torch.zeros(2, dtype=torch.uint64)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
        return _backward(grad, q, k, v, rest[0], rest[6])

    monkeypatch.setitem(varlen._varlen_attn._backend_fns, None, forward)
    monkeypatch.setitem(varlen._varlen_attn_backward._backend_fns, None, backward)
    return calls


def trained(
    make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample], mode: Any, attn: str
) -> tuple[Counter[str], dict[str, Tensor]]:
    model = make_model("qwen3", attn=attn)
    for layer in decoder_layers(model):
        keep_activations(layer, mode)
    with Counts() as counts:
        row = micro_batch([make_sample(9), make_sample(13, seed=1)], CPU)
        token_statistics(model, row).logprobs.sum().backward()
    return counts.calls, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", MODES)
def test_attention_is_computed_again_in_mode_full_alone(
    mode: Any, kernel: list[int], make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample]
) -> None:
    attn = packed_attention.implementation("varlen")
    _, found = trained(make_model, make_sample, mode, attn)
    assert len(kernel) == (2 if mode == "full" else 1) * LAYERS
    _, expected = trained(make_model, make_sample, "none", packed_attention.NAME)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5)


def test_products_are_computed_again_unless_selected(
    make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample]
) -> None:
    calls = {mode: trained(make_model, make_sample, mode, packed_attention.NAME)[0] for mode in MODES}
    attended = "aten::_scaled_dot_product_flash_attention_for_cpu"
    products = {mode: found["aten::mm"] for mode, found in calls.items()}
    assert products["selective"] == products["none"] == products["offload"]
    assert products["attention"] == products["full"] == products["none"] + 6 * LAYERS  # nobody needs the last one
    once = calls["none"][attended]
    assert once == LAYERS
    assert [calls[mode][attended] for mode in MODES] == [once, once, once, 2 * once, once]


def test_operations_that_are_not_registered_are_left_out() -> None:
    found = activation_checkpointing.operations(
        ["aten::mm", "aten::of_another_version", "of_another_package::attention"]
    )
    assert torch.ops.aten.mm.default in found
    assert {str(operation).rpartition(".")[0] for operation in found} == {"aten.mm"}
