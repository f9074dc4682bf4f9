"""Status of a run, written only by the operator. Source of the CRD's status schema."""

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
"""Phase of a run, derived from the conditions and never read back. For Unserved see `UNSERVED`."""
UNSERVED: Mapping[str, str | int] = {
    "phase": "Unserved",
    "message": "no operator has processed this run yet: check that one watches this namespace, and that managedBy (if set) is its name",
    "observedGeneration": 0,
}
"""Status of a run until an operator writes one. The API server fills it in, and operators ignore it. It has a generation because
kstatus regards a resource without conditions as ready."""

COUNT_MAX = 2**53
"""Largest count. Larger numbers in JSON are not exact for all readers."""
ATTEMPT_MAX = 10**9 - 1
"""Largest attempt number; it is part of names and labels."""
PODS_MAX = 2**16
"""Largest number of pods; a specification may request far fewer."""


def _at_most(most: int) -> Callable[[int], int]:
    def check(value: int) -> int:
        if not 0 <= value <= most:
            raise ValueError(f"{value} is not between 0 and {most}")
        return value

    return check


def _node_name(value: str) -> str:
    if len(value) > 253 or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", value):
        raise ValueError("it is not the name of a node")
    return value


# These limits are not in the CRD's schema. They are far below the limits of the API, so that the largest value plus one can be written.
Count = Annotated[int, AfterValidator(_at_most(COUNT_MAX))]
AttemptNumber = Annotated[int, AfterValidator(_at_most(ATTEMPT_MAX))]
PodCount = Annotated[int, AfterValidator(_at_most(PODS_MAX))]


class Condition(Config):
    """One aspect of the run, as in Kubernetes' own resources."""

    type: str
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """True if the condition holds."""
    reason: str
    """One CamelCase word. The troubleshooting page lists all reasons."""
    message: str
    """Explanation and fix for users."""
    last_transition_time: str
    """Time of the last change of `status` (RFC 3339)."""
    observed_generation: int | None = None
    """`metadata.generation` that the condition refers to."""


class RoleStatus(Config):
    """Pods of one role."""

    desired: PodCount = 0
    """Number of desired pods."""
    ready: PodCount = 0
    """Number of ready pods."""


class TrainerStatus(RoleStatus):
    """The trainer's pods, and the size of an elastic trainer."""

    size: PodCount | None = None
    """Pods of this attempt, or of the next one, if fewer than `replicas`."""
    reason: str | None = None
    """Reason for the last change of the size."""
    changed: str | None = None
    """Time of that change (RFC 3339)."""
    grow_time: str | None = None
    """Earliest time of the next growth (RFC 3339)."""
    grown_from: PodCount | None = None
    """Size before a growth, until the first step after it."""
    growths: Count | None = None
    """Consecutive growths that found no node."""
    waiting_on: str | None = None
    """Condition that another size waits for."""


class SpotStatus(RoleStatus):
    """Engines on interruptible nodes."""

    lost: Count = 0
    """Losses so far."""
    last_loss: str | None = None
    """Description of the last loss."""
    pods: list[str] | None = None
    """Pods that were ready until now."""


class InferenceStatus(RoleStatus):
    """Engines."""

    weight_version: Count | None = None
    """Newest policy version that an engine has loaded."""
    reason: str | None = None
    """Reason for the last change of `desired` by autoscaling."""
    selector: str | None = None
    """Label selector of the pods."""
    spot: SpotStatus | None = None
    """Engines on interruptible nodes, with `inference.spot`."""


class ProgressStatus(Config):
    """Progress of the run, from the orchestrator's last report."""

    step: Count = 0
    """Last trained step."""
    total_steps: Count = 0
    """`spec.maxSteps`."""
    percent: Count = 0
    """`step` as a percentage of `totalSteps`."""
    furthest_step: Count = 0
    """Highest step ever trained."""
    policy_version: Count | None = None
    """Newest version that an engine has loaded."""
    reward: float | None = None
    """Mean reward of the last trained step."""
    tokens_per_second: float | None = None
    """Tokens trained per second."""
    staleness_mean: float | None = None
    """Mean age of the last step's tokens, in policy versions."""
    last_step_time: str | None = None
    """Time at which the operator observed the last step (RFC 3339)."""
    estimated_completion_time: str | None = None
    """Estimate from the speed of the last steps (RFC 3339)."""
    waiting_on: str | None = None
    """Reason why the next step waits."""


