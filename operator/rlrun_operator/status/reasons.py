"""Condition types, condition reasons and event reasons. They are part of the interface: alerts and scripts match them.

The tables give each one its meaning; the documentation is generated from them. `failure_reasons` has those of `status.lastFailure`.
"""

from __future__ import annotations

# Condition types
CONFIGURATION_VALID = "ConfigurationValid"
HOST_AVAILABLE = "HostAvailable"
ADMITTED = "Admitted"
STORAGE_READY = "StorageReady"
SCHEDULED = "Scheduled"
PODS_READY = "PodsReady"
INFERENCE_AVAILABLE = "InferenceAvailable"
PROGRESSING = "Progressing"
CHECKPOINT_HEALTHY = "CheckpointHealthy"
WITHIN_BUDGET = "WithinBudget"
CHILDREN_INTACT = "ChildrenIntact"
RESTARTING = "Restarting"
SUSPENDED = "Suspended"
COMPLETE = "Complete"
FAILED = "Failed"
RECONCILING = "Reconciling"
"""kstatus: the operator still has work to do."""
STALLED = "Stalled"
"""kstatus: permanent failure; the run cannot continue without a user."""

CONDITION_TYPES = {
    CONFIGURATION_VALID: "The specification is valid.",
    HOST_AVAILABLE: "Guests only: the run that `trainer.sharedWith` names can train this run.",
    ADMITTED: "There is room for all pods of the run, so the operator may create them. Only with a queue.",
    STORAGE_READY: "The run's claim is bound to a volume, and the run can write to it.",
    SCHEDULED: "Every pod of the run has a node.",
    PODS_READY: "The trainer's pods and the orchestrator are ready.",
    INFERENCE_AVAILABLE: "At least `inference.minAvailable` engines are ready.",
    PROGRESSING: "Steps are trained, or questions answered. Unknown: the operator cannot see it yet, or no longer.",
    CHECKPOINT_HEALTHY: "A restart would lose no more steps than the checkpoint interval promises.",
    WITHIN_BUDGET: "The run has used less GPU time than `spec.budget` allows. Only with a budget.",
    CHILDREN_INTACT: "Services, policies, ConfigMap, rights and workloads of the attempt are unchanged, and the API server accepts "
    "the operator's writes to the run's objects. Absent until this was false once.",
    RESTARTING: "An attempt has ended and the next one has not started.",
    SUSPENDED: "The run has no pods, because of `spec.suspend`, the queue or a spent budget. False with reason Suspending: its pods save "
    "and end.",
    COMPLETE: "All steps are trained, or every policy is measured. False with reason Completing: the pods are being removed; "
    "GuestsJoined: they stay for other runs.",
    FAILED: "The run has ended before all its steps.",
    RECONCILING: "The operator is bringing the run to training steps (kstatus).",
    STALLED: "The run cannot continue without a user (kstatus).",
}

