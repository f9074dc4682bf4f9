"""Kernels of attention over packed rows, one signature for all: `[T, heads, D]` and the row's lengths in, `[T, heads, D]` out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rlrun.trainer.modeling.packed_attention import Layout, packed_attention

Kernel = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]


class UnavailableError(Exception):
    """This machine, or this row, has no such kernel; says why."""


def trainer_varlen(q: Tensor, k: Tensor, v: Tensor, row: Layout) -> Tensor:
    """The trainer's kernel on CUDA: torch's flash attention."""
    if not q.is_cuda:
        raise UnavailableError("CUDA only")
    return _of_trainer(q, k, v, row, "varlen")


def trainer_blocks(q: Tensor, k: Tensor, v: Tensor, row: Layout) -> Tensor:
    """The trainer's kernel elsewhere: padded blocks."""
    return _of_trainer(q, k, v, row, "sdpa")


def _of_trainer(q: Tensor, k: Tensor, v: Tensor, row: Layout, kernel: Any) -> Tensor:
    inputs = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    output, _ = packed_attention(nn.Identity(), *inputs, None, packed=row, kernel=kernel)
    return output[0]


def fa3(q: Tensor, k: Tensor, v: Tensor, row: Layout) -> Tensor:
    """FlashAttention-3, from a package of its own."""
    interface = _package("flash_attn_interface")
    longest = max(row.lengths)
    found = interface.flash_attn_varlen_func(q, k, v, row.boundaries, row.boundaries, longest, longest, causal=True)
    return found[0] if isinstance(found, tuple) else found


def fa4(q: Tensor, k: Tensor, v: Tensor, row: Layout) -> Tensor:
    """FlashAttention-4, from a package of its own; its fourth positional argument is another one than FlashAttention-3's."""
    interface, longest = _package("flash_attn.cute"), max(row.lengths)
    found = interface.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=row.boundaries,
        cu_seqlens_k=row.boundaries,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
    )
    return found[0] if isinstance(found, tuple) else found


def cudnn(q: Tensor, k: Tensor, v: Tensor, row: Layout) -> Tensor:
    """cuDNN's, over a row of sequences of one length."""
    if not q.is_cuda:
        raise UnavailableError("CUDA only")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return of_one_length(q, k, v, row.lengths)


def of_one_length(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """torch's own attention with the row cut into a batch."""
    if len(set(lengths)) > 1:
        raise UnavailableError("sequences of one length only")
    q, k, v = (tensor.unflatten(0, (len(lengths), lengths[0])).transpose(1, 2) for tensor in (q, k, v))
    output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return output.transpose(1, 2).flatten(0, 1)


def flex(q: Tensor, k: Tensor, v: Tensor, row: Layout) -> Tensor:
    """flex_attention, compiled on CUDA, with a mask of blocks made once per row."""
    if q.requires_grad and not q.is_cuda:
        raise UnavailableError("CUDA only: no backward elsewhere")
    inputs = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    mask = _block_mask(row.lengths, q.device)
    return _flex(q.is_cuda)(*inputs, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


@cache
def _block_mask(lengths: tuple[int, ...], device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    owner = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (owner[query] == owner[key]) & (query >= key)

    # A mask of all pairs of 65k tokens takes 4 GiB; compiled, it is never made.
    return create_block_mask(seen, None, None, len(owner), len(owner), device=device, _compile=device.type == "cuda")


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"no {name}: {error}") from error


KERNELS: dict[str, Kernel] = {
    "varlen (trainer)": trainer_varlen,
    "fa3": fa3,
    "fa4": fa4,
    "cudnn": cudnn,
    "flex": flex,
    "blocks (trainer)": trainer_blocks,
}
"""In order of worth."""
