"""Kernels of packages that have a differentiable function for packed rows: FlashAttention 3 (`fa3`) and 2 (`flash2`).

Both register their forward pass as an operation of torch, so that activation checkpointing and the compiler see it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import Tensor

from rlrun.fit.kernel_table import FA3, FLASH2, Kernel, Package
from rlrun.trainer.modeling.attention.layout import Segments
from rlrun.trainer.modeling.attention.scores import Scores


def fa3(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """`flash_attn_interface.flash_attn_varlen_func`; arguments as of `compute.attend`."""
    return _varlen(FA3, query, key, value, segments, scores)


def flash2(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """`flash_attn.flash_attn_varlen_func`; arguments as of `compute.attend`."""
    return _varlen(FLASH2, query, key, value, segments, scores)


_Function = Callable[..., Tensor | tuple[Tensor, ...]]
_loaded: dict[str, _Function] = {}
"""The packages' functions, by module. The compiler follows a look-up in a table, and no import."""


def load(kernel: Kernel) -> None:
    """Import a kernel's package before the first call, if it has one here."""
    package = {"fa3": FA3, "flash2": FLASH2}.get(kernel)
    if package is not None:
        _load(package)


def _load(package: Package) -> None:
    (name,) = package.functions
    _loaded[package.module] = getattr(importlib.import_module(package.module), name)


def _varlen(package: Package, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    if package.module not in _loaded:
        _load(package)
    found = _loaded[package.module](
        query,
        key,
        value,
        cu_seqlens_q=segments.query_ends,
        cu_seqlens_k=segments.key_ends,
        max_seqlen_q=segments.longest_query,
        max_seqlen_k=segments.longest_key,
        softmax_scale=scores.scale,
        causal=True,
        window_size=(-1 if scores.window is None else scores.window - 1, 0),  # a window counts the token itself
        softcap=scores.softcap or 0.0,
    )
    return found[0] if isinstance(found, tuple) else found  # versions of 2024 give sums of exponentials beside it