# Reasons of conditions
VALID = "Valid"
FIELDS_IGNORED = "FieldsIgnored"
CHANGE_PENDING = "ChangePending"
INVALID_CONFIGURATION = "InvalidConfiguration"
FORBIDDEN = "ForbiddenByPolicy"
HOST_READY = "HostReady"
HOST_NOT_FOUND = "HostNotFound"
HOST_IS_GUEST = "HostIsGuest"
HOST_NOT_SHARED = "HostNotShared"
HOST_NOT_NAMED = "HostNamesOthers"
HOST_INCOMPATIBLE = "HostIncompatible"
HOST_SLOTS_TAKEN = "HostSlotsTaken"
HOST_NOT_READY = "HostNotReady"
HOST_RESTARTING = "HostRestarting"
HOST_SUSPENDED = "HostSuspended"
HOST_COMPLETE = "HostComplete"
HOST_FAILED = "HostFailed"
ROOM_FOUND = "RoomFound"
WAITING_FOR_RESOURCES = "WaitingForResources"
WAITING_FOR_TURN = "WaitingForTurn"
NEVER_FITS = "NeverFits"
BACKING_OFF = "BackingOff"
PREEMPTED = "Preempted"
RELEASED = "Released"
EVICTED = "Evicted"
QUEUE_MISCONFIGURED = "QueueMisconfigured"
QUEUE_UNAVAILABLE = "QueueUnavailable"
DEACTIVATED = "WorkloadDeactivated"
NOT_QUEUED = "NotQueued"
CLAIM_BOUND = "ClaimBound"
CLAIM_PENDING = "ClaimPending"
CLAIM_RESIZING = "ClaimResizing"
CLAIM_RESIZE_REFUSED = "ClaimResizeRefused"
CLAIM_WAITING = "ClaimWaiting"
CLAIM_NOT_FOUND = "ClaimNotFound"
CLAIM_LOST = "ClaimLost"
CLAIM_DELETED = "ClaimDeleted"
STORAGE_FULL = "StorageFull"
STORAGE_READ_ONLY = "StorageReadOnly"
STORAGE_FAILING = "StorageFailing"
STORAGE_SLOW = "StorageSlow"
ALL_SCHEDULED = "AllScheduled"
SCHEDULING = "Scheduling"
UNSCHEDULABLE = "Unschedulable"
QUOTA_EXCEEDED = "QuotaExceeded"
PODS_REFUSED = "PodsRefused"
REFERENCE_NOT_FOUND = "ReferenceNotFound"
ADMISSION_REFUSED = "AdmissionRefused"
PREVIOUS_RUN_ENDING = "PreviousRunEnding"
NAME_TAKEN = "NameTaken"
KEY_LOST = "KeyLost"
ALL_READY = "AllReady"
PODS_STARTING = "PodsStarting"
IMAGE_PULL_FAILED = "ImagePullFailed"
CONTAINER_CONFIG_INVALID = "ContainerConfigInvalid"
CONTAINER_FAILING = "ContainerFailing"
MOUNT_FAILED = "MountFailed"
NODE_NOT_READY = "NodeNotReady"
MODEL_PREPARING = "ModelPreparing"
ENGINE_LOADING = "EngineLoading"
WAITING_FOR_FIRST_STEP = "WaitingForFirstStep"
TRAINING = "Training"
ANSWERING = "Answering"
HEARTBEAT_LOST = "HeartbeatLost"
NO_PROGRESS = "NoProgress"
NO_CHECKPOINT_YET = "NoCheckpointYet"
CHECKPOINTS_LOST = "CheckpointsLost"
CHECKPOINTS_COMPLETE = "CheckpointsComplete"
CHECKPOINTS_OVERDUE = "CheckpointsOverdue"
CHECKPOINTS_OFF = "CheckpointsOff"
BUDGET_LEFT = "BudgetLeft"
BUDGET_NEARLY_SPENT = "BudgetNearlySpent"
BUDGET_SPENT = "BudgetSpent"
DRIFTED = "Drifted"
REPAIRED = "Repaired"
NOT_RESTARTING = "NotRestarting"
PODS_ENDING = "PodsEnding"
BACK_OFF = "BackOff"
SUSPENDING = "Suspending"
NOT_SUSPENDED = "NotSuspended"
COMPLETING = "Completing"
GUESTS_JOINED = "GuestsJoined"
COMPLETED = "Completed"
NOT_FAILED = "NotFailed"
RUN_OVER = "RunOver"
PERMANENT_FAILURE = "PermanentFailure"
MAX_RESTARTS_EXCEEDED = "MaxRestartsExceeded"
DEADLINE_EXCEEDED = "DeadlineExceeded"
FAILED_BY_RULE = "FailedByRule"
FAILED_TO_START = "FailedToStart"

