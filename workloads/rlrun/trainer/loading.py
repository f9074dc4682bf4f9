"""Load a model without making it whole anywhere: built on meta, divided over the ranks, and each rank reads its slices of the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from rlrun.config.model import ModelConfig
from rlrun.config.parallel import AttentionKernel
from rlrun.protocol import exit_codes
from rlrun.protocol.failures import RoleError
from rlrun.trainer import attention
from rlrun.trainer.group import Group
from rlrun.trainer.model import Memory, load_model, loading_errors, local_part, shard
from rlrun.trainer.tensor_names import expert_parts

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
Read = Callable[[tuple[slice, ...]], Tensor]
"""A part of a tensor in a file, or in several."""


def load_sharded(
    config: ModelConfig,
    source: str,
    group: Group,
    *,
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
        with_weights: False leaves them undefined, to be filled from a checkpoint.
        memory: what is kept, recomputed and rounded; see `shard`.
        kernel: what computes attention.
        prepare: changes the model before it is divided; parameters that it adds or replaces are left undefined.

    Raises:
        RoleError: it cannot be loaded, or not be divided so.
    """
    options = {"revision": config.revision or "main"}
    with loading_errors(source):
        model: Any = _on_meta(config, source, options)
        files = _files(source, options) if with_weights else {}
    plan: dict[str, Read] = {}
    if files is not None:
        plan, fits = _plan(model, files, with_weights=with_weights)
    if files is None or not fits:
        model = load_model(config, source, with_weights=with_weights)
        model.set_attn_implementation(attention.implementation(kernel))
        prepare(model)
        return shard(model, group, memory=memory)
    model.set_attn_implementation(attention.implementation(kernel))
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


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _on_meta(config: ModelConfig, source: str, options: Mapping[str, Any]) -> Any:
    attention.register()
    trust = config.trust_remote_code
    architecture = AutoConfig.from_pretrained(source, trust_remote_code=trust, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            architecture, trust_remote_code=trust, dtype=torch.float32, attn_implementation=attention.NAME
        )
    model.config.use_cache = False
    if cached_file(source, "generation_config.json", _raise_exceptions_for_missing_entries=False, **options):
        model.generation_config = GenerationConfig.from_pretrained(source, **options)
    return model


def _files(source: str, options: Mapping[str, Any]) -> dict[str, Path] | None:
    """The file of each tensor; None when the weights are not in safetensors."""
    index = cached_file(source, _INDEX, _raise_exceptions_for_missing_entries=False, **options)
    if index is not None:
        paths, _ = get_checkpoint_shard_files(source, index, **options)
        by_name = {Path(path).name: Path(path) for path in paths}
        return {name: by_name[file] for name, file in json.loads(Path(index).read_text())["weight_map"].items()}
    single = cached_file(source, _SINGLE, _raise_exceptions_for_missing_entries=False, **options)
    if single is None:
        return None
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), Path(single))


def _plan(model: Any, files: Mapping[str, Path], *, with_weights: bool) -> tuple[dict[str, Read], bool]:
    """How to read each parameter and buffer, and whether that is all of them.

    Raises:
        RoleError: a tensor in a file has another shape than the model's.
    """
    plan: dict[str, Read] = {}
    stored = set(model.state_dict())
    for name, tensor in _tensors(model):
        if name not in stored:  # `_materialise` knows how to make rotary frequencies
            owner = model.get_submodule(name.rpartition(".")[0])
            if "RotaryEmbedding" not in type(owner).__name__ or not hasattr(owner, "original_inv_freq"):
                return {}, False
            continue
        if not with_weights:
            continue
        read = _reader(name, tensor, files)
        if read is None:
            return {}, False
        plan[name] = read
    return plan, True


def _reader(name: str, tensor: Tensor, files: Mapping[str, Path]) -> Read | None:
    if name in files:
        _check_shape(name, files[name], tensor.shape)
        return lambda part: _read(files[name], name, part)
    experts = expert_parts(name)
    if experts is None:
        return None
    prefix, matrices = experts
    rows = tensor.shape[1] // len(matrices)
    names = [[f"{prefix}.{e}.{matrix}.weight" for matrix in matrices] for e in range(tensor.shape[0])]
    if any(one not in files for both in names for one in both):
        return None
    for both in names:
        for one in both:
            _check_shape(one, files[one], torch.Size([rows, tensor.shape[2]]))

    def read(part: tuple[slice, ...]) -> Tensor:
        chosen, within, columns = part
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
    """Pairs of names of one parameter, the first of which `named_parameters` tells."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return [(first[id(parameter)], name) for name, parameter in every if first[id(parameter)] != name]


def _materialise(model: Any, ties: list[tuple[str, str]], group: Group, memory: Memory | None) -> None:
    """Give every tensor memory on its device: parameters and stored buffers undefined, rotary frequencies as they should be."""
    offloaded = memory is not None and memory.cpu_offload
    buffers_device = group.device
    model.to_empty(device=torch.device("cpu") if offloaded else group.device)
    for name, other in ties:  # moving made two of each
        path, _, attribute = other.rpartition(".")
        model.get_submodule(path).register_parameter(attribute, model.get_parameter(name))
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
