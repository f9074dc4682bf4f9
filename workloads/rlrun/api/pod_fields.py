"""Fields of each role's block that configure its pods, in addition to the fields of its computation."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlrun.api.kubernetes_types import (
    Affinity,
    EnvFromSource,
    EnvVar,
    LabelKey,
    LabelValue,
    LocalObjectReference,
    PositiveQuantity,
    ResourceRequirements,
    Toleration,
    reserved_variable,
)
from rlrun.api.router_rules import TRAINER_RULES
from rlrun.config.base import Config, FreeMapping, Rule
from rlrun.config.formats import Distinct, GuestPattern, ImageReference, ObjectName
from rlrun.config.models.engine_arguments import EXTRA_ARGUMENTS_RULES
from rlrun.config.models.parallel import Sizes, trainer_sizes
from rlrun.config.models.roles import InferenceSpec, OrchestratorSpec, TrainerSpec

_CLOSE = 1e-9
"""Tolerance of the rounding errors of shares, which are floats."""


def _without_reserved(template: object) -> object:
    if (found := reserved_variable(template)) is not None:
        path, name = found
        raise ValueError(f"spec.{path} ({name}) is reserved: RLRun sets it itself; remove it")
    return template


class PodFields(Config):
    """The pods of one role."""

    image: ImageReference | None = None
    """Container image. Default: the operator's image for this role."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When to pull the image. Default: the default of Kubernetes."""
    image_pull_secrets: Annotated[list[LocalObjectReference], Field(max_length=16), Distinct("name")] = Field(
        default_factory=list
    )
    """Secrets with the registry's credentials."""
    resources: ResourceRequirements = ResourceRequirements()
    """Requests and limits of the container; GPUs come from `gpusPerReplica`."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """Tolerated taints. Pods with GPUs always tolerate the taint of the GPU resource."""
    affinity: Affinity = Affinity()
    """Kubernetes affinity; `placement` adds to it."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, such as `nvidia`."""
    env: Annotated[list[EnvVar], Field(max_length=128), Distinct("name")] = Field(default_factory=list)
    """Environment variables. `RLRUN_*` and the variables of torchrun are reserved."""
    env_from: Annotated[list[EnvFromSource], Field(max_length=32)] = Field(default_factory=list)
    """Secrets and ConfigMaps whose keys become environment variables."""
    shared_memory: PositiveQuantity | None = None
    """Size limit of `/dev/shm`. Default: the container's memory."""
    pod_template: Annotated[FreeMapping, AfterValidator(_without_reserved)] = Field(default_factory=dict)
    """PodTemplateSpec, merged like `kubectl patch`, as far as the operator's policy allows. The container has the role's name."""


_PER_POD = (
    "(has(self.processesPerReplica) ? self.processesPerReplica : self.gpusPerReplica > 0 ? self.gpusPerReplica : 1)"
)
_RANKS = f"(self.replicas * {_PER_POD})"
_LEAST_RANKS = f"(self.elastic.min * {_PER_POD})"
_DIVIDED = "(self.parallelism.pp * self.parallelism.dpReplicate * self.parallelism.cp * self.parallelism.tp)"
_REPLICATED = "(self.parallelism.pp * self.parallelism.dpReplicate * self.parallelism.tp)"


class ElasticSpec(Config):
    """Training with fewer pods than `trainer.replicas` if the cluster lacks nodes."""

    min: Annotated[int, Field(ge=1, le=4096)] = 1
    """Fewest pods."""
    wait_seconds: Annotated[int, Field(ge=1, le=86400)] = 300
    """Seconds that pods wait for nodes before the run continues with fewer pods."""
    grow_seconds: Annotated[int, Field(ge=1, le=604800)] = 1800
    """Shortest time, in seconds, before the run grows again."""


