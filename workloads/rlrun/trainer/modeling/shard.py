"""Sharding of a Hugging Face causal LM over the ranks with FSDP2: float32 master parameters, summed gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.utils.logging import disable_progress_bar

from rlrun.config.layout_rules import compile_problem
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.parallel import ZERO_BUBBLE, ActivationCheckpointing, ActivationMode, GradientAccumulation
from rlrun.config.models.roles import TrainerConfig, TrainerSpec
from rlrun.fit.model_sources import auto_class
from rlrun.fit.trainer_memory import GATHERED_SHARE
from rlrun.hub.folder_weights import weights_problem
from rlrun.hub.refused_models import refuse_other_formats
from rlrun.hub.repository import show_source
from rlrun.model_class import import_model_class
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling import gradient_accumulation, packed_attention
from rlrun.trainer.modeling.activation_checkpointing import (
    NO_COMPILER,
    activation_mode,
    compiled_layers,
    has_compiler,
    keep_activations,
)
from rlrun.trainer.modeling.activation_offload import Offload
from rlrun.trainer.modeling.compile_fallback import compile_layer
from rlrun.trainer.modeling.encoders import encoder_parts, freeze_encoders, text_decoder
from rlrun.trainer.modeling.noise import remove_noise
from rlrun.trainer.modeling.packed_attention import is_traced, kernel_of
from rlrun.trainer.modeling.parallel import sharded_rows
from rlrun.trainer.modeling.parallel.expert_parallel import divide_experts, experts_of
from rlrun.trainer.modeling.parallel.pipeline import postpone_products
from rlrun.trainer.modeling.parallel.pipeline_stages import Elsewhere, keep_stage, second_copy
from rlrun.trainer.modeling.parallel.tensor_parallel import check_family, divide_layers
from rlrun.trainer.modeling.recurrent import divide_mixers, packing_of, pass_rows
from rlrun.trainer.modeling.router_replay import pass_routes, wrap_routers
from rlrun.trainer.modeling.source_config import build_model, source_config
from rlrun.trainer.modeling.tensor_names import remember_names
from rlrun.trainer.ranks.group import Group, ParallelDims


def check_source(config: ModelConfig, source: str) -> None:
    """Check the model's folder before anything is loaded. Headers of its weights are read, but no values.

    Raises:
        RoleError: the folder, its configuration or its weights are missing, or the weights are incomplete or in another format.
    """
    if config.name is not None:
        return
    folder = Path(source)
    if not folder.is_dir():
        raise RoleError(f"model.path: {source} is not a folder", exit_codes.DATA)
    refuse_other_formats(folder, "model.path", source)
    if not (folder / "config.json").is_file():
        raise RoleError(
            f"model.path: {source} has no config.json; it must be a Hugging Face model folder", exit_codes.DATA
        )
    if (problem := weights_problem(folder)) is not None:
        raise RoleError(f"model.path: {problem}", exit_codes.DATA)


def load_model(config: ModelConfig, source: str, *, with_weights: bool = True) -> nn.Module:
    """Load a model in float32 on the CPU, with packed attention; without weights its values are random.

    Raises:
        RoleError: transformers cannot load the model; the message has the reason in one line.
    """
    packed_attention.register_attention()
    disable_progress_bar()
    options: dict[str, Any] = {"revision": config.revision or "main", "trust_remote_code": config.trust_remote_code}
    shape: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": packed_attention.NAME}
    with loading_errors(source):
        architecture = source_config(config, source)
        remove_noise(architecture)
        if with_weights:
            kind = auto_class(architecture) if config.class_ is None else import_model_class(config.class_)
            model = kind.from_pretrained(source, config=architecture, use_safetensors=True, **options, **shape)
        else:
            model = build_model(config, architecture, **shape)
    model.config.use_cache = False
    freeze_encoders(model)
    return model


@contextmanager
def loading_errors(source: str) -> Iterator[None]:
    """Convert errors of transformers and safetensors.

    Raises:
        RoleError: the model cannot be loaded; the message has the reason in one line.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RoleError(f"cannot load the model {show_source(source)}: {reason[0]}", exit_codes.DATA) from error


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the list of decoder layers of any architecture. An encoder may have a list of the same length, so the decoder comes first."""
    count = model.config.get_text_config().num_hidden_layers
    for module in (*text_decoder(model).modules(), *model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise RoleError(f"{type(model).__name__} has no list of {count} decoder layers to shard", exit_codes.DATA)


@dataclass(frozen=True)
class Memory:
    """Options of memory: precision, recomputation, compilation, offload. Only `compute_dtype` changes numbers."""

    compute_dtype: torch.dtype | None = None
    """Number format of forward and backward; master parameters and gradient sums are float32. Default: bfloat16 on CUDA, float32
    elsewhere.
    """
    activations: ActivationCheckpointing = "none"
    """Activation mode; auto needs `run`."""
    compile: bool | None = False
    """Compilation of layers; None selects automatically (`activation_checkpointing.compiled_layers`)."""
    cpu_offload: bool = False
    """Keep master parameters, gradients and optimizer states in host memory."""
    accumulation: GradientAccumulation = "reduce"
    """Accumulation of gradients over micro-batches (`gradient_accumulation`)."""
    run: TrainerConfig | None = None
    """Configuration of the run, for automatic choices by memory (`activation_checkpointing`)."""

    @classmethod
    def from_config(cls, config: TrainerSpec) -> Memory:
        """Read the options from the trainer's configuration."""
        compute = None if config.compute_dtype == "auto" else getattr(torch, config.compute_dtype)
        return cls(
            compute,
            config.activation_checkpointing,
            config.compile,
            config.cpu_offload,
            config.gradient_accumulation,
            config if isinstance(config, TrainerConfig) else None,
        )


