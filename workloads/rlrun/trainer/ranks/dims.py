"""Position of a rank: the sizes of all kinds of parallelism, and the device meshes and groups that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlrun.config.models.parallel import ParallelismConfig, PipelineSchedule
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes


@dataclass(frozen=True)
class ParallelDims:
    """Sizes. A rank is `(((stage * dp_replicate + replicate) * dp_shard + shard) * cp + context) * tp + tensor`.

    So tensor groups sit on one machine, and a stage's ranks are neighbours.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Divides `dp_shard * cp`; groups of neighbours there."""
    pp: int = 1
    schedule: PipelineSchedule = "1F1B"
    local_stages: int = 1
    """Stages of each rank."""

    @classmethod
    def of(cls, config: ParallelismConfig, world_size: int) -> ParallelDims:
        """The sizes for so many ranks; dp_shard takes what is left.

        Raises:
            RoleError: they do not fit; names field, value and fix.
        """
        problem = config.problem(world_size)
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
        """Ranks of one stage; of all without a pipeline."""
        return self.dp_replicate * self.fsdp * self.tp

    def stage(self, rank: int) -> int:
        """Place of a rank, of `pp`, among those that a row passes through: the number of its first stage."""
        return rank // self.stage_size

    @property
    def head_place(self) -> int:
        """Place of the ranks that have the last stage, and compute the loss."""
        return 0 if self.schedule == "ZBVZeroBubble" else self.pp - 1

    @property
    def fsdp(self) -> int:
        """Ranks that share one copy of the layers' parameters."""
        return self.dp_shard * self.cp

    @property
    def data_size(self) -> int:
        """Groups of ranks that each have rows of their own."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Number of the group, of `data_size`, that a rank belongs to; all stages have the rows of all groups."""
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
    """The meshes of a layout. All have one root, as FSDP demands of the meshes of one parameter."""

    def __init__(self, dims: ParallelDims, device_type: str) -> None:
        """Every rank makes them together: they open process groups."""
        self.dims = dims
        self._world = init_device_mesh(device_type, (dims.world_size,), mesh_dim_names=("world",))
        layers = self._divided(("fsdp", dims.fsdp), ("tp", dims.tp))
        self.layers = self._data_parallel(layers, "fsdp")
        """Mesh that FSDP divides the layers over: `(fsdp)`, or `(dp_replicate, fsdp)`. Gradients are summed over it."""
        self.tp: DeviceMesh | None = layers["tp"] if dims.tp > 1 else None
        self.outer = self.layers
        """Mesh that FSDP divides embedding, last norm and head over: the tensor ranks too, as each computes a part of the positions."""
        if dims.tp > 1:
            self.outer = self._data_parallel(self._divided(("all_shards", dims.fsdp * dims.tp)), "all_shards")
        self.experts = self.tp
        """Mesh over which experts are dealt out: the expert group with its tensor ranks; None when every rank has all."""
        self.expert_copies = self.layers
        """Mesh that FSDP divides each of these parts over."""
        if dims.ep > 1:
            spread = self._divided(("expert_fsdp", dims.fsdp // dims.ep), ("ep", dims.ep * dims.tp))
            self.experts, self.expert_copies = spread["ep"], self._data_parallel(spread, "expert_fsdp")
        self.cp: dist.ProcessGroup | None = None
        self.row: dist.ProcessGroup | None = None
        """The ranks that share a row: those of context and tensor parallelism."""
        if dims.cp > 1:
            self.cp = self._divided(("dp_shard", dims.dp_shard), ("cp", dims.cp), ("tp", dims.tp))["cp"].get_group()
        if dims.cp * dims.tp > 1:
            self.row = self._divided(("dp_shard", dims.dp_shard), ("row", dims.cp * dims.tp))["row"].get_group()
        self.pp: dist.ProcessGroup | None = None
        """The ranks of all stages that have the same rows and the same part of their stage, in order of the stages."""
        if dims.pp > 1:
            self.pp = self._divided(("column", dims.fsdp * dims.tp))["pp"].get_group()

    def _divided(self, *parts: tuple[str, int]) -> DeviceMesh:
        stages = (("pp", self.dims.pp),) if self.dims.pp > 1 else ()
        names, sizes = zip(*(*stages, ("dp_replicate", self.dims.dp_replicate), *parts), strict=True)
        return self._world._unflatten(0, sizes, names)

    def _data_parallel(self, mesh: DeviceMesh, name: str) -> DeviceMesh:
        return mesh["dp_replicate", name] if self.dims.dp_replicate > 1 else mesh[name]
