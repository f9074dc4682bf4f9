"""FlashAttention 3 as torch operations, `rlrun::flash_attention_3` and its backward pass, with fake implementations and a gradient.

`flash_attn_interface` registers `flash_attn_3::fwd` and `flash_attn_3::bwd`. Most versions have no fake implementations for the compiler,
and the arguments of the Python functions differ between versions. The arguments of these two operations that are used here have the same
names in all versions. Each operation takes tensors and numbers only, because custom operations do not accept other types.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch
from torch import Tensor

from rlrun.fit.attention_kernels import FA3


class _Graph(Protocol):
    """Context of the operation in the autograd graph."""

    saved_tensors: tuple[Tensor, ...]
    options: tuple[int, int, float, int, float]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save tensors for the backward pass."""


def _options(
    ends: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float, left: int, softcap: float
) -> dict[str, Tensor | float | int | bool]:
    """Return the common keyword arguments of both operations. Causal attention closes a window's right end; -1 leaves the left end open."""
    return {
        "cu_seqlens_q": ends[0],
        "cu_seqlens_k": ends[1],
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
        "softmax_scale": scale,
        "is_causal": True,
        "window_size_left": left,
        "window_size_right": 0,
        "softcap": softcap,
    }


@torch.library.custom_op("rlrun::flash_attention_3", mutates_args=())  # type: ignore[untyped-decorator]
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
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return the output `[T, heads, D]` and lse `[heads, T]` float32."""
    options = _options((query_ends, key_ends), (longest_query, longest_key), scale, left, softcap)
    importlib.import_module(FA3.module)  # the import registers the operations
    # With one split the result of a sequence does not depend on other sequences of the row.
    output, lse, *_ = torch.ops.flash_attn_3.fwd(query, key, value, num_splits=1, **options)
    return output, lse


@torch.library.custom_op("rlrun::flash_attention_3_backward", mutates_args=())  # type: ignore[untyped-decorator]
def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
    left: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    options = _options((query_ends, key_ends), (longest_query, longest_key), scale, left, softcap)
    found = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value))
    torch.ops.flash_attn_3.bwd(
        gradient.contiguous(),
        query,
        key,
        value,
        output,
        lse.contiguous(),
        dq=found[0],
        dk=found[1],
        dv=found[2],
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **options,
    )
    return found[0], found[1], found[2]


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
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, int, float],
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.options = inputs[5:]


def _gradients(ctx: _Graph, gradient: Tensor, of_lse: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, query_ends, key_ends, output, lse = ctx.saved_tensors
    found = backward(gradient, query, key, value, output, lse, query_ends, key_ends, *ctx.options)
    return *found, None, None, None, None, None, None, None


forward.register_autograd(_gradients, setup_context=_save)
