"""Kernels given as a pair of operations, forward and backward: FlashAttention 2 of torch (`varlen`), 3 (`fa3`) and 4 (`fa4`).

**Sinks** need no kernel of their own. With `lse` the logarithm of the sum of exponentials over the keys and `s` a head's sink, attention
with a sink has `lse' = log(exp(lse) + exp(s))` and `output' = output * exp(lse - lse')`. A flash kernel's backward pass makes the
probabilities again, `P = exp(scores - lse)`, and needs of the forward pass no more than `sum(gradient * output)` per query: given `lse'`
and `output'` it computes the gradients of queries, keys and values with the sink. The sink's own is `-exp(s - lse') * sum(gradient *
output')`, summed over the queries. Gradients of `lse` itself are dropped by all of these kernels: sinks built from it train wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.attention.varlen  # registers its operations
from torch import Tensor

from rlrun.trainer.modeling.attention import operation_fa3, operation_fa4
from rlrun.trainer.modeling.attention.layout import Segments
from rlrun.trainer.modeling.attention.scores import Scores

_NAMES_GROUPED_HEADS = any(
    argument.name == "enable_gqa" for argument in torch.ops.torch_attn._varlen_attn.default._schema.arguments
)
"""True if torch's operation has an argument for fewer key-value heads: up to 2.11 it has none, and takes them as they are."""
Forward = Callable[[Tensor, Tensor, Tensor, Segments, Scores], tuple[Tensor, Tensor]]
"""Query, key, value, segments, options without sinks -> output `[T, heads, D]`, lse `[heads, T]` float32."""
Backward = Callable[[Tensor, tuple[Tensor, Tensor, Tensor], Tensor, Tensor, Segments, Scores], tuple[Tensor, ...]]
"""Gradient, (query, key, value), output, lse, segments, options -> gradients of query, key, value."""


def varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """torch's variable-length attention; arguments as of `compute.attend`."""
    return _with_sinks(_varlen_forward, _varlen_backward, query, key, value, segments, scores)


def fa3(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """FlashAttention 3; arguments as of `compute.attend`."""
    return _with_sinks(_fa3_forward, _fa3_backward, query, key, value, segments, scores)


def fa4(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """FlashAttention 4; arguments as of `compute.attend`."""
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
    """Memory of attention with sinks in autograd's graph."""

    saved_tensors: tuple[Tensor, ...]
    constant: tuple[Forward, Backward, Segments, Scores]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors."""


class _Sinks(torch.autograd.Function):  # type: ignore[misc]
    """Attention with sinks by a pair of operations without; see the module."""

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
    """Keys before and after a query's own that it sees; -1: all."""
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
    unused = torch.zeros(2, dtype=torch.uint64, device=gradient.device)  # state of a dropout that there is not
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