class TrainerBlock(TrainerSpec, PodFields):
    """The trainer: a torchrun group that runs the optimizer (FSDP2), and its pods."""

    elastic: ElasticSpec | None = None
    """Continue with fewer pods if nodes are missing."""
    guests: Annotated[list[GuestPattern], Field(max_length=64), Distinct()] = Field(default_factory=list)
    """Runs that may use this trainer (`sharedWith`), by name or by prefix (`ann-*`). Default: no other run."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!has(self.parallelism.dpShard) || {_DIVIDED} * self.parallelism.dpShard == {_RANKS}",
            f"parallelism: pp * dpReplicate * dpShard * cp * tp ({{{_DIVIDED} * self.parallelism.dpShard}}) must be the number of ranks "
            f"({{{_RANKS}}} = replicas * (processesPerReplica or gpusPerReplica)); change one of them, or remove dpShard",
            ".parallelism",
        ),
        Rule(
            f"has(self.parallelism.dpShard) || {_RANKS} % {_DIVIDED} == 0",
            f"parallelism: pp * dpReplicate * cp * tp ({{{_DIVIDED}}}) must divide the number of ranks "
            f"({{{_RANKS}}} = replicas * (processesPerReplica or gpusPerReplica)); lower one of them or raise replicas",
            ".parallelism",
        ),
        Rule(
            f"[{_RANKS}].all(ranks, ranks % {_DIVIDED} != 0 || ranks / {_REPLICATED} % self.parallelism.ep == 0)",
            f"parallelism.ep ({{self.parallelism.ep}}) must divide dpShard * cp ({{{_RANKS} / {_REPLICATED}}}); lower ep or raise dpShard",
            ".parallelism",
        ),
        Rule(
            "!self.cpuOffload || self.gpusPerReplica > 0",
            "cpuOffload (true) needs GPUs, but gpusPerReplica is 0; remove cpuOffload",
            ".cpuOffload",
        ),
        Rule(
            "!self.optimizer.offload || self.gpusPerReplica > 0",
            "optimizer.offload (true) needs GPUs, but gpusPerReplica is 0; remove optimizer.offload",
            ".optimizer",
        ),
        Rule(
            "!self.optimizer.offload || !self.cpuOffload",
            "optimizer.offload (true) has no effect with cpuOffload (true), which moves the moments as well; remove one of them",
            ".optimizer",
        ),
        Rule(
            "!self.cpuOffload || self.parallelism.pp == 1",
            "cpuOffload (true) keeps gradients in host memory, which the stages of parallelism.pp ({self.parallelism.pp}) cannot share; "
            "set cpuOffload: false or pp: 1",
            ".parallelism",
        ),
        Rule(
            "!has(self.lora) || self.lora.slots == 1 || self.parallelism.pp == 1",
            "lora.slots ({self.lora.slots}) needs ranks that fail together, but the stages of parallelism.pp "
            "({self.parallelism.pp}) do not; set lora.slots: 1 or pp: 1",
            ".parallelism",
        ),
        Rule(
            "self.parallelism.schedule == '1F1B' || self.parallelism.pp > 1",
            "parallelism.schedule ({self.parallelism.schedule}) orders the stages of a pipeline, but pp is 1; raise pp, or remove schedule",
            ".parallelism",
        ),
        Rule(
            "!has(self.parallelism.stagesPerRank) || (self.parallelism.schedule == '1F1B' ? self.parallelism.stagesPerRank == 1 : "
            "self.parallelism.stagesPerRank == 2 || (self.parallelism.stagesPerRank > 2 && self.parallelism.schedule != 'ZBVZeroBubble'))",
            "parallelism.stagesPerRank ({self.parallelism.stagesPerRank}) does not fit schedule {self.parallelism.schedule}: "
            "1F1B has 1 stage, ZBVZeroBubble 2, the others 2 or more; change one of them",
            ".parallelism",
        ),
        Rule(
            "!self.parallelism.schedule.endsWith('ZeroBubble') || (self.parallelism.tp == 1 && self.gradientAccumulation == 'local' && "
            "(!has(self.compile) || !self.compile) && !has(self.lora))",
            "parallelism.schedule ({self.parallelism.schedule}) computes gradients of weights after gradients of inputs, which needs tp: 1 "
            "(here {self.parallelism.tp}), gradientAccumulation: local (here {self.gradientAccumulation}), no compile: true and no lora; "
            "change these, or set schedule: Interleaved1F1B",
            ".parallelism",
        ),
        Rule(
            "self.optimizer.moments == 'float32' || self.parallelism.tp == 1",
            "optimizer.moments (int8) keeps blocks of rows, which parallelism.tp ({self.parallelism.tp}) divides; "
            "set moments: float32 or tp: 1",
            ".optimizer",
        ),
        Rule(
            "self.attention in ['auto', 'sdpa'] || self.gpusPerReplica > 0",
            "attention ({self.attention}) needs GPUs, but gpusPerReplica is 0; set attention: auto",
            ".attention",
        ),
        Rule(
            "!has(self.lora) || self.parallelism.tp == 1 || self.lora.dropout == 0.0",
            "lora.dropout ({self.lora.dropout}) would drop different inputs on each rank of parallelism.tp ({self.parallelism.tp}); "
            "set lora.dropout: 0 or tp: 1",
            ".parallelism",
        ),
        Rule(
            "!has(self.sharedWith) || has(self.lora)",
            "sharedWith ({self.sharedWith}) needs lora, because runs share a trainer only with adapters; set lora",
            ".sharedWith",
        ),
        Rule(
            "!has(self.lora) || !has(self.lora.modulesToSave) || size(self.lora.modulesToSave) == 0 || "
            "(!has(self.sharedWith) && self.lora.slots == 1)",
            "lora.modulesToSave trains full modules, which runs cannot share; remove it, or remove sharedWith and lora.slots",
            ".lora",
        ),
        Rule(
            "!has(self.sharedWith) || (self.replicas == 1 && !has(self.processesPerReplica) && self.gpusPerReplica == 0 && "
            "self.parallelism.dpReplicate == 1 && !has(self.parallelism.dpShard) && self.parallelism.tp == 1 && "
            "self.parallelism.cp == 1 && self.parallelism.ep == 1 && self.parallelism.pp == 1 && "
            "self.activationCheckpointing in ['auto', 'none'] && "
            "self.attention == 'auto' && (!has(self.compile) || !self.compile) && self.computeDtype == 'auto' && !self.cpuOffload && "
            "self.gradientAccumulation == 'reduce' && "
            "(!has(self.lora) || self.lora.slots == 1))",
            "sharedWith ({self.sharedWith}) uses the host's processes, layout and memory; remove lora.slots, replicas, "
            "processesPerReplica, gpusPerReplica, parallelism, activationCheckpointing, attention, compile, computeDtype, cpuOffload and "
            "gradientAccumulation",
            ".sharedWith",
        ),
        Rule(
            "!has(self.elastic) || self.elastic.min <= self.replicas",
            "elastic.min ({self.elastic.min}) must be at most replicas ({self.replicas}); lower it or raise replicas",
            ".elastic",
        ),
        Rule(
            "!has(self.elastic) || !has(self.parallelism.dpShard)",
            "elastic changes the number of ranks, which parallelism.dpShard ({self.parallelism.dpShard}) fixes; remove one of them",
            ".elastic",
        ),
        Rule(
            f"!has(self.elastic) || has(self.parallelism.dpShard) || ({_LEAST_RANKS} % {_DIVIDED} == 0 && "
            f"{_LEAST_RANKS} / {_REPLICATED} % self.parallelism.ep == 0)",
            f"elastic.min ({{self.elastic.min}}) gives {{{_LEAST_RANKS}}} ranks, which pp * dpReplicate * cp * tp ({{{_DIVIDED}}}) must "
            "divide, and ep ({self.parallelism.ep}) must divide their dpShard * cp; change elastic.min or parallelism",
            ".elastic",
        ),
        Rule(
            "!has(self.elastic) || !has(self.lora) || self.lora.slots == 1",
            "elastic starts new attempts, which interrupt other runs that lora.slots ({self.lora.slots}) admits; remove one of them",
            ".elastic",
        ),
        *TRAINER_RULES,
    )

    @property
    def sizes(self) -> Sizes:
        """Numbers of pods that the run may have: only `replicas`, unless the trainer is elastic."""
        least = self.replicas if self.elastic is None else self.elastic.min
        return trainer_sizes(self.parallelism, self.ranks_per_replica, least, self.replicas)

    @model_validator(mode="after")
    def _fits_all_sizes(self) -> Self:
        if self.elastic is None:
            return self
        least, layout = self.elastic.min, self.parallelism
        if least > self.replicas:
            raise ValueError(
                f"elastic.min ({least}) must be at most replicas ({self.replicas}); lower it or raise replicas"
            )
        if layout.dp_shard is not None:
            raise ValueError(
                f"elastic changes the number of ranks, which parallelism.dpShard ({layout.dp_shard}) fixes; remove one of them"
            )
        if least not in self.sizes.allowed:
            divided = layout.pp * layout.dp_replicate * layout.cp * layout.tp
            raise ValueError(
                f"elastic.min ({least}) gives {least * self.ranks_per_replica} ranks, which pp * dpReplicate * cp * tp ({divided}) must "
                f"divide, and ep ({layout.ep}) must divide their dpShard * cp; change elastic.min or parallelism"
            )
        if self.lora is not None and self.lora.slots > 1:
            raise ValueError(
                f"elastic starts new attempts, which interrupt other runs that lora.slots ({self.lora.slots}) admits; remove one of them"
            )
        return self


class AutoscaleSpec(Config):
    """Limits and target of the number of engines."""

    min: Annotated[int, Field(ge=1, le=4096)] = 1
    """Fewest engines, and the initial number."""
    max: Annotated[int, Field(ge=1, le=4096)]
    """Most engines."""
    target_wait: Annotated[float, Field(ge=0.01, le=0.9)] = 0.05
    """Share of time that the trainer may wait for rollouts."""
    stabilization_seconds: Annotated[int, Field(ge=0, le=86400)] = 120
    """Shortest measurement, in seconds; a measurement includes at least two steps."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.min <= self.max",
            "autoscale.min ({self.min}) must be at most autoscale.max ({self.max}); lower min or raise max",
            ".min",
        ),
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min > self.max:
            raise ValueError(
                f"autoscale.min ({self.min}) must be at most autoscale.max ({self.max}); lower min or raise max"
            )
        return self


