"""Sharded loading: the model is built on the meta device and divided, then each rank reads only its slices of the files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from loguru import logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from rlrun.config.model_heads import TEXT_MODEL
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.parallel import AttentionKernel
from rlrun.fit.attention_kernels import Feature
from rlrun.fit.model_sources import auto_class
from rlrun.hub.repository import show_source
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling import packed_attention
from rlrun.trainer.modeling.attention.select import needs_of, select_kernel
from rlrun.trainer.modeling.encoders import freeze_encoders
from rlrun.trainer.modeling.noise import read_noise, remember_noise, remove_noise
from rlrun.trainer.modeling.recurrent import Packing, set_packing
from rlrun.trainer.modeling.router_replay import freeze_routers, set_routing
from rlrun.trainer.modeling.shard import Memory, decoder_layers, loading_errors, local_part, shard_model
from rlrun.trainer.modeling.source_config import build_model, source_config
from rlrun.trainer.modeling.stored.load_plan import make_buffers, plan_tensors
from rlrun.trainer.modeling.stored.stored_tensors import Lazy
from rlrun.trainer.modeling.stored.weight_files import Files, open_files, stored_names
from rlrun.trainer.modeling.tensor_names import remember_names
from rlrun.trainer.ranks.group import Group

_NAMED = 3
"""Maximum number of tensors named in an error message."""


@dataclass(frozen=True)
class Support:
    """Requirements of an architecture that the trainer computes correctly."""

    features: frozenset[Feature]
    """Kernel features that the model's attention needs."""
    packing: Packing
    """Rows with which the model computes correctly."""
    routing_fault: str | None = None
    """Reason why routes of the model cannot be replayed, or None."""


ArchitectureCheck = Callable[[PreTrainedModel, str, Group, int], Support]
"""Architecture check: arguments are model (on meta), source, ranks and longest sequence in tokens; raises `RoleError`."""


@dataclass(frozen=True)
class LoadOptions:
    """Options of a sharded load."""

    with_weights: bool = True
    """Read the weights. False leaves trained parameters undefined, to be loaded from a checkpoint; parameters that the architecture
    freezes (biases of routers), frozen routers, and encoders, are always read, because checkpoints lack them."""
    memory: Memory | None = None
    """Options of memory, see `shard_model`."""
    kernel: AttentionKernel = "auto"
    """Configured attention kernel."""
    prepare: Callable[[nn.Module], object] = lambda model: None
    """Function that changes the model before sharding; parameters that it adds or replaces are undefined."""
    with_routing: bool = False
    """Count the load of experts and replay routes of rows, if the model supports it."""
    freeze_routers: bool = False
    """Freeze the routers of a mixture. Their weights are always read, because checkpoints lack them."""


