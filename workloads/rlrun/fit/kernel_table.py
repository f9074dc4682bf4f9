"""Kernels of attention as data: features, devices and packages of each, and the order in which they are tried. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Feature = Literal["window", "softcap", "sinks", "value heads", "float32", "context"]
Kernel = Literal["fa3", "fa4", "flash2", "cudnn", "varlen", "flex", "sdpa"]
"""A kernel; `AttentionKernel` without `auto`."""
FEATURES: Mapping[Feature, str] = {
    "window": "a sliding window",
    "softcap": "soft-capped scores",
    "sinks": "sinks",
    "value heads": "values of another head size than keys",
    "float32": "computeDtype float32",
    "context": "rows that ranks share (parallelism.cp)",
}
"""Demands on a kernel, in words that follow "does not compute"."""


@dataclass(frozen=True)
class Package:
    """A package that a kernel comes from."""

    module: str
    """Module that is imported."""
    functions: Mapping[str, tuple[str, ...]]
    """Functions that are called, and the arguments by which they are."""
    distributions: tuple[str, ...]
    """Names under which it may be installed; they have the version."""
    install: str
    """Way to get it."""
    operations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Operations that its import registers with torch, and their arguments that are used."""


@dataclass(frozen=True)
class Backend:
    """Abilities of one kernel."""

    features: frozenset[Feature]
    head_dims: int | None
    """Largest size of a head; None: any."""
    capabilities: tuple[int, int] | None
    """First and last major compute capability of CUDA; None: any device."""
    package: Package | None = None
    head_step: int = 1
    """Sizes of heads are multiples of this. A package's kernel is tried with the model's size besides."""


_VARLEN_FUNCTION = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal")
FLASH2 = Package(
    "flash_attn",
    {"flash_attn_varlen_func": (*_VARLEN_FUNCTION, "window_size", "softcap")},
    ("flash-attn", "flash_attn"),
    "pip install --no-build-isolation 'flash-attn>=2.8'",
)
_OPERATION3 = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal", "softcap")
FA3 = Package(
    "flash_attn_interface",
    {},
    ("flash-attn-3", "flash_attn_3"),
    "build hopper/ of flash-attention 3.0.0 for this torch (python setup.py install)",
    {
        "flash_attn_3::fwd": (*_OPERATION3, "window_size_left", "window_size_right", "num_splits"),
        "flash_attn_3::bwd": (*_OPERATION3, "window_size_left", "window_size_right", "dq", "dk", "dv", "deterministic"),
    },
)
"""The two operations take the same arguments in all versions since April 2025; the Python functions around them do not."""
_FLASH4_ARGUMENTS = ("cu_seqlens_q", "cu_seqlens_k", "softmax_scale", "causal", "window_size_left", "window_size_right")
FA4 = Package(
    "flash_attn.cute.interface",
    {
        "_flash_attn_fwd": (*_FLASH4_ARGUMENTS, "max_seqlen_q", "max_seqlen_k", "return_lse"),
        "_flash_attn_bwd": _FLASH4_ARGUMENTS,
    },
    ("flash-attn-4", "flash_attn_4"),
    "pip install --pre 'flash-attn-4>=4.0.0b4,<5'",
)
"""The two functions are those that torch's own adapter to FlashAttention 4 calls. The public one has no gradient of sinks, and its
backward pass over packed rows refuses soft caps."""

BACKENDS: Mapping[Kernel, Backend] = {
    "fa3": Backend(frozenset({"window", "softcap", "sinks", "context"}), 256, (9, 9), FA3, 8),
    "fa4": Backend(frozenset({"window", "sinks", "context"}), 128, (9, 11), FA4, 8),
    "flash2": Backend(frozenset({"window", "softcap", "context"}), 256, (8, 12), FLASH2),
    "cudnn": Backend(frozenset(), 128, (8, 12), head_step=8),
    "varlen": Backend(frozenset({"window", "sinks", "context"}), 256, (8, 12), head_step=8),
    "flex": Backend(frozenset({"window", "softcap", "sinks", "value heads", "float32", "context"}), 256, (8, 12)),
    "sdpa": Backend(frozenset({"window", "softcap", "sinks", "value heads", "float32", "context"}), None, None),
}
ORDER: tuple[tuple[range, tuple[Kernel, ...]], ...] = (
    (range(9, 10), ("fa3", "fa4", "varlen", "flash2", "flex", "sdpa")),
    (range(10, 12), ("fa4", "varlen", "flash2", "flex", "sdpa")),
    (range(8, 13), ("varlen", "flash2", "flex", "sdpa")),
)
"""Order of `auto` by major compute capability, the first range that has it; elsewhere `sdpa`. cuDNN plans anew for every shape, which rows
of changing lengths would wait for: it is taken by name alone."""
