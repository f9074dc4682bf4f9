"""Names of tensors in files, where transformers keeps tensors otherwise in memory: a mixture's experts, and modules that were renamed.

In memory all experts of a layer are one tensor; in files most families have matrices for each expert, each family with names of its own.
transformers knows, for each architecture, how files become parameters (`conversion_mapping`), and how to revert that. Which of these
conversions were needed is known once the files' names are: `remember_names` keeps them with the model, before it is sharded.
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
"""Attribute where transformers looks for a model's conversions when it writes it."""


@dataclass(frozen=True)
class Part:
    """Tensors in memory that become tensors in files together; mostly one, which stays itself."""

    names: tuple[str, ...]
    """Names in memory."""
    files: Mapping[str, torch.Size]
    """Shapes of the tensors in files, by name."""
    converted: bool = False
    """True if more than names changes."""


@dataclass(frozen=True)
class Sources:
    """Tensors in files that make one in memory, or several that are made together."""

    names: Mapping[str, list[str]]
    """Names in the files, in the order in which the converter takes them, by its pattern; without a converter a single one."""
    converter: Any = None
    """transformers' WeightConverter; None: the tensor is as in the file."""


def remember_names(model: nn.Module, stored: Iterable[str] | None = None) -> None:
    """Keep with the model which conversions its files need; called before it is sharded, which changes names of classes.

    Args:
        model: what transformers has loaded remembers them already, and is left alone.
        stored: names of the tensors in the files; None: unknown, taken to be those that transformers writes.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, _ATTRIBUTE, None) is not None:
        return
    conversions = get_model_conversion_mapping(model, add_legacy=stored is not None)
    if stored is None:  # only files show whether there was a prefix
        needed = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
    else:
        renamings, converters = _by_kind(conversions)
        state, prefix = model.state_dict(), model.base_model_prefix
        for name in stored:
            rename_source_key(name, renamings, converters, prefix, state)
        needed = [conversion for conversion in conversions if conversion.was_used()]
    setattr(model, _ATTRIBUTE, needed)


def copy_names(model: nn.Module, other: nn.Module) -> None:
    """Let `other`, a model of the same class, have files like those of `model`."""
    setattr(other, _ATTRIBUTE, getattr(model, _ATTRIBUTE, None))


def tensor_parts(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[Part]:
    """Parts of files' tensors that make the model's, in their order; each tensor is in one part.

    Args:
        model: that `remember_names` has seen, or transformers has loaded.
        tensors: by their names in memory; only shapes are looked at.
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
    """The tensors in files of a part's tensors in memory, by name; views where they can be.

    Args:
        model: as for `tensor_parts`.
        part: of the model.
        tensors: whole ones, by name; all of the part's.
    """
    own = {name: tensors[name] for name in part.names}
    if not part.converted:
        return dict(zip(part.files, own.values(), strict=True))
    reverted: dict[str, Tensor] = revert_weight_conversion(model, own)
    return reverted


def source_parts(model: PreTrainedModel, stored: Iterable[str], state: Mapping[str, Tensor]) -> dict[str, Sources]:
    """Parts that tensors in memory are made of, by their names; of those that are made together, the first one's.

    Args:
        model: that `remember_names` has seen.
        stored: names of the tensors in the files; those that no tensor of the model is made of are left out.
        state: tensors in memory by name; only names are looked at.
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
    """The tensors in memory that tensors in files make, by name.

    Args:
        model: of the tensors.
        name: key of `source_parts`.
        one: its value, with a converter.
        tensors: in files, by pattern as in `one.names`.
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
