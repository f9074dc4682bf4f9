"""Fields of each role's block that configure its pods, beside those of its computation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlrun.api.kubernetes import (
    Affinity,
    EnvFromSource,
    EnvVar,
    LabelKey,
    LabelValue,
    LocalObjectReference,
    ObjectName,
    PositiveQuantity,
    ResourceRequirements,
    Toleration,
    reserved_variable,
)
from rlrun.config.base import Config
from rlrun.config.formats import Distinct, GuestPattern, ImageReference
from rlrun.config.free import FreeMapping
from rlrun.config.models.roles import InferenceSpec, OrchestratorSpec, TrainerSpec


def _without_reserved(template: Any) -> Any:
    if (found := reserved_variable(template)) is not None:
        where, name = found
        raise ValueError(f"spec.{where} ({name}) is reserved: RLRun sets it itself; remove it")
    return template


class PodFields(Config):
    """The pods of one role."""

    image: ImageReference | None = None
    """Container image; default: the operator's for this role."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When to pull the image; default: Kubernetes'."""
    image_pull_secrets: Annotated[list[LocalObjectReference], Field(max_length=16), Distinct("name")] = Field(
        default_factory=list
    )
    """Secrets with the registry's credentials."""
    resources: ResourceRequirements = ResourceRequirements()
    """Requests and limits of the container; GPUs come from `gpusPerReplica`."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """Tolerated taints; pods with GPUs always tolerate the GPU resource's own."""
    affinity: Affinity = Affinity()
    """Kubernetes affinity; `placement` adds to it."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, such as `nvidia`."""
    env: Annotated[list[EnvVar], Field(max_length=128), Distinct("name")] = Field(default_factory=list)
    """Environment variables; `RLRUN_*` and torchrun's own are reserved."""
    env_from: Annotated[list[EnvFromSource], Field(max_length=32)] = Field(default_factory=list)
    """Secrets and ConfigMaps whose keys become environment variables."""
    shared_memory: PositiveQuantity | None = None
    """Size limit of `/dev/shm`; default: the container's memory."""
    pod_template: Annotated[FreeMapping, AfterValidator(_without_reserved)] = Field(default_factory=dict)
    """PodTemplateSpec merged as `kubectl patch` does, within the policy of the operator; the container has the role's name."""


class TrainerBlock(TrainerSpec, PodFields):
    """The torchrun group that steps the optimizer (FSDP2), and its pods."""

    guests: Annotated[list[GuestPattern], Field(max_length=64), Distinct()] = Field(default_factory=list)
    """Runs that may use this trainer (`sharedWith`), by name or by its beginning (`ann-*`); default: none."""


class InferenceBlock(InferenceSpec, PodFields):
    """The vLLM engines and their pods."""

    min_available: Annotated[int, Field(ge=0, le=4096)] = 1
    """Ready engines below which InferenceAvailable is False; at most `replicas`."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.min_available > self.replicas:
            raise ValueError(
                f"minAvailable ({self.min_available}) must be at most replicas ({self.replicas}); lower it or raise replicas"
            )
        return self


class OrchestratorBlock(OrchestratorSpec, PodFields):
    """The process that makes rollouts, batches and decisions, and its pod."""
