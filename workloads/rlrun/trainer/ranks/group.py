"""Group of all ranks: the layout of the ranks, collectives for values that are not tensors, and agreement to stop.

The layout contains the sizes of all kinds of parallelism, and their device meshes and process groups. The agreement consists of points at
which all ranks decide together whether to stop.
"""

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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlrun.config.models.parallel import ParallelismConfig, PipelineSchedule
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.ranks.stop import Stop, StopAgreed


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of all kinds of parallelism. A rank is `(((stage * dp_replicate + replicate) * dp_shard + shard) * cp + context) * tp +
    tensor`.

    With this order, tensor parallel groups are on one machine, and the ranks of a stage are neighbors.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Expert parallelism; divides `dp_shard * cp` into groups of neighbors."""
    pp: int = 1
    schedule: PipelineSchedule = "1F1B"
    local_stages: int = 1
    """Number of pipeline stages per rank."""

    @classmethod
    def from_config(cls, config: ParallelismConfig, world_size: int) -> ParallelDims:
        """Compute the sizes for a number of ranks; dp_shard gets the remaining ranks.

        Raises:
            RoleError: the sizes do not fit; the message has field, value and fix.
        """
        problem = config.layout_problem(world_size)
        if problem is not None:
            raise RoleError(f"trainer.{problem}", exit_codes.CONFIGURATION)
        rest = world_size // (config.pp * config.dp_replicate * config.cp * config.tp)
        return cls(
            config.dp_replicate,
            config.dp_shard or rest,
            config.cp,
            config.tp,
            config.ep,
            config.pp,
            config.schedule,
            config.local_stages,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.stage_size

    @property
    def stage_size(self) -> int:
        """Number of ranks of one stage; all ranks without a pipeline."""
        return self.dp_replicate * self.fsdp * self.tp

    def pipeline_position(self, rank: int) -> int:
        """Return the position of a rank in the pipeline, from 0 to `pp` - 1: the number of its first stage."""
        return rank // self.stage_size

    @property
    def head_place(self) -> int:
        """Position in the pipeline of the ranks with the last stage, which compute the loss."""
        return 0 if self.schedule == "ZBVZeroBubble" else self.pp - 1

    @property
    def fsdp(self) -> int:
        """Number of ranks that shard one copy of the layers' parameters."""
        return self.dp_shard * self.cp

    @property
    def data_size(self) -> int:
        """Number of groups of ranks with different rows."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Return the number of a rank's group, from 0 to `data_size` - 1; all stages process the rows of all groups."""
        return rank % self.stage_size // (self.cp * self.tp)

    def __str__(self) -> str:
        sizes = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
            "ep": self.ep,
        }
        text = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
        return text if self.local_stages == 1 else f"{text}, {self.local_stages} stages each in {self.schedule}"


