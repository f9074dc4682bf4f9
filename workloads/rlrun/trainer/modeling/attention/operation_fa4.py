"""FlashAttention 4 as torch operations, `rlrun::flash_attention_4` and its backward pass, with fake implementations and a gradient.

The package has only Python functions, which are invisible to compiled code and activation checkpointing. Each operation takes tensors and
numbers only, because custom operations do not accept other types.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch
from torch import Tensor

from rlrun.fit.attention_kernels import FA4


class _Graph(Protocol):
    """Context of the operation in the autograd graph."""

    saved_tensors: tuple[Tensor, ...]
    options: tuple[float, int]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save tensors for the backward pass."""


def _fa4_options(scale: float, left: int) -> dict[str, float | int | bool | None]:
    """Return the common keyword arguments of both functions. None is an open end of a window; causal attention excludes a window."""
    return {
        "softmax_scale": scale,
        "causal": left < 0,
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if left < 0 else 0,
    }


@torch.library.custom_op("rlrun::flash_attention_4", mutates_args=())  # type: ignore[untyped-decorator]
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
    left: int,
) -> tuple[Tensor, Tensor]:
    """Return the output `[T, heads, D]` and lse `[heads, T]` float32."""
    package = importlib.import_module(FA4.module)
    output, lse = package._flash_attn_fwd(
        query,
        key,
        value,
        cu_seqlens_q=query_ends,
        cu_seqlens_k=key_ends,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        return_lse=True,
        **_fa4_options(scale, left),
    )
    return output.contiguous(), lse.contiguous()


@torch.library.custom_op("rlrun::flash_attention_4_backward", mutates_args=())  # type: ignore[untyped-decorator]
def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    scale: float,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    package = importlib.import_module(FA4.module)
    dq, dk, dv = package._flash_attn_bwd(
        query,
        key,
        value,
        output,
        gradient,
        lse.contiguous(),
        cu_seqlens_q=query_ends,
        cu_seqlens_k=key_ends,
        **_fa4_options(scale, left),
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@forward.register_fake  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32),
    )


@backward.register_fake  # type: ignore[untyped-decorator]
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, ...]:
    found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
    return found[0], found[1], found[2]


def _save(
    ctx: _Graph,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, int],
    output: tuple[Tensor, Tensor],
) -> None:
    query, key, value, query_ends, key_ends, _, _, scale, left = inputs
    ctx.save_for_backward(query, key, value, query_ends, key_ends, *output)
    ctx.options = (scale, left)


def _gradients(ctx: _Graph, gradient: Tensor, of_lse: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, query_ends, key_ends, output, lse = ctx.saved_tensors
    found = backward(
        gradient,
        query,
        key,
        value,
        output,
        lse,
        query_ends,
        key_ends,
        *ctx.options,
    )
    return *found, None, None, None, None, None, None


forward.register_autograd(_gradients, setup_context=_save)