def _divide_model(model: nn.Module, layers: Sequence[nn.Module], group: Group) -> None:
    """Divide layers over tensor ranks, experts over expert ranks, and rows over context ranks."""
    dims, meshes = group.dims, group.meshes
    if dims.cp > 1:
        check_family(model, layers, "cp", dims.cp)
    if dims.ep > 1 and any(experts_of(layer) is not None for layer in layers):
        check_family(model, layers, "ep", dims.ep)
    if meshes is None:
        return
    if meshes.tp is not None:
        divide_layers(model, layers, meshes.tp)
    dealt = dims.pp == 1 or any(experts_of(layer) is not None for layer in layers)  # a stage may have only dense layers
    if meshes.experts is not None and dealt:
        divide_experts(layers, meshes.experts, meshes.tp)
    sharded_rows.attach_division(model, meshes)


def shard_model(model: nn.Module, group: Group, *, memory: Memory | None = None) -> nn.Module:
    """Shard the model by the group's layout, in place.

    Gradients are summed over the ranks, not averaged, because each rank's loss is already divided by the global token count.

    Args:
        model: model with float32 parameters, on the CPU or on meta.
        group: all ranks, with their layout.
        memory: options of memory. Default: keep everything on the device.

    Raises:
        RoleError: the model cannot be divided by the layout; the message has the field and the model's size.
    """
    # Divide the model first: stages, then tensors, experts and rows. FSDP shards the remaining parts.
    remember_names(model)
    memory = memory or Memory()
    dims, stack = group.dims, decoder_layers(model)
    policy = _mixed_precision(memory, group.device)
    _keep_own_stage(model, stack, group, policy.param_dtype or torch.float32)
    layers = [layer for layer in stack if not isinstance(layer, Elsewhere)]
    _divide_model(model, layers, group)
    # Before FSDP: delayed gradients replace forward methods, and memory checks need unsharded sizes.
    if dims.schedule in ZERO_BUBBLE:
        postpone_products(model, layers)
    stays = _stays_gathered(model, policy, group)
    _check_and_sum(model, memory, group, stays_gathered=stays)
    recipe = _sharding_recipe(model, memory, group)
    offload = CPUOffloadPolicy() if memory.cpu_offload else OffloadPolicy()
    placement = _choose_dimension(memory, dims.fsdp)
    _wrap_layers(model, layers)
    # Each layer is one FSDP unit; its experts are a separate unit over their own mesh.
    for layer in layers:
        _keep_and_compile(layer, recipe)
        experts = experts_of(layer)
        if experts is not None and dims.ep > 1:
            assert group.meshes is not None
            fully_shard(experts, mesh=group.meshes.expert_copies, mp_policy=policy, offload_policy=offload)
        fully_shard(
            layer,
            mesh=group.mesh,
            reshard_after_forward=not stays,
            mp_policy=policy,
            offload_policy=offload,
            shard_placement_fn=placement,
        )
    if packing_of(model) == "mixer":
        pass_rows(model, layers)
    pass_routes(model, layers)
    outer = group.mesh if group.meshes is None else group.meshes.outer
    # Encoders are separate units: rows of text do not call them, so that they are never gathered for a step. Embedding, last norm and head
    # form the root unit, which is also sharded over tensor ranks.
    for unit in (*encoder_parts(model).values(), model):
        fully_shard(unit, mesh=outer, mp_policy=policy, offload_policy=offload)
    for module in fsdp_modules(model):
        if group.world_size > 1:  # on a single rank FSDP would copy the gradient to divide it by 1
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums
    _move_buffers(model, group.device)
    return model.train()


