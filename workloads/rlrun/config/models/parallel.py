"""Parallelism of the trainer's ranks over one model, and recomputation of activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from rlrun.config.base import Config

ActivationMode = Literal["none", "full", "selective", "attention", "offload"]
ActivationCheckpointing = Literal["auto", "none", "full", "selective", "attention", "offload"]
AttentionKernel = Literal["auto", "fa3", "fa4", "flash2", "cudnn", "varlen", "flex", "sdpa"]
GPU_KERNELS: tuple[AttentionKernel, ...] = tuple(
    one for one in get_args(AttentionKernel) if one not in ("auto", "sdpa")
)
"""Kernels of attention that need a GPU."""
GradientAccumulation = Literal["reduce", "local"]
ComputeDType = Literal["auto", "float32", "bfloat16"]


class ParallelismConfig(Config):
    """Division of model and data among the ranks. Does not change the result; ranks = pp * dpReplicate * dpShard * cp * tp."""

    dp_replicate: Annotated[int, Field(ge=1, le=4096)] = 1
    """Copies of the sharded model (HSDP)."""
    dp_shard: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Data-parallel ranks that share one copy (FSDP); default: all that are left."""
    tp: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that share every layer's matrices."""
    cp: Annotated[int, Field(ge=1, le=256)] = 1
    """Ranks that share every row's tokens."""
    ep: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks among dpShard * cp that share a mixture's experts."""
    pp: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages, each of some of the layers, that micro-batches pass through one after the other."""

    def problem(self, world_size: int) -> str | None:
        """Reason why `world_size` ranks cannot be divided so: the field, its value and the fix. None when they can."""
        fixed = self.pp * self.dp_replicate * (self.dp_shard or 1) * self.cp * self.tp
        product = "pp * dpReplicate * dpShard * cp * tp"
        if self.dp_shard is not None and fixed != world_size:
            return (
                f"parallelism: {product} ({fixed}) must be the number of ranks ({world_size} = replicas * processesPerReplica); "
                "change one of them, or remove dpShard"
            )
        if world_size % fixed:
            return (
                f"parallelism: pp * dpReplicate * cp * tp ({fixed}) must divide the number of ranks "
                f"({world_size} = replicas * processesPerReplica); lower one of them or raise replicas"
            )
        sharing = world_size // self.pp // self.dp_replicate // self.tp
        if sharing % self.ep:
            return f"parallelism.ep ({self.ep}) must divide dpShard * cp ({sharing}); lower ep or raise dpShard"
        return None


@dataclass(frozen=True)
class Sizes:
    """Numbers of pods that a layout can divide its ranks among.

    Attributes:
        allowed: ascending.
        left_out: the others of the range, each with the reason.
    """

    allowed: tuple[int, ...]
    left_out: Mapping[int, str]

    def at_most(self, pods: int) -> int | None:
        """Largest allowed number that is no larger than `pods`; None: there is none."""
        return max((size for size in self.allowed if size <= pods), default=None)


def sizes(layout: ParallelismConfig, ranks: int, least: int, most: int) -> Sizes:
    """Sizes of a trainer from `least` to `most` pods.

    Any batch is dealt to any number of ranks, so that the layout alone decides.

    Args:
        layout: of all sizes; data-parallel shards take what is left.
        ranks: in each pod.
        least: fewest pods.
        most: most pods.
    """
    problems = {pods: layout.problem(pods * ranks) for pods in range(least, most + 1)}
    left_out = {pods: problem for pods, problem in problems.items() if problem is not None}
    return Sizes(tuple(pods for pods, problem in problems.items() if problem is None), left_out)
