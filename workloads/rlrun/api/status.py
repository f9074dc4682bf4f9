"""Status of a run, written by the operator alone. Source of the CRD's status schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlrun.config.base import Config

Phase = Literal[
    "Unserved",
    "Pending",
    "Queued",
    "Starting",
    "Running",
    "Restarting",
    "Suspending",
    "Suspended",
    "Completing",
    "Complete",
    "Failed",
]
"""Derived from the conditions by one function and never read back. Unserved: see `UNSERVED`."""
UNSERVED: Mapping[str, str | int] = {
    "phase": "Unserved",
    "message": "no operator has taken this run yet: is one installed that watches this namespace, and is managedBy (if set) its name?",
    "observedGeneration": 0,
}
"""The status of a run until an operator writes one, filled in by the API server; for operators there is none. The generation is for
kstatus, which takes a resource without conditions for ready."""

COUNT_MAX = 2**53
"""Largest count: beyond it, a number in JSON is not the same for all readers."""
ATTEMPT_MAX = 10**9 - 1
"""Numbers of attempts are part of names and labels."""
PODS_MAX = 2**16
"""Far more than a specification may ask for."""


def _at_most(most: int) -> Callable[[int], int]:
    def check(value: int) -> int:
        if not 0 <= value <= most:
            raise ValueError(f"{value} is not from 0 to {most}")
        return value

    return check


def _node_name(value: str) -> str:
    if len(value) > 253 or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", value):
        raise ValueError("it is no name of a node")
    return value


# No part of the CRD's schema, and far below what the API takes: one more than the largest that is read can still be written.
Count = Annotated[int, AfterValidator(_at_most(COUNT_MAX))]
AttemptNumber = Annotated[int, AfterValidator(_at_most(ATTEMPT_MAX))]
PodCount = Annotated[int, AfterValidator(_at_most(PODS_MAX))]


class Condition(Config):
    """One aspect of the run, as in Kubernetes' own resources."""

    type: str
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """True if it holds."""
    reason: str
    """One CamelCase word; the troubleshooting page lists them."""
    message: str
    """Explanation for users, and what to do."""
    last_transition_time: str
    """When `status` changed last (RFC 3339)."""
    observed_generation: int | None = None
    """`metadata.generation` that this is about."""


class RoleStatus(Config):
    """Pods of one role."""

    desired: PodCount = 0
    """Number of desired pods."""
    ready: PodCount = 0
    """Number of ready pods."""


class TrainerStatus(RoleStatus):
    """The trainer's pods, and the size of an elastic one."""

    size: PodCount | None = None
    """Pods of this attempt, or of the next one, while fewer than `replicas`."""
    reason: str | None = None
    """Why the size has changed last."""
    changed: str | None = None
    """When (RFC 3339)."""
    grow_time: str | None = None
    """It does not grow before (RFC 3339)."""
    grown_from: PodCount | None = None
    """Size before a growth, until that has trained a step."""
    growths: Count | None = None
    """Growths in a row that found no node."""
    waiting_on: str | None = None
    """Condition that another size waits for."""


class SpotStatus(RoleStatus):
    """Engines on interruptible nodes."""

    lost: Count = 0
    """Losses so far."""
    last_loss: str | None = None
    """The last one."""
    pods: list[str] | None = None
    """Ready until now."""


class InferenceStatus(RoleStatus):
    """Engines."""

    weight_version: Count | None = None
    """Newest policy version that an engine holds."""
    reason: str | None = None
    """Why autoscaling has changed `desired` last."""
    selector: str | None = None
    """Labels of the pods."""
    spot: SpotStatus | None = None
    """With `inference.spot`."""


class ProgressStatus(Config):
    """Progress of the run, as the orchestrator reported it last."""

    step: Count = 0
    """Last trained step."""
    total_steps: Count = 0
    """`spec.maxSteps`."""
    percent: Count = 0
    """`step` of `totalSteps`."""
    furthest_step: Count = 0
    """Highest step ever trained."""
    policy_version: Count | None = None
    """Newest version that an engine holds."""
    reward: float | None = None
    """Mean reward of the last trained step."""
    tokens_per_second: float | None = None
    """Tokens trained per second."""
    staleness_mean: float | None = None
    """Mean age of the last step's tokens, in policy versions."""
    last_step_time: str | None = None
    """When the operator saw the step change (RFC 3339)."""
    estimated_completion_time: str | None = None
    """Estimate by the last steps' speed (RFC 3339)."""
    waiting_on: str | None = None
    """Cause of the next step's wait."""


