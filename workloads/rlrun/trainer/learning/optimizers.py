"""Optimizers on float32 master weights, which may be sharded: AdamW, AdamW with 8-bit moments, Muon and SGD.

AdamW with 8-bit moments is plain torch, for CPU and GPU, with or without sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.optim.host_moments import HostMoments
from rlrun.trainer.learning.optim.muon import Muon
from rlrun.trainer.modeling.shard import decoder_layers, local_part

BLOCK = 256
"""Number of values with a common scale, their largest magnitude. A block is part of one row (an index of dimension 0), because sharding
never splits rows.
"""
SMALLEST = 4096
"""Smallest number of elements for 8-bit moments. Moments of smaller parameters and of vectors stay in float32, because norms and biases
need little memory.
"""
_DECADES = 7
_TINY = 1e-38
"""Divisor of a block of zeros."""


@cache
def make_codebook(*, signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of dynamic tree quantization in [-1, 1] or [0, 1], ascending (Dettmers et al. 2022, arXiv:2110.02861, 2.1).

    Each decade from 10^-7 to 1 has twice as many evenly spaced values as the one below, so large values are precise and small ones have a
    bounded relative error.
    """
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = (10.0 ** (decade + 1 - _DECADES) * (edges[1:] + edges[:-1]) / 2).tolist()
        values += [*middles, *(-value for value in middles)] if signed else middles
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def _code_middles(*, signed: bool, device: torch.device) -> Tensor:
    values = make_codebook(signed=signed, device=device)
    return (values[1:] + values[:-1]) / 2


