"""Parallel layout of the trainer's ranks, recomputation of activations, and routers of mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from rlrun.config.base import Config, Rule

ActivationMode = Literal["none", "full", "selective", "attention", "offload"]
ActivationCheckpointing = Literal["auto", "none", "full", "selective", "attention", "offload"]
AttentionKernel = Literal["auto", "fa3", "fa4", "flash2", "cudnn", "varlen", "flex", "sdpa"]
GPU_KERNELS: tuple[AttentionKernel, ...] = tuple(
    name for name in get_args(AttentionKernel) if name not in ("auto", "sdpa")
)
"""Attention kernels that need a GPU."""
GradientAccumulation = Literal["reduce", "local"]
ComputeDType = Literal["auto", "float32", "bfloat16"]
PipelineSchedule = Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
ZERO_BUBBLE: tuple[PipelineSchedule, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that compute gradients of weights later than gradients of inputs."""


RouterReplay = Literal["Off", "Rollout", "Step"]
RouterBias = Literal["Frozen", "Update"]
BIAS_RATE = 1e-3


class RouterConfig(Config):
    """Routers of a mixture of experts."""

    replay: RouterReplay = "Off"
    """Experts that each token uses in the trainer. `Rollout`: those that the engine chose (R3). `Step`: in updates, those of the pass at
    the start of the step (R2). `Off`: the router chooses in every pass. Tokens without recorded experts are routed natively."""
    freeze: bool = False
    """Keep the weights of the routers. Checkpoints do not contain them."""
    bias: RouterBias = "Frozen"
    """Correction bias of routers that have one (DeepSeek-V3, GLM-4.5, MiniMax-M2). `Update`: after each step, add `biasRate` to the bias of
    experts with fewer tokens than the mean, and subtract it from the others. `Frozen`: keep it."""
    bias_rate: Annotated[float, Field(gt=0, le=1)] = BIAS_RATE
    """Change of a correction bias in a step, with `bias: Update`."""
    aux_loss: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Coefficient of a load-balancing loss, computed for each layer and sequence. 0: no such loss. Default: 0."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.bias == 'Update' || self.biasRate == {BIAS_RATE}",
            "biasRate ({self.biasRate}) has no effect with bias (Frozen); set bias: Update or remove biasRate",
            ".biasRate",
        ),
        Rule(
            "!self.freeze || self.auxLoss == 0.0",
            "auxLoss ({self.auxLoss}) has little effect on frozen routers; set auxLoss: 0 or freeze: false",
            ".auxLoss",
        ),
    )

    @model_validator(mode="after")
    def _check_balance(self) -> Self:
        if self.bias == "Frozen" and self.bias_rate != BIAS_RATE:
            raise ValueError(
                f"biasRate ({self.bias_rate}) has no effect with bias (Frozen); set bias: Update or remove biasRate"
            )
        if self.freeze and self.aux_loss > 0:
            raise ValueError(
                f"auxLoss ({self.aux_loss}) has little effect on frozen routers; set auxLoss: 0 or freeze: false"
            )
        return self

    def balance_problem(self, parallelism: ParallelismConfig, *, with_lora: bool) -> str | None:
        """Return why the trainer cannot freeze or balance routers with other settings (field, value and fix), or None.

        Args:
            parallelism: layout of the ranks.
            with_lora: whether only adapters are trained.
        """
        options = (
            (self.freeze, "freeze (true)", "freeze: false"),
            (self.bias == "Update", "bias (Update)", "bias: Frozen"),
            (self.aux_loss > 0, f"auxLoss ({self.aux_loss})", "auxLoss: 0"),
        )
        for given, text, remedy in options:
            if given and with_lora:
                return f"router.{text} is not supported with lora, whose adapters keep the routers; set router.{remedy}"
        for name in ("tp", "pp"):
            size = getattr(parallelism, name)
            if self.aux_loss > 0 and size > 1:
                return (
                    f"router.auxLoss ({self.aux_loss}) is not supported with parallelism.{name} ({size}); set parallelism.{name}: 1 or "
                    "router.auxLoss: 0"
                )
        return None

    def replay_problem(self, *, pp: int, updates: int, epochs: int, shared_with: str | None, slots: int) -> str | None:
        """Return why the trainer cannot replay experts with other settings (field, value and fix), or None.

        Args:
            pp: pipeline stages.
            updates: updates of each pass over a step's samples.
            epochs: passes over a step's samples.
            shared_with: run that hosts the trainer, or None.
            slots: runs of the trainer.
        """
        if self.replay == "Step" and pp > 1:
            return (
                f"router.replay (Step) records experts row by row, which the stages of parallelism.pp ({pp}) do not compute in order; "
                "set router.replay: Rollout or pp: 1"
            )
        if self.replay == "Step" and updates * epochs == 1:
            return (
                "router.replay (Step) has no effect with updatesPerStep (1), because the update is the first pass of a step; "
                "set router.replay: Off, or updatesPerStep: 2 or more"
            )
        if self.replay == "Step" and updates > 1 and epochs > 1:
            return (
                f"router.replay (Step) records experts by row, but epochsPerStep ({epochs}) with updatesPerStep ({updates}) divides the "
                "samples into other rows; set router.replay: Rollout, epochsPerStep: 1 or updatesPerStep: 1"
            )
        if self.replay != "Off" and shared_with is not None:
            return f"router.replay ({self.replay}) is not supported with sharedWith ({shared_with}); set router.replay: Off"
        if self.replay != "Off" and slots > 1:
            return (
                f"router.replay ({self.replay}) is not supported for a trainer of several runs, but lora.slots is {slots}; "
                "set router.replay: Off or lora.slots: 1"
            )
        return None


