"""Plan of loading a model: the sources in files of each tensor in memory, and buffers that are not in files.

Most tensors are stored unchanged. Tensors that transformers converts during loading (experts, joined or transposed matrices) are read by
slices too if the conversion consists of the four operations of `stored_tensors`. For other conversions all sources of one tensor are read
and converted, one tensor at a time.

Buffers that are not in files are rotary frequencies, scales of embeddings, and masks. The architecture's code recomputes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose
from transformers.initialization import guard_torch_init_functions

from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.stored.stored_tensors import (
    Lazy,
    Slices,
    chunk_tensor,
    join_tensors,
    stack_tensors,
    transpose_tensor,
)
from rlrun.trainer.modeling.stored.weight_files import Files
from rlrun.trainer.modeling.tensor_names import Sources, convert_tensors, source_parts


def plan_tensors(model: PreTrainedModel, files: Files) -> dict[str, Lazy]:
    """Return lazy tensors for the model's tensors in its files, by name in memory.

    Args:
        model: model on meta with stored conversions (`tensor_names.remember_names`), before sharding.
        files: files of its weights.

    Raises:
        RoleError: the shape of a tensor differs from the model's.
        ValueError: tensors cannot be combined.
    """
    state, found = model.state_dict(), {}
    for name, one in source_parts(model, files.where, state).items():
        if one.converter is None:
            (stored,) = one.names[name]
            found[name] = _check_shape(files, stored, files.lazy_tensor(stored), state[name])
            continue
        for target, lazy in _convert_parts(model, name, one, files, state).items():
            found[target] = _check_shape(files, target, lazy, state[target])
    return found


def _convert_parts(
    model: PreTrainedModel, name: str, one: Sources, files: Files, state: Mapping[str, Tensor]
) -> dict[str, Lazy]:
    parts = {pattern: [files.lazy_tensor(stored) for stored in names] for pattern, names in one.names.items()}
    combined = _combine_parts(one, list(parts.values()), expected=tuple(state[name].shape))
    empty = {pattern: [torch.empty(lazy.shape, device="meta") for lazy in of_one] for pattern, of_one in parts.items()}
    try:
        targets = convert_tensors(model, name, one, empty)
    except RuntimeError as error:
        raise ValueError(f"cannot convert the files' tensors to {name}: {error}") from error
    if combined is not None:
        return dict(zip(targets, combined, strict=True))
    return {target: _by_transformers(model, name, one, parts, target, tensor) for target, tensor in targets.items()}


def _combine_parts(one: Sources, parts: list[list[Lazy]], *, expected: tuple[int, ...]) -> list[Lazy] | None:
    """Apply the converter's operations to lazy parts; return None if an operation does not support slices."""
    for operation in one.converter.operations:
        if getattr(operation, "num_shards_attribute", None) is not None:
            return None
        first = parts[0][0]
        alone = len(parts) == len(parts[0]) == 1
        if type(operation) is MergeModulelist:
            parts = [[stack_tensors(same, operation.dim)] for same in parts]
        elif type(operation) is Concatenate:
            parts = [[join_tensors([lazy for same in parts for lazy in same], operation.dim)]]
        elif type(operation) is Chunk and alone:
            parts = [[lazy] for lazy in chunk_tensor(first, len(one.converter.target_patterns), operation.dim)]
        elif type(operation) is Transpose and alone:
            if not operation.check_dims or first.shape != expected:
                parts = [[transpose_tensor(first, operation.dim0, operation.dim1)]]
        else:
            return None
    return [lazy for same in parts for lazy in same]


def _by_transformers(
    model: PreTrainedModel, name: str, one: Sources, parts: Mapping[str, Sequence[Lazy]], target: str, empty: Tensor
) -> Lazy:
    def read(slices: Slices) -> Tensor:
        whole = {pattern: [lazy.read_all() for lazy in of_one] for pattern, of_one in parts.items()}
        return convert_tensors(model, name, one, whole)[target][slices]

    return Lazy(tuple(empty.shape), read)


def _check_shape(files: Files, stored: str, found: Lazy, expected: Tensor) -> Lazy:
    if found.shape != tuple(expected.shape):
        path = files.where.get(stored) or next(iter(files.where.values()))
        within = f" in {path.name}" if stored in files.where else ""
        raise RoleError(
            f"cannot load the model {path.parent}: {stored} has shape {list(found.shape)}{within}, "
            f"but {list(expected.shape)} by config.json",
            exit_codes.DATA,
        )
    return found


_DONE = "_is_hf_initialized"
"""Attribute that protects a tensor from initialization by transformers."""
_FILLINGS = (0, 1)
"""Values of a buffer before its initialization; if the result depends on them, the buffer was not initialized."""


def make_buffers(model: PreTrainedModel, names: set[str]) -> None:
    """Initialize buffers with their values in a new model.

    Args:
        model: model with memory for all tensors, sharded or not; parameters are not changed.
        names: names of the undefined buffers.

    Raises:
        RoleError: `_init_weights` of the architecture does not initialize a buffer, so transformers would leave it undefined too.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = [name for name, _ in module.named_buffers(recurse=False) if prefix + name in names]
        if not own:
            continue
        maker = _buffer_maker(model, path)
        for owners in ([module], [module, maker]):  # Falcon-H1's decoder initializes buffers of its layers
            first, second = (_make_module(maker, module, own, filling, owners) for filling in _FILLINGS)
            undefined = [name for name in own if not torch.equal(first[name], second[name])]
            if not undefined:
                break
        if undefined:
            raise RoleError(
                f"{type(model).__name__} cannot be trained: its files lack the buffer {prefix}{undefined[0]}, and its code does not "
                "initialize it in _init_weights; initialize it there, or register it with persistent=True",
                exit_codes.CONFIGURATION,
            )


def _buffer_maker(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the innermost model that contains a module, such as the image model of a multimodal model; its code initializes the
    buffers.
    """
    found, module = model, model
    for name in path.split(".") if path else ():
        module = getattr(module, name)
        found = module if isinstance(module, PreTrainedModel) else found
    return found


def _make_module(
    model: PreTrainedModel, module: nn.Module, names: list[str], filling: int, owners: Sequence[nn.Module]
) -> dict[str, Tensor]:
    for name in names:
        module.get_buffer(name).fill_(filling)
    others = [tensor for name, tensor in _own_buffers(module) if name not in names]
    with torch.no_grad(), _left_alone(others), guard_torch_init_functions():
        for owner in owners:
            model._init_weights(owner)
    return {name: module.get_buffer(name).clone() for name in names}


def _own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


@contextmanager
def _left_alone(tensors: list[Tensor]) -> Iterator[None]:
    marked = [tensor for tensor in tensors if not getattr(tensor, _DONE, False)]
    for tensor in marked:
        setattr(tensor, _DONE, True)
    yield
    for tensor in marked:
        delattr(tensor, _DONE)
