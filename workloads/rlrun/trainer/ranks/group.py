"""The ranks as one group: where each computes, and the few collectives that carry values other than tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlrun.config.models.parallel import ParallelismConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.ranks.dims import Meshes, ParallelDims

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Longest time that ranks wait for each other; covers one rank that reads or writes a large model alone."""


@dataclass(frozen=True)
class Group:
    """View of the group from this rank."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    """Mesh that FSDP divides the layers over."""
    meshes: Meshes | None = None
    """The whole layout; None: FSDP over all ranks and nothing else."""

    @property
    def dims(self) -> ParallelDims:
        """The layout's sizes."""
        return self.meshes.dims if self.meshes is not None else ParallelDims(dp_shard=self.world_size)

    @property
    def data_rank(self) -> int:
        """Number of this rank's share of the rows, of `data_size`: the ranks of a context and tensor group have the same."""
        return self.dims.data_rank(self.rank)

    @property
    def data_size(self) -> int:
        """Number of groups of ranks that each have rows of their own."""
        return self.dims.data_size

    @property
    def leads(self) -> bool:
        """True if this is rank 0, the only one that talks to the orchestrator and owns the run's files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sums({})

    def broadcast(self, document: object, *, root: int = 0) -> Any:
        """The JSON document of one rank, on every rank; what the others pass is ignored."""
        content = json.dumps(document).encode() if self.rank == root else b""
        size = torch.tensor([len(content)])
        dist.broadcast(size, root)
        payload = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == root:
            payload = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(payload, root)
        return json.loads(bytes(payload.numpy()))

    def neighbours(self) -> list[int]:
        """Process ids of the other ranks on this rank's machine, in order of rank. All ranks call this together."""
        mine = float(os.environ.get("GROUP_RANK", "0"))  # torchrun's number of the machine
        places = self.sums({str(r): mine if r == self.rank else 0.0 for r in range(self.world_size)})
        pids = self.sums({str(r): float(os.getpid()) if r == self.rank else 0.0 for r in range(self.world_size)})
        return [int(pids[r]) for r, place in places.items() if place == mine and int(r) != self.rank]

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over all ranks, in float64; every rank passes the same names in the same order."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def data_sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums of what was computed from this rank's rows: ranks with the same rows count once, the last stage's."""
        first = self.rank % (self.dims.cp * self.dims.tp) == 0 and self.dims.stage(self.rank) == self.dims.head_place
        return self.sums({name: value if first else 0.0 for name, value in values.items()})

    def maxima(self, values: Mapping[str, float]) -> dict[str, float]:
        """Maxima over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Mapping[str, float], operation: object) -> dict[str, float]:
        reduced = torch.tensor([*values.values(), 0.0], dtype=torch.float64)
        dist.all_reduce(reduced, operation)
        return dict(zip(values, reduced.tolist(), strict=False))


def device_for(gpus: int, local_rank: int) -> torch.device:
    """The device of a rank.

    Raises:
        RoleError: GPUs are asked for and this machine has none left for this rank.
    """
    if gpus == 0:
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= found:
        raise RoleError(
            f"trainer.gpusPerReplica is {gpus}, but rank {local_rank} of this machine finds {found} usable GPUs; "
            "set trainer.gpusPerReplica: 0 to train on CPU",
            exit_codes.UNAVAILABLE,
        )
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(gpus: int, parallelism: ParallelismConfig | None = None) -> Iterator[Group]:
    """Join the group that torchrun describes in the environment.

    Args:
        gpus: of this machine; 0 computes on its CPU.
        parallelism: how the ranks share a model; default: FSDP over all of them.

    Raises:
        RoleError: so many ranks cannot be divided so, or there are too few GPUs.
    """
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ["LOCAL_RANK"])
    except (KeyError, ValueError):
        raise RoleError(
            "RANK, WORLD_SIZE and LOCAL_RANK are not set: start the trainer with `python -m rlrun.trainer.ranks.torchrun`",
            exit_codes.USAGE,
        ) from None
    dims = ParallelDims.of(parallelism or ParallelismConfig(), world_size)
    device = device_for(gpus, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    meshes = Meshes(dims, device.type)
    yield Group(rank, world_size, device, meshes.layers, meshes)
    dist.destroy_process_group()  # not after an error: the peers may be gone, and the process ends anyway
