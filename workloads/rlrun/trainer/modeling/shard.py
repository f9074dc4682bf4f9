"""Load a Hugging Face causal LM and shard it over the ranks (FSDP2): float32 masters, summed gradients."""

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
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rlrun.config.division import compile_problem
from rlrun.config.models.model import ModelConfig
from rlrun.config.models.parallel import ZERO_BUBBLE, ActivationCheckpointing, ActivationMode, GradientAccumulation
from rlrun.config.models.roles import TrainerConfig, TrainerSpec
from rlrun.fit.trainer import GATHERED_SHARE
from rlrun.hub.pickled import refuse_pickles
from rlrun.hub.repository import show_source
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling import gradient_accumulation, packed_attention
from rlrun.trainer.modeling.activation_checkpointing import keep_activations
from rlrun.trainer.modeling.activation_choice import NO_COMPILER, activation_mode, compiled_layers, has_compiler
from rlrun.trainer.modeling.activation_offload import Offload
from rlrun.trainer.modeling.compiled.fallback import compile_layer
from rlrun.trainer.modeling.noise import remove_noise
from rlrun.trainer.modeling.packed_attention import is_traced, kernel_of
from rlrun.trainer.modeling.parallel import rows
from rlrun.trainer.modeling.parallel.experts import divide_experts, experts_of
from rlrun.trainer.modeling.parallel.later_weights import postpone_products
from rlrun.trainer.modeling.parallel.stages import Elsewhere, keep_stage, second_copy
from rlrun.trainer.modeling.parallel.tensor import check_family, divide_layers
from rlrun.trainer.modeling.tensor_names import remember_names
from rlrun.trainer.ranks.dims import ParallelDims
from rlrun.trainer.ranks.group import Group

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def check_source(config: ModelConfig, source: str) -> None:
    """Look at the model's folder before anything is loaded.

    Raises:
        RoleError: it is missing, has no configuration or no weights, or its weights are pickles; names what is missing.
    """
    if config.name is not None:
        return
    folder = Path(source)
    if not folder.is_dir():
        raise RoleError(f"model.path {source} is not a folder", exit_codes.DATA)
    if not (folder / "config.json").is_file():
        raise RoleError(f"the model folder {source} has no config.json", exit_codes.DATA)
    refuse_pickles(folder, "model.path", source)
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise RoleError(
            f"the model folder {source} has no weights: expected {_WEIGHTS[0]} or {_WEIGHTS[1]}", exit_codes.DATA
        )


def load_model(config: ModelConfig, source: str, *, with_weights: bool = True) -> nn.Module:
    """The model in float32 on the CPU, with packed attention; without weights it is left random, to be filled from a checkpoint.

    Raises:
        RoleError: transformers cannot load it; says why in one line.
    """
    packed_attention.register_attention()
    disable_progress_bar()
    options: dict[str, Any] = {"revision": config.revision or "main", "trust_remote_code": config.trust_remote_code}
    shape: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": packed_attention.NAME}
    with loading_errors(source):
        architecture = AutoConfig.from_pretrained(source, **options)
        remove_noise(architecture)
        if with_weights:
            model = AutoModelForCausalLM.from_pretrained(
                source, config=architecture, use_safetensors=True, **options, **shape
            )
        else:
            model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=config.trust_remote_code, **shape)
    model.config.use_cache = False
    return model


