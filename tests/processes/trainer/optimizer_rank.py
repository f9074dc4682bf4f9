"""Program of one of N ranks: optimizers on sharded parameters, compared with the same on whole ones."""

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
"""Equal shapes, tall and wide ones, indivisible rows, fewer rows than ranks, and experts."""
STEPS = 3
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


def make_tensors(step: int) -> list[Tensor]:
    """Return the parameters before step 0, or the gradients of a later step."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def make_muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Muon(parameters, [nn.Parameter(torch.zeros(2))], momentum=0.9, adamw={**OPTIONS, "fused": True})


def make_adamw8bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return AdamW8bit(parameters, **OPTIONS)


def take_steps(optimizer: torch.optim.Optimizer, gradients: list[list[Tensor]]) -> None:
    """Take all steps."""
    parameters = optimizer.param_groups[0]["params"]
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient
        optimizer.step()


def main(rank: int, ranks: int, store: str) -> None:
    """Raise `AssertionError` if sharding changes a number."""
    optimizers.SMALLEST, optimizers.BLOCK = 20, 4
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = (init_device_mesh("cpu", (ranks,)), [Shard(0)])
    replicas = (init_device_mesh("cpu", (1, ranks)), [Replicate(), Shard(0)])
    columns = (init_device_mesh("cpu", (ranks,)), [Shard(1)])
    for make, layouts in ((make_muon, (rows, replicas, columns)), (make_adamw8bit, (rows, replicas))):
        expected = [nn.Parameter(tensor) for tensor in make_tensors(0)]
        take_steps(make(expected), [make_tensors(step) for step in range(1, STEPS + 1)])
        for layout in layouts:
            divided = partial(distribute_tensor, device_mesh=layout[0], placements=layout[1], src_data_rank=None)
            parameters = [nn.Parameter(divided(tensor)) for tensor in make_tensors(0)]
            take_steps(
                make(parameters), [[divided(tensor) for tensor in make_tensors(step)] for step in range(1, STEPS + 1)]
            )
            for parameter, exact in zip(parameters, expected, strict=True):
                torch.testing.assert_close(parameter.detach().full_tensor(), exact.detach(), atol=1e-6, rtol=1e-5)
            print(make.__name__, flush=True)
    dist.barrier()
    os._exit(
        0
    )  # As in the trainer's ranks: gloo's threads may outlive its groups, and a normal interpreter exit would abort.


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
