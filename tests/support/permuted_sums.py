"""A processor with another order of summation: `PERMUTED_SUMS=SEED python -m pytest -p tests.support.permuted_sums
FILE...`.

Vector widths, blocks and threads decide in which order a kernel sums. No machine has all orders, so this plugin invents
one: matrix products and sums use their terms in a random order, which depends on the operation, on the shapes and on
the seed. Equal operations on equal shapes give equal bits, as on every processor. A product of one row differs from the
same row in a batch, as on some of them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

SEED = os.environ.get("PERMUTED_SUMS", "0")
_ATEN = torch.ops.aten
_LIBRARY = torch.library.Library("aten", "IMPL")
"""Kernels below autograd, so that backward passes use them as well; they exist as long as this object."""


@cache
def _permutation(operation: str, shapes: tuple[tuple[int, ...], ...], terms: int) -> Tensor:
    seed = zlib.crc32(f"{SEED}/{operation}/{shapes}".encode())
    return torch.randperm(terms, generator=torch.Generator().manual_seed(seed))


def _reordered(operation: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of a product with the terms of its sums in another order."""
    if not a.is_floating_point() or a.shape[-1] < 2:
        return a, b
    order = _permutation(operation, (tuple(a.shape), tuple(b.shape)), a.shape[-1])
    return a.index_select(-1, order), b.index_select(max(b.dim() - 2, 0), order)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`aten::mm`."""
    out = a.new_empty((a.shape[0], b.shape[1]))
    return _ATEN.mm.out(*_reordered("mm", a, b), out=out)


def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`aten::addmm`."""
    out = a.new_empty((a.shape[0], b.shape[1]))
    return _ATEN.addmm.out(c, *_reordered("addmm", a, b), beta=beta, alpha=alpha, out=out)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """`aten::bmm`."""
    out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    return _ATEN.bmm.out(*_reordered("bmm", a, b), out=out)


def mv(a: Tensor, b: Tensor) -> Tensor:
    """`aten::mv`."""
    return _ATEN.mv.out(*_reordered("mv", a, b), out=a.new_empty((a.shape[0],)))


def sum_of_dimensions(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """`aten::sum.dim_IntList`."""
    reduced = {d % x.dim() for d in dim or range(x.dim())} if x.dim() else set()
    kept = [1 if d in reduced else n for d, n in enumerate(x.shape) if keepdim or d not in reduced]
    exact = not (x.is_floating_point() or x.is_complex())
    kind = dtype or (torch.int64 if exact else x.dtype)
    shape = tuple(x.shape)
    for d in () if exact else sorted(reduced):
        if shape[d] > 2:
            x = x.index_select(d, _permutation("sum", (shape, (d,)), shape[d]))
    return _ATEN.sum.IntList_out(x, dim, keepdim, dtype=dtype, out=torch.empty(kept, dtype=kind))


def sum_of_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """`aten::sum`."""
    return sum_of_dimensions(x, None, dtype=dtype)


_KERNELS: dict[str, Any] = {
    "mm": mm,
    "addmm": addmm,
    "bmm": bmm,
    "mv": mv,
    "sum": sum_of_all,
    "sum.dim_IntList": sum_of_dimensions,
}
for _name, _kernel in _KERNELS.items():
    _LIBRARY.impl(_name, _kernel, "CPU")
