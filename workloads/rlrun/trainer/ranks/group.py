"""Group of all ranks: device and layout of each rank, and collectives for values that are not tensors."""

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
"""Timeout of collectives; long enough for one rank to read or write a large model while the others wait."""


@dataclass(frozen=True)
class Group:
    """Group of all ranks, from the view of one rank."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    """Mesh over which FSDP shards the layers."""
    meshes: Meshes | None = None
    """Complete layout, or None for FSDP over all ranks without other parallelism."""

    @property
    def dims(self) -> ParallelDims:
        """Sizes of the layout."""
        return self.meshes.dims if self.meshes is not None else ParallelDims(dp_shard=self.world_size)

    @property
    def data_rank(self) -> int:
        """Index of this rank's part of the rows, from 0 to `data_size` - 1; equal for the ranks of a context and tensor group."""
        return self.dims.data_rank(self.rank)

    @property
    def data_size(self) -> int:
        """Number of groups of ranks with different rows."""
        return self.dims.data_size

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the only rank that communicates with the orchestrator and owns the run's files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sums({})

    def broadcast(self, document: object, *, root: int = 0) -> Any:
        """Return the JSON document of one rank on every rank; the arguments of other ranks are ignored."""
        content = json.dumps(document).encode() if self.rank == root else b""
        size = torch.tensor([len(content)])
        dist.broadcast(size, root)
        payload = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == root:
            payload = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(payload, root)
        return json.loads(bytes(payload.numpy()))

    def neighbours(self) -> list[int]:
        """Return the process ids of the other ranks on this machine, in order of rank. All ranks call it together."""
        mine = float(os.environ.get("GROUP_RANK", "0"))  # number of the machine in torchrun
        places = self.sums({str(r): mine if r == self.rank else 0.0 for r in range(self.world_size)})
        pids = self.sums({str(r): float(os.getpid()) if r == self.rank else 0.0 for r in range(self.world_size)})
        return [int(pids[r]) for r, place in places.items() if place == mine and int(r) != self.rank]

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sums over all ranks in float64; every rank passes the same names in the same order."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def data_sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum values of rows over all ranks; of ranks with the same rows, only one on the last stage counts."""
        first = self.rank % (self.dims.cp * self.dims.tp) == 0 and self.dims.stage(self.rank) == self.dims.head_place
        return self.sums({name: value if first else 0.0 for name, value in values.items()})

    def maxima(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the maxima over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Mapping[str, float], operation: object) -> dict[str, float]:
        reduced = torch.tensor([*values.values(), 0.0], dtype=torch.float64)
        dist.all_reduce(reduced, operation)
        return dict(zip(values, reduced.tolist(), strict=False))


def device_for(gpus: int, local_rank: int) -> torch.device:
    """Return the device of a rank.

    Raises:
        RoleError: the configuration requires GPUs, but this machine has too few.
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
    """Join the process group that torchrun describes in the environment.

    Args:
        gpus: number of GPUs of this machine; 0 selects the CPU.
        parallelism: division of the ranks. Default: FSDP over all ranks.

    Raises:
        RoleError: the ranks cannot be divided as configured, or the machine has too few GPUs.
    """
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ["LOCAL_RANK"])
    except (KeyError, ValueError):
        raise RoleError(
            "RANK, WORLD_SIZE and LOCAL_RANK are not set; start the trainer with `python -m rlrun.trainer.ranks.torchrun`",
            exit_codes.USAGE,
        ) from None
    dims = ParallelDims.from_config(parallelism or ParallelismConfig(), world_size)
    device = device_for(gpus, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    meshes = Meshes(dims, device.type)
    yield Group(rank, world_size, device, meshes.layers, meshes)
    dist.destroy_process_group()  # skipped after an error, because the peers may have ended
