"""Delayed weight gradients of linear layers for zero-bubble schedules, which compute the gradients of inputs first.

Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv:2401.10241). torch's split of a backward pass traverses the graph, where it does
not find weights gathered by FSDP. Here a linear layer stores its input and the gradient of its output instead, which also works with
recomputed and offloaded activations. All other parameters (norms, embedding, head, experts) get their gradients immediately.
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
"""Weight, bias, input and gradient of the output."""


class LaterWeights:
    """Delayed products of one rank."""

    def __init__(self, model: nn.Module) -> None:
        """Create a store for the linear layers of `model` that `postpone_products` changes."""
        self._model = model
        self._waiting: list[_Kept] = []

    def keep(self, product: _Kept) -> None:
        """Store the factors of a weight's gradient."""
        self._waiting.append(product)

    def take(self) -> Callable[[], None]:
        """Return a function that computes the products stored since the last call."""
        kept, self._waiting = self._waiting, []
        return partial(_add_products, self._model, kept)


def postpone_products(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Change the linear layers in `layers`, in place and before FSDP, to delay the products of their weight gradients."""
    later = LaterWeights(model)
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear) and module.weight.requires_grad:
                module.forward = partial(_forward_linear, module, later)
    object.__setattr__(model, _ATTRIBUTE, later)


def later_weights_of(model: nn.Module) -> LaterWeights | None:
    """Return the delayed products of a model, or None if its gradients are not delayed."""
    found: LaterWeights | None = getattr(model, _ATTRIBUTE, None)
    return found


def hold_gradients(model: nn.Module) -> None:
    """Disable the reduction of gradients until `reduce_gradients`."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)


def reduce_gradients(model: nn.Module) -> None:
    """Sum the accumulated gradients over the ranks once, like the backward pass of a last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
        model._get_fsdp_state()._root_post_backward_final_callback()


def _forward_linear(module: nn.Linear, later: LaterWeights, hidden: Tensor) -> Tensor:
    made: Tensor = _Linear.apply(hidden, module.weight, module.bias, later)
    return made


class _Linear(torch.autograd.Function):  # type: ignore[misc]  # torch is not type-checked
    """Linear layer whose backward pass computes only the gradient of the input."""

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
    """Add the gradients to the gathered parameters, which keep them because of `hold_gradients`."""
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
    """Add gradients in the compute dtype to FSDP's float32 sums, as FSDP does after a backward pass, so that sums are never rounded."""
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()
