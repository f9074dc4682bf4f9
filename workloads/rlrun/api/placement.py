"""Placement of pods."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from rlrun.api.kubernetes import ExtendedResource, LabelKey, LabelValue
from rlrun.config.base import Config
from rlrun.config.rule import Rule


class RolePlacement(Config):
    """Replaces the run's placement for one role."""

    gpu_product: LabelValue | None = None
    """GPU model: node label `nvidia.com/gpu.product`."""
    pool: LabelValue | None = None
    """Node pool: node label `rlrun.io/pool`."""


class TopologySpec(Config):
    """Keep pods near each other. At most one of `required` and `preferred`."""

    required: LabelKey | None = None
    """Node label, such as `nvidia.com/gpu.clique`, whose value all pods of the scope must share. Otherwise they wait."""
    preferred: LabelKey | None = None
    """Node label whose value the pods of the scope should share."""
    scope: Literal["Role", "Run"] = "Role"
    """Role: the trainer's pods. Run: the pods of trainer and inference."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.required) != has(self.preferred)",
            "set exactly one of required ({has(self.required) ? self.required : 'not set'}) and preferred "
            "({has(self.preferred) ? self.preferred : 'not set'})",
        ),
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.required is None) == (self.preferred is None):
            required, preferred = self.required or "not set", self.preferred or "not set"
            raise ValueError(f"set exactly one of required ({required}) and preferred ({preferred})")
        return self


class PlacementSpec(Config):
    """Placement of the run's pods on the nodes of a GPU cluster."""

    gpu_product: LabelValue | None = None
    """GPU model of trainer and inference: node label `nvidia.com/gpu.product`."""
    pool: LabelValue | None = None
    """Node pool of all roles: node label `rlrun.io/pool`."""
    trainer: RolePlacement = RolePlacement()
    """Replaces the two fields above for the trainer."""
    inference: RolePlacement = RolePlacement()
    """Replaces the two fields above for inference."""
    orchestrator: RolePlacement = RolePlacement()
    """Replaces the pool for the orchestrator, which needs no GPU."""
    topology: TopologySpec | None = None
    """Keep pods near each other. Default: no constraint."""
    spread_inference: Literal["None", "Preferred", "Required"] = "Preferred"
    """Put engines on different nodes, so that the loss of one node does not stop all of them."""
    colocate: bool = False
    """Run an engine in each trainer pod, on the same GPUs, in turn with the trainer."""
    gpu_resource: ExtendedResource = "nvidia.com/gpu"
    """Extended resource that counts GPUs."""
