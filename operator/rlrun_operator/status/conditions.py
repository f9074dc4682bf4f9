"""Conditions and phase of a run, and the fields of its status that a decision sets.

The phase follows from the conditions. `StatusChange` is a partial update of the status: the fields that a decision sets, each with its
type.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Final, Literal, NamedTuple

from rlrun.api.run_status import (
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
from rlrun.runtime.printable import shorten_text
from rlrun_operator.names import Role
from rlrun_operator.state import Json, Manifest
from rlrun_operator.status import reasons
from rlrun_operator.times import format_rfc3339, seconds_of

Truth = Literal["True", "False", "Unknown"]


class ConditionUpdate(NamedTuple):
    """New status, reason and message of one condition."""

    status: Truth
    reason: str
    message: str


def find_condition(conditions: Sequence[Condition], kind: str) -> Condition | None:
    """Return the condition of type `kind`, or None."""
    for condition in conditions:  # called dozens of times in a decision: a generator takes twice as long
        if condition.type == kind:
            return condition
    return None


def raw_conditions(document: Manifest) -> list[Manifest]:
    """Return the conditions of an unvalidated status, in which any client may have written anything."""
    found = document.get("conditions")
    return [c for c in found if isinstance(c, Mapping)] if isinstance(found, list) else []


def is_true(conditions: Sequence[Condition], kind: str) -> bool:
    """Return whether the condition of type `kind` has status True."""
    found = find_condition(conditions, kind)
    return found is not None and found.status == "True"


def true_since(conditions: Sequence[Condition], kind: str, *, true: bool) -> float | None:
    """Return the time since which a condition is true (or not true), in seconds since the epoch, or None if it is otherwise."""
    found = find_condition(conditions, kind)
    if found is None or (found.status == "True") != true:
        return None
    return seconds_of(found.last_transition_time)


def attempt_started_at(conditions: Sequence[Condition]) -> float | None:
    """Return when the current attempt started (after a restart or a suspension), in seconds since the epoch, or None without an attempt."""
    times = [true_since(conditions, kind, true=False) for kind in (reasons.RESTARTING, reasons.SUSPENDED)]
    return max((time for time in times if time is not None), default=None)


def not_failed(past: Sequence[Condition]) -> dict[str, ConditionUpdate]:
    """Clear the Failed condition after a fixed specification or a manual restart."""
    return (
        {reasons.FAILED: ConditionUpdate("False", reasons.NOT_FAILED, "the run has not failed")}
        if is_true(past, reasons.FAILED)
        else {}
    )


def run_phase(conditions: Sequence[Condition], attempt: int) -> Phase:
    """Return the phase of the run. Complete and Failed are terminal; a run without an attempt (`attempt` is 0) is Pending at most."""
    if is_true(conditions, reasons.COMPLETE):
        return "Complete"
    if is_true(conditions, reasons.FAILED):
        return "Failed"
    completing = find_condition(conditions, reasons.COMPLETE)
    if completing is not None and completing.reason in reasons.ENDING:
        return "Completing"
    # The queue and a suspension come before the attempt: while one of them holds the run back, its attempt does not matter.
    suspended, admitted = find_condition(conditions, reasons.SUSPENDED), find_condition(conditions, reasons.ADMITTED)
    stops = suspended is not None and (suspended.status, suspended.reason) == ("False", reasons.SUSPENDING)
    if admitted is not None and admitted.reason in reasons.QUEUED and not stops:
        return "Queued"
    if suspended is not None and suspended.reason in reasons.SUSPENSION:
        if suspended.status == "True" and is_true(conditions, reasons.ADMITTED):
            return "Starting" if attempt else "Pending"  # the queue has just admitted it
        return "Suspended" if suspended.status == "True" else "Suspending"
    if is_true(conditions, reasons.RESTARTING):
        return "Restarting"
    scheduled = find_condition(conditions, reasons.SCHEDULED)
    if not attempt or scheduled is None or scheduled.reason in (reasons.PREVIOUS_RUN_ENDING, reasons.NAME_TAKEN):
        return "Pending"
    return "Starting" if is_true(conditions, reasons.RECONCILING) else "Running"


_SETTLED = ((reasons.PODS_READY, "True"), (reasons.RECONCILING, "False"), (reasons.COMPLETE, "False"))
"""Transitions that cannot be older than the youngest pod, whose creation time comes from the API server's clock."""


def write_conditions(
    past: Sequence[Condition],
    updates: Mapping[str, ConditionUpdate | None],
    *,
    generation: int | None,
    now: float,
    born: float = 0.0,
) -> list[Condition]:
    """Return all conditions in their fixed order: an update replaces the past condition, a missing one keeps it, and None removes it.

    `lastTransitionTime` changes only if the status changes. `born` is the creation time of the youngest pod by the API server's
    clock: the conditions in `_SETTLED` cannot have become true earlier, even if the operator's clock is behind.
    """
    result = []
    for kind in reasons.CONDITION_TYPES:
        old, new = find_condition(past, kind), updates.get(kind)
        if new is None:
            result += [old] if old is not None and kind not in updates else []
            continue
        at = max(now, born) if (kind, new.status) in _SETTLED else now
        when = old.last_transition_time if old is not None and old.status == new.status else format_rfc3339(at)
        result.append(
            Condition(
                type=kind,
                status=new.status,
                reason=new.reason,
                message=shorten_text(new.message),
                last_transition_time=when,
                observed_generation=generation,
            )
        )
    return result


_BY_IMPORTANCE = (
    (reasons.FAILED, "True"),
    (reasons.COMPLETE, "True"),
    (reasons.COMPLETE, "False"),
    (reasons.WITHIN_BUDGET, "False"),
    (reasons.ADMITTED, "False"),
    (reasons.SUSPENDED, None),
    (reasons.CONFIGURATION_VALID, "False"),
    (reasons.HOST_AVAILABLE, "False"),
    (reasons.RESTARTING, "True"),
    (reasons.STORAGE_READY, "False"),
    (reasons.SCHEDULED, "False"),
    (reasons.PODS_READY, "False"),
    (reasons.INFERENCE_AVAILABLE, "False"),
    (reasons.PROGRESSING, None),
    (reasons.ADMITTED, "True"),
)
"""Conditions in the order in which a user should read them; the first one that applies becomes the status message."""


def foremost_condition(conditions: Sequence[Condition]) -> Condition | None:
    """Return the most important condition, which the status repeats as its reason and message.

    A claim that only waits (for its first pod to be scheduled) is less important than the problem that keeps its pods waiting.
    """
    for kind, status in _BY_IMPORTANCE:
        found = find_condition(conditions, kind)
        if found is None or (status is not None and found.status != status) or found.reason == reasons.NOT_SUSPENDED:
            continue
        if (kind, status) == (
            reasons.ADMITTED,
            "False",
        ) and found.reason not in reasons.QUEUED | reasons.QUEUE_SUSPENSION:
            continue
        if found.reason not in reasons.PROBLEMS and _problem_after(conditions, kind):
            continue
        return found
    return None


def _problem_after(conditions: Sequence[Condition], kind: str) -> bool:
    waits = (reasons.STORAGE_READY, reasons.SCHEDULED, reasons.PODS_READY, reasons.INFERENCE_AVAILABLE)
    if kind not in waits:
        return False
    later = waits[waits.index(kind) + 1 :]
    return any((c := find_condition(conditions, k)) is not None and c.reason in reasons.PROBLEMS for k in later)


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