@contextmanager
def loading_errors(source: str) -> Iterator[None]:
    """Report in one line why `transformers` or safetensors cannot load a model.

    Raises:
        RoleError: instead of their error.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RoleError(f"cannot load the model {show_source(source)}: {reason[0]}", exit_codes.DATA) from error


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The stack of decoder layers, wherever the architecture keeps it."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise RoleError(f"{type(model).__name__} has no list of {count} decoder layers to shard", exit_codes.DATA)


@dataclass(frozen=True)
class Memory:
    """Choices of memory: what is kept, recomputed, rounded and offloaded. Only `compute_dtype` changes numbers."""

    compute_dtype: torch.dtype | None = None
    """Number format of forward and backward; masters and gradient sums are float32. None: bfloat16 on CUDA, float32 elsewhere."""
    activations: ActivationCheckpointing = "none"
    """Kept activations; auto needs `run`."""
    compile: bool | None = False
    """True if layers are compiled; None: where it serves (`activation_choice.compiled_layers`)."""
    cpu_offload: bool = False
    """Masters, gradients and the optimizer's state stay in the host's memory."""
    accumulation: GradientAccumulation = "reduce"
    """Place where the gradients of micro-batches are summed (`learning.gradient_accumulation`)."""
    run: TrainerConfig | None = None
    """The whole run, for what is chosen by its memory (`activation_choice`)."""

    @classmethod
    def of(cls, config: TrainerSpec) -> Memory:
        """Choices of the trainer's block."""
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
    """Divide layers over tensor ranks, experts over expert ranks and rows over context ranks."""
    dims, meshes = group.dims, group.meshes
    if dims.cp > 1:
        check_family(model, layers, "cp", dims.cp)
    if dims.ep > 1 and any(experts_of(layer) is not None for layer in layers):
        check_family(model, layers, "ep", dims.ep)
    if meshes is None:
        return
    if meshes.tp is not None:
        divide_layers(model, layers, meshes.tp)
    dealt = dims.pp == 1 or any(
        experts_of(layer) is not None for layer in layers
    )  # a stage may be of dense layers alone
    if meshes.experts is not None and dealt:
        divide_experts(layers, meshes.experts, meshes.tp)
    rows.attach_division(model, meshes)


def shard_model(model: nn.Module, group: Group, *, memory: Memory | None = None) -> nn.Module:
    """Divide the model over the group's ranks by its layout, in place.

    Gradients are summed over the ranks, not averaged: each rank's loss is already divided by the global token count.

    Args:
        model: parameters in float32, on the CPU or on meta.
        group: says the layout.
        memory: what is kept, recomputed and rounded; default: everything kept.

    Raises:
        RoleError: the model cannot be divided so; names the field and the model's size.
    """
    remember_names(model)
    memory = memory or Memory()
    dims, stack = group.dims, decoder_layers(model)
    policy = _mixed_precision(memory, group.device)
    _keep_own_stage(model, stack, group, policy.param_dtype or torch.float32)
    layers = [layer for layer in stack if not isinstance(layer, Elsewhere)]
    _divide_model(model, layers, group)
    if dims.schedule in ZERO_BUBBLE:
        postpone_products(model, layers)
    stays = _stays_gathered(model, policy, group)
    _check_and_sum(model, memory, group, stays_gathered=stays)
    recipe = _sharding_recipe(model, memory, group)
    offload = CPUOffloadPolicy() if memory.cpu_offload else OffloadPolicy()
    placement = _choose_dimension(memory, dims.fsdp)
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
    outer = group.mesh if group.meshes is None else group.meshes.outer
    fully_shard(model, mesh=outer, mp_policy=policy, offload_policy=offload)
    for module in fsdp_modules(model):
        if group.world_size > 1:  # FSDP copies one rank's gradient once more to divide it by 1
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction; dividing by 1 is left out
    _move_buffers(model, group.device)
    return model.train()


def _keep_own_stage(model: nn.Module, stack: nn.ModuleList, group: Group, dtype: torch.dtype) -> None:
    """Leave of the layers those of this rank's pipeline stage."""
    dims, meshes = group.dims, group.meshes
    if meshes is None or dims.pp == 1:
        return
    stage, per_rank = dims.stage(group.rank), dims.local_stages
    keep_stage(model, stack, stage, dims.pp, per_rank=per_rank, schedule=dims.schedule, group=meshes.pp, dtype=dtype)


def _check_and_sum(model: nn.Module, memory: Memory, group: Group, *, stays_gathered: bool) -> None:
    """Refuse what the machine cannot do, then say where the gradients of micro-batches are summed."""
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
    """Treatment of each layer before it is sharded."""

    mode: ActivationMode
    offloaded: Offload
    compiles: bool
    inside: bool
    """A layer's checkpoint is compiled with it."""
    asked: bool
    """`trainer.compile` is true, and not chosen."""


