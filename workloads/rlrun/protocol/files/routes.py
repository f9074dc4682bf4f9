"""Routes: the experts that the routers of a mixture chose for each token, as raw columns of bytes or words.

A column is `[T, L, K]`: tokens, layers with a router in the order of the model, chosen experts. A token without a route in a layer has the
largest number of the column's type in all K places, because zeros would be a valid choice; the trainer routes it natively.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Routes: TypeAlias = "npt.NDArray[np.uint8] | npt.NDArray[np.uint16]"
DTYPES = ("uint8", "uint16")
"""Types of a column, by name."""
_BYTE_EXPERTS = 256
_MOST_EXPERTS = 65_535


class RoutesError(ValueError):
    """Error for routes that do not belong to a model or to their tokens."""


@dataclass(frozen=True)
class RouteShape:
    """Size of a model's routes."""

    layers: int
    """Decoder layers with a router."""
    top_k: int
    """Experts that a router chooses for each token."""
    experts: int
    """Experts of each layer."""

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
        """Smallest type whose largest number is not a valid route. With several choices, a repeated expert is not a valid route."""
        limit = _BYTE_EXPERTS if self.top_k > 1 else _BYTE_EXPERTS - 1
        return np.dtype(np.uint8) if self.experts <= limit else np.dtype(np.uint16)


@dataclass(frozen=True)
class EngineRoutes:
    """Experts that an engine chose for the tokens of one sequence, prompt included."""

    start: int
    """Position of the first token."""
    experts: Routes
    """`[rows, decoder layers, K]`; dense layers contain zeros. The last token of an answer was not forwarded and has no row."""


def describe_routes(experts: Routes) -> dict[str, object]:
    """Return shape and type of an array, for the head of a message."""
    return {"shape": list(experts.shape), "dtype": experts.dtype.name}


def routes_bytes(experts: Routes) -> bytes:
    """Return the content of an array, little-endian."""
    return np.ascontiguousarray(experts, experts.dtype.newbyteorder("<")).tobytes()


def described_size(described: Mapping[str, object]) -> int:
    """Return the number of bytes of a described array.

    Raises:
        RoutesError: the description is invalid.
    """
    shape, dtype = described.get("shape"), described.get("dtype")
    if dtype not in DTYPES or not isinstance(shape, list) or len(shape) != 3:
        raise RoutesError(f"routes have shape {shape} and type {dtype}; expected three sizes and {' or '.join(DTYPES)}")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise RoutesError(f"routes have shape {shape}; sizes must be numbers of 0 or more")
    return math.prod(shape) * np.dtype(dtype).itemsize


def read_routes(described: Mapping[str, Any], content: bytes) -> Routes:
    """Return a described array from its content."""
    kind = np.dtype(described["dtype"])
    found: Routes = np.frombuffer(content, kind.newbyteorder("<")).astype(kind).reshape(described["shape"])
    return found


def missing_route(dtype: npt.DTypeLike) -> int:
    """Return the number that fills all places of a missing route."""
    return int(np.iinfo(dtype).max)


def make_missing(tokens: int, layers: int, top_k: int, dtype: npt.DTypeLike) -> Routes:
    """Return a column without routes, `[tokens, layers, top_k]`."""
    column: Routes = np.full((tokens, layers, top_k), missing_route(dtype), dtype)
    return column


def has_route(routes: Routes) -> npt.NDArray[np.bool_]:
    """Return whether each token has a route in each layer, `[T, L]`."""
    found: npt.NDArray[np.bool_] = (routes != missing_route(routes.dtype)).any(-1)
    return found


def join_engine_routes(parts: Sequence[EngineRoutes], tokens: int) -> Routes | None:
    """Return the column of a sequence from the experts of its answers, without dense layers; None without any.

    Args:
        parts: experts of consecutive parts of the sequence, in order.
        tokens: length of the sequence.

    Raises:
        RoutesError: the parts have different sizes or types, or no layer has a router.
    """
    if not parts:
        return None
    first = parts[0].experts
    if any(part.experts.shape[1:] != first.shape[1:] or part.experts.dtype != first.dtype for part in parts):
        raise RoutesError("the engines returned experts of different layers, choices or types for one sequence")
    # A router chooses different experts for a token, so only dense layers contain zeros everywhere.
    mixed = np.logical_or.reduce([(part.experts != 0).any((0, 2)) for part in parts])
    if not mixed.any():
        raise RoutesError("the engines returned experts of 0 for every layer")
    column = make_missing(tokens, int(mixed.sum()), first.shape[2], first.dtype)
    for part in parts:
        column[part.start : part.start + len(part.experts)] = part.experts[: tokens - part.start, mixed]
    return column


def check_column(routes: Routes, tokens: int) -> None:
    """Check type and size of a column without its model.

    Raises:
        RoutesError: a size or the type is wrong; the message names it.
    """
    if routes.dtype.name not in DTYPES:
        raise RoutesError(f"routes have type {routes.dtype}; supported: {', '.join(DTYPES)}")
    if routes.ndim != 3 or routes.shape[0] != tokens or 0 in routes.shape[1:]:
        raise RoutesError(f"routes have shape {routes.shape}, expected ({tokens}, layers, experts of a token)")


def check_routes(routes: Routes, shape: RouteShape) -> None:
    """Check that a column contains only routes that a model's routers can choose.

    Raises:
        RoutesError: the column has other layers or choices, an unknown expert, the same expert twice, or another type.
    """
    if routes.shape[1:] != (shape.layers, shape.top_k):
        raise RoutesError(
            f"routes have {routes.shape[1]} layers with {routes.shape[2]} experts, the model has {shape.layers} with {shape.top_k}"
        )
    if routes.dtype != shape.dtype:
        raise RoutesError(f"routes have type {routes.dtype}, a model with {shape.experts} experts has {shape.dtype}")
    present = routes[has_route(routes)]
    if present.size and int(present.max()) >= shape.experts:
        raise RoutesError(f"routes contain expert {int(present.max())}, the model has {shape.experts} experts")
    ordered = np.sort(present, axis=-1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise RoutesError("routes contain the same expert twice for one token")


def join_columns(columns: list[Routes | None], lengths: list[int]) -> Routes | None:
    """Concatenate the columns of several samples. Samples without a column get missing routes; without any column, return None.

    Raises:
        RoutesError: the columns have different layers, choices or types.
    """
    present = [column for column in columns if column is not None]
    if not present:
        return None
    first = present[0]
    for column in present:
        if column.shape[1:] != first.shape[1:] or column.dtype != first.dtype:
            raise RoutesError(
                f"routes of one batch have shapes {first.shape[1:]} ({first.dtype}) and {column.shape[1:]} ({column.dtype})"
            )
    _, layers, top_k = first.shape
    parts = [
        make_missing(length, layers, top_k, first.dtype) if column is None else column
        for column, length in zip(columns, lengths, strict=True)
    ]
    # numpy keeps the memory layout of the parts, and safetensors would write another layout's bytes under this shape.
    joined: Routes = np.ascontiguousarray(np.concatenate(parts))
    return joined
