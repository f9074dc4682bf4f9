"""Activation checkpointing of decoder layers: keep all activations, only the input, results of some operations, or all in host memory.

It changes memory and time, never numbers. The layer's `forward` is replaced inside of FSDP's hooks, so that the layer's parameters are
gathered only once for backward and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rlrun.config.models.parallel import ActivationMode
from rlrun.trainer.modeling.activation_offload import Forward, Offload

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_grouped_mm")
_ATTENTION = (
    "torch_attn::_varlen_attn",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "rlrun::flash_attention_3",
    "rlrun::flash_attention_4",
)
_KEPT: dict[ActivationMode, tuple[str, ...]] = {
    "selective": (*_PRODUCTS, *_ATTENTION),
    "attention": _ATTENTION,
}
"""Operations whose results a mode keeps; missing operations of this installation are ignored."""


def keep_activations(layer: nn.Module, mode: ActivationMode, offload: Offload | None = None) -> None:
    """Apply an activation mode to a decoder layer, in place.

    Args:
        layer: decoder layer of the model.
        mode: activation mode.
        offload: object shared by all layers of a model, for mode `offload`. Default: a new one for this layer.
    """
    if mode == "none":
        return
    forward: Forward = layer.forward
    if mode == "offload":
        layer.forward = partial((offload or Offload()).run, forward, layer)
        return
    options: dict[str, object] = {"use_reentrant": False}
    if mode in _KEPT:
        policy = partial(_save_policy, find_operations(_KEPT[mode]))
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    layer.forward = partial(_recompute_again, forward, options)


def _recompute_again(forward: Forward, options: dict[str, object], *inputs: object, **keywords: object) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*inputs, **keywords)
    return checkpoint(forward, *inputs, **options, **keywords)


def find_operations(names: Iterable[str]) -> frozenset[object]:
    """Return the registered operations of the given names (`namespace::name`), with all overloads."""
    with suppress(ImportError):
        import torch.nn.attention.varlen  # the import registers the operation
    packets = [getattr(getattr(torch.ops, space), name, None) for space, name in (full.split("::") for full in names)]
    return frozenset(
        getattr(packet, overload)
        for packet in packets
        if packet is not None
        for overload in packet.overloads()
        if "out" not in overload  # overloads `out` write to an argument
    )


def _save_policy(
    kept: frozenset[object], context: object, operation: object, *inputs: object, **keywords: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE
