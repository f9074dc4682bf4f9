"""Entry point of attention for all kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlrun.fit.kernel_table import Kernel
from rlrun.trainer.modeling.attention import blocks, flash, flex, packages
from rlrun.trainer.modeling.attention.layout import Segments
from rlrun.trainer.modeling.attention.scores import Scores

Function = Callable[[Tensor, Tensor, Tensor, Segments, Scores], Tensor]
FUNCTIONS: Mapping[Kernel, Function] = {
    "fa3": flash.fa3,
    "fa4": flash.fa4,
    "flash2": packages.flash2,
    "cudnn": blocks.cudnn,
    "varlen": flash.varlen,
    "flex": flex.flex,
    "sdpa": blocks.sdpa,
}


def attend(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Compute causal attention within each segment.

    Args:
        kernel: attention kernel, which must support the options (`kernel_table.BACKENDS`); `choose_kernel` ensures this.
        query: queries of all segments, concatenated, `[queries, heads, D]`.
        key: keys `[keys, key-value heads, D]`; value is `[keys, key-value heads, V]`. Equal groups of query heads share them.
        segments: pairs of query and key ranges.
        scores: options of the layer.

    Returns:
        Output `[queries, heads, V]`.
    """
    # Remove a window that excludes no key, so that kernels without windows work; not in compiled code, which would be recompiled per
    # length.
    if scores.window is not None and not torch.compiler.is_compiling() and scores.window >= segments.longest_key:
        scores = replace(scores, window=None)
    if scores.sinks is not None and scores.sinks.shape != (query.shape[1],):
        raise ValueError(f"sinks of shape {list(scores.sinks.shape)} for {query.shape[1]} heads")
    return FUNCTIONS[kernel](query, key, value, segments, scores)
