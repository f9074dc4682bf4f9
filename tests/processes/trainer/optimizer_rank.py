"""Program of one of N ranks: optimizers on sharded parameters, compared with the same on whole ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from rlrun.trainer.learning import optimizers
from rlrun.trainer.learning.optim.matrix_exchange import matrix_divisions
from rlrun.trainer.learning.optim.muon import Muon
from rlrun.trainer.learning.optimizers import AdamW8bit

SHAPES = [(6, 4), (5, 3), (6, 4), (3, 5), (4, 6), (6, 4), (1, 4), (3, 4, 2), (2, 5, 6), (1, 4, 8), (2, 2, 3, 4)]
"""Equal shapes, tall and wide ones, indivisible rows, fewer rows than ranks, experts, and two dimensions of experts."""
Layout = tuple[DeviceMesh, list[Placement]]
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


def one_division(ranks: int) -> dict[str, Layout]:
    """Return the layouts for any number of ranks."""
    mesh, copies = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (1, ranks))
    return {
        "rows": (mesh, [Shard(0)]),
        "replicas": (copies, [Replicate(), Shard(0)]),
        "second": (mesh, [Shard(1)]),  # columns of matrices, rows of experts
        "last": (mesh, [Shard(-1)]),
        "strided": (mesh, [_StridedShard(0, split_factor=2)]),
    }


def two_divisions() -> dict[str, Layout]:
    """Return the layouts of four ranks that divide a matrix twice, FSDP first in the mesh, and of experts over two of them."""
    mesh = init_device_mesh("cpu", (2, 2))
    return {
        "fsdp-tp-rows": (mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        "rows-twice": (mesh, [Shard(0), Shard(0)]),
        "fsdp-tp-columns": (mesh, [Shard(0), Shard(1)]),
        "two-copies": (mesh, [Replicate(), Shard(1)]),
    }


def compare(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], layout: Layout) -> None:
    """Raise `AssertionError` if an update of divided parameters differs from that of whole ones."""
    expected = [nn.Parameter(tensor) for tensor in make_tensors(0)]
    take_steps(make(expected), [make_tensors(step) for step in range(1, STEPS + 1)])
    mesh, placements = layout

    def divide(tensor: Tensor) -> Tensor:
        # From the last dimension: -1 is another dimension in each tensor.
        own = [Shard(tensor.ndim - 1) if isinstance(p, Shard) and p.dim == -1 else p for p in placements]
        return distribute_tensor(tensor, mesh, own, src_data_rank=None)

    parameters = [nn.Parameter(divide(tensor)) for tensor in make_tensors(0)]
    take_steps(make(parameters), [[divide(tensor) for tensor in make_tensors(step)] for step in range(1, STEPS + 1)])
    for parameter, exact in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().full_tensor(), exact.detach(), atol=1e-6, rtol=1e-5)
    gathered = sum(matrix_divisions(parameter) is None for parameter in parameters)
    print(make.__name__, gathered, flush=True)


def main(rank: int, ranks: int, store: str) -> None:
    """Print optimizer and number of parameters that all ranks gather, for each layout.

    Raises:
        AssertionError: sharding changes a number.
    """
    optimizers.SMALLEST, optimizers.BLOCK = 20, 4
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    layouts = one_division(ranks)
    for layout in (*layouts.values(), *(two_divisions().values() if ranks == 4 else ())):
        compare(make_muon, layout)
    for name in ("rows", "replicas"):
        compare(make_adamw8bit, layouts[name])
    dist.barrier()
    # As in the trainer's ranks: gloo's threads may outlive its groups, and a normal interpreter exit would abort.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