class ParallelismConfig(Config):
    """Layout of model and data over the ranks: ranks = pp * dpReplicate * dpShard * cp * tp. Does not change the result."""

    dp_replicate: Annotated[int, Field(ge=1, le=4096)] = 1
    """Copies of the sharded model (HSDP)."""
    dp_shard: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Data-parallel ranks that share one copy (FSDP). Default: all remaining ranks."""
    tp: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor parallelism: ranks that share the matrices of every layer."""
    cp: Annotated[int, Field(ge=1, le=256)] = 1
    """Context parallelism: ranks that share the tokens of every row."""
    ep: Annotated[int, Field(ge=1, le=1024)] = 1
    """Expert parallelism: ranks, out of dpShard * cp, that share the experts of a mixture."""
    pp: Annotated[int, Field(ge=1, le=64)] = 1
    """Pipeline parallelism: parts of the layers, each on its own ranks. Micro-batches pass through them in order."""
    schedule: PipelineSchedule = "1F1B"
    """Order of a pipeline's forward and backward passes, with torch's names."""
    stages_per_rank: Annotated[int, Field(ge=1, le=64)] | None = None
    """Stages on each rank of a pipeline. Default: 1 with 1F1B, otherwise 2."""

    @property
    def local_stages(self) -> int:
        """Stages on each rank."""
        return self.stages_per_rank or (1 if self.schedule == "1F1B" else 2)

    @property
    def folded(self) -> bool:
        """Whether micro-batches pass through the ranks and back, so that the first rank holds the first stage and the last."""
        return self.schedule == "ZBVZeroBubble"

    def layout_problem(self, world_size: int) -> str | None:
        """Return why `world_size` ranks cannot use this layout (field, value and fix), or None if they can."""
        if (problem := self._schedule_problem()) is not None:
            return problem
        fixed = self.pp * self.dp_replicate * (self.dp_shard or 1) * self.cp * self.tp
        product = "pp * dpReplicate * dpShard * cp * tp"
        if self.dp_shard is not None and fixed != world_size:
            return (
                f"parallelism: {product} ({fixed}) must be the number of ranks "
                f"({world_size} = replicas * (processesPerReplica or gpusPerReplica)); change one of them, or remove dpShard"
            )
        if world_size % fixed:
            return (
                f"parallelism: pp * dpReplicate * cp * tp ({fixed}) must divide the number of ranks "
                f"({world_size} = replicas * (processesPerReplica or gpusPerReplica)); lower one of them or raise replicas"
            )
        sharing = world_size // self.pp // self.dp_replicate // self.tp
        if sharing % self.ep:
            return f"parallelism.ep ({self.ep}) must divide dpShard * cp ({sharing}); lower ep or raise dpShard"
        return None

    def _schedule_problem(self) -> str | None:
        if self.schedule != "1F1B" and self.pp == 1:
            return f"parallelism.schedule ({self.schedule}) orders the stages of a pipeline, but pp is 1; raise pp, or remove schedule"
        fewest, most = {"1F1B": (1, 1), "ZBVZeroBubble": (2, 2)}.get(self.schedule, (2, 64))
        if not fewest <= self.local_stages <= most:
            return (
                f"parallelism.stagesPerRank ({self.stages_per_rank}) does not fit schedule {self.schedule}: 1F1B has 1 stage, "
                "ZBVZeroBubble 2, the others 2 or more; change one of them"
            )
        return None


@dataclass(frozen=True)
class Sizes:
    """Numbers of pods that a layout can use.

    Attributes:
        allowed: sizes that fit, in ascending order.
        left_out: sizes of the range that do not fit, each with the reason.
    """

    allowed: tuple[int, ...]
    left_out: Mapping[int, str]

    def at_most(self, pods: int) -> int | None:
        """Return the largest allowed number that is at most `pods`, or None if all allowed numbers are larger."""
        return max((size for size in self.allowed if size <= pods), default=None)


def trainer_sizes(layout: ParallelismConfig, ranks: int, least: int, most: int) -> Sizes:
    """Return the sizes, from `least` to `most` pods, that a trainer can have.

    Only the layout restricts the size, because any batch can be divided among any number of ranks.

    Args:
        layout: layout of every size; data-parallel shards use the remaining ranks.
        ranks: ranks per pod.
        least: fewest pods.
        most: most pods.
    """
    problems = {pods: layout.layout_problem(pods * ranks) for pods in range(least, most + 1)}
    left_out = {pods: problem for pods, problem in problems.items() if problem is not None}
    return Sizes(tuple(pods for pods, problem in problems.items() if problem is None), left_out)