class CheckpointStatus(Config):
    """Checkpoints, and steps lost to restarts."""

    latest_complete_step: Count | None = None
    """Newest complete checkpoint."""
    latest_complete_time: str | None = None
    """When the operator saw it first (RFC 3339)."""
    resumed_from_step: Count | None = None
    """Checkpoint that the current attempt started from; 0: from the model."""
    steps_lost_total: Count = 0
    """Steps that restarts had to train again, over all attempts."""


class FailureRecord(Config):
    """Failure that ended an attempt."""

    time: str
    """Time (RFC 3339)."""
    attempt: AttemptNumber
    """Number of the attempt."""
    role: Literal["trainer", "inference", "orchestrator"]
    """Role of the first failed pod."""
    pod_name: str
    """Name of that pod."""
    node_name: str | None = None
    """Node of that pod."""
    exit_code: int | None = None
    """Exit code; 128+n: signal n."""
    reason: str
    """One CamelCase word."""
    message: str
    """Message of the role or of Kubernetes."""
    counted: bool = True
    """True if the restart counted."""
    step: Count | None = None
    """Step that the run had reached."""


class ExcludedNode(Config):
    """A node that the run keeps away from."""

    name: Annotated[str, AfterValidator(_node_name)]
    """Name of the node."""
    until: str
    """End of the exclusion (RFC 3339)."""
    reason: str
    """Cause of the exclusion."""


class StorageStatus(Config):
    """The run's volume."""

    claim_name: str
    """The PersistentVolumeClaim."""
    path: str
    """The run's folder as the pods see it."""
    volume_name: str | None = None
    """The bound PersistentVolume."""
    size: str | None = None
    """Capacity that the claim asks for."""


class SharedWithStatus(Config):
    """The run whose trainer and engines this one uses."""

    run: str
    """Name of that run."""
    attempt: AttemptNumber | None = None
    """Attempt of that run to which this run's belongs."""


class QueueStatus(Config):
    """Place of a run in the operator's queue."""

    since: str
    """When the run asked for room first (RFC 3339); a preemption does not change it."""
    position: Count | None = None
    """Place in the queue, from 1; none while the run has room."""
    waiting: Count | None = None
    """Number of runs that wait."""


class DefaultsStatus(Config):
    """Defaults of the run's namespace."""

    config_map: str
    """ConfigMap that they come from, with its namespace."""
    mark: str
    """Fingerprint of its content."""
    fields: list[str]
    """Fields that the current attempt has from it."""


class RoleCost(Config):
    """GPU time of one role in one attempt."""

    attempt: AttemptNumber
    """Its number; 0: all earlier ones."""
    role: Literal["trainer", "inference", "orchestrator"]
    """The role."""
    gpu_seconds: dict[str, Count] = Field(default_factory=dict)
    """GPU-seconds by use."""


class CostStatus(Config):
    """GPU time of the run's pods, from node to end."""

    gpu_hours: float = 0.0
    """All of it."""
    gpu_seconds: dict[str, Count] = Field(default_factory=dict)
    """By use: trained, waitedForRollouts, waitedForTrainer, startup, repeated, stopping, other."""
    trained: dict[str, Count] | None = None
    """`tokens` and `samples` trained."""
    per_gpu_hour: dict[str, float] | None = None
    """The same per GPU-hour."""
    attempts: list[RoleCost] = Field(default_factory=list)
    """By attempt and role."""
    counted_to: str
    """Until when it is counted (RFC 3339)."""
    pods: list[str] = Field(default_factory=list)
    """Pods: UID/role/GPUs (0: ended and counted), and /the end of their grace period."""


class RestartStatus(Config):
    """Time of the last restart, by phase."""

    since: str
    """When the end of the attempt before was seen (RFC 3339)."""
    attempt: AttemptNumber | None = None
    """Attempt that it began."""
    seconds: dict[str, Count] = Field(default_factory=dict)
    """Seconds by phase."""
    total_seconds: Count | None = None
    """Seconds to the first new step."""
    slow: str | None = None
    """Phases beyond their budgets, and why."""