class SpotSpec(Config):
    """Engines on interruptible nodes."""

    share: Annotated[float, Field(gt=0, le=1)]
    """Largest share of the engines; `minAvailable` engines stay on other nodes."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(min_length=1, max_length=32)]
    """Labels of the interruptible nodes. Taints with the same keys are tolerated."""


class InferenceBlock(InferenceSpec, PodFields):
    """The vLLM engines and their pods."""

    min_available: Annotated[int, Field(ge=0, le=4096)] = 1
    """Fewest ready engines for which InferenceAvailable is True; at most `replicas`."""
    autoscale: AutoscaleSpec | None = None
    """Let the operator choose the number of engines."""
    spot: SpotSpec | None = None
    """Engines on interruptible nodes; their loss does not count as a failure."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        *EXTRA_ARGUMENTS_RULES,
        Rule(
            "!has(self.autoscale) || !has(self.replicas)",
            "replicas ({self.replicas}) cannot be set with autoscale, which chooses it from autoscale.min to autoscale.max; remove one of "
            "them",
            ".replicas",
        ),
        Rule(
            "has(self.autoscale) || self.minAvailable <= self.replicas",
            "minAvailable ({self.minAvailable}) must be at most replicas ({self.replicas}); lower it or raise replicas",
            ".minAvailable",
        ),
        Rule(
            "!has(self.autoscale) || self.minAvailable <= self.autoscale.min",
            "minAvailable ({self.minAvailable}) must be at most autoscale.min ({self.autoscale.min}); lower it or raise autoscale.min",
            ".minAvailable",
        ),
        Rule(
            "self.gpusPerReplica == 0 || self.gpusPerReplica == self.tensorParallel * self.dataParallel",
            "gpusPerReplica ({self.gpusPerReplica}) must be tensorParallel x dataParallel "
            "({self.tensorParallel * self.dataParallel}), or 0 for CPUs",
            ".gpusPerReplica",
        ),
    )

    @property
    def min_replicas(self) -> int:
        """Fewest engines that the run always has."""
        return self.replicas if self.autoscale is None else self.autoscale.min

    @property
    def max_replicas(self) -> int:
        """Most engines that the run may have."""
        return self.replicas if self.autoscale is None else self.autoscale.max

    def on_spot(self, engines: int) -> int:
        """Return how many of `engines` run on interruptible nodes: at most their share, without the `minAvailable` others."""
        if self.spot is None:
            return 0
        return max(0, min(math.floor(self.spot.share * engines + _CLOSE), engines - self.min_available))

    @model_validator(mode="after")
    def _check_engine_count(self) -> Self:
        if self.autoscale is not None:
            if "replicas" in self.model_fields_set:
                raise ValueError(
                    f"replicas ({self.replicas}) cannot be set with autoscale, which chooses it from autoscale.min to autoscale.max; "
                    "remove one of them"
                )
            if self.min_available > self.autoscale.min:
                raise ValueError(
                    f"minAvailable ({self.min_available}) must be at most autoscale.min ({self.autoscale.min}); lower it or raise "
                    "autoscale.min"
                )
        elif self.min_available > self.replicas:
            raise ValueError(
                f"minAvailable ({self.min_available}) must be at most replicas ({self.replicas}); lower it or raise replicas"
            )
        return self


class OrchestratorBlock(OrchestratorSpec, PodFields):
    """The process that schedules rollouts, builds batches and controls the run, and its pod."""
