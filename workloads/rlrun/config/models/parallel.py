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
PipelineSchedule = Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
ZERO_BUBBLE: tuple[PipelineSchedule, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that compute the gradients of weights later than those of inputs."""


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
    """Parts of the layers, each on ranks of its own, that micro-batches pass through one after the other."""
    schedule: PipelineSchedule = "1F1B"
    """Order of a pipeline's forward and backward passes, by torch's names."""
    stages_per_rank: Annotated[int, Field(ge=1, le=64)] | None = None
    """Stages of each rank of a pipeline; default: 1 with 1F1B, 2 with the others."""

    @property
    def local_stages(self) -> int:
        """Stages of each rank."""
        return self.stages_per_rank or (1 if self.schedule == "1F1B" else 2)

    @property
    def folded(self) -> bool:
        """True if rows go through the ranks and back: the first rank has the first stage and the last."""
        return self.schedule == "ZBVZeroBubble"

    def problem(self, world_size: int) -> str | None:
        """Reason why `world_size` ranks cannot be divided so: the field, its value and the fix. None when they can."""
        if (problem := self._schedule_problem()) is not None:
            return problem
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

    def _schedule_problem(self) -> str | None:
        """Contradiction between the fields of a pipeline; None: there is none."""
        if self.schedule != "1F1B" and self.pp == 1:
            return f"parallelism.schedule ({self.schedule}) orders the stages of a pipeline, and pp is 1; raise pp, or remove schedule"
        fewest, most = {"1F1B": (1, 1), "ZBVZeroBubble": (2, 2)}.get(self.schedule, (2, 64))
        if not fewest <= self.local_stages <= most:
            return (
                f"parallelism.stagesPerRank ({self.stages_per_rank}) does not go with schedule {self.schedule}: 1F1B has 1, "
                "ZBVZeroBubble 2, the others 2 or more; change one of them"
            )
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


def trainer_sizes(layout: ParallelismConfig, ranks: int, least: int, most: int) -> Sizes:
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
