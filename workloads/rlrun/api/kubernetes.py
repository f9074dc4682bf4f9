"""The parts of Kubernetes' own API that a role's pod takes as they are.

They are typed, so that a typo is refused at apply, and carry no descriptions: Kubernetes documents them, and with them the CRD would
be three times as large. What only Kubernetes knows (does this label key exist?), and what is not typed, the dry-run of the pods finds.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config
from rlrun.config.formats import RESERVED_VARIABLES, Format
from rlrun.config.free import FreeMapping

Quantity = Annotated[
    str,
    Field(min_length=1, max_length=32),
    Format(
        r"[0-9]+(\.[0-9]+)?([numkMGTPE]|[KMGTPE]i|e[0-9]+)?",
        "a Kubernetes quantity such as 500m, 16Gi or 2Ti",
    ),
]
"""Kubernetes' notation of an amount."""
Amount = Quantity | Annotated[int, Field(ge=0)]
"""Of a resource: a quantity, or a plain number as YAML reads it."""
LabelValue = Annotated[
    str,
    Field(max_length=63),
    Format(
        r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?",
        "a label value: letters and digits, and -, _ or . between them",
    ),
]
LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253)]
RESERVED_ENV = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
RESERVED_ENV_PREFIX = RESERVED_VARIABLES


class LocalObjectReference(Config):
    name: ObjectName


class ResourceRequirements(Config):
    limits: dict[str, Amount] = Field(default_factory=dict, max_length=32)
    requests: dict[str, Amount] = Field(default_factory=dict, max_length=32)


class Toleration(Config):
    key: Annotated[str, Field(max_length=317)] | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class KeySelector(Config):
    name: ObjectName
    key: Annotated[str, Field(min_length=1, max_length=253)]
    optional: bool | None = None


class FieldSelector(Config):
    field_path: Annotated[str, Field(min_length=1, max_length=253)]
    api_version: Annotated[str, Field(max_length=63)] | None = None


class EnvVarSource(Config):
    secret_key_ref: KeySelector | None = None
    config_map_key_ref: KeySelector | None = None
    field_ref: FieldSelector | None = None


class EnvVar(Config):
    name: Annotated[str, Field(min_length=1, max_length=253)]
    value: Annotated[str, Field(max_length=32768)] | None = None
    value_from: EnvVarSource | None = None

    @model_validator(mode="after")
    def _free(self) -> Self:
        if self.name in RESERVED_ENV or self.name.startswith(RESERVED_ENV_PREFIX):
            raise ValueError(f"name ({self.name}) is reserved: RLRun sets it itself; remove it")
        return self


class EnvSourceReference(Config):
    name: ObjectName
    optional: bool | None = None


class EnvFromSource(Config):
    prefix: Annotated[str, Field(max_length=253)] | None = None
    secret_ref: EnvSourceReference | None = None
    config_map_ref: EnvSourceReference | None = None


FreeTerms = Annotated[list[FreeMapping], Field(max_length=16)]
"""Checked by the dry-run of the pods alone."""


class NodeAffinity(Config):
    required_during_scheduling_ignored_during_execution: FreeMapping | None = None
    preferred_during_scheduling_ignored_during_execution: FreeTerms | None = None


class PodAffinity(Config):
    required_during_scheduling_ignored_during_execution: FreeTerms | None = None
    preferred_during_scheduling_ignored_during_execution: FreeTerms | None = None


class Affinity(Config):
    """As in a PodSpec; `model_dump(by_alias=True, exclude_none=True)` is what the user wrote."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None