CONDITION_REASONS = {
    VALID: "The specification is valid.",
    FIELDS_IGNORED: "The specification has fields that this operator ignores: fields of a newer release, or of another queue.",
    CHANGE_PENDING: "The specification was edited; the change takes effect when the next attempt starts.",
    INVALID_CONFIGURATION: "The specification, or a pod made from it, is refused; the message names field, value and fix.",
    FORBIDDEN: "The installation's policy does not allow a value of the specification; the message names field, value and fix.",
    HOST_READY: "The host's trainer is ready.",
    HOST_NOT_FOUND: "The run that `trainer.sharedWith` names does not exist or is being deleted.",
    HOST_IS_GUEST: "The host is itself a guest; only the owner of a trainer can share it.",
    HOST_NOT_SHARED: "The host trains no adapters, or has only its own slot.",
    HOST_NOT_NAMED: "The host's `trainer.guests` does not name this run.",
    HOST_INCOMPATIBLE: "Host and guest differ in a field that must be the same for one trainer, its engines and its volume; the message "
    "names it.",
    HOST_SLOTS_TAKEN: "All slots of the host's trainer (`trainer.lora.slots`) are in use.",
    HOST_NOT_READY: "Not all pods of the host's trainer are ready.",
    HOST_RESTARTING: "The host restarts; its guests then start their next attempts, which do not count.",
    HOST_SUSPENDED: "The host is suspended; its guests continue when it is resumed, which does not count.",
    HOST_COMPLETE: "The host has trained all its steps and takes no more guests.",
    HOST_FAILED: "The host has failed.",
    ROOM_FOUND: "There is room for all pods of the run.",
    WAITING_FOR_RESOURCES: "There is not enough room for all pods of the run; the message names the missing resources.",
    WAITING_FOR_TURN: "Free resources are reserved for a run that has waited longer, or another run is starting (one at a time).",
    NEVER_FITS: "The cluster is too small for all pods of the run, even if it were empty and all of its nodes were ready.",
    BACKING_OFF: "The run was admitted and its pods got no nodes in time; the queue retries later.",
    PREEMPTED: "The run releases its resources to another run: it saves, and waits for its next turn.",
    RELEASED: "Not all pods of the run got a node in time: it releases its resources, and the queue retries later.",
    EVICTED: "Kueue evicts the run, or the run needs other resources: it saves, and waits for admission; the message has the cause.",
    QUEUE_MISCONFIGURED: "Kueue or Volcano does not have the queue, or the operator lacks a class or flavor; the message names it.",
    QUEUE_UNAVAILABLE: "Kueue or Volcano is not installed, or refuses the run's Workload or PodGroup; the message has the cause.",
    DEACTIVATED: "A user deactivated the run's Workload, or Kueue did so after too many evictions.",
    NOT_QUEUED: "The run needs no resources: it is suspended, or is being stopped.",
    CLAIM_BOUND: "The claim has its volume.",
    CLAIM_PENDING: "The claim gets no volume; the message has the cause.",
    CLAIM_RESIZING: "The claim has its volume, which is growing to `storage.claimTemplate.size`.",
    CLAIM_RESIZE_REFUSED: "The claim has its volume; the API server refuses to enlarge it; the message has the cause; the run continues.",
    CLAIM_WAITING: "The claim's volume is being created, or waits for the first pod's node.",
    CLAIM_NOT_FOUND: "`storage.claimName` names a claim that does not exist.",
    CLAIM_LOST: "The volume behind the claim is gone.",
    CLAIM_DELETED: "A user deleted the run's own claim; the next attempt starts with a new one.",
    STORAGE_FULL: "The volume has no space, no inodes or no quota left. Roles that write to it wait and continue when there is space.",
    STORAGE_READ_ONLY: "The volume is read-only. Roles that write to it wait and continue when it is writable.",
    STORAGE_FAILING: "The volume returns errors (Input/output error, Stale file handle, Connection timed out). Roles that use it "
    "wait. After 10 minutes the waiting role exits, and the run restarts with a new mount of the volume, which does not count.",
    STORAGE_SLOW: "The volume has not answered for half a minute. The run continues when it does.",
    ALL_SCHEDULED: "Every pod has a node.",
    SCHEDULING: "The pods are being created and assigned to nodes.",
    UNSCHEDULABLE: "No node accepts a pod; the message names its demands.",
    QUOTA_EXCEEDED: "The namespace's quota does not allow the pods.",
    PODS_REFUSED: "The API server refuses the pods, for example by Pod Security.",
    REFERENCE_NOT_FOUND: "The pods name a PriorityClass, RuntimeClass or ServiceAccount that does not exist.",
    ADMISSION_REFUSED: "A webhook, a policy or another admission refuses an object of the run, or a change of one; the operator retries "
    "until it is accepted.",
    KEY_LOST: "The Secret with the run's API key was deleted; the next attempt starts with another key.",
    NAME_TAKEN: "A foreign object has the name of an object that the run needs; the operator does not touch it.",
    PREVIOUS_RUN_ENDING: "Objects of a deleted run of the same name are still being removed.",
    ALL_READY: "Every pod of the trainer and the orchestrator is ready.",
    PODS_STARTING: "Containers are starting.",
    IMAGE_PULL_FAILED: "A node cannot pull an image.",
    CONTAINER_CONFIG_INVALID: "A container names a Secret, ConfigMap or key that does not exist.",
    CONTAINER_FAILING: "A container fails repeatedly, or cannot be started.",
    MOUNT_FAILED: "A node cannot mount a volume.",
    NODE_NOT_READY: "The node of a pod whose containers have not started is not ready.",
    MODEL_PREPARING: "The trainer's first pod, or the orchestrator's for task Eval, creates the tiny model.",
    ENGINE_LOADING: "The engines load the model or wait for weights.",
    WAITING_FOR_FIRST_STEP: "The attempt's first step is not done; the message names what it waits for.",
    TRAINING: "Steps are trained.",
    ANSWERING: "Questions are answered (task Eval).",
    HEARTBEAT_LOST: "The orchestrator has not renewed its Lease, or never has; this is only a report, and the run continues.",
    NO_PROGRESS: "No step was done within `spec.progress`; the message names what the run waits for, possibly a hanging orchestrator.",
    NO_CHECKPOINT_YET: "No checkpoint is complete yet.",
    CHECKPOINTS_LOST: "The attempt started from a step before the newest complete checkpoint, which is damaged or missing.",
    CHECKPOINTS_COMPLETE: "Checkpoints are completed at the configured interval.",
    CHECKPOINTS_OVERDUE: "The newest complete checkpoint is older than three intervals.",
    CHECKPOINTS_OFF: "`checkpoint.enabled` is false: an interrupted run starts again from the model.",
    BUDGET_LEFT: "Less than 80 % of `budget.gpuHours` is spent.",
    BUDGET_NEARLY_SPENT: "At least 80 % of `budget.gpuHours` is spent; at 100 % the run saves and is suspended.",
    BUDGET_SPENT: "All of `budget.gpuHours` is spent: the run saves and is suspended, and continues once the budget is raised.",
    DRIFTED: "An object of the current attempt was deleted or edited; the message names it and the consequence.",
    REPAIRED: "The operator has repaired deleted or edited objects of this attempt, or a refused write is accepted again.",
    NOT_RESTARTING: "No restart is under way.",
    RESTARTING: "The attempt has ended and the next one has not started.",
    PODS_ENDING: "The ended attempt's pods are being removed.",
    BACK_OFF: "The next attempt starts at `status.nextRetryTime`.",
    SUSPENDING: "`spec.suspend` is true, the budget is spent, or the queue needs the resources: the trainer saves, then the engines end.",
    SUSPENDED: "The run has no pods; it continues when `spec.suspend` is false, its budget is not spent and the queue admits it.",
    NOT_SUSPENDED: "The run is not suspended.",
    COMPLETING: "All steps are trained, or every policy is measured; the pods with GPUs are being removed.",
    GUESTS_JOINED: "All steps are trained; trainer and engines stay for the runs that share them.",
    COMPLETED: "All steps are trained, or every policy is measured.",
    NOT_FAILED: "The run has not failed.",
    RUN_OVER: "The run has ended; its pods are removed, except for the orchestrator's finished pod.",
    PERMANENT_FAILURE: "A role ended with an exit code from 64 to 78: a restart cannot help.",
    MAX_RESTARTS_EXCEEDED: "One more failure than `failurePolicy.maxRestarts`.",
    DEADLINE_EXCEEDED: "The run was active for `activeDeadlineSeconds`; it saves and ends.",
    FAILED_TO_START: "The fields that the queue's admission adds contradict the run's pods; the message names the field.",
    FAILED_BY_RULE: "A rule of `failurePolicy.rules` with the action FailRun matches; the message names it.",
}