class RLRunStatus(Config):
    """Observed state of a run."""

    observed_generation: int | None = None
    """`metadata.generation` that the operator has acted on."""
    phase: Phase | None = None
    """Stage of the run's life cycle."""
    conditions: list[Condition] = Field(default_factory=list)
    """Conditions by type, from ConfigurationValid to Complete and Failed, and kstatus' Reconciling and Stalled."""
    reason: str | None = None
    """Reason of the condition that matters most now."""
    message: str | None = None
    """Its message: what the run waits for, or why it ended."""
    attempt: AttemptNumber = 0
    """Number of the current attempt; 0 before the first."""
    launched_attempt: AttemptNumber = 0
    """Newest attempt whose workloads were all seen: a missing one was deleted."""
    restarts: Count = 0
    """All restarts."""
    restarts_counted_towards_max: Count = 0
    """Restarts after failures; compared with `failurePolicy.maxRestarts`."""
    counted_at_step: Count | None = None
    """Furthest step at the last counted restart."""
    restarts_without_step: Count = 0
    """Restarts in a row without a new step."""
    next_retry_time: str | None = None
    """When the backoff ends (RFC 3339)."""
    start_time: str | None = None
    """When the first attempt began (RFC 3339)."""
    completion_time: str | None = None
    """When the run became Complete or Failed (RFC 3339)."""
    active_since: str | None = None
    """Since when the run is neither suspended nor over (RFC 3339)."""
    active_seconds: Count = 0
    """Seconds of activity before `activeSince`."""
    max_steps: Count | None = None
    """`spec.maxSteps` that the current attempt was made with."""
    restart_requested_at: str | None = None
    """The last `rlrun.io/restart-requested-at` that was acted on."""
    key_attempt: AttemptNumber | None = None
    """Attempt with whose beginning the run's API key is made; none: the first."""
    key_rotation_requested_at: str | None = None
    """The last `rlrun.io/rotate-key-requested-at` that was acted on."""
    config_hash: str | None = None
    """Fingerprint of what the run computes."""
    spec_hash: str | None = None
    """Fingerprint of the spec that the current attempt's children were rendered from."""
    unstarted: Annotated[list[Literal["trainer", "inference", "orchestrator"]], Field(max_length=3)] | None = None
    """Roles of which no container has started with this spec yet; while there are any, spec may be edited."""
    steps: str | None = None
    """`412/1000`, for the printer column; of Eval: answers."""
    results: list[str] | None = None
    """Results of Eval: `gsm8k, step 20: avg@4 0.4120, pass@4 0.7100`."""
    trainer: TrainerStatus = TrainerStatus()
    """The trainer's pods."""
    inference: InferenceStatus = InferenceStatus()
    """The engines; a guest's are its host's, as its trainer is."""
    orchestrator: RoleStatus = RoleStatus()
    """The orchestrator's pod."""
    trainer_ready: str | None = None
    """`2/2`, for the printer column."""
    inference_ready: str | None = None
    """`4/4`, for the printer column."""
    progress: ProgressStatus = ProgressStatus()
    """Progress of the run."""
    checkpoint: CheckpointStatus = CheckpointStatus()
    """Checkpoints, and steps lost to restarts."""
    last_failure: FailureRecord | None = None
    """Failure that ended the last attempt."""
    failures: list[FailureRecord] = Field(default_factory=list, max_length=5)
    """The last five, newest last."""
    last_restart: RestartStatus | None = None
    """Time of the last restart, by phase."""
    excluded_nodes: Annotated[list[ExcludedNode], Field(max_length=16)] | None = None
    """Left out by the next attempts."""
    storage: StorageStatus | None = None
    """The run's volume."""
    queue: QueueStatus | None = None
    """Place in the queue, if the operator has one."""
    cost: CostStatus | None = None
    """Cost of the run, if it had GPUs."""
    shared_with: SharedWithStatus | None = None
    """The host of a guest (`trainer.sharedWith`)."""
    guests: list[str] | None = None
    """Runs that have begun with this run's trainer and are not over."""
    defaults: DefaultsStatus | None = None
    """Defaults that the current attempt began with."""
