"""What each role's block says about its pods, beside what the role computes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rlrun.api.kubernetes import (
    Affinity,
    EnvFromSource,
    EnvVar,
    LabelKey,
    LabelValue,
    LocalObjectReference,
    Quantity,
    ResourceRequirements,
    Toleration,
)
from rlrun.config.base import Config
from rlrun.config.roles import InferenceSpec, OrchestratorSpec, TrainerSpec


class PodFields(Config):
    """The pods of one role."""

    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Container image; default: the operator's for this role."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the node pulls the image; default: Kubernetes'."""
    image_pull_secrets: Annotated[list[LocalObjectReference], Field(max_length=16)] = Field(default_factory=list)
    """Secrets of this namespace with the registry's credentials."""
    resources: ResourceRequirements = ResourceRequirements()
    """CPU, memory and other requests and limits of the role's container; GPUs come from `gpusPerReplica`."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """Taints of nodes that the pods bear. The GPU resource's own taint is always tolerated by pods with GPUs."""
    affinity: Affinity = Affinity()
    """Kubernetes affinity; `placement` adds to it."""
    priority_class_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """PriorityClass of the pods."""
    runtime_class_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """RuntimeClass of the pods, such as `nvidia`."""
    env: Annotated[list[EnvVar], Field(max_length=128)] = Field(default_factory=list)
    """More environment variables. `RLRUN_*` and torchrun's own names are reserved."""
    env_from: Annotated[list[EnvFromSource], Field(max_length=32)] = Field(default_factory=list)
    """Secrets and ConfigMaps whose keys become environment variables, such as a hub token."""
    shared_memory: Quantity | None = None
    """Size limit of `/dev/shm`; default: bounded by the container's memory alone."""
    pod_template: dict[str, JsonValue] = Field(default_factory=dict)
    """The way out: a PodTemplateSpec merged over the generated one as `kubectl patch` would; the role's container is called
    after the role."""


class TrainerBlock(TrainerSpec, PodFields):
    """The torchrun group that steps the optimizer (FSDP2), and its pods."""


class InferenceBlock(InferenceSpec, PodFields):
    """The vLLM engines and their pods."""

    min_available: Annotated[int, Field(ge=0, le=4096)] = 1
    """Ready engines below which the condition InferenceAvailable is False. At most `replicas`."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.min_available > self.replicas:
            raise ValueError(
                f"minAvailable ({self.min_available}) must be at most replicas ({self.replicas}); lower it or raise replicas"
            )
        return self


class OrchestratorBlock(OrchestratorSpec, PodFields):
    """The process that makes rollouts, batches and decisions, and its pod."""
