"""Sums and maxima over the sequences of a row, with equal bits in every call on every device.

`index_add` and `scatter_reduce` add floating-point numbers with atomic instructions on CUDA, in an order that changes from call to call,
and so do the backward passes of `index_select`, `gather` and `repeat_interleave`. The sequences of a row are contiguous, so each one is
reduced by itself, in a fixed order (`torch.segment_reduce`). The backward pass of a sum repeats values, and the backward pass of a
repetition sums them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def segment_boundaries(segment_ids: Tensor, num_segments: int) -> Tensor:
    """Return the first element of each segment and the number of elements, `[S + 1]` int64. The host does not wait for the device.

    Args:
        segment_ids: index of each element's segment, `[T]` int64, in ascending order.
        num_segments: number of segments S.
    """
    return torch.searchsorted(segment_ids, torch.arange(num_segments + 1, device=segment_ids.device))


def reduce_segments(kind: str, values: Tensor, boundaries: Tensor, segment_ids: Tensor) -> Tensor:
    """Reduce the values of each segment: `[T]` -> `[S]`. Only a sum is differentiable.

    Args:
        kind: `sum` or `max`.
        values: values, `[T]`; integers are summed exactly up to 2^53.
        boundaries: `segment_boundaries` of the ids.
        segment_ids: index of each value's segment, `[T]` int64, in ascending order.
    """
    if not values.is_floating_point():
        return _segment_reduce(kind, values.double(), boundaries).to(values.dtype)
    if kind == "sum":
        return cast(Tensor, _Sum.apply(values, boundaries, segment_ids))  # type: ignore[no-untyped-call]
    return _segment_reduce(kind, values.detach(), boundaries)


def repeat_for_segments(per_segment: Tensor, boundaries: Tensor, segment_ids: Tensor) -> Tensor:
    """Return the value of each element's segment: `[S]` -> `[T]`, differentiable. For the arguments see `reduce_segments`."""
    return cast(Tensor, _Repeat.apply(per_segment, boundaries, segment_ids))  # type: ignore[no-untyped-call]


def _segment_reduce(kind: str, values: Tensor, boundaries: Tensor) -> Tensor:
    # The checks of the boundaries, which `unsafe` skips, would let the host wait for the device.
    return torch.segment_reduce(values, kind, offsets=boundaries, unsafe=True)


class _Sum(torch.autograd.Function):
    """Sum of each segment."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, boundaries: Tensor, segment_ids: Tensor) -> Tensor:
        ctx.save_for_backward(boundaries, segment_ids)
        return _segment_reduce("sum", values, boundaries)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return repeat_for_segments(gradient, *ctx.saved_tensors), None, None


class _Repeat(torch.autograd.Function):
    """Value of each element's segment."""

    @staticmethod
    def forward(ctx: Any, per_segment: Tensor, boundaries: Tensor, segment_ids: Tensor) -> Tensor:
        ctx.save_for_backward(boundaries, segment_ids)
        return per_segment[segment_ids]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_segments("sum", gradient, *ctx.saved_tensors), None, None
