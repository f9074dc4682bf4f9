"""Plan of loading a model: the sources in files of each tensor in memory.

Most tensors are stored unchanged. Tensors that transformers converts during loading (experts, joined or transposed matrices) are read by
slices too if the conversion consists of the four operations of `lazy`. For other conversions all sources of one tensor are read and
converted, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose

from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.stored.files import Files
from rlrun.trainer.modeling.stored.lazy import Lazy, Slices, chunk_tensor, join_tensors, stack_tensors, transpose_tensor
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
            found[name] = _check_shape(files, stored, files.tensor(stored), state[name])
            continue
        for target, lazy in _convert_parts(model, name, one, files, state).items():
            found[target] = _check_shape(files, target, lazy, state[target])
    return found


def _convert_parts(
    model: PreTrainedModel, name: str, one: Sources, files: Files, state: Mapping[str, Tensor]
) -> dict[str, Lazy]:
    parts = {pattern: [files.tensor(stored) for stored in names] for pattern, names in one.names.items()}
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
