"""Attention over packed rows without attention between sequences, as an attention function of transformers.

A row is `[1, T]` and contains several concatenated sequences. The package `attention` has the kernels and their selection.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rlrun.config.models.parallel import AttentionKernel
from rlrun.fit.attention_kernels import BACKENDS, Feature, Kernel, Needs, choose_kernel
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.attention.compute import attend
from rlrun.trainer.modeling.attention.installed import read_machine
from rlrun.trainer.modeling.attention.packed_layout import Block, Context, Layout, Scores, part_layout, row_layout
from rlrun.trainer.modeling.parallel.collectives import gather_parts
from rlrun.trainer.modeling.recurrent import packing_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "NAME",
    "Block",
    "Context",
    "Layout",
    "implementation_name",
    "is_traced",
    "kernel_of",
    "observed_features",
    "packed_attention",
    "part_layout",
    "register_attention",
    "row_layout",
    "set_kernel",
]

NAME = "rlrun_packed"
_NEUTRAL = frozenset({"position_ids", "cache_position", "logits_to_keep"})
"""Keywords that models pass to their attention and that do not change its result."""
_NEUTRAL_VALUES = {"is_causal": True, "return_dict": True, "dropout": 0.0}
"""Values of other keywords that do not change the result; False for all keywords that are not listed."""
_SUFFIXES: Mapping[Kernel, str] = {
    kernel: {"sdpa": "blocks", "flash2": "fa2"}.get(kernel, kernel) for kernel in BACKENDS
}
"""Suffixes of registered names; transformers interprets names with `sdpa` or `flash` as its own kernels."""
TRACED: frozenset[Kernel] = frozenset({"fa3", "fa4", "flash2", "varlen"})
"""Kernels that can be part of a compiled layer: operations of torch with the row's boundaries as a tensor argument."""
_observed: ContextVar[set[Feature] | None] = ContextVar("observed", default=None)


@dataclass(frozen=True)
class _AttentionOptions:
    """Keywords of a model's attention that change its result."""

    packed: Layout | None = None
    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None