def load_sharded(
    config: ModelConfig,
    source: str,
    group: Group,
    *,
    seq_len: int,
    check: ArchitectureCheck,
    options: LoadOptions = LoadOptions(),
) -> nn.Module:
    """Load a model in float32, sharded by the group's layout. All ranks call it together.

    Each rank reads only its slices of the files, also of quantized ones.

    Args:
        config: revision of the model, and trust in its code.
        source: folder or name on the hub.
        group: all ranks, with their layout.
        seq_len: longest sequence of the run, in tokens.
        check: architecture check before weights are read (`proof.start_check.check_model`, passed as an argument because `proof` imports
            this package).
        options: weights, memory, attention kernel and preparation.

    Raises:
        RoleError: the model cannot be loaded or divided, or its architecture computes wrong numbers.
    """
    memory, with_weights = options.memory, options.with_weights
    model = model_on_meta(config, source)
    support = check(model, source, group, seq_len)
    features = support.features
    compute_dtype = None if memory is None else memory.compute_dtype
    needs = needs_of(model.config, features)
    chosen = select_kernel(options.kernel, type(model).__name__, needs, group, compute_dtype=compute_dtype)

    def finished(model: nn.Module) -> None:
        set_packing(model, support.packing)
        packed_attention.set_kernel(model, chosen, features, cp=group.dims.cp)
        options.prepare(model)
        if options.with_routing and support.routing_fault is None:
            set_routing(model, decoder_layers(model))

    if options.freeze_routers:
        freeze_routers(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    with loading_errors(source):
        files = open_files(source, _revision_option(config)) if with_weights or frozen else Files({})
    _by_slices(model, files, group, memory, source=source, finish=finished, only=None if with_weights else frozen)
    if files.where and group.leads:
        logger.info(f"read {files.bytes_read / 2**30:.2f} GiB of the weights on rank 0")
    return model


def _by_slices(
    model: PreTrainedModel,
    files: Files,
    group: Group,
    memory: Memory | None,
    *,
    source: str,
    finish: Callable[[nn.Module], None],
    only: Collection[str] | None,
) -> None:
    """Prepare and shard a model on meta, and read this rank's slices of the files.

    `only`: names of the parameters to read. Default: all. Without files the parameters are undefined.
    """
    planned = plan_complete(model, files, source)  # with the names of the whole model, before it is divided
    stored = planned if files.where else model.state_dict()
    unsaved = {name for name, _ in model.named_buffers() if name not in stored}
    # Tensors that `finish` adds or replaces are not in the files; they stay undefined.
    before = dict(_named_tensors(model))
    finish(model)
    kept = {name for name, tensor in _named_tensors(model) if tensor is before.get(name)}
    # Shard on meta, allocate only this rank's parts, then read them.
    ties = _tied_names(model)
    shard_model(model, group, memory=memory)
    _allocate_tensors(model, ties, group, memory)
    make_buffers(model, unsaved & kept)
    with loading_errors(source):
        for name, tensor in _named_tensors(model):
            if name in planned and name in kept and (only is None or name in only):
                _fill_tensor(tensor, planned[name])


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def model_on_meta(config: ModelConfig, source: str) -> PreTrainedModel:
    """Build a model without memory for its tensors, with the conversions of its files' names.

    Args:
        config: revision of the model, and trust in its code.
        source: folder or name on the hub.

    Raises:
        RoleError: the model does not exist, or transformers cannot build it.
    """
    options = _revision_option(config)
    with loading_errors(source):
        model = _on_meta(config, source, options)
        names = stored_names(source, options)
    remember_names(model, names)
    return model


def _revision_option(config: ModelConfig) -> dict[str, str]:
    return {"revision": config.revision or "main"}


def _on_meta(config: ModelConfig, source: str, options: Mapping[str, Any]) -> PreTrainedModel:
    packed_attention.register_attention()
    architecture = source_config(config, source)
    values = read_noise(architecture)
    remove_noise(architecture)
    if config.class_ is None:
        _require_class(architecture, source)
    try:
        with torch.device("meta"):
            model = build_model(config, architecture, dtype=torch.float32, attn_implementation=packed_attention.NAME)
    except TimeoutError:  # a deadline of the caller
        raise
    except Exception as error:  # code of the architecture may raise any error
        lines = str(error).strip().splitlines() or ["no message"]
        reason = f"transformers cannot build it: {type(error).__name__}: {lines[0]}"
        if packed_attention.NAME in str(error):
            reason = "its code does not support other attention functions"
        raise RoleError(
            f"model {show_source(source)}: models of type {architecture.model_type} cannot be trained: {reason}",
            exit_codes.CONFIGURATION,
        ) from error
    if config.class_ is None:
        _check_named_class(architecture, source)
    model.config.use_cache = False
    freeze_encoders(model)
    remember_noise(model, values)
    if cached_file(source, "generation_config.json", _raise_exceptions_for_missing_entries=False, **options):
        model.generation_config = GenerationConfig.from_pretrained(source, **options)
    return model


def _require_class(architecture: PreTrainedConfig, source: str) -> None:
    """Raise an error for a type that transformers has no class for, such as an encoder or a model for speech."""
    if not _has_own_code(architecture) and type(architecture) not in auto_class(architecture)._model_mapping:
        raise RoleError(
            f"model {show_source(source)}: models of type {architecture.model_type} (model_type in config.json) cannot be trained: "
            f"transformers {transformers.__version__} has no causal language model of this type; use one, such as {TEXT_MODEL}",
            exit_codes.CONFIGURATION,
        )


def _has_own_code(architecture: PreTrainedConfig) -> bool:
    return "AutoModelForCausalLM" in (getattr(architecture, "auto_map", None) or {})


def _check_named_class(architecture: PreTrainedConfig, source: str) -> None:
    """Raise an error for files of another class than the trained one.

    The trainer selects the class by `model_type`, and engines by `architectures`: without it vLLM serves the base class, which computes
    no tokens.
    """
    if _has_own_code(architecture):
        return
    names = architecture.architectures or []
    trained = auto_class(architecture)._model_mapping[type(architecture)].__name__
    if names and any(_has_head(name, architecture) for name in names):
        return
    fix = f'set architectures in config.json to ["{trained}"]'
    reason = f"architectures in config.json ({names[0]})" if names else "config.json has no architectures"
    if not names:
        reason = f"{reason}, by which engines select the class; {fix}"
    elif isinstance(architecture, _config_class(names[0])):
        reason = f"{reason} is not a causal language model; if its files have a head, {fix}, or use a model such as {TEXT_MODEL}"
    else:
        other = _config_class(names[0]).model_type
        reason = f"{reason} is a class of type {other}, but model_type is {architecture.model_type}; {fix}, or model_type to {other}"
    raise RoleError(f"model {show_source(source)}: {reason}", exit_codes.CONFIGURATION)


def _has_head(name: str, architecture: PreTrainedConfig) -> bool:
    """Return whether a class generates text with this configuration. Classes that transformers does not have are not judged."""
    found = getattr(transformers, name, None)
    if found is None or _config_class(name) is PreTrainedConfig:
        return True
    return isinstance(architecture, _config_class(name)) and bool(found.can_generate())


def _config_class(name: str) -> type[PreTrainedConfig]:
    found: type[PreTrainedConfig] | None = getattr(getattr(transformers, name), "config_class", None)
    return found or PreTrainedConfig


def plan_complete(model: PreTrainedModel, files: Files, source: str) -> dict[str, Lazy]:
    """Return lazy tensors for the parameters of a model that is not divided yet; only headers of the files are read.

    Args:
        model: model on meta, of `model_on_meta`.
        files: files of its weights, possibly none.
        source: folder or name on the hub, for messages.

    Raises:
        RoleError: the files lack a parameter, or a tensor has another shape.
    """
    with loading_errors(source):
        planned = plan_tensors(model, files)
    for name, other in _tied_names(model):  # the files may have either name of a tied parameter
        if other in planned:
            planned.setdefault(name, planned[other])
    if files.where:
        _check_complete(model, planned, source)
    return planned


def _check_complete(model: nn.Module, planned: Mapping[str, Lazy], source: str) -> None:
    missing = [name for name, _ in model.named_parameters() if name not in planned]
    if missing:
        listed = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        raise RoleError(
            f"cannot load the model {show_source(source)}: its files lack {listed}, which would be random; "
            "use the files of a complete causal language model",
            exit_codes.DATA,
        )


def _tied_names(model: nn.Module) -> list[tuple[str, str]]:
    """Return the names of tied parameters in pairs; the first is the name in `named_parameters`."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return [(first[id(parameter)], name) for name, parameter in every if first[id(parameter)] != name]


def _allocate_tensors(model: PreTrainedModel, ties: list[tuple[str, str]], group: Group, memory: Memory | None) -> None:
    """Allocate every tensor on its device; its values are undefined."""
    offloaded = memory is not None and memory.cpu_offload
    buffers_device = group.device
    model.to_empty(device=torch.device("cpu") if offloaded else group.device)
    there = dict(model.named_parameters())
    for name, other in ties:  # `to_empty` has duplicated tied parameters
        if name not in there:  # belongs to another stage
            continue
        path, _, attribute = other.rpartition(".")
        model.get_submodule(path).register_parameter(attribute, there[name])
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(buffers_device)


def _fill_tensor(tensor: Tensor, stored: Lazy) -> None:
    shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = local_part(tensor)
    if not local.numel():
        return
    with torch.no_grad():
        local.copy_(stored.read(tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))))