def _sharding_recipe(model: nn.Module, memory: Memory, group: Group) -> _Recipe:
    mode, offloaded = activation_mode(memory.activations, memory.run, model.config, group), Offload()
    inside = _checkpoint_inside(model, mode)
    compiles = compiled_layers(memory.compile, mode, model, group)
    if memory.compile and not inside:
        _warn_of_hidden_products(model, memory, mode, group)
    return _Recipe(mode, offloaded, compiles, inside, asked=bool(memory.compile))


def _keep_and_compile(layer: nn.Module, recipe: _Recipe) -> None:
    """Checkpoint a layer and compile it, inside its checkpoint or with it."""
    if recipe.compiles and not recipe.inside:
        compile_layer(layer, asked=recipe.asked)
    keep_activations(layer, recipe.mode, recipe.offloaded)
    if recipe.compiles and recipe.inside:
        compile_layer(layer, asked=recipe.asked)


def _stays_gathered(model: nn.Module, policy: MixedPrecisionPolicy, group: Group) -> bool:
    """True if a single GPU keeps its layers' copies in the compute dtype for the backward pass instead of making them a second time."""
    if group.world_size > 1 or group.device.type != "cuda" or policy.param_dtype is None:
        return False
    copies: int = policy.param_dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
    return copies * GATHERED_SHARE <= gradient_accumulation.device_memory(group.device)


def _warn_of_hidden_products(model: nn.Module, memory: Memory, mode: str, group: Group) -> None:
    """Say that products are computed again which the mode is to keep, where a compiled layer does not have its checkpoint inside."""
    if mode == "selective" and group.leads:
        logger.warning(
            f"trainer.compile (true) hides the products from activationCheckpointing ({memory.activations}) with attention "
            f"{kernel_of(model)}: they are computed again"
        )


def _choose_dimension(memory: Memory, ranks: int) -> Callable[[nn.Parameter], Shard | None] | None:
    """Choice of the dimension over which a parameter is divided: the first, unless it has fewer entries than there are ranks.

    The experts of a mixture are few: with more ranks than experts every further rank would hold none of them, and the others no less.
    """

    if memory.run is not None and memory.run.optimizer.moments == "int8":
        return None  # its blocks lie in rows

    def choose(parameter: nn.Parameter) -> Shard | None:
        if isinstance(parameter, DTensor) or parameter.shape[0] >= ranks:
            return None
        return next((Shard(dim) for dim in range(1, parameter.ndim) if parameter.shape[dim] % ranks == 0), None)

    return choose


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring buffers to where FSDP has moved the parameters."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)


def _checkpoint_inside(model: nn.Module, mode: ActivationMode) -> bool:
    """True if a layer's checkpoint is compiled with it, which then sees every operation: one graph from end to end, without a break."""
    return mode in ("full", "selective", "attention") and is_traced(model)


def _mixed_precision(memory: Memory, device: torch.device) -> MixedPrecisionPolicy:
    compute = memory.compute_dtype
    if compute is None:
        compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    if compute == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def check_compiler(dims: ParallelDims) -> None:
    """Refuse to compile where the compiler cannot.

    Raises:
        RoleError: there is no compiler, or the layout does not allow it; names the fix.
    """
    problem = compile_problem(dims.tp, later_weights=dims.schedule in ZERO_BUBBLE)
    if problem is not None:
        raise RoleError(f"trainer.compile (true) {problem}", exit_codes.CONFIGURATION)
    if not has_compiler():
        raise RoleError(
            f"trainer.compile (true) needs a C++ compiler, and {NO_COMPILER}; set compile: false, or add a compiler to the trainer's image",
            exit_codes.CONFIGURATION,
        )


def counts_here(model: nn.Module, parameter: Tensor) -> bool:
    """True if this rank's part of a parameter counts in a sum over all ranks: of ranks with the same part, the first."""
    if not isinstance(parameter, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    mesh = parameter.device_mesh
    if parameter is second_copy(model):
        return False
    coordinate = mesh.get_coordinate() or ()
    copies = [at for at, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate()]
    meshes = rows.meshes_of(model)
    if meshes is not None and meshes.tp is not None and mesh.size() < meshes.dims.stage_size:
        copies.append(meshes.tp.get_local_rank())  # not divided over the tensor ranks: each has the same
    return not any(copies)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that FSDP shards as a unit, the root first."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def local_part(tensor: Tensor) -> Tensor:
    """Shard of a distributed tensor on this rank; a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
