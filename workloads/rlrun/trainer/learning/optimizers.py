"""The optimizers, on float32 master weights that may be sharded: AdamW, Muon and SGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlrun.config.models.learning import OptimizerConfig
from rlrun.trainer.modeling.shard import decoder_layers

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Jordan, 2024, https://kellerjordan.github.io/posts/muon)."""
NEWTON_SCHULZ_STEPS = 5
_NORM_EPS = 1e-7


def make_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """Optimizer of a model's parameters; every step sets the rate of every group.

    A group whose `matrices` is true is what Muon orthogonalises: the weight matrices of the decoder layers.
    """
    if config.name == "sgd":
        return torch.optim.SGD(
            _trained(model.parameters()),
            lr=config.lr,
            momentum=config.effective_momentum,
            weight_decay=config.weight_decay,
        )
    adamw = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        # One operation for all parameters: of sharded ones each is costly to dispatch.
        "fused": device.type in ("cpu", "cuda"),
    }
    if config.name == "adamw":
        return torch.optim.AdamW(_trained(model.parameters()), **adamw)
    matrices = [p for p in _trained(decoder_layers(model).parameters()) if p.ndim >= 2]
    chosen = set(map(id, matrices))
    others = [p for p in _trained(model.parameters()) if id(p) not in chosen]
    return Muon(matrices, others, momentum=config.effective_momentum, adamw=adamw)


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


class Muon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not typed for mypy
    """Momentum orthogonalised by Newton-Schulz (Jordan et al., 2024) for matrices, AdamW for everything else.

    With gradient G, momentum μ and shape `[..., m, n]` (leading dimensions hold independent matrices, such as experts):

        B ← μ B + (1 - μ) G        U = NS((1 - μ) G + μ B)        W ← W (1 - lr·decay) - lr·0.2·√max(m, n)·U

    The factor makes the update as large as AdamW's (Liu et al., 2025, arXiv:2502.16982), so that both kinds of parameters share
    one rate. A sharded matrix is gathered, orthogonalised on every rank and cut again; its momentum stays sharded.
    """

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], *, momentum: float, adamw: dict[str, Any]
    ) -> None:
        shared = {"lr": adamw["lr"], "weight_decay": adamw["weight_decay"]}
        super().__init__([{"params": matrices, "matrices": True, "momentum": momentum, **shared}], {})
        self._adamw = torch.optim.AdamW(others, **adamw)
        self.add_param_group({**self._adamw.param_groups[0], "matrices": False})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if group["matrices"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        # A loaded state replaces groups and state; the inner optimizer works on those of this one.
        self._adamw.param_groups = [group for group in self.param_groups if not group["matrices"]]
        self._adamw.state = self.state
        self._adamw.step()
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state, momentum = parameter.grad, self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum)
        if isinstance(direction, DTensor):
            whole = orthogonalized(direction.full_tensor())
            update = distribute_tensor(whole, direction.device_mesh, direction.placements, src_data_rank=None)
        else:
            update = orthogonalized(direction)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape[-2:])))


def orthogonalized(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, about: singular values of `[..., m, n]` float32 become 0.7 to 1.2.

    Five steps of X ← aX + (bA + cA²)X with A = XXᵀ, in bfloat16 on CUDA and in float32 elsewhere; zeros stay zeros.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_NORM_EPS)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrix.dtype)
