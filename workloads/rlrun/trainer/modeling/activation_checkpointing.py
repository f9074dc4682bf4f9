"""Activations of a decoder layer that are kept for backward: all, its input alone, results of some operations, or all elsewhere.

Changes memory and time, never numbers. The layer's `forward` is replaced inside of FSDP's hooks, so that a layer's parameters are
gathered once for backward and its second forward alike.
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
"""Operations whose results a mode keeps; those that this installation does not have are left out."""


def keep_activations(layer: nn.Module, mode: ActivationMode, offload: Offload | None = None) -> None:
    """Make a decoder layer keep its activations so, in place.

    Args:
        layer: of the model.
        mode: what is kept where.
        offload: shared by the layers of a model, for mode `offload`; default: one of this layer.
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
    """The operations of these names (`namespace::name`) that are registered, with every overload of each."""
    with suppress(ImportError):
        import torch.nn.attention.varlen  # registers its operation when it is imported
    packets = [getattr(getattr(torch.ops, space), name, None) for space, name in (full.split("::") for full in names)]
    return frozenset(
        getattr(packet, overload)
        for packet in packets
        if packet is not None
        for overload in packet.overloads()
        if "out" not in overload  # such a one writes to a tensor that it is given
    )


def _save_policy(
    kept: frozenset[object], context: object, operation: object, *inputs: object, **keywords: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE
