"""Differentiable collectives. Every rank of the group computes the same loss, and it counts once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class _GroupContext(Protocol):
    """Context of a collective in the autograd graph."""

    group: dist.ProcessGroup
    size: int


class _ExchangeContext(Protocol):
    """Context of `_Exchange` in the autograd graph."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]


class _FactorContext(Protocol):
    """Context of `_ScaleGradient` in the autograd graph."""

    factor: float


GroupFunction = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _Copy(torch.autograd.Function):
    apply: ClassVar[GroupFunction]

    @staticmethod
    def forward(ctx: _GroupContext, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: _GroupContext, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Reduce(torch.autograd.Function):
    apply: ClassVar[GroupFunction]

    @staticmethod
    def forward(ctx: _GroupContext, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: _GroupContext, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    apply: ClassVar[GroupFunction]

    @staticmethod
    def forward(ctx: _GroupContext, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.size = group, dist.get_world_size(group)
        whole = tensor.new_empty(ctx.size * tensor.shape[0], *tensor.shape[1:])
        dist.all_gather_single(whole, tensor.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: _GroupContext, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        part = gradient.new_empty(gradient.shape[0] // ctx.size, *gradient.shape[1:])
        dist.reduce_scatter_single(part, gradient, group=ctx.group)
        return part, None


class _Exchange(torch.autograd.Function):
    apply: ClassVar[Callable[[Tensor, Sequence[int], Sequence[int], dist.ProcessGroup], Tensor]]

    @staticmethod
    def forward(
        ctx: _ExchangeContext, tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = list(sent), list(received), group
        return _all_to_all(tensor, ctx.sent, ctx.received, group)

    @staticmethod
    def backward(ctx: _ExchangeContext, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(tensor: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(arrived, tensor.contiguous(), received, sent, group=group)
    return arrived


class _ScaleGradient(torch.autograd.Function):
    apply: ClassVar[Callable[[Tensor, float], Tensor]]

    @staticmethod
    def forward(ctx: _FactorContext, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: _FactorContext, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def copy_to(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the same tensor, of which each rank uses a part; backward sums the gradients over ranks (f of arXiv:1909.08053, 3)."""
    return _Copy.apply(tensor, group)


def reduce_from(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks, with which all ranks compute the same; backward is the identity (g of arXiv:1909.08053, 3)."""
    return _Reduce.apply(tensor, group)


def gather_parts(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the parts of all ranks along dimension 0; backward sums the gradients over ranks and returns this rank's part."""
    return _Gather.apply(tensor, group)


def exchange_rows(tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows of dimension 0: send `sent[r]` rows to rank r and receive `received[r]` from it; backward exchanges the gradients."""
    return _Exchange.apply(tensor, sent, received, group)


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Return the same tensor; backward multiplies its gradient by `factor`."""
    return _ScaleGradient.apply(tensor, factor)