def _wrap_layers(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Make mixers and routers read the layout and the routes of their row."""
    if packing_of(model) == "mixer":
        divide_mixers(layers)
    wrap_routers(model, layers)


def _keep_own_stage(model: nn.Module, stack: nn.ModuleList, group: Group, dtype: torch.dtype) -> None:
    """Keep only the layers of this rank's pipeline stages."""
    dims, meshes = group.dims, group.meshes
    if meshes is None or dims.pp == 1:
        return
    stage, per_rank = dims.pipeline_position(group.rank), dims.local_stages
    keep_stage(model, stack, stage, dims.pp, per_rank=per_rank, schedule=dims.schedule, group=meshes.pp, dtype=dtype)


def _check_and_sum(model: nn.Module, memory: Memory, group: Group, *, stays_gathered: bool) -> None:
    """Check that the machine supports the options, then configure gradient accumulation."""
    dims = group.dims
    if memory.compile:
        check_compiler(dims)
    gradient_accumulation.check_memory(
        model,
        memory.accumulation,
        shards=dims.fsdp * dims.tp,
        offloaded=memory.cpu_offload,
        available=gradient_accumulation.device_memory(group.device),
    )
    gradient_accumulation.attach_gradients(model, memory.accumulation, stays_gathered=stays_gathered)


@dataclass(frozen=True)
class _Recipe:
    """Changes of each layer before sharding."""

    mode: ActivationMode
    offloaded: Offload
    compiles: bool
    inside: bool
    """Whether the compiled code of a layer contains its activation checkpoint."""
    asked: bool
    """Whether `trainer.compile` is set to true, not selected automatically."""


def _sharding_recipe(model: nn.Module, memory: Memory, group: Group) -> _Recipe:
    mode, offloaded = activation_mode(memory.activations, memory.run, model.config, group), Offload()
    inside = _checkpoint_inside(model, mode)
    compiles = compiled_layers(memory.compile, mode, model, group)
    if memory.compile and not inside:
        _warn_of_hidden_products(model, memory, mode, group)
    return _Recipe(mode, offloaded, compiles, inside, asked=bool(memory.compile))


def _keep_and_compile(layer: nn.Module, recipe: _Recipe) -> None:
    """Apply the activation mode and compilation to a layer."""
    if recipe.compiles and not recipe.inside:
        compile_layer(layer, asked=recipe.asked)
    keep_activations(layer, recipe.mode, recipe.offloaded)
    if recipe.compiles and recipe.inside:
        compile_layer(layer, asked=recipe.asked)


def _stays_gathered(model: nn.Module, policy: MixedPrecisionPolicy, group: Group) -> bool:
    """Return whether a single GPU keeps its parameters in the compute dtype for the backward pass instead of converting them again."""
    if group.world_size > 1 or group.device.type != "cuda" or policy.param_dtype is None:
        return False
    copies: int = policy.param_dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
    return copies * GATHERED_SHARE <= gradient_accumulation.device_memory(group.device)


def _warn_of_hidden_products(model: nn.Module, memory: Memory, mode: str, group: Group) -> None:
    """Warn that the mode `selective` recomputes products if the checkpoint is outside of compiled code."""
    if mode == "selective" and group.leads:
        logger.warning(
            f"trainer.compile (true) hides the products from activationCheckpointing ({memory.activations}) with attention "
            f"{kernel_of(model)}, so they are recomputed"
        )


def _choose_dimension(memory: Memory, ranks: int) -> Callable[[nn.Parameter], Shard | None] | None:
    """Return the function that selects the sharded dimension of a parameter: the first, unless it has fewer entries than ranks.

    A mixture has few experts: with more ranks than experts, sharding the first dimension would leave ranks without experts and save no
    memory on others.
    """

    if memory.run is not None and memory.run.optimizer.moments == "int8":
        return None  # 8-bit moments need complete rows

    def choose(parameter: nn.Parameter) -> Shard | None:
        if isinstance(parameter, DTensor) or parameter.shape[0] >= ranks:
            return None
        return next((Shard(dim) for dim in range(1, parameter.ndim) if parameter.shape[dim] % ranks == 0), None)

    return choose


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the device of the parameters."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)


def _checkpoint_inside(model: nn.Module, mode: ActivationMode) -> bool:
    """Return whether the checkpoint of a layer is compiled with it, as one graph that contains all operations."""
    return mode in ("full", "selective", "attention") and is_traced(model)


def _mixed_precision(memory: Memory, device: torch.device) -> MixedPrecisionPolicy:
    compute = memory.compute_dtype
    if compute is None:
        compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    if compute == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def check_compiler(dims: ParallelDims) -> None:
    """Check that compilation is possible.

    Raises:
        RoleError: the C++ compiler is missing, or the layout does not support compilation; the message contains a fix.
    """
    problem = compile_problem(dims.tp, later_weights=dims.schedule in ZERO_BUBBLE)
    if problem is not None:
        raise RoleError(f"trainer.compile (true) {problem}", exit_codes.CONFIGURATION)
    if not has_compiler():
        raise RoleError(
            f"trainer.compile (true) needs a C++ compiler, but {NO_COMPILER}; set compile: false, or add a compiler to the trainer's image",
            exit_codes.CONFIGURATION,
        )


def counts_here(model: nn.Module, parameter: Tensor) -> bool:
    """Return whether this rank's part of a parameter counts in a sum over all ranks; of several ranks with the same part only the first
    counts.
    """
    if not isinstance(parameter, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    mesh = parameter.device_mesh
    if parameter is second_copy(model):
        return False
    coordinate = mesh.get_coordinate() or ()
    copies = [at for at, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate()]
    meshes = sharded_rows.meshes_of(model)
    if meshes is not None and meshes.tp is not None and mesh.size() < meshes.dims.stage_size:
        copies.append(meshes.tp.get_local_rank())  # not divided over the tensor ranks, so each has the same part
    return not any(copies)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP shards as units, the root first."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a distributed tensor, or a plain tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