_READ = tuple(option.name for option in fields(_AttentionOptions))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kernel: AttentionKernel = "auto",
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence of a row.

    Args:
        query: queries `[1, heads, T, D]`; key and value are `[1, key-value heads, T, D]`. With a context layout they are a part of the
            row.
        kernel: attention kernel; auto: see `choose_kernel`.
        options: keyword arguments of the model's attention. `packed`: layout of the row, which the model passes on. `scaling`: factor of
            the scores; default: D^-0.5. `sliding_window`: number of tokens visible to a query, including itself; default: all. `softcap`:
            soft cap, see `Scores`. `s_aux`: sinks of `Scores`, `[heads]`. No other argument may change the result.

    Returns:
        Output `[1, T, heads, D]`, and None for the weights.

    Raises:
        RoleError: the model's attention has an unsupported option; the message contains its name.
    """
    read = _AttentionOptions(**{name: options.pop(name) for name in _READ if name in options})
    if read.packed is None:
        raise RoleError(
            f"its layers do not pass the row's layout to their attention ({type(module).__name__})",
            exit_codes.CONFIGURATION,
        )
    _refuse_unread(module, attention_mask, options)
    scale = query.shape[3] ** -0.5 if read.scaling is None else read.scaling
    scores = Scores(scale, read.sliding_window, read.softcap or None, read.s_aux)
    if torch.compiler.is_compiling() and kernel != "auto":  # `set_kernel` excludes sinks and context parallelism here
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return attend(kernel, q, k, v, read.packed.segments, scores)[None], None
    return _run_eager(query, key, value, read.packed, kernel, scores), None


def _run_eager(
    query: Tensor, key: Tensor, value: Tensor, packed: Layout, kernel: AttentionKernel, scores: Scores
) -> Tensor:
    """Compute attention outside of compiled code, with all features."""
    features = _option_features(query, value, packed, scores)
    if (observed := _observed.get()) is not None:
        observed.update(features)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if packed.context is not None:  # gather keys and values from all context ranks
        together = gather_parts(torch.cat([k, v], dim=-1), packed.context.group)[packed.context.gather]
        k, v = together.split([key.shape[3], value.shape[3]], dim=-1)
    chosen = _of_call(query, features) if kernel == "auto" else kernel
    return attend(chosen, q, k, v, packed.segments, scores)[None]


def _option_features(query: Tensor, value: Tensor, packed: Layout, scores: Scores) -> frozenset[Feature]:
    acts: dict[Feature, bool] = {
        "window": scores.window is not None and scores.window < max(packed.lengths),
        "softcap": scores.softcap is not None,
        "sinks": scores.sinks is not None,
        "value heads": value.shape[3] != query.shape[3],
        "context": packed.context is not None,
    }
    return frozenset(name for name, there in acts.items() if there)


def _of_call(query: Tensor, features: frozenset[Feature]) -> Kernel:
    """Choose the kernel of a call for a model without a selected kernel."""
    if query.is_cuda and query.dtype == torch.float32:
        features |= {"float32"}
    return choose_kernel("auto", Needs(features, query.shape[3]), read_machine(query.device)).kernel


@contextmanager
def observed_features() -> Iterator[set[Feature]]:
    """Collect the kernel features that layers need inside the block, in the yielded set."""
    found: set[Feature] = set()
    token = _observed.set(found)
    try:
        yield found
    finally:
        _observed.reset(token)


def _refuse_unread(module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, object]) -> None:
    """Raise `RoleError` for an unsupported attention option that changes the result."""
    unread = {name: value for name, value in options.items() if name not in _NEUTRAL and value is not None}
    unread = {name: value for name, value in unread.items() if not _changes_nothing(name, value)}
    if attention_mask is not None:
        unread["attention_mask"] = attention_mask
    if unread:
        told = [
            f"{name} ({value})" if isinstance(value, bool | int | float | str) else name
            for name, value in unread.items()
        ]
        raise RoleError(
            f"its attention ({type(module).__name__}) has {', '.join(told)}, which the trainer's attention does not compute",
            exit_codes.CONFIGURATION,
        )


def _changes_nothing(name: str, value: object) -> bool:
    return isinstance(value, bool | int | float) and value == _NEUTRAL_VALUES.get(name, False)


def register_attention() -> None:
    """Register the attention functions in transformers. They get no mask, because the layout replaces it."""
    for kernel in get_args(AttentionKernel):
        function = partial(packed_attention, kernel=kernel)
        # Disabling the compiler for the whole call causes one graph break instead of several inside.
        AttentionInterface.register(implementation_name(kernel, traced=False), torch.compiler.disable(function))
        if kernel in TRACED:
            AttentionInterface.register(implementation_name(kernel), function)


def implementation_name(kernel: AttentionKernel, *, traced: bool = True) -> str:
    """Return the `attn_implementation` name of a kernel in transformers.

    Args:
        kernel: attention kernel.
        traced: False excludes the call from compiled code, even for a kernel that supports it.
    """
    if kernel == "auto":
        return NAME
    return f"{NAME}_{_SUFFIXES[kernel]}" + ("_apart" if kernel in TRACED and not traced else "")


def set_kernel(model: PreTrainedModel, kernel: Kernel, features: Collection[Feature], *, cp: int) -> None:
    """Set the attention kernel of a model's layers.

    Args:
        model: model, changed in place.
        kernel: selected kernel.
        features: required features; sinks are computed outside of compiled code.
        cp: number of context parallel ranks; their exchange is outside of compiled code too.
    """
    # A layer with divided mixers is compiled in parts, so its attention stays outside of them too.
    traced = "sinks" not in features and cp == 1 and packing_of(model) != "mixer"
    model.set_attn_implementation(implementation_name(kernel, traced=traced))


def kernel_of(model: PreTrainedModel) -> AttentionKernel:
    """Return the attention kernel of a model; auto means that each call chooses."""
    name = model.config._attn_implementation.removesuffix("_apart")
    return next(kernel for kernel in get_args(AttentionKernel) if implementation_name(kernel) == name)


def is_traced(model: PreTrainedModel) -> bool:
    """Return whether attention can be part of a model's compiled layers."""
    return any(implementation_name(kernel) == model.config._attn_implementation for kernel in TRACED)
