"""Construction of optimizers on float32 master weights, which may be sharded: AdamW, Muon and SGD."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.optim.adamw8bit import AdamW8bit, divides_rows
from rlrun.trainer.learning.optim.host_moments import HostMoments
from rlrun.trainer.learning.optim.muon import Muon
from rlrun.trainer.modeling.shard import decoder_layers


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