class CheckpointStatus(Config):
    """Checkpoints, and steps lost to restarts."""

    latest_complete_step: Count | None = None
    """Step of the newest complete checkpoint."""
    latest_complete_time: str | None = None
    """Time at which the operator observed it (RFC 3339)."""
    resumed_from_step: Count | None = None
    """Step of the checkpoint that the current attempt started from; 0: the model."""
    steps_lost_total: Count = 0
    """Steps that were repeated after restarts, over all attempts."""


class FailureRecord(Config):
    """Failure that ended an attempt."""

    time: str
    """Time of the failure (RFC 3339)."""
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
    """Whether the restart counted towards `maxRestarts`."""
    step: Count | None = None
    """Last step before the failure."""


class ExcludedNode(Config):
    """A node that the run avoids."""

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
    """Path of the run's folder in the pods."""
    volume_name: str | None = None
    """The bound PersistentVolume."""
    size: str | None = None
    """Capacity that the claim requests."""


class SharedWithStatus(Config):
    """The run whose trainer and engines this run uses."""

    run: str
    """Name of that run."""
    attempt: AttemptNumber | None = None
    """Attempt of that run during which this run's attempt runs."""


class QueueStatus(Config):
    """Position of a run in the operator's queue."""

    since: str
    """Time at which the run first requested resources (RFC 3339); a preemption does not change it."""
    position: Count | None = None
    """Position in the queue, from 1; unset while the run has resources."""
    waiting: Count | None = None
    """Number of waiting runs."""


class DefaultsStatus(Config):
    """Defaults of the run's namespace."""

    config_map: str
    """ConfigMap with the defaults, as namespace and name."""
    mark: str
    """Fingerprint of its content."""
    fields: list[str]
    """Fields that the current attempt takes from it."""


class RoleCost(Config):
    """GPU time of one role in one attempt."""

    attempt: AttemptNumber
    """Number of the attempt; 0: all earlier attempts."""
    role: Literal["trainer", "inference", "orchestrator"]
    """The role."""
    gpu_seconds: dict[str, Count] = Field(default_factory=dict)
    """GPU-seconds by use."""


class CostStatus(Config):
    """GPU time of the run's pods, from scheduling to termination."""

    gpu_hours: float = 0.0
    """GPU-hours in total."""
    gpu_seconds: dict[str, Count] = Field(default_factory=dict)
    """GPU-seconds by use: trained, waitedForRollouts, waitedForTrainer, startup, repeated, stopping, other."""
    trained: dict[str, Count] | None = None
    """Trained `tokens` and `samples`."""
    per_gpu_hour: dict[str, float] | None = None
    """Trained tokens and samples per GPU-hour."""
    attempts: list[RoleCost] = Field(default_factory=list)
    """GPU time by attempt and role."""
    counted_to: str
    """Time up to which the GPU time is counted (RFC 3339)."""
    pods: list[str] = Field(default_factory=list)
    """Pods, as UID/role/GPUs (0: ended and counted), with /the end of their grace period."""


class RestartStatus(Config):
    """Duration of the last restart, by phase."""

    since: str
    """Time at which the end of the previous attempt was observed (RFC 3339)."""
    attempt: AttemptNumber | None = None
    """Attempt that the restart started."""
    seconds: dict[str, Count] = Field(default_factory=dict)
    """Seconds by phase."""
    total_seconds: Count | None = None
    """Seconds until the first new step."""
    slow: str | None = None
    """Phases that exceeded their budgets, with the reason."""


