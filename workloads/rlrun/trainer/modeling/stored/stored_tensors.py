"""Tensors that are not in memory and are read by slices. They can be combined: stacked, joined, divided, transposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

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
        return self.read(self.everything())

    def everything(self) -> Slices:
        """Return the slices of the complete tensor."""
        return tuple(slice(0, size) for size in self.shape)


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


_SizeT = TypeVar("_SizeT")


def transpose_tensor(one: Lazy, first: int, second: int) -> Lazy:
    """Exchange two dimensions of a tensor."""

    def exchanged(sizes: Sequence[_SizeT]) -> tuple[_SizeT, ...]:
        found = list(sizes)
        found[first], found[second] = found[second], found[first]
        return tuple(found)

    return replace(
        one,
        shape=exchanged(one.shape),
        read=lambda slices: one.read(exchanged(slices)).transpose(first, second),
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
