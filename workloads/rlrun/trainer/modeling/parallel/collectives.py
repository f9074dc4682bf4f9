"""Differentiable collectives. Every rank of the group computes the same loss, and it counts once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _Copy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Reduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.size = group, dist.get_world_size(group)
        whole = tensor.new_empty(ctx.size * tensor.shape[0], *tensor.shape[1:])
        dist.all_gather_single(whole, tensor.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        part = gradient.new_empty(gradient.shape[0] // ctx.size, *gradient.shape[1:])
        dist.reduce_scatter_single(part, gradient, group=ctx.group)
        return part, None


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: FunctionCtx, tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = list(sent), list(received), group
        return _all_to_all(tensor, ctx.sent, ctx.received, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(tensor: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(arrived, tensor.contiguous(), received, sent, group=group)
    return arrived


class _ScaleGradient(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def copy_to(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the same tensor, of which each rank uses a part; backward sums the gradients over ranks (f of arXiv:1909.08053, 3)."""
    result: Tensor = _Copy.apply(tensor, group)
    return result


def reduce_from(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks, with which all ranks compute the same; backward is the identity (g of arXiv:1909.08053, 3)."""
    result: Tensor = _Reduce.apply(tensor, group)
    return result


def gather_parts(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the parts of all ranks along dimension 0; backward sums the gradients over ranks and returns this rank's part."""
    result: Tensor = _Gather.apply(tensor, group)
    return result


def exchange_rows(tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows of dimension 0: send `sent[r]` rows to rank r and receive `received[r]` from it; backward exchanges the gradients."""
    result: Tensor = _Exchange.apply(tensor, sent, received, group)
    return result


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Return the same tensor; backward multiplies its gradient by `factor`."""
    result: Tensor = _ScaleGradient.apply(tensor, factor)
    return result
