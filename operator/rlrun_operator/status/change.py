"""Partial update of a run's status: the fields that a decision sets, each with its type."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Final, Literal

from rlrun.api.status import (
    CheckpointStatus,
    Condition,
    CostStatus,
    DefaultsStatus,
    ExcludedNode,
    FailureRecord,
    InferenceStatus,
    Phase,
    ProgressStatus,
    QueueStatus,
    RestartStatus,
    RLRunStatus,
    RoleStatus,
    SharedWithStatus,
    StorageStatus,
    TrainerStatus,
)
from rlrun_operator.names import Role
from rlrun_operator.state import Json, Manifest


class Unset(enum.Enum):
    """Type of `UNSET`."""

    UNSET = "UNSET"


UNSET: Final[Literal[Unset.UNSET]] = Unset.UNSET
"""Value of a field that a change does not touch. None is a value: it removes the field from the status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange:
    """New values of fields of `RLRunStatus`, under the same names and of the same types."""

    observed_generation: int | Unset | None = UNSET
    phase: Phase | Unset | None = UNSET
    conditions: list[Condition] | Unset = UNSET
    reason: str | Unset | None = UNSET
    message: str | Unset | None = UNSET
    attempt: int | Unset = UNSET
    launched_attempt: int | Unset = UNSET
    restarts: int | Unset = UNSET
    restarts_counted_towards_max: int | Unset = UNSET
    counted_at_step: int | Unset | None = UNSET
    restarts_without_step: int | Unset = UNSET
    next_retry_time: str | Unset | None = UNSET
    start_time: str | Unset | None = UNSET
    completion_time: str | Unset | None = UNSET
    active_since: str | Unset | None = UNSET
    active_seconds: int | Unset = UNSET
    max_steps: int | Unset | None = UNSET
    restart_requested_at: str | Unset | None = UNSET
    key_attempt: int | Unset | None = UNSET
    key_rotation_requested_at: str | Unset | None = UNSET
    config_hash: str | Unset | None = UNSET
    spec_hash: str | Unset | None = UNSET
    unstarted: list[Role] | Unset | None = UNSET
    steps: str | Unset | None = UNSET
    results: list[str] | Unset | None = UNSET
    trainer: TrainerStatus | Unset = UNSET
    inference: InferenceStatus | Unset = UNSET
    orchestrator: RoleStatus | Unset = UNSET
    trainer_ready: str | Unset | None = UNSET
    inference_ready: str | Unset | None = UNSET
    progress: ProgressStatus | Unset = UNSET
    checkpoint: CheckpointStatus | Unset = UNSET
    last_failure: FailureRecord | Unset | None = UNSET
    failures: list[FailureRecord] | Unset = UNSET
    last_restart: RestartStatus | Unset | None = UNSET
    excluded_nodes: list[ExcludedNode] | Unset | None = UNSET
    storage: StorageStatus | Unset | None = UNSET
    queue: QueueStatus | Unset | None = UNSET
    cost: CostStatus | Unset | None = UNSET
    shared_with: SharedWithStatus | Unset | None = UNSET
    guests: list[str] | Unset | None = UNSET
    defaults: DefaultsStatus | Unset | None = UNSET

    def __or__(self, later: StatusChange) -> StatusChange:
        """Combine both changes; for a field that both set, `later` wins."""
        return combine_changes(self, later)

    def values(self) -> Manifest:
        """Return the fields that are set, by name."""
        return {name: value for name, value in zip(_NAMES, _all_of(self), strict=True) if value is not UNSET}

    def applied_to(self, past: RLRunStatus) -> RLRunStatus:
        """Return `past` with this change applied, without another validation."""
        return past.model_copy(update=self.values())


def combine_changes(*changes: StatusChange) -> StatusChange:
    """Combine changes; for a field that several set, the last one wins."""
    values: Json = {}
    for change in changes:
        values.update(change.values())
    return StatusChange(**values)


_NAMES = tuple(field.name for field in fields(StatusChange))
_all_of = attrgetter(*_NAMES)
NO_CHANGE = StatusChange()
