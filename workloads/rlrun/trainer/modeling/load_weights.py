"""Load a model without making it whole anywhere: built on meta, divided over the ranks, and each rank reads its slices of the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from rlrun.config.models.model import ModelConfig
from rlrun.config.models.parallel import AttentionKernel
from rlrun.hub.repository import shown
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling import packed_attention
from rlrun.trainer.modeling.architecture_check import check_architecture, find_fault
from rlrun.trainer.modeling.attention.select import needs_of, select
from rlrun.trainer.modeling.parallel.stage_check import check_stages
from rlrun.trainer.modeling.shard import Memory, load_model, loading_errors, local_part, shard
from rlrun.trainer.modeling.small_config import deterministic
from rlrun.trainer.modeling.tensor_names import Part, parts, remember
from rlrun.trainer.ranks.group import Group

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
Read = Callable[[tuple[slice, ...]], Tensor]
"""A part of a tensor in a file, or in several."""


def load_sharded(
    config: ModelConfig,
    source: str,
    group: Group,
    *,
    seq_len: int,
    with_weights: bool = True,
    memory: Memory | None = None,
    kernel: AttentionKernel = "auto",
    prepare: Callable[[nn.Module], object] = lambda model: None,
) -> nn.Module:
    """The model in float32, divided over the group's ranks by its layout; every rank takes part.

    A model whose files say something else than its parameters, or with buffers that are in no file, is loaded whole by every rank, and
    then divided.

    Args:
        config: which revision, and whether its code is trusted.
        source: folder or name on the hub.
        group: says the layout.
        seq_len: longest sequence of the run, in tokens.
        with_weights: False leaves them undefined, to be filled from a checkpoint.
        memory: what is kept, recomputed and rounded; see `shard`.
        kernel: what computes attention.
        prepare: changes the model before it is divided; parameters that it adds or replaces are left undefined.

    Raises:
        RoleError: it cannot be loaded, its architecture gives wrong numbers here, or it cannot be divided so.
    """
    options = {"revision": config.revision or "main"}
    with loading_errors(source):
        model = _on_meta(config, source, options)
        names = stored_names(source, options)
    remember(model, names)
    features = check_architecture(model, source, group, seq_len=seq_len)
    check_stages(model, group, seq_len=seq_len)
    compute_dtype = None if memory is None else memory.compute_dtype
    needs = needs_of(model.config, features)
    chosen = select(kernel, type(model).__name__, needs, group, compute_dtype=compute_dtype)
    with loading_errors(source):
        files = {} if not with_weights else None if names is None else _files(source, options, names)
    plan, fits = ({}, False) if files is None else _plan(model, files, with_weights=with_weights)
    if not fits:
        model = load_model(config, source, with_weights=with_weights)
        remember(model, names)
        packed_attention.set_kernel(model, chosen, features, cp=group.dims.cp)
        prepare(model)
        return shard(model, group, memory=memory)
    packed_attention.set_kernel(model, chosen, features, cp=group.dims.cp)
    before = dict(_tensors(model))
    prepare(model)
    kept = {name for name, tensor in _tensors(model) if tensor is before.get(name)}
    ties = _ties(model)
    shard(model, group, memory=memory)
    _materialise(model, ties, group, memory)
    with loading_errors(source):
        for name, tensor in _tensors(model):
            if name in plan and name in kept:
                _fill(tensor, plan[name])
    return model


def check_folder(path: str, *, trust_remote_code: bool, seq_len: int) -> None:
    """Refuse a model folder whose architecture the trainer computes wrongly, as `load_sharded` does, without its weights.

    Args:
        path: of the folder.
        trust_remote_code: whether its own code may run.
        seq_len: longest sequence of the run, in tokens.

    Raises:
        RoleError: what the trainer would refuse it with.
    """
    options = {"revision": "main"}
    with loading_errors(path):
        model = _on_meta(ModelConfig(path=path, trust_remote_code=trust_remote_code), path, options)
        names = stored_names(path, options)
    remember(model, names)
    if (fault := find_fault(model, seq_len=seq_len)) is not None:
        raise RoleError(fault, exit_codes.CONFIGURATION)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _on_meta(config: ModelConfig, source: str, options: Mapping[str, Any]) -> PreTrainedModel:
    packed_attention.register()
    trust = config.trust_remote_code
    architecture = AutoConfig.from_pretrained(source, trust_remote_code=trust, **options)
    deterministic(architecture)
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
            f"model {shown(source)}: models of type {architecture.model_type} cannot be trained: {reason}",
            exit_codes.CONFIGURATION,
        ) from error
    model.config.use_cache = False
    if cached_file(source, "generation_config.json", _raise_exceptions_for_missing_entries=False, **options):
        model.generation_config = GenerationConfig.from_pretrained(source, **options)
    return model


def stored_names(source: str, options: Mapping[str, Any]) -> list[str] | None:
    """Names of the tensors in a model's files; None when the weights are not in safetensors.

    Args:
        source: folder or name on the hub.
        options: of the hub, such as the revision.
    """
    index = cached_file(source, _INDEX, _raise_exceptions_for_missing_entries=False, **options)
    if index is not None:
        return list(json.loads(Path(index).read_text())["weight_map"])
    single = cached_file(source, _SINGLE, _raise_exceptions_for_missing_entries=False, **options)
    if single is None:
        return None
    with safe_open(single, framework="pt") as file:
        return list(file.keys())


def _files(source: str, options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Path]:
    """The file of each of these tensors, all of which the source has; files of the hub are downloaded."""
    index = cached_file(source, _INDEX, _raise_exceptions_for_missing_entries=False, **options)
    if index is None:
        single = cached_file(source, _SINGLE, **options)
        return dict.fromkeys(names, Path(single))
    paths, _ = get_checkpoint_shard_files(source, index, **options)
    by_name = {Path(path).name: Path(path) for path in paths}
    return {name: by_name[file] for name, file in json.loads(Path(index).read_text())["weight_map"].items()}


def _plan(model: PreTrainedModel, files: Mapping[str, Path], *, with_weights: bool) -> tuple[dict[str, Read], bool]:
    """Reads of each parameter and buffer, and true if that is all of them.

    Raises:
        RoleError: a tensor in a file has another shape than the model's.
    """
    plan: dict[str, Read] = {}
    stored = model.state_dict()
    by_name = {part.names[0]: part for part in parts(model, stored) if len(part.names) == 1} if with_weights else {}
    for name, tensor in _tensors(model):
        if name not in stored:  # `_materialise` knows how to make rotary frequencies
            owner = model.get_submodule(name.rpartition(".")[0])
            if "RotaryEmbedding" not in type(owner).__name__ or not hasattr(owner, "original_inv_freq"):
                return {}, False
            continue
        if not with_weights:
            continue
        read = _reader(by_name[name], tensor, files) if name in by_name else None
        if read is None:
            return {}, False
        plan[name] = read
    return plan, True


def _reader(part: Part, tensor: Tensor, files: Mapping[str, Path]) -> Read | None:
    if any(name not in files for name in part.files):
        return None
    if not part.converted:
        (name,) = part.files
        _check_shape(name, files[name], tensor.shape)
        return lambda slices: _read(files[name], name, slices)
    if part.experts is None:
        return None
    names = part.experts
    for name, shape in part.files.items():
        _check_shape(name, files[name], shape)
    rows = tensor.shape[1] // len(names[0])

    def read(slices: tuple[slice, ...]) -> Tensor:
        chosen, within, columns = slices
        found = []
        for both in names[chosen]:
            pieces = []
            for position, one in enumerate(both):
                first, last = max(within.start - position * rows, 0), min(within.stop - position * rows, rows)
                if first < last:
                    pieces.append(_read(files[one], one, (slice(first, last), columns)))
            found.append(torch.cat(pieces))
        return torch.stack(found)

    return read


def _check_shape(name: str, path: Path, shape: torch.Size) -> None:
    with safe_open(path, framework="pt") as file:
        found = file.get_slice(name).get_shape()
    if list(found) != list(shape):
        raise RoleError(
            f"cannot load the model {path.parent}: {name} has shape {list(found)} in {path.name}, but {list(shape)} by config.json",
            exit_codes.DATA,
        )


def _read(path: Path, name: str, part: tuple[slice, ...]) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_slice(name)[part]
    return tensor


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names of one parameter, the first of which `named_parameters` gives."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return [(first[id(parameter)], name) for name, parameter in every if first[id(parameter)] != name]


def _materialise(model: PreTrainedModel, ties: list[tuple[str, str]], group: Group, memory: Memory | None) -> None:
    """Give every tensor memory on its device: parameters and stored buffers undefined, rotary frequencies as they should be."""
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
        if hasattr(module, "original_inv_freq"):
            model._init_weights(module)


def _fill(tensor: Tensor, read: Read) -> None:
    shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = local_part(tensor)
    if not local.numel():
        return
    with torch.no_grad():
        local.copy_(read(tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))))
