"""Optimizer moments in host memory on a GPU: bitwise equality with device moments, and device memory for two buckets
only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlrun.config.models.learning import OptimizerConfig
from rlrun.trainer.learning.optim.host_moments import HostMoments
from rlrun.trainer.learning.optim.update import apply_gradient
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.modeling.shard import local_part

BUCKET = 4 * 2**20


def parameters(device: torch.device) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(512, 512) for _ in range(8)]).to(device)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(1)
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, device=device, generator=generator)
        apply_gradient(model, optimizer, lr=1e-3, max_grad_norm=1.0)


@pytest.mark.parametrize("fields", [{}, {"moments": "int8"}, {"name": "sgd"}])
def test_host_moments_equal_device_moments_bitwise(fields: dict[str, Any], device: torch.device) -> None:
    plain, moved = parameters(device), parameters(device)
    steps(plain, make_optimizer(plain, OptimizerConfig(**fields), device), device)
    optimizer = HostMoments(make_optimizer(moved, OptimizerConfig(**fields), device), device, bucket_bytes=BUCKET)
    steps(moved, optimizer, device)
    assert all(map(torch.equal, moved.parameters(), plain.parameters()))
    assert 0 < optimizer.buffer_bytes <= 2 * BUCKET
    optimizer.state_dict()  # waits for the last copy
    moments = [
        local_part(value)
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step" and value.ndim > 1
    ]
    assert moments
    assert all(one.device.type == "cpu" for one in moments)
    assert all(one.is_pinned() for one in moments) == (device.type == "cuda")
