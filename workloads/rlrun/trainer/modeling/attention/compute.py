"""The one call of attention, whatever computes it."""

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
    """Causal attention within each segment.

    Args:
        kernel: what computes it; it has to support the options (`table.BACKENDS`), which `choose` sees to.
        query: `[queries, heads, D]`, the segments' end to end.
        key: `[keys, key-value heads, D]`; value `[keys, key-value heads, V]`. Query heads share them in equal groups.
        segments: the pairs of queries and keys.
        scores: the layer's options.

    Returns:
        `[queries, heads, V]`.
    """
    # A window that ends nothing goes, so that kernels without windows do; not in compiled code, which would be another for every length.
    if scores.window is not None and not torch.compiler.is_compiling() and scores.window >= segments.longest_key:
        scores = replace(scores, window=None)
    if scores.sinks is not None and scores.sinks.shape != (query.shape[1],):
        raise ValueError(f"sinks of shape {list(scores.sinks.shape)} for {query.shape[1]} heads")
    return FUNCTIONS[kernel](query, key, value, segments, scores)
