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
    """Node label, such as `nvidia.com/gpu.clique`, that all pods of the scope must share; else they wait."""
    preferred: LabelKey | None = None
    """Node label that the pods of the scope should agree in."""
    scope: Literal["Role", "Run"] = "Role"
    """Role: the trainer's pods among themselves. Run: trainer and inference together."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.required) != has(self.preferred)",
            "exactly one of required ({has(self.required) ? self.required : 'not set'}) and preferred "
            "({has(self.preferred) ? self.preferred : 'not set'}) names the node label; set one of them",
        ),
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.required is None) == (self.preferred is None):
            required, preferred = self.required or "not set", self.preferred or "not set"
            raise ValueError(
                f"exactly one of required ({required}) and preferred ({preferred}) names the node label; set one of them"
            )
        return self


class PlacementSpec(Config):
    """Placement of the run's pods, in the terms of GPU clusters."""

    gpu_product: LabelValue | None = None
    """GPU model of trainer and inference: node label `nvidia.com/gpu.product`."""
    pool: LabelValue | None = None
    """Node pool of all roles: node label `rlrun.io/pool`."""
    trainer: RolePlacement = RolePlacement()
    """Replaces the two above for the trainer."""
    inference: RolePlacement = RolePlacement()
    """Replaces the two above for inference."""
    orchestrator: RolePlacement = RolePlacement()
    """Replaces the pool for the orchestrator, which needs no GPU."""
    topology: TopologySpec | None = None
    """Keep pods near each other; none by default."""
    spread_inference: Literal["None", "Preferred", "Required"] = "Preferred"
    """Put engines on different nodes, so that one node's loss leaves others."""
    colocate: bool = False
    """Run an engine in each of the trainer's pods, on its GPUs, in turn with it."""
    gpu_resource: ExtendedResource = "nvidia.com/gpu"
    """Extended resource that counts GPUs."""
