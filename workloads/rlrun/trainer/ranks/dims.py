"""Layout of the ranks: the sizes of all kinds of parallelism, and their device meshes and process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlrun.config.models.parallel import ParallelismConfig, PipelineSchedule
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes


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
        """Number of ranks of one stage; all ranks without a pipeline."""
        return self.dp_replicate * self.fsdp * self.tp

    def stage(self, rank: int) -> int:
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
        layers = self._divided(("fsdp", dims.fsdp), ("tp", dims.tp))
        self.layers = self._data_parallel(layers, "fsdp")
        """Mesh over which FSDP shards the layers: `(fsdp)`, or `(dp_replicate, fsdp)`. Gradients are summed over it."""
        self.tp: DeviceMesh | None = layers["tp"] if dims.tp > 1 else None
        self.outer = self.layers
        """Mesh over which FSDP shards embedding, last norm and head. It includes the tensor ranks, because each computes a part of the
        positions.
        """
        if dims.tp > 1:
            self.outer = self._data_parallel(self._divided(("all_shards", dims.fsdp * dims.tp)), "all_shards")
        self.experts = self.tp
        """Mesh over which experts are distributed: the expert group with its tensor ranks, or None if every rank has all experts."""
        self.expert_copies = self.layers
        """Mesh over which FSDP shards the experts of one rank of `experts`."""
        if dims.ep > 1:
            spread = self._divided(("expert_fsdp", dims.fsdp // dims.ep), ("ep", dims.ep * dims.tp))
            self.experts, self.expert_copies = spread["ep"], self._data_parallel(spread, "expert_fsdp")
        self.cp: dist.ProcessGroup | None = None
        self.row: dist.ProcessGroup | None = None
        """Ranks that share a row: the context and tensor parallel ranks."""
        if dims.cp > 1:
            self.cp = self._divided(("dp_shard", dims.dp_shard), ("cp", dims.cp), ("tp", dims.tp))["cp"].get_group()
        if dims.cp * dims.tp > 1:
            self.row = self._divided(("dp_shard", dims.dp_shard), ("row", dims.cp * dims.tp))["row"].get_group()
        self.pp: dist.ProcessGroup | None = None
        """Ranks of all stages with the same rows and the same part of their stage, in order of the stages."""
        if dims.pp > 1:
            self.pp = self._divided(("column", dims.fsdp * dims.tp))["pp"].get_group()

    def _divided(self, *parts: tuple[str, int]) -> DeviceMesh:
        stages = (("pp", self.dims.pp),) if self.dims.pp > 1 else ()
        names, sizes = zip(*(*stages, ("dp_replicate", self.dims.dp_replicate), *parts), strict=True)
        return self._world._unflatten(0, sizes, names)

    def _data_parallel(self, mesh: DeviceMesh, name: str) -> DeviceMesh:
        return mesh["dp_replicate", name] if self.dims.dp_replicate > 1 else mesh[name]
