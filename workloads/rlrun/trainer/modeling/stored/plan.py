"""Plan of a model's load: for each tensor in memory, what is to be read of which tensors in files.

Most are themselves. Those that transformers puts together when it loads (experts of a mixture, joined or transposed matrices) are read by
slices too, where its operations are of the four kinds that `lazy` knows; of others all that makes up one tensor is read and converted, one
tensor at a time.
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
    """The tensors of the model that its files have, by name in memory.

    Args:
        model: on meta, its names remembered (`tensor_names.remember_names`), before it is divided.
        files: of its weights.

    Raises:
        RoleError: a tensor has another shape than the model's.
        ValueError: tensors that become one do not go together.
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
        raise ValueError(f"{name} cannot be made of the files: {error}") from error
    if combined is not None:
        return dict(zip(targets, combined, strict=True))
    return {target: _by_transformers(model, name, one, parts, target, tensor) for target, tensor in targets.items()}


def _combine_parts(one: Sources, parts: list[list[Lazy]], *, expected: tuple[int, ...]) -> list[Lazy] | None:
    """Result of the converter's operations on the parts; None if there is one whose slices nobody knows."""
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
        whole = {pattern: [lazy.whole() for lazy in of_one] for pattern, of_one in parts.items()}
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
