"""Mapping between tensors in files and in memory, which differ for experts of mixtures and for renamed modules.

In memory all experts of a layer are one tensor; in most files each expert has its own matrices, with names that depend on the family.
transformers has the conversions of each architecture (`conversion_mapping`) and can revert them. The names in the files determine the
needed conversions: `remember_names` stores them at the model before sharding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

_ATTRIBUTE = "_weight_conversions"
"""Attribute that transformers reads for a model's conversions when it saves the model."""


@dataclass(frozen=True)
class Part:
    """Tensors in memory that are converted together to tensors in files; usually one unchanged tensor."""

    names: tuple[str, ...]
    """Names of the tensors in memory."""
    files: Mapping[str, torch.Size]
    """Shapes of the tensors in files, by name."""
    converted: bool = False
    """Whether the conversion changes more than names."""


@dataclass(frozen=True)
class Sources:
    """Tensors in files that are converted together to one or several tensors in memory."""

    names: Mapping[str, list[str]]
    """Names in the files in the converter's order, by its pattern; without a converter a single name."""
    converter: Any = None
    """`WeightConverter` of transformers, or None for an unchanged tensor."""


def remember_names(model: nn.Module, stored: Iterable[str] | None = None) -> None:
    """Store the conversions that the model's files need at the model. Called before sharding, which changes class names.

    Args:
        model: model; if transformers has loaded its weights, it has them already and is not changed.
        stored: names of the tensors in the files. Default: the names that transformers would write.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, _ATTRIBUTE, None) is not None:
        return
    conversions = get_model_conversion_mapping(model, add_legacy=stored is not None)
    if stored is None:  # only the names in files show whether a prefix is used
        needed = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
    else:
        renamings, converters = _by_kind(conversions)
        state, prefix = model.state_dict(), model.base_model_prefix
        for name in stored:
            rename_source_key(name, renamings, converters, prefix, state)
        needed = [conversion for conversion in conversions if conversion.was_used()]
    setattr(model, _ATTRIBUTE, needed)


def copy_names(model: nn.Module, other: nn.Module) -> None:
    """Copy the stored conversions to `other`, a model of the same class."""
    setattr(other, _ATTRIBUTE, getattr(model, _ATTRIBUTE, None))


def tensor_parts(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[Part]:
    """Divide the model's tensors, in their order, into parts that are converted together.

    Args:
        model: model with stored conversions, from `remember_names` or from loading with transformers.
        tensors: tensors by names in memory; only shapes are used.
    """
    reverted = [conversion.reverse_transform() for conversion in reversed(getattr(model, _ATTRIBUTE, None) or [])]
    renamings, converters = _by_kind(reverted)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, list[str]] = {}
    chosen: dict[str, object] = {}
    for name in tensors:
        renamed, pattern = rename_source_key(name, renamings, converters, reverse=True)
        groups.setdefault(renamed, []).append(name)
        chosen[renamed] = None if pattern is None else by_pattern[pattern]
    return [_name_part(model, renamed, names, chosen[renamed], tensors) for renamed, names in groups.items()]


def file_tensors(model: nn.Module, part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a part's tensors in memory to tensors in files, by name; views if possible.

    Args:
        model: model, see `tensor_parts`.
        part: part of the model.
        tensors: complete tensors by name; must contain all of the part.
    """
    own = {name: tensors[name] for name in part.names}
    if not part.converted:
        return dict(zip(part.files, own.values(), strict=True))
    reverted: dict[str, Tensor] = revert_weight_conversion(model, own)
    return reverted


def source_parts(model: PreTrainedModel, stored: Iterable[str], state: Mapping[str, Tensor]) -> dict[str, Sources]:
    """Return the sources of tensors in memory by name; tensors that are converted together are listed under the first name.

    Args:
        model: model with stored conversions.
        stored: names of the tensors in the files; unused ones are ignored.
        state: tensors in memory by name; only names are used.
    """
    renamings, converters = _by_kind(getattr(model, _ATTRIBUTE, None) or [])
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    found: dict[str, Sources] = {}
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        if renamed not in state:
            continue
        if pattern is None:
            found.setdefault(renamed, Sources({renamed: [name]}))
            continue
        converter = by_pattern[pattern]
        one = found.setdefault(renamed, Sources({each: [] for each in converter.source_patterns}, converter))
        one.names[pattern].append(name)
    return found


def convert_tensors(
    model: PreTrainedModel, name: str, one: Sources, tensors: Mapping[str, list[Tensor]]
) -> dict[str, Tensor]:
    """Convert tensors in files to tensors in memory, by name.

    Args:
        model: model of the tensors.
        name: key of `source_parts`.
        one: value of `source_parts` with a converter.
        tensors: tensors in the files, by pattern as in `one.names`.
    """
    converter = copy.deepcopy(one.converter)
    for pattern, of_one in tensors.items():
        for stored, tensor in zip(one.names[pattern], of_one, strict=True):
            converter.add_tensor(name, stored, pattern, tensor)
    found: dict[str, Tensor] = converter.convert(name, model=model, config=model.config)
    return found


def _by_kind(conversions: Iterable[object]) -> tuple[list[Any], list[Any]]:
    conversions = list(conversions)
    return (
        [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)],
        [conversion for conversion in conversions if isinstance(conversion, WeightConverter)],
    )


def _name_part(
    model: nn.Module, renamed: str, names: list[str], converter: object, tensors: Mapping[str, Tensor]
) -> Part:
    if converter is None:
        return Part(tuple(names), {renamed: tensors[names[0]].shape})
    empty = {name: torch.empty(tensors[name].shape, device="meta") for name in names}
    files = {name: tensor.shape for name, tensor in revert_weight_conversion(model, empty).items()}
    return Part(tuple(names), files, converted=True)