SUSPENSION = frozenset({SUSPENDING, SUSPENDED})
"""Reasons of Suspended while the phase is Suspending or Suspended."""
QUEUED = frozenset(
    {
        WAITING_FOR_RESOURCES,
        WAITING_FOR_TURN,
        NEVER_FITS,
        BACKING_OFF,
        QUEUE_MISCONFIGURED,
        QUEUE_UNAVAILABLE,
        DEACTIVATED,
    }
)
"""Reasons of Admitted while the phase is Queued."""
QUEUE_SUSPENSION = frozenset({PREEMPTED, RELEASED, EVICTED})
"""Reasons of Admitted with which the queue suspends a run."""
NEVER_STARTS = frozenset(
    {REFERENCE_NOT_FOUND, IMAGE_PULL_FAILED, CONTAINER_CONFIG_INVALID, CONTAINER_FAILING, MOUNT_FAILED}
)
"""Problems that keep a role from ever starting without a user: after `progress.startupDeadlineSeconds` the run fails with them."""
VOLUME = frozenset({STORAGE_FULL, STORAGE_READ_ONLY, STORAGE_FAILING, STORAGE_SLOW})
"""Reasons that the roles report of a bound volume; no restart helps."""
ENDING = frozenset({COMPLETING, GUESTS_JOINED})
"""Reasons of Complete while it is False: the phase is Completing."""
HOST_NEEDS_A_PERSON = frozenset(
    {HOST_NOT_FOUND, HOST_IS_GUEST, HOST_NOT_SHARED, HOST_NOT_NAMED, HOST_INCOMPATIBLE, HOST_COMPLETE, HOST_FAILED}
)
"""Reasons of HostAvailable that need a user."""
PROBLEMS = HOST_NEEDS_A_PERSON | frozenset(
    {
        HOST_SLOTS_TAKEN,
        NEVER_FITS,
        PREEMPTED,
        RELEASED,
        EVICTED,
        QUEUE_MISCONFIGURED,
        QUEUE_UNAVAILABLE,
        DEACTIVATED,
        CLAIM_PENDING,
        CLAIM_NOT_FOUND,
        CLAIM_LOST,
        CLAIM_DELETED,
        CLAIM_RESIZE_REFUSED,
        STORAGE_FULL,
        STORAGE_READ_ONLY,
        STORAGE_FAILING,
        STORAGE_SLOW,
        UNSCHEDULABLE,
        QUOTA_EXCEEDED,
        ADMISSION_REFUSED,
        NAME_TAKEN,
        KEY_LOST,
        PODS_REFUSED,
        REFERENCE_NOT_FOUND,
        IMAGE_PULL_FAILED,
        CONTAINER_CONFIG_INVALID,
        CONTAINER_FAILING,
        MOUNT_FAILED,
        NODE_NOT_READY,
        CHECKPOINTS_OVERDUE,
        CHECKPOINTS_LOST,
        BUDGET_NEARLY_SPENT,
        BUDGET_SPENT,
        DRIFTED,
        HEARTBEAT_LOST,
        NO_PROGRESS,
    }
)
"""Reasons that need a user's attention: each becomes a Warning event of the same name when it appears."""