def quantize(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize `values` `[m, n]` fp32 to the nearest codes `[m, n]` uint8, with scales `[m, ceil(n / BLOCK)]` fp32.

    Without a sign, nonzero values have nonzero codes, because the update divides by second moments.
    """
    blocks = _split_blocks(values)
    scales = blocks.abs().amax(2)
    shares = blocks / scales.clamp(min=_TINY)[..., None]
    codes = torch.bucketize(shares, _code_middles(signed=signed, device=values.device), out_int32=True)
    if not signed:
        codes = torch.maximum(codes, (blocks > 0).to(codes.dtype))
    return codes.to(torch.uint8).flatten(1)[:, : values.shape[1]].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Convert the result of `quantize` to values `[m, n]` fp32."""
    values = make_codebook(signed=signed, device=codes.device)[codes.int()]
    return (_split_blocks(values) * scales[..., None]).flatten(1)[:, : codes.shape[1]]


def _split_blocks(values: Tensor) -> Tensor:
    """Reshape `[m, n]` to `[m, blocks, BLOCK]`, padded with 0."""
    rest = -values.shape[1] % BLOCK
    filled = nn.functional.pad(values, (0, rest)) if rest else values
    return filled.reshape(len(values), filled.shape[1] // BLOCK, BLOCK)


class AdamW8bit(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not typed for mypy
    """AdamW (Loshchilov and Hutter 2019) with moments in blocks of 8-bit codes: 2.03 bytes per parameter instead of 8.

    An update uses the moments before they are rounded. Codes and scales are sharded by rows like the parameter, so that a checkpoint can
    be resumed with another number of ranks.
    """

    def __init__(self, parameters: list[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, group)
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state. torch converts every tensor to float32, which represents codes exactly."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: value.to(torch.uint8) for name, value in state.items() if name.endswith("_codes")}

    def _update_parameter(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], local_part(parameter.grad)
        weight = local_part(parameter.detach())
        beta1, beta2 = group["betas"]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        step = state["step"].add_(1)
        first = _read_moment(state, "exp_avg", parameter, signed=True).lerp_(gradient, 1 - beta1)
        second = _read_moment(state, "exp_avg_sq", parameter, signed=False).mul_(beta2)
        second.addcmul_(gradient, gradient, value=1 - beta2)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        # Scalars stay on the device, so that the host does not wait.
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight.sub_(first / root * (group["lr"] / (1 - beta1**step)))
        _keep_moment(state, "exp_avg", parameter, first, signed=True)
        _keep_moment(state, "exp_avg_sq", parameter, second, signed=False)


def _read_moment(state: dict[str, Any], name: str, parameter: Tensor, *, signed: bool) -> Tensor:
    """Return this rank's part of a moment, fp32 in the parameter's shape; 0 before the first step."""
    like = local_part(parameter.detach())
    if name in state:
        return local_part(state[name])
    if f"{name}_codes" not in state:
        return torch.zeros_like(like)
    codes, scales = local_part(state[f"{name}_codes"]), local_part(state[f"{name}_scales"])
    # Not -1 for the columns: with more ranks than experts, a rank has no rows, and the size would be ambiguous.
    return dequantize(codes.reshape(len(like), like.shape[1:].numel()), scales, signed=signed).reshape(like.shape)


def _keep_moment(state: dict[str, Any], name: str, parameter: Tensor, values: Tensor, *, signed: bool) -> None:
    """Store a moment, sharded like the parameter."""
    if parameter.ndim < 2 or parameter.numel() < SMALLEST:
        state[name] = _local_part(values, parameter, parameter.shape)
        return
    codes, scales = quantize(values.reshape(len(values), values.shape[1:].numel()), signed=signed)
    blocks = -(-parameter.shape[1:].numel() // BLOCK)
    state[f"{name}_codes"] = _local_part(codes.reshape(values.shape), parameter, parameter.shape)
    state[f"{name}_scales"] = _local_part(scales, parameter, torch.Size([parameter.shape[0], blocks]))


def _local_part(part: Tensor, parameter: Tensor, shape: torch.Size) -> Tensor:
    """Wrap this rank's part of a tensor of `shape` whose rows are sharded like the parameter's."""
    if not isinstance(parameter, DTensor):
        return part
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def divides_rows(parameter: Tensor) -> bool:
    """Return whether the parameter is sharded by complete rows, so that no block is split."""
    if not isinstance(parameter, DTensor):
        return True
    return all(placement.is_replicate() or placement.dim == 0 for placement in parameter.placements)


def make_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """Create the optimizer of a model's trained parameters. Every step sets the learning rate of all groups.

    Muon orthogonalizes the parameter group with `matrices` true: the weight matrices of the decoder layers.
    """
    made = _resident_optimizer(model, config, device)
    return HostMoments(made, device) if config.offload else made


def _resident_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """Create an optimizer with its states on the device."""
    if config.name == "sgd":
        return torch.optim.SGD(
            _trained_parameters(model.parameters()),
            lr=config.lr,
            momentum=config.effective_momentum,
            weight_decay=config.weight_decay,
        )
    if config.moments == "int8":
        return _make_adamw8bit(model, config)
    adamw = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        # One fused operation for all parameters, because dispatching one per sharded parameter is slow.
        "fused": device.type in ("cpu", "cuda"),
    }
    if config.name == "adamw":
        return torch.optim.AdamW(_trained_parameters(model.parameters()), **adamw)
    matrices = [p for p in _trained_parameters(decoder_layers(model).parameters()) if p.ndim >= 2]
    chosen = set(map(id, matrices))
    others = [p for p in _trained_parameters(model.parameters()) if id(p) not in chosen]
    return Muon(matrices, others, momentum=config.effective_momentum, adamw=adamw)


def _make_adamw8bit(model: nn.Module, config: OptimizerConfig) -> AdamW8bit:
    trained = _trained_parameters(model.parameters())
    if not all(map(divides_rows, trained)):
        raise RoleError(
            "optimizer.moments (int8) stores blocks of complete rows, but this layout divides rows; set moments: float32",
            exit_codes.CONFIGURATION,
        )
    betas = (config.beta1, config.beta2)
    return AdamW8bit(trained, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay)


def _trained_parameters(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]
