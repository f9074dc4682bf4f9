"""Activation checkpointing of decoder layers, and automatic choices before a model is sharded.

A mode keeps all activations, only the input, results of some operations, or all in host memory. It changes memory and time, never numbers.
The layer's `forward` is replaced inside of FSDP's hooks, so that the layer's parameters are gathered only once for backward and
recomputation.

The automatic choices are the activation mode by memory (the arithmetic of `rlrun fit`), and compilation of layers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig

from rlrun.config.models.parallel import ZERO_BUBBLE, ActivationCheckpointing, ActivationMode
from rlrun.config.models.roles import TrainerConfig
from rlrun.fit.architecture import Architecture, ShapeError, from_config
from rlrun.fit.model_sources import UnknownModelError, shape_of
from rlrun.fit.trainer_memory import ChosenMode, chosen_mode
from rlrun.trainer.modeling.activation_offload import Forward, Offload
from rlrun.trainer.modeling.gradient_accumulation import device_memory
from rlrun.trainer.modeling.packed_attention import is_traced, kernel_of
from rlrun.trainer.ranks.group import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def activation_mode(
    asked: ActivationCheckpointing, run: TrainerConfig | None, config: PreTrainedConfig, group: Group
) -> ActivationMode:
    """Return the configured mode; for `auto`, rank 0 chooses and logs a mode. All ranks call it together.

    Args:
        asked: value of `trainer.activationCheckpointing`.
        run: configuration whose memory is estimated; None disables the estimate, and auto becomes `none`.
        config: configuration of the model.
        group: all ranks, with equal devices.
    """
    if asked != "auto":
        return asked
    mode, why = group.broadcast(_choose_saved(run, config, group) if group.leads else None)
    if group.leads:
        logger.info(f"activationCheckpointing auto is {mode}: {why}")
    found: ActivationMode = mode
    return found


NO_COMPILER = "this machine has neither g++ nor clang++"


def has_compiler() -> bool:
    """Return whether torch's compiler finds a C++ compiler."""
    return os.environ.get("CXX") is not None or any(shutil.which(name) for name in ("g++", "c++", "clang++"))


def compiled_layers(asked: bool | None, mode: ActivationMode, model: PreTrainedModel, group: Group) -> bool:
    """Return `trainer.compile`; if it is not set, rank 0 chooses and logs a value. All ranks call it together.

    Args:
        asked: value of `trainer.compile`.
        mode: activation mode.
        model: model with its attention kernel set.
        group: all ranks, with equal devices.
    """
    if asked is not None:
        return asked
    problem = group.broadcast(_against_compiling(mode, model, group) if group.leads else None)
    if group.leads:
        kernel = kernel_of(model)
        joined = "attention in it" if is_traced(model) else f"attention {kernel} between compiled parts"
        why = f"on: one graph of every kind of layer, with {joined}" if problem is None else f"off: {problem}"
        logger.info(f"compile is {why}")
    return problem is None


def _against_compiling(mode: ActivationMode, model: PreTrainedModel, group: Group) -> str | None:
    """Return the reason against automatic compilation, or None."""
    if group.device.type != "cuda":
        return "the trainer computes on a CPU"
    if group.dims.tp > 1:
        return f"parallelism.tp ({group.dims.tp}) divides every layer, and torch cannot compile such a layer for rows of all lengths"
    if group.dims.schedule in ZERO_BUBBLE:
        return f"parallelism.schedule ({group.dims.schedule}) splits the backward pass of a layer, which compilation does not allow"
    if not has_compiler():
        return NO_COMPILER
    if mode == "selective" and not is_traced(model):
        return (
            f"attention {kernel_of(model)} runs between compiled parts, which would hide the products from "
            "activationCheckpointing (selective)"
        )
    return None


def _choose_saved(run: TrainerConfig | None, config: PreTrainedConfig, group: Group) -> tuple[ActivationMode, str]:
    if group.device.type != "cuda":
        return "none", "the trainer computes on a CPU"
    if run is None:
        return "none", "the configuration of the run is not available"
    try:
        found = choose_for(run, config, device_memory(group.device))
    except ShapeError as error:
        return "none", f"cannot estimate the memory of this model: {error}"
    return found.mode, found.why


def choose_for(run: TrainerConfig, config: PreTrainedConfig, memory: int) -> ChosenMode:
    """Choose the activation mode of a run.

    Args:
        run: configuration of the trainer.
        config: configuration of the model.
        memory: memory of a GPU, in bytes.
    """
    model = from_config(config.to_dict())
    return chosen_mode(run, model, _reference_shape(run, model), memory=memory, colocated=run.colocated)


def _reference_shape(run: TrainerConfig, model: Architecture) -> Architecture | None:
    """Return the shape of the reference model, or the policy's shape if it is unknown."""
    if run.algorithm.reference is None:
        return None
    chosen = run.algorithm.reference.resolve_model(run.model)
    if chosen is run.model:
        return model
    try:
        return shape_of(chosen, "algorithm.reference.model", count=False)
    except UnknownModelError:
        return model
