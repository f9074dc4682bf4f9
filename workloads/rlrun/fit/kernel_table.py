"""Attention kernels as data: features, devices and packages of each, and the order of `auto`. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Feature = Literal["window", "softcap", "sinks", "value heads", "float32", "context"]
Kernel = Literal["fa3", "fa4", "flash2", "cudnn", "varlen", "flex", "sdpa"]
"""A kernel: `AttentionKernel` without `auto`."""
FEATURES: Mapping[Feature, str] = {
    "window": "a sliding window",
    "softcap": "soft-capped scores",
    "sinks": "sinks",
    "value heads": "values of another head size than keys",
    "float32": "computeDtype float32",
    "context": "rows that ranks share (parallelism.cp)",
}
"""Requirements on a kernel, as text after "the model's attention has"."""


@dataclass(frozen=True)
class Package:
    """A package that provides a kernel."""

    module: str
    """Module to import."""
    functions: Mapping[str, tuple[str, ...]]
    """Functions to call, with their arguments."""
    distributions: tuple[str, ...]
    """Possible names of the distribution, which has the version."""
    install: str
    """Command or instruction to install it."""
    operations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Operations that the import registers with torch, with the arguments that are used."""


@dataclass(frozen=True)
class Backend:
    """Capabilities of one kernel."""

    features: frozenset[Feature]
    head_dims: int | None
    """Largest head size; None: unlimited."""
    capabilities: tuple[int, int] | None
    """First and last major CUDA compute capability; None: any device."""
    package: Package | None = None
    head_step: int = 1
    """Divisor of supported head sizes. A package's kernel is also tested with the model's size."""


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
"""The two operations have the same arguments in all versions since April 2025; the Python functions around them have not."""
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
"""The two functions that torch's own adapter to FlashAttention 4 calls. The public function has no gradient of sinks, and its backward
pass over packed rows refuses soft caps."""

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
"""Order of `auto` by major compute capability; the first matching range counts. Other devices use `sdpa`. cuDNN is used only by name,
because it creates a new plan for every shape, which would delay rows of changing lengths."""
