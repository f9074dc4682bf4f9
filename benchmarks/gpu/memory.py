"""The memory of a step, and the activation mode with the least work that fits: no row is measured that is known to fail.

    bytes = constant + peak + kept per token and layer * layers * tokens

Constant: float32 masters, gradients and Adam's moments, copies in bfloat16, CUDA itself. Peak: a chunk of logits, backward of attention,
one layer made again. Estimates for one H100 and Qwen3-0.6B, until `memory.txt` of a run says better.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.shapes import Shape

GIB = 2**30
CONSTANT, PEAK = 12 * GIB, 9 * GIB
KEPT = {
    ("none", False): 70_000,
    ("none", True): 40_000,
    ("selective", False): 30_000,
    ("selective", True): 30_000,
    ("attention", False): 6_100,
    ("attention", True): 6_100,
    ("full", False): 2_000,
    ("full", True): 2_000,
}
"""(activationCheckpointing, compile) -> bytes kept per token and layer, at a hidden size of 1024. In order of the work that they repeat."""
USABLE = 78 * GIB
"""Usable memory of an H100 with 80 GB, in bytes."""


def needed(shape: Shape, tokens: int, mode: str, compiled: bool) -> float:
    """Bytes of a step on rows of so many tokens."""
    return CONSTANT + PEAK + KEPT[mode, compiled] * (shape.hidden / 1024) * shape.layers * tokens


def fitting(shape: Shape, tokens: int, *, compiled: bool, offered: Sequence[str], usable: float = USABLE) -> str | None:
    """The first mode of the table that fits and that the trainer offers; None where none does."""
    for mode, compiles in KEPT:
        if compiles == compiled and mode in offered and needed(shape, tokens, mode, compiled) <= usable:
            return mode
    return None