# Reasons of events that are not reasons of conditions
SERVED_BY_ANOTHER = "ServedByAnotherOperator"
REQUEST_REFUSED = "RequestRefused"
ATTEMPT_STARTED = "AttemptStarted"
ENQUEUED = "Queued"
RESUMED = "ResumedFromCheckpoint"
ATTEMPT_FAILED = "AttemptFailed"
DISRUPTED = "Disrupted"
ATTEMPT_TAKEN = "AttemptNumberTaken"
ENGINES_AVAILABLE = "EnginesAvailable"
ENGINES_UNAVAILABLE = "EnginesUnavailable"
INFERENCE_SCALED = "InferenceScaled"
SPOT_ENGINES_LOST = "SpotEnginesLost"
SPOT_ENGINES_READY = "SpotEnginesReady"
TRAINER_RESIZED = "TrainerResized"
NODE_EXCLUDED = "NodeExcluded"
HEARTBEAT_RESUMED = "HeartbeatResumed"
RESTART_REQUESTED = "RestartRequested"
RESTART_REQUEST_INVALID = "RestartRequestInvalid"
KEY_ROTATION_REQUESTED = "KeyRotationRequested"
KEY_ROTATION_REQUEST_INVALID = "KeyRotationRequestInvalid"

EVENT_REASONS = {reason: CONDITION_REASONS[reason] for reason in sorted(PROBLEMS)} | {
    INVALID_CONFIGURATION: CONDITION_REASONS[INVALID_CONFIGURATION],
    FORBIDDEN: CONDITION_REASONS[FORBIDDEN],
    CHANGE_PENDING: CONDITION_REASONS[CHANGE_PENDING],
    SERVED_BY_ANOTHER: "This namespace is served by another operator; this one is idle.",
    REQUEST_REFUSED: "The API server refuses a request that the operator depends on, such as writing the status; the message has the fix.",
    ATTEMPT_STARTED: "StatefulSet, Deployment and orchestrator pod of an attempt were applied.",
    TRAINING: "The attempt's first step is done.",
    ANSWERING: "The attempt's first answer is complete (task Eval).",
    ENQUEUED: "The run waits until there is room for all of its pods.",
    ADMITTED: "There is room for all pods of the run, and the operator creates them.",
    RESUMED: "The attempt started from a checkpoint, or found answers; the message has the number of steps to train again.",
    ATTEMPT_FAILED: "A pod failed; the whole run restarts, and the restart counts.",
    DISRUPTED: "A pod was deleted, preempted or lost its node; the whole run restarts, and the restart does not count.",
    ATTEMPT_TAKEN: "The volume has a newer attempt than the status; the operator uses the next free number at once.",
    MAX_RESTARTS_EXCEEDED: CONDITION_REASONS[MAX_RESTARTS_EXCEEDED],
    PERMANENT_FAILURE: CONDITION_REASONS[PERMANENT_FAILURE],
    FAILED_BY_RULE: CONDITION_REASONS[FAILED_BY_RULE],
    FAILED_TO_START: CONDITION_REASONS[FAILED_TO_START],
    ENGINES_AVAILABLE: "At least `inference.minAvailable` engines are ready.",
    ENGINES_UNAVAILABLE: "Fewer than `inference.minAvailable` engines are ready, after there were enough.",
    NODE_EXCLUDED: "The run failed twice on a node and avoids it for an hour.",
    INFERENCE_SCALED: "The number of engines follows an edit of `inference` or `inference.autoscale`; the message has the cause.",
    SPOT_ENGINES_LOST: "The run lost interruptible nodes and their engines (`inference.spot`); the run continues without them.",
    SPOT_ENGINES_READY: "All engines on interruptible nodes are ready again.",
    TRAINER_RESIZED: "An elastic trainer continues with fewer pods, or with more again (`trainer.elastic`); the message has the cause.",
    HEARTBEAT_RESUMED: "The orchestrator renews its Lease again.",
    COMPLETED: CONDITION_REASONS[COMPLETED],
    SUSPENDING: CONDITION_REASONS[SUSPENDING],
    SUSPENDED: CONDITION_REASONS[SUSPENDED],
    DEADLINE_EXCEEDED: CONDITION_REASONS[DEADLINE_EXCEEDED],
    RESTART_REQUESTED: "The annotation `rlrun.io/restart-requested-at` requests a restart, which does not count.",
    RESTART_REQUEST_INVALID: "The value of the annotation `rlrun.io/restart-requested-at` is not a time; it has no effect.",
    KEY_ROTATION_REQUESTED: "The annotation `rlrun.io/rotate-key-requested-at` requests another API key; the restart does not count.",
    KEY_ROTATION_REQUEST_INVALID: "The value of the annotation `rlrun.io/rotate-key-requested-at` is not a time; it has no effect.",
}
"""All event reasons, with their meanings."""
