"""Tensors in a model's files, read by slices; a file is never read completely.

Lazy tensors can be combined: stacked, joined, divided, transposed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

Slices = tuple[slice, ...]
"""One slice per dimension, each with a start and a stop within the shape."""


@dataclass(frozen=True)
class Lazy:
    """Tensor that is not in memory; parts of it can be read."""

    shape: tuple[int, ...]
    read: Callable[[Slices], Tensor]
    """Function that reads a part."""

    def read_all(self) -> Tensor:
        """Read the complete tensor."""
        return self.read(tuple(slice(0, size) for size in self.shape))


def stack_tensors(parts: Sequence[Lazy], dim: int) -> Lazy:
    """Stack tensors of equal shape along a new dimension.

    Raises:
        ValueError: the shapes differ.
    """
    shape = _same_shape([part.shape for part in parts])

    def read(slices: Slices) -> Tensor:
        chosen = range(len(parts))[slices[dim]]
        return torch.stack([parts[at].read(slices[:dim] + slices[dim + 1 :]) for at in chosen], dim=dim)

    return Lazy((*shape[:dim], len(parts), *shape[dim:]), read)


def join_tensors(parts: Sequence[Lazy], dim: int) -> Lazy:
    """Concatenate tensors along a dimension.

    Raises:
        ValueError: the shapes differ in another dimension.
    """
    rest = _same_shape([part.shape[:dim] + part.shape[dim + 1 :] for part in parts])
    sizes = [part.shape[dim] for part in parts]

    def read(slices: Slices) -> Tensor:
        found = [parts[at].read(_replace_slice(slices, dim, one)) for at, one in _overlapping_parts(sizes, slices[dim])]
        return found[0] if len(found) == 1 else torch.cat(found, dim=dim)

    return Lazy((*rest[:dim], sum(sizes), *rest[dim:]), read)


def chunk_tensor(one: Lazy, count: int, dim: int) -> list[Lazy]:
    """Divide a tensor along a dimension like `torch.chunk`."""
    size = -(-one.shape[dim] // count)
    return [
        _tensor_part(one, dim, start, min(start + size, one.shape[dim]))
        for start in range(0, one.shape[dim], max(size, 1))
    ]


def transpose_tensor(one: Lazy, first: int, second: int) -> Lazy:
    """Exchange two dimensions of a tensor."""

    def exchanged(sizes: Sequence[object]) -> list[object]:
        found = list(sizes)
        found[first], found[second] = found[second], found[first]
        return found

    return replace(
        one,
        shape=tuple(exchanged(one.shape)),  # type: ignore[arg-type]
        read=lambda slices: one.read(tuple(exchanged(slices))).transpose(first, second),  # type: ignore[arg-type]
    )


def _tensor_part(one: Lazy, dim: int, start: int, stop: int) -> Lazy:
    def read(slices: Slices) -> Tensor:
        asked = slices[dim]
        return one.read(_replace_slice(slices, dim, slice(start + asked.start, start + asked.stop)))

    return Lazy((*one.shape[:dim], stop - start, *one.shape[dim + 1 :]), read)


def _overlapping_parts(sizes: Sequence[int], asked: slice) -> Iterator[tuple[int, slice]]:
    """Iterate over the parts that overlap a slice of their concatenation, each with its own slice; without overlap yield an empty slice
    of the first part.
    """
    start, met = 0, False
    for at, size in enumerate(sizes):
        first, last = max(asked.start - start, 0), min(asked.stop - start, size)
        if first < last:
            met = True
            yield at, slice(first, last)
        start += size
    if not met:
        yield 0, slice(0, 0)


def _replace_slice(slices: Slices, dim: int, one: slice) -> Slices:
    return (*slices[:dim], one, *slices[dim + 1 :])


def _same_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    for shape in shapes:
        if shape != shapes[0]:
            raise ValueError(f"cannot combine tensors of shapes {list(shapes[0])} and {list(shape)}")
    return shapes[0]


_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of a single file, and of the index of several files. Pickles (`pytorch_model.bin`) are refused by `rlrun.hub.refused_models`."""


class Files:
    """Tensors in a model's files.

    Args:
        where: file of each tensor, by name.
    """

    def __init__(self, where: Mapping[str, Path]) -> None:
        self.where = where
        self.bytes_read = 0
        """Total bytes of all read slices, in the number format of the files."""
        self.largest_read = 0
        """Bytes of the largest read slice."""

    def tensor(self, name: str) -> Lazy:
        """Return a lazy tensor by its name in the files."""
        return Lazy(self._shape(name), lambda slices: self._read(name, slices))

    def _shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self.where[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def _read(self, name: str, slices: Slices) -> Tensor:
        with safe_open(self.where[name], framework="pt") as file:
            found = file.get_slice(name)[slices] if slices else file.get_tensor(name)
        size = found.numel() * found.element_size()
        self.bytes_read += size
        self.largest_read = max(self.largest_read, size)
        return found


def stored_names(source: str, options: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the tensors in a model's files without reading values, or None if the model has no files.

    Args:
        source: folder or name on the hub.
        options: options of the hub, such as the revision.
    """
    if (path := _optional_file(source, _INDEX, options)) is not None:
        return list(_weight_map(path))
    if (path := _optional_file(source, _SINGLE, options)) is None:
        return None
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def open_files(source: str, options: Mapping[str, Any], names: list[str]) -> Files:
    """Open the files of the tensors from `stored_names`, and download them if the source is on the hub."""
    if (path := _optional_file(source, _INDEX, options)) is not None:
        paths, _ = get_checkpoint_shard_files(source, str(path), **options)
        by_name = {Path(one).name: Path(one) for one in paths}
        return Files({name: by_name[file] for name, file in _weight_map(path).items()})
    if (path := _optional_file(source, _SINGLE, options)) is not None:
        return Files(dict.fromkeys(names, path))
    raise FileNotFoundError(f"{source} has no safetensors files")


def _optional_file(source: str, name: str, options: Mapping[str, Any]) -> Path | None:
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **options)
    return None if found is None else Path(found)


def _weight_map(index: Path) -> Mapping[str, str]:
    return dict(json.loads(index.read_text())["weight_map"])
