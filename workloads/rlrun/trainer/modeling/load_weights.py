"""Load a model without making it whole anywhere: built on meta, divided over the ranks, and each rank reads its slices of the files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from rlrun.config.models.model import ModelConfig
from rlrun.config.models.parallel import AttentionKernel
from rlrun.fit.kernel_table import Feature
from rlrun.hub.repository import show_source
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling import packed_attention
from rlrun.trainer.modeling.attention.select import needs_of, select_kernel
from rlrun.trainer.modeling.noise import read_noise, remember_noise, remove_noise
from rlrun.trainer.modeling.shard import Memory, load_model, loading_errors, local_part, shard_model
from rlrun.trainer.modeling.stored.buffers import make_buffers
from rlrun.trainer.modeling.stored.files import Files, open_files, stored_names
from rlrun.trainer.modeling.stored.lazy import Lazy
from rlrun.trainer.modeling.stored.plan import plan_tensors
from rlrun.trainer.modeling.tensor_names import remember_names
from rlrun.trainer.ranks.group import Group

_NAMED = 3
"""Most tensors that an error names."""


ArchitectureCheck = Callable[[PreTrainedModel, str, Group, int], frozenset[Feature]]
"""Check of a model on meta: model, source, ranks, longest sequence in tokens. Returns the demands on the kernel; raises `RoleError`."""


def load_sharded(
    config: ModelConfig,
    source: str,
    group: Group,
    *,
    seq_len: int,
    check: ArchitectureCheck,
    with_weights: bool = True,
    memory: Memory | None = None,
    kernel: AttentionKernel = "auto",
    prepare: Callable[[nn.Module], object] = lambda model: None,
) -> nn.Module:
    """The model in float32, divided over the group's ranks by its layout; every rank takes part.

    Each rank reads the slices of the files that become its own; one whose weights are quantized is loaded whole, and then divided.

    Args:
        config: which revision, and whether its code is trusted.
        source: folder or name on the hub.
        group: says the layout.
        seq_len: longest sequence of the run, in tokens.
        check: check of the architecture before weights are read: `proof.start_check.check_model`, a room above this one.
        with_weights: False leaves them undefined, to be filled from a checkpoint; but for those that the architecture itself freezes
            (biases of routers), which no checkpoint has.
        memory: what is kept, recomputed and rounded; see `shard_model`.
        kernel: what computes attention.
        prepare: changes the model before it is divided; parameters that it adds or replaces are left undefined.

    Raises:
        RoleError: it cannot be loaded, its architecture gives wrong numbers here, or it cannot be divided so.
    """
    model, names = model_on_meta(config, source)
    features = check(model, source, group, seq_len)
    compute_dtype = None if memory is None else memory.compute_dtype
    needs = needs_of(model.config, features)
    chosen = select_kernel(kernel, type(model).__name__, needs, group, compute_dtype=compute_dtype)

    def finished(model: nn.Module) -> None:
        packed_attention.set_kernel(model, chosen, features, cp=group.dims.cp)
        prepare(model)

    if with_weights and getattr(model.config, "quantization_config", None) is not None:
        whole = load_model(config, source)  # transformers knows how its numbers are read
        remember_names(whole, names)
        finished(whole)
        return shard_model(whole, group, memory=memory)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    with loading_errors(source):
        files = open_files(source, _revision(config), names or []) if with_weights or frozen else Files({})
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
    """Finish and divide a model on meta, and read this rank's slices of the files; without any its parameters are left undefined.

    `only`: names of the parameters that are read; None: all.
    """
    with loading_errors(source):
        planned = plan_tensors(model, files)
    for name, other in _tied_names(model):  # whichever of its names a parameter has in the files
        if other in planned:
            planned.setdefault(name, planned[other])
    if files.where:
        _check_complete(model, planned, source)
    stored = planned if files.where else model.state_dict()
    unsaved = {name for name, _ in model.named_buffers() if name not in stored}
    before = dict(_named_tensors(model))
    finish(model)
    kept = {name for name, tensor in _named_tensors(model) if tensor is before.get(name)}
    ties = _tied_names(model)
    shard_model(model, group, memory=memory)
    _materialize(model, ties, group, memory)
    make_buffers(model, unsaved & kept)
    with loading_errors(source):
        for name, tensor in _named_tensors(model):
            if name in planned and name in kept and (only is None or name in only):
                _fill_tensor(tensor, planned[name])


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def model_on_meta(config: ModelConfig, source: str) -> tuple[PreTrainedModel, list[str] | None]:
    """Build a model without memory for its tensors, which remembers the names in its files; return it and these names.

    Args:
        config: revision, and whether the model's own code may run.
        source: folder or name on the hub.

    Raises:
        RoleError: there is no such model, or transformers cannot build it.
    """
    options = _revision(config)
    with loading_errors(source):
        model = _on_meta(config, source, options)
        names = stored_names(source, options)
    remember_names(model, names)
    return model, names


def _revision(config: ModelConfig) -> dict[str, str]:
    return {"revision": config.revision or "main"}


def _on_meta(config: ModelConfig, source: str, options: Mapping[str, Any]) -> PreTrainedModel:
    packed_attention.register_attention()
    trust = config.trust_remote_code
    architecture = AutoConfig.from_pretrained(source, trust_remote_code=trust, **options)
    values = read_noise(architecture)
    remove_noise(architecture)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                architecture, trust_remote_code=trust, dtype=torch.float32, attn_implementation=packed_attention.NAME
            )
    except Exception as error:  # of the architecture's own code, whatever it is
        lines = str(error).strip().splitlines() or ["no message"]
        reason = f"transformers cannot build it: {type(error).__name__}: {lines[0]}"
        if packed_attention.NAME in str(error):
            reason = "its code takes no attention function but its own"
        raise RoleError(
            f"model {show_source(source)}: models of type {architecture.model_type} cannot be trained: {reason}",
            exit_codes.CONFIGURATION,
        ) from error
    model.config.use_cache = False
    remember_noise(model, values)
    if cached_file(source, "generation_config.json", _raise_exceptions_for_missing_entries=False, **options):
        model.generation_config = GenerationConfig.from_pretrained(source, **options)
    return model


def _check_complete(model: nn.Module, planned: Mapping[str, Lazy], source: str) -> None:
    missing = [name for name, _ in model.named_parameters() if name not in planned]
    if missing:
        listed = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        raise RoleError(
            f"cannot load the model {show_source(source)}: its files lack {listed}, which would start from random numbers; "
            "bring files of a whole causal language model",
            exit_codes.DATA,
        )


def _tied_names(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names of one parameter, the first of which `named_parameters` gives."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return [(first[id(parameter)], name) for name, parameter in every if first[id(parameter)] != name]


def _materialize(model: PreTrainedModel, ties: list[tuple[str, str]], group: Group, memory: Memory | None) -> None:
    """Give every tensor memory on its device; its values are undefined."""
    offloaded = memory is not None and memory.cpu_offload
    buffers_device = group.device
    model.to_empty(device=torch.device("cpu") if offloaded else group.device)
    there = dict(model.named_parameters())
    for name, other in ties:  # moving made two of each
        if name not in there:  # another stage has them
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
