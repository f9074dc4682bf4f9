"""What of a decoder layer's forward pass is kept for backward: all of it, its input alone, the expensive part, or all of it elsewhere.

Changes memory and time, never numbers. The layer's `forward` is replaced inside of FSDP's hooks, so that a layer's parameters are
gathered once for backward and its second forward alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rlrun.config.parallel import ActivationCheckpointing

_aten = torch.ops.aten
EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._flash_attention_forward.default,
}
"""Operations whose results `selective` keeps."""


def keep_activations(layer: Any, mode: ActivationCheckpointing) -> None:
    """Make a decoder layer keep its activations so, in place."""
    if mode == "none":
        return
    forward: Callable[..., Any] = layer.forward
    if mode == "offload":
        layer.forward = partial(_on_host, forward, layer)
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    layer.forward = partial(_again, forward, options)


def _again(forward: Callable[..., Any], options: dict[str, Any], *inputs: Any, **keywords: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **keywords)
    return checkpoint(forward, *inputs, **options, **keywords)


def _policy(context: Any, operation: Any, *inputs: Any, **keywords: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _on_host(forward: Callable[..., Any], layer: nn.Module, *inputs: Any, **keywords: Any) -> Any:
    # Parameters are saved for backward too, and FSDP frees and gathers them itself.
    weights = {_local(parameter).untyped_storage().data_ptr() for parameter in layer.parameters()}

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor] | Tensor:
        if isinstance(tensor, nn.Parameter | DTensor) or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        pinned = tensor.is_cuda
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        host.copy_(tensor, non_blocking=pinned)
        return tensor.device, host

    def unpack(kept: tuple[torch.device, Tensor] | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, host = kept
        return host.to(device, non_blocking=host.is_pinned())

    with saved_tensors_hooks(pack, unpack):
        return forward(*inputs, **keywords)


def _local(parameter: Tensor) -> Tensor:
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local