class Meshes:
    """Device meshes of a layout. All have the same root mesh, because FSDP requires it for the meshes of a parameter."""

    def __init__(self, dims: ParallelDims, device_type: str) -> None:
        """Create the meshes and their process groups; all ranks call it together."""
        self.dims = dims
        self._world = init_device_mesh(device_type, (dims.world_size,), mesh_dim_names=("world",))
        layers = self._divide_mesh(("fsdp", dims.fsdp), ("tp", dims.tp))
        self.layers = self._data_parallel(layers, "fsdp")
        """Mesh over which FSDP shards the layers: `(fsdp)`, or `(dp_replicate, fsdp)`. Gradients are summed over it."""
        self.tp: DeviceMesh | None = layers["tp"] if dims.tp > 1 else None
        self.outer = self.layers
        """Mesh over which FSDP shards embedding, last norm and head. It includes the tensor ranks, because each computes a part of the
        positions.
        """
        if dims.tp > 1:
            self.outer = self._data_parallel(self._divide_mesh(("all_shards", dims.fsdp * dims.tp)), "all_shards")
        self.experts = self.tp
        """Mesh over which experts are distributed: the expert group with its tensor ranks, or None if every rank has all experts."""
        self.expert_copies = self.layers
        """Mesh over which FSDP shards the experts of one rank of `experts`."""
        if dims.ep > 1:
            spread = self._divide_mesh(("expert_fsdp", dims.fsdp // dims.ep), ("ep", dims.ep * dims.tp))
            self.experts, self.expert_copies = spread["ep"], self._data_parallel(spread, "expert_fsdp")
        self.cp: dist.ProcessGroup | None = None
        self.row: dist.ProcessGroup | None = None
        """Ranks that share a row: the context and tensor parallel ranks."""
        if dims.cp > 1:
            self.cp = self._divide_mesh(("dp_shard", dims.dp_shard), ("cp", dims.cp), ("tp", dims.tp))["cp"].get_group()
        if dims.cp * dims.tp > 1:
            self.row = self._divide_mesh(("dp_shard", dims.dp_shard), ("row", dims.cp * dims.tp))["row"].get_group()
        self.pp: dist.ProcessGroup | None = None
        """Ranks of all stages with the same rows and the same part of their stage, in order of the stages."""
        if dims.pp > 1:
            self.pp = self._divide_mesh(("column", dims.fsdp * dims.tp))["pp"].get_group()

    def _divide_mesh(self, *parts: tuple[str, int]) -> DeviceMesh:
        stages = (("pp", self.dims.pp),) if self.dims.pp > 1 else ()
        names, sizes = zip(*(*stages, ("dp_replicate", self.dims.dp_replicate), *parts), strict=True)
        return self._world._unflatten(0, sizes, names)

    def _data_parallel(self, mesh: DeviceMesh, name: str) -> DeviceMesh:
        return mesh["dp_replicate", name] if self.dims.dp_replicate > 1 else mesh[name]


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
        self.sum_over_ranks({})

    def broadcast(self, document: object, *, root: int = 0) -> Any:
        """Return the JSON document of one rank on every rank; the arguments of other ranks are ignored."""
        content = json.dumps(document).encode() if self.rank == root else b""
        # The size first: gloo needs a tensor of the same size on every rank.
        size = torch.tensor([len(content)])
        dist.broadcast(size, root)
        payload = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == root:
            payload = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(payload, root)
        return json.loads(bytes(payload.numpy()))

    def neighbor_pids(self) -> list[int]:
        """Return the process ids of the other ranks on this machine, in order of rank. All ranks call it together."""
        mine = float(os.environ.get("GROUP_RANK", "0"))  # number of the machine in torchrun
        places = self.sum_over_ranks({str(r): mine if r == self.rank else 0.0 for r in range(self.world_size)})
        # Numbers of processes are exact in float64.
        pids = self.sum_over_ranks(
            {str(r): float(os.getpid()) if r == self.rank else 0.0 for r in range(self.world_size)}
        )
        return [int(pids[r]) for r, place in places.items() if place == mine and int(r) != self.rank]

    def sum_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sums over all ranks in float64; every rank passes the same names in the same order."""
        return self._reduce_values(values, dist.ReduceOp.SUM)

    def data_sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum values of rows over all ranks; of ranks with the same rows, only one on the last stage counts."""
        counts = self.represents_rows
        return self.sum_over_ranks({name: value if counts else 0.0 for name, value in values.items()})

    @property
    def represents_rows(self) -> bool:
        """Whether this rank is the one on the last stage that counts for all ranks with the same rows."""
        return (
            self.rank % (self.dims.cp * self.dims.tp) == 0
            and self.dims.pipeline_position(self.rank) == self.dims.head_place
        )

    def max_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the maxima over all ranks."""
        return self._reduce_values(values, dist.ReduceOp.MAX)

    def _reduce_values(self, values: Mapping[str, float], operation: object) -> dict[str, float]:
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
    # Orders and small values use gloo on the CPU, also with GPUs: a collective on the device would
    # wait for the kernels in its queue.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    meshes = Meshes(dims, device.type)
    yield Group(rank, world_size, device, meshes.layers, meshes)
    dist.destroy_process_group()  # skipped after an error, because the peers may have ended


class Agreement:
    """Stop agreement on one rank.

    Args:
        group: all ranks.
        stop: stop requests of this rank.
    """

    def __init__(self, group: Group, stop: Stop) -> None:
        self._group, self.stop = group, stop
        self.place = 0
        """Number of passed points; the same on all ranks."""

    def check_stop(self) -> None:
        """Pass a point; all ranks call it together.

        A rank never leaves alone, because the others would wait for it in their next collective.

        Raises:
            StopAgreed: at least one rank has a request to stop; raised on all ranks.
        """
        self.place += 1
        # One collective for both values: every rank sees the same answer at the same point.
        asked = self._group.max_over_ranks(
            {"stop": float(self.stop.is_requested), "signal": float(self.stop.number or 0)}
        )
        if asked["stop"]:
            # A rank without a signal joins the stop, so that its own deadline runs and a signal
            # that comes later is not its second one.
            self.stop.request_stop(int(asked["signal"]) or None)
            raise StopAgreed