class RLRunStatus(Config):
    """Observed state of a run."""

    observed_generation: int | None = None
    """Last `metadata.generation` that the operator processed."""
    phase: Phase | None = None
    """Phase of the run's lifecycle."""
    conditions: list[Condition] = Field(default_factory=list)
    """Conditions by type, from ConfigurationValid to Complete and Failed, and Reconciling and Stalled for kstatus."""
    reason: str | None = None
    """Reason of the currently most important condition."""
    message: str | None = None
    """Message of that condition: what the run waits for, or why it ended."""
    attempt: AttemptNumber = 0
    """Number of the current attempt; 0 before the first attempt."""
    launched_attempt: AttemptNumber = 0
    """Newest attempt with all its workloads observed. A missing workload was deleted afterwards."""
    restarts: Count = 0
    """Number of all restarts."""
    restarts_counted_towards_max: Count = 0
    """Restarts after failures, which `failurePolicy.maxRestarts` limits."""
    counted_at_step: Count | None = None
    """Furthest step at the last counted restart."""
    restarts_without_step: Count = 0
    """Consecutive restarts without a new step."""
    next_retry_time: str | None = None
    """End of the backoff (RFC 3339)."""
    start_time: str | None = None
    """Start of the first attempt (RFC 3339)."""
    completion_time: str | None = None
    """Time at which the run became Complete or Failed (RFC 3339)."""
    active_since: str | None = None
    """Time since which the run is neither suspended nor ended (RFC 3339)."""
    active_seconds: Count = 0
    """Active seconds before `activeSince`."""
    max_steps: Count | None = None
    """`spec.maxSteps` at the start of the current attempt."""
    restart_requested_at: str | None = None
    """Last processed value of `rlrun.io/restart-requested-at`."""
    key_attempt: AttemptNumber | None = None
    """Attempt at whose start the run's API key is created; unset: the first attempt."""
    key_rotation_requested_at: str | None = None
    """Last processed value of `rlrun.io/rotate-key-requested-at`."""
    config_hash: str | None = None
    """Fingerprint of the configuration that determines the run's result."""
    spec_hash: str | None = None
    """Fingerprint of the spec from which the current attempt's objects were rendered."""
    unstarted: Annotated[list[Literal["trainer", "inference", "orchestrator"]], Field(max_length=3)] | None = None
    """Roles without a started container for this spec. While the list is not empty, the spec may be edited."""
    steps: str | None = None
    """Progress for the printer column: `412/1000`. For Eval: number of answers."""
    results: list[str] | None = None
    """Results of Eval: `gsm8k, step 20: avg@4 0.4120, pass@4 0.7100`."""
    trainer: TrainerStatus = TrainerStatus()
    """The trainer's pods."""
    inference: InferenceStatus = InferenceStatus()
    """The engines. A guest reports the engines of its host, and its trainer likewise."""
    orchestrator: RoleStatus = RoleStatus()
    """The orchestrator's pod."""
    trainer_ready: str | None = None
    """Ready pods for the printer column: `2/2`."""
    inference_ready: str | None = None
    """Ready pods for the printer column: `4/4`."""
    progress: ProgressStatus = ProgressStatus()
    """Progress of the run."""
    checkpoint: CheckpointStatus = CheckpointStatus()
    """Checkpoints, and steps lost to restarts."""
    last_failure: FailureRecord | None = None
    """Failure that ended the last attempt."""
    failures: list[FailureRecord] = Field(default_factory=list, max_length=5)
    """Last five failures, newest last."""
    last_restart: RestartStatus | None = None
    """Duration of the last restart, by phase."""
    excluded_nodes: Annotated[list[ExcludedNode], Field(max_length=16)] | None = None
    """Nodes that the next attempts avoid."""
    storage: StorageStatus | None = None
    """The run's volume."""
    queue: QueueStatus | None = None
    """Position in the operator's queue, if the run is queued there."""
    cost: CostStatus | None = None
    """Cost of the run, if it has used GPUs."""
    shared_with: SharedWithStatus | None = None
    """Host of a guest (`trainer.sharedWith`)."""
    guests: list[str] | None = None
    """Runs that have started with this run's trainer and have not ended."""
    defaults: DefaultsStatus | None = None
    """Defaults at the start of the current attempt."""
