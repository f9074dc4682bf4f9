"""Gradients of linear layers' weights that are computed later than those of inputs, as zero-bubble schedules order them.

Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv:2401.10241). torch's own division of a backward pass walks its graph and finds no
weights that FSDP has gathered; here a linear layer keeps its input and its output's gradient instead, so that recomputed and offloaded
activations go with it. Everything else (norms, embedding, head, a mixture's experts) has its gradient at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear

_ATTRIBUTE = "_rlrun_later_weights"
_Kept = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""Weight, bias, input and the output's gradient."""


class LaterWeights:
    """Products that wait, of one rank."""

    def __init__(self, model: nn.Module) -> None:
        """Products of the linear layers of `model`, which `postpone_products` has changed."""
        self._model = model
        self._waiting: list[_Kept] = []

    def keep(self, product: _Kept) -> None:
        """Keep what a weight's gradient is made of."""
        self._waiting.append(product)

    def take(self) -> Callable[[], None]:
        """Computation of what has been kept since the last call."""
        kept, self._waiting = self._waiting, []
        return partial(_add_products, self._model, kept)


def postpone_products(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Have the linear layers in `layers` keep the products of their weights' gradients, in place, before FSDP divides the model."""
    later = LaterWeights(model)
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear) and module.weight.requires_grad:
                module.forward = partial(_forward_linear, module, later)
    object.__setattr__(model, _ATTRIBUTE, later)


def later_weights_of(model: nn.Module) -> LaterWeights | None:
    """Products of a model that `postpone_products` has changed; None: it has its gradients at once."""
    found: LaterWeights | None = getattr(model, _ATTRIBUTE, None)
    return found


def hold_gradients(model: nn.Module) -> None:
    """Keep gradients whole on every rank until `reduce_gradients`."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)


def reduce_gradients(model: nn.Module) -> None:
    """Sum over the ranks what has been held, once, as the backward pass of a last micro-batch does."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
        model._get_fsdp_state()._root_post_backward_final_callback()


def _forward_linear(module: nn.Linear, later: LaterWeights, hidden: Tensor) -> Tensor:
    made: Tensor = _Linear.apply(hidden, module.weight, module.bias, later)
    return made


class _Linear(torch.autograd.Function):  # type: ignore[misc]  # torch is not type-checked
    """Linear layer whose backward pass computes the input's gradient alone."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, later: LaterWeights) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.parameters, ctx.later = (weight, bias), later
        return linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        hidden, weight = ctx.saved_tensors
        ctx.later.keep((*ctx.parameters, hidden.detach(), gradient.detach()))
        return (gradient @ weight if ctx.needs_input_grad[0] else None), None, None, None


@torch.no_grad()  # type: ignore[untyped-decorator]
def _add_products(model: nn.Module, kept: list[_Kept]) -> None:
    """Add the gradients to those of the gathered parameters, which `hold_gradients` keeps."""
    while kept:
        weight, bias, hidden, gradient = kept.pop()
        columns = gradient.flatten(0, -2)
        _accumulate_gradient(weight, columns.T @ hidden.flatten(0, -2))
        if bias is not None and bias.requires_grad:
            _accumulate_gradient(bias, columns.sum(0))
    if isinstance(model, FSDPModule):
        _sum_in_float32(model)


def _accumulate_gradient(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _sum_in_float32(model: nn.Module) -> None:
    """Add rounded gradients to FSDP's float32 sums, as it does itself after a backward pass: none is added to another rounded one."""
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()
