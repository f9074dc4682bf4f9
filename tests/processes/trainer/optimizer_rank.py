"""A program that is one of N ranks: optimizers on divided parameters, held against the same on whole ones."""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rlrun.trainer.learning import optimizers
from rlrun.trainer.learning.optim.muon import Muon
from rlrun.trainer.learning.optimizers import AdamW8bit

SHAPES = [(6, 4), (5, 3), (6, 4), (3, 5), (4, 6), (6, 4), (1, 4), (3, 4, 2)]
"""Equal ones, tall and wide, rows that do not divide, fewer rows than ranks, and experts."""
STEPS = 3
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


def whole(step: int) -> list[Tensor]:
    """The parameters before step 0, the gradients of the steps after."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Muon(parameters, [nn.Parameter(torch.zeros(2))], momentum=0.9, adamw={**OPTIONS, "fused": True})


def coded(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return AdamW8bit(parameters, **OPTIONS)


def stepped(optimizer: torch.optim.Optimizer, gradients: list[list[Tensor]]) -> None:
    """Take all steps."""
    parameters = optimizer.param_groups[0]["params"]
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient
        optimizer.step()


def main(rank: int, ranks: int, store: str) -> None:
    """Raise `AssertionError` where the division changes a number."""
    optimizers.SMALLEST, optimizers.BLOCK = 20, 4
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = (init_device_mesh("cpu", (ranks,)), [Shard(0)])
    replicas = (init_device_mesh("cpu", (1, ranks)), [Replicate(), Shard(0)])
    columns = (init_device_mesh("cpu", (ranks,)), [Shard(1)])
    for make, layouts in ((muon, (rows, replicas, columns)), (coded, (rows, replicas))):
        expected = [nn.Parameter(tensor) for tensor in whole(0)]
        stepped(make(expected), [whole(step) for step in range(1, STEPS + 1)])
        for layout in layouts:
            divided = partial(distribute_tensor, device_mesh=layout[0], placements=layout[1], src_data_rank=None)
            parameters = [nn.Parameter(divided(tensor)) for tensor in whole(0)]
            stepped(make(parameters), [[divided(tensor) for tensor in whole(step)] for step in range(1, STEPS + 1)])
            for parameter, exact in zip(parameters, expected, strict=True):
                torch.testing.assert_close(parameter.detach().full_tensor(), exact.detach(), atol=1e-6, rtol=1e-5)
            print(make.__name__, flush=True)
    dist.barrier()
    os._exit(
        0
    )  # as the trainer's ranks: gloo's threads may outlive its groups, and an interpreter that ends would abort


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
