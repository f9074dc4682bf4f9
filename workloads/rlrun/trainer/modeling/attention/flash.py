"""Kernels that consist of a forward and a backward operation: FlashAttention 2 of torch (`varlen`), 3 (`fa3`) and 4 (`fa4`).

**Sinks** do not need a special kernel. With `lse` the logarithm of the sum of exponentials over the keys and `s` a head's sink, attention
with a sink has `lse' = log(exp(lse) + exp(s))` and `output' = output * exp(lse - lse')`. The backward pass of a flash kernel recomputes
`P = exp(scores - lse)` and needs from the forward pass only `sum(gradient * output)` per query. With `lse'` and `output'` it therefore
computes the gradients of queries, keys and values with the sink. The gradient of the sink is `-exp(s - lse') * sum(gradient * output')`,
summed over the queries. All these kernels drop gradients of `lse`, so sinks computed from `lse` by autograd would get wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.attention.varlen  # registers its operations
from torch import Tensor

from rlrun.trainer.modeling.attention import operation_fa3, operation_fa4
from rlrun.trainer.modeling.attention.packed_layout import Scores, Segments

_NAMES_GROUPED_HEADS = any(
    argument.name == "enable_gqa" for argument in torch.ops.torch_attn._varlen_attn.default._schema.arguments
)
"""Whether torch's operation has an argument for fewer key-value heads; up to 2.11 it accepts them without the argument."""
Forward = Callable[[Tensor, Tensor, Tensor, Segments, Scores], tuple[Tensor, Tensor]]
"""Function of query, key, value, segments and options without sinks; returns output `[T, heads, D]` and lse `[heads, T]` float32."""
Backward = Callable[[Tensor, tuple[Tensor, Tensor, Tensor], Tensor, Tensor, Segments, Scores], tuple[Tensor, ...]]
"""Function of gradient, (query, key, value), output, lse, segments and options; returns the gradients of query, key and value."""


def varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Compute torch's variable-length attention; for the arguments see `compute.attend`."""
    return _with_sinks(_varlen_forward, _varlen_backward, query, key, value, segments, scores)


def fa3(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Compute FlashAttention 3; for the arguments see `compute.attend`."""
    return _with_sinks(_fa3_forward, _fa3_backward, query, key, value, segments, scores)


def fa4(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Compute FlashAttention 4; for the arguments see `compute.attend`."""
    return _with_sinks(_fa4_forward, _fa4_backward, query, key, value, segments, scores)


def _with_sinks(
    forward: Forward,
    backward: Backward,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scores: Scores,
) -> Tensor:
    if scores.sinks is None:
        return forward(query, key, value, segments, scores)[0]
    constant = (forward, backward, segments, replace(scores, sinks=None))
    output: Tensor = _Sinks.apply(query, key, value, scores.sinks, constant)
    return output


class _Graph(Protocol):
    """Context of attention with sinks in the autograd graph."""

    saved_tensors: tuple[Tensor, ...]
    constant: tuple[Forward, Backward, Segments, Scores]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save tensors for the backward pass."""


class _Sinks(torch.autograd.Function):  # type: ignore[misc]
    """Attention with sinks on top of operations without sinks; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: _Graph,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        constant: tuple[Forward, Backward, Segments, Scores],
    ) -> Tensor:
        run, _, segments, scores = constant
        output, lse = run(query, key, value, segments, scores)
        column = sinks.float()[:, None]
        with_sink = torch.logaddexp(lse, column)
        output = (output.float() * (lse - with_sink).exp().T[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, with_sink)
        ctx.constant = constant
        return output

    @staticmethod
    def backward(ctx: _Graph, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        _, run, segments, scores = ctx.constant
        gradient = gradients[0].contiguous()
        of_inputs = run(gradient, (query, key, value), output, lse, segments, scores)
        per_query = (gradient.float() * output.float()).sum(-1).T
        of_sinks = -((sinks.float()[:, None] - lse).exp() * per_query).sum(1)
        return *of_inputs, of_sinks.to(sinks.dtype), None


def _window_keys(scores: Scores) -> list[int]:
    """Return the numbers of visible keys before and after a query's position; -1 means all."""
    return [-1 if scores.window is None else scores.window - 1, 0]


def _varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores
) -> tuple[Tensor, Tensor]:
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if _NAMES_GROUPED_HEADS else {}
    output, lse, _ = torch.ops.torch_attn._varlen_attn(
        query,
        key,
        value,
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        is_causal=scores.window is None,
        scale=scores.scale,
        window_size=_window_keys(scores),
        **grouped,
    )
    return output, lse


def _varlen_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    lse: Tensor,
    segments: Segments,
    scores: Scores,
) -> tuple[Tensor, ...]:
    unused = torch.zeros(2, dtype=torch.uint64, device=gradient.device)  # random state of the unused dropout
    found: tuple[Tensor, ...] = torch.ops.torch_attn._varlen_attn_backward(
        gradient,
        *inputs,
        output,
        lse,
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        scores.window is None,
        unused,
        scale=scores.scale,
        window_size=_window_keys(scores),
    )
    return found


def _fa3_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = operation_fa3.forward(
        query,
        key,
        value,
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        scores.scale,
        _window_keys(scores)[0],
        scores.softcap or 0.0,
    )
    return found


def _fa3_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    lse: Tensor,
    segments: Segments,
    scores: Scores,
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = operation_fa3.backward(
        gradient,
        *inputs,
        output,
        lse,
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        scores.scale,
        _window_keys(scores)[0],
        scores.softcap or 0.0,
    )
    return found


def _fa4_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = operation_fa4.forward(
        query,
        key,
        value,
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        scores.scale,
        _window_keys(scores)[0],
    )
    return found


def _fa4_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    lse: Tensor,
    segments: Segments,
    scores: Scores,
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = operation_fa4.backward(
        gradient,
        *inputs,
        output,
        lse,
        segments.query_ends,
        segments.key_ends,
        scores.scale,
        _window_keys(scores)[0],
    )
    return found
