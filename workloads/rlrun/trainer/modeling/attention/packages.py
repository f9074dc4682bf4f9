"""FlashAttention 2 (`flash2`): the differentiable function of its package for packed rows.

The forward pass is a torch operation, so it is visible to activation checkpointing and the compiler.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import Tensor

from rlrun.fit.kernel_table import FLASH2, Kernel
from rlrun.trainer.modeling.attention.layout import Segments
from rlrun.trainer.modeling.attention.scores import Scores

_loaded: list[Callable[..., Tensor | tuple[Tensor, ...]]] = []
"""Function of the package. The compiler can trace a look-up in a list, but not an import."""


def load_package(kernel: Kernel) -> None:
    """Import the package of a kernel before its first call; no effect for other kernels."""
    if kernel == "flash2":
        (name,) = FLASH2.functions
        _loaded[:] = [getattr(importlib.import_module(FLASH2.module), name)]


def flash2(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Call `flash_attn.flash_attn_varlen_func`; for the arguments see `compute.attend`."""
    if not _loaded:
        load_package("flash2")
    found = _loaded[0](
        query,
        key,
        value,
        cu_seqlens_q=segments.query_ends,
        cu_seqlens_k=segments.key_ends,
        max_seqlen_q=segments.longest_query,
        max_seqlen_k=segments.longest_key,
        softmax_scale=scores.scale,
        causal=True,
        window_size=(-1 if scores.window is None else scores.window - 1, 0),  # our window includes the token itself
        softcap=scores.softcap or 0.0,
    )
    return found[0] if isinstance(found, tuple) else found  # versions of 2024 also return sums of exponentials
