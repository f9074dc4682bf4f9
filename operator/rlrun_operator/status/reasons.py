"""Every condition type, reason and event reason, in one place. They are part of the interface: alerts and scripts match them.

The tables give each a line of meaning; the documentation is made from them. See `failure_reasons` for those of `status.lastFailure`.
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
"""kstatus: the operator still has something to do."""
STALLED = "Stalled"
"""kstatus: permanent failure; nothing goes on without a person."""

CONDITION_TYPES = {
    CONFIGURATION_VALID: "The specification can be run.",
    HOST_AVAILABLE: "Guests only: the run that `trainer.sharedWith` names can train this one.",
    ADMITTED: "All pods of the run have room, so that they may be made. Only where the operator has a queue.",
    STORAGE_READY: "The run's claim is bound to a volume, which takes what the run writes.",
    SCHEDULED: "Every pod of the run has a node.",
    PODS_READY: "The trainer's pods and the orchestrator are ready.",
    INFERENCE_AVAILABLE: "At least `inference.minAvailable` engines are ready.",
    PROGRESSING: "Steps are trained, or questions answered. Unknown: not (or no longer) known.",
    CHECKPOINT_HEALTHY: "A restart would lose no more than the checkpoint interval promises.",
    WITHIN_BUDGET: "The run has used less GPU time than `spec.budget` allows. Only where it has one.",
    CHILDREN_INTACT: "Services, policies, ConfigMap, rights and workloads of the attempt are as they were made, and what the operator "
    "writes to the run's objects is let in. Told once that was not so.",
    RESTARTING: "An attempt has ended and the next one has not begun.",
    SUSPENDED: "No pod is left, as `spec.suspend`, the queue or a spent budget asks. False with reason Suspending: they save and end.",
    COMPLETE: "All steps are trained, or every policy is measured. False with reason Completing: the pods are being removed; "
    "GuestsJoined: they stay for other runs.",
    FAILED: "The run has ended without all its steps.",
    RECONCILING: "The operator is bringing the run to training steps (kstatus).",
    STALLED: "Nothing goes on without a person (kstatus).",
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
    VALID: "Nothing is wrong with the specification.",
    FIELDS_IGNORED: "The specification has fields that this operator does not act on: of a newer release, or for another queue.",
    CHANGE_PENDING: "The specification was edited; the change takes effect when the next attempt begins.",
    INVALID_CONFIGURATION: "The specification, or a pod made from it, is refused; the message names field, value and fix.",
    FORBIDDEN: "The specification asks for what the installation's policy does not allow; the message names field, value and fix.",
    HOST_READY: "The host's trainer is ready.",
    HOST_NOT_FOUND: "There is no run of the name in `trainer.sharedWith`, or it is being deleted.",
    HOST_IS_GUEST: "The host is itself a guest; a trainer is shared by its owner alone.",
    HOST_NOT_SHARED: "The host trains no adapters, or has one slot, its own.",
    HOST_NOT_NAMED: "The host's `trainer.guests` does not name this run.",
    HOST_INCOMPATIBLE: "Host and guest differ in what one trainer, its engines and its volume have once; the message names the field.",
    HOST_SLOTS_TAKEN: "As many runs use the host's trainer as `trainer.lora.slots` allows.",
    HOST_NOT_READY: "Not all pods of the host's trainer are ready.",
    HOST_RESTARTING: "The host restarts; its guests then begin their next attempts, which do not count.",
    HOST_SUSPENDED: "The host is suspended; its guests go on when it is resumed, which does not count.",
    HOST_COMPLETE: "The host has trained all its steps and takes no more guests.",
    HOST_FAILED: "The host has failed.",
    ROOM_FOUND: "All pods of the run have room.",
    WAITING_FOR_RESOURCES: "Too little is free for all pods of the run; the message says what is missing.",
    WAITING_FOR_TURN: "What is free is kept for a run that waits longer, or another run begins and one at a time does.",
    NEVER_FITS: "The cluster has too little for all pods of the run, even if nothing else ran and all of its nodes were ready.",
    BACKING_OFF: "The run was admitted and its pods got no nodes in time; it is tried again later.",
    PREEMPTED: "The run gives its room to another one: it saves, and waits for its next turn.",
    RELEASED: "Not all pods of the run got a node in time: it gives its room back, and is tried again later.",
    EVICTED: "Kueue takes the run's room back, or it needs another one: it saves, and waits for its next admission; the message says why.",
    QUEUE_MISCONFIGURED: "Kueue or Volcano does not know the queue, or the operator a class or flavor that it needs; the message names it.",
    QUEUE_UNAVAILABLE: "Kueue or Volcano is not installed, or does not take the run's Workload or PodGroup; the message says why.",
    DEACTIVATED: "Somebody has deactivated the run's Workload, or Kueue has after too many evictions.",
    NOT_QUEUED: "The run asks for no room: it is suspended, or is being stopped.",
    CLAIM_BOUND: "The claim has its volume.",
    CLAIM_PENDING: "The claim gets no volume; the message says why.",
    CLAIM_RESIZING: "The claim has its volume, which grows as `storage.claimTemplate.size` asks.",
    CLAIM_RESIZE_REFUSED: "The claim has its volume, and the API server does not let it grow; the message says why. The run goes on.",
    CLAIM_WAITING: "The claim's volume is being made, or waits for the first pod's node.",
    CLAIM_NOT_FOUND: "`storage.claimName` names a claim that does not exist.",
    CLAIM_LOST: "The volume behind the claim is gone.",
    CLAIM_DELETED: "Somebody deletes the run's own claim; the next attempt begins on a new one.",
    STORAGE_FULL: "The volume has no space, no inodes or no quota left. What needs it waits; the run goes on by itself when there is some.",
    STORAGE_READ_ONLY: "The volume takes no writes. What needs it waits; the run goes on by itself when it does again.",
    STORAGE_FAILING: "The volume answers with errors (Input/output error, Stale file handle, Connection timed out). What needs it "
    "waits. After 10 minutes the role that waits ends, and the run restarts with the volume mounted anew, which does not count.",
    STORAGE_SLOW: "The volume has not answered for half a minute. The run goes on by itself when it does.",
    ALL_SCHEDULED: "Every pod has a node.",
    SCHEDULING: "The pods are being created and given nodes.",
    UNSCHEDULABLE: "No node can take a pod; the message says what it needs.",
    QUOTA_EXCEEDED: "The namespace's quota does not allow the pods.",
    PODS_REFUSED: "The API server refuses the pods, for example by Pod Security.",
    REFERENCE_NOT_FOUND: "The pods name a PriorityClass, RuntimeClass or ServiceAccount that does not exist.",
    ADMISSION_REFUSED: "A webhook, a policy or another admission does not let in an object of the run, or a change of one; it is tried "
    "again until it is let in.",
    KEY_LOST: "Somebody has deleted the Secret with the run's API key; the next attempt begins with another one.",
    NAME_TAKEN: "An object that the run needs has the name of one that is not its own; that one is left alone.",
    PREVIOUS_RUN_ENDING: "Objects of a deleted run of the same name are still being removed.",
    ALL_READY: "Every pod of the trainer and the orchestrator is ready.",
    PODS_STARTING: "Containers are starting.",
    IMAGE_PULL_FAILED: "A node cannot pull an image.",
    CONTAINER_CONFIG_INVALID: "A container names a Secret, ConfigMap or key that does not exist.",
    CONTAINER_FAILING: "A container ends again and again, or cannot be started.",
    MOUNT_FAILED: "A node cannot mount a volume.",
    NODE_NOT_READY: "The node of a pod that has not begun does not answer.",
    MODEL_PREPARING: "The trainer's first pod, or the orchestrator's of task Eval, makes the tiny model.",
    ENGINE_LOADING: "The engines load the model or wait for weights.",
    WAITING_FOR_FIRST_STEP: "The attempt's first step is not done; the message says what it waits for.",
    TRAINING: "Steps are trained.",
    ANSWERING: "Questions are answered (task Eval).",
    HEARTBEAT_LOST: "The orchestrator has not renewed its Lease, or never has; reported only, the run goes on.",
    NO_PROGRESS: "No step is done within `spec.progress`; the message says what the run waits for, maybe an orchestrator that hangs.",
    NO_CHECKPOINT_YET: "No checkpoint is complete yet.",
    CHECKPOINTS_LOST: "The attempt started from an earlier step than that of the newest complete checkpoint, which is damaged or missing.",
    CHECKPOINTS_COMPLETE: "Checkpoints are completed as the interval says.",
    CHECKPOINTS_OVERDUE: "The newest complete checkpoint is older than three intervals.",
    CHECKPOINTS_OFF: "`checkpoint.enabled` is false: an interrupted run starts again from the model.",
    BUDGET_LEFT: "Less than 80 % of `budget.gpuHours` is spent.",
    BUDGET_NEARLY_SPENT: "At least 80 % of `budget.gpuHours` is spent; when all is, the run saves and is suspended.",
    BUDGET_SPENT: "All of `budget.gpuHours` is spent: the run saves and is suspended, and goes on by itself once it is raised.",
    DRIFTED: "Somebody has deleted or edited an object that the attempt was begun with; the message names it, and what follows.",
    REPAIRED: "What somebody has deleted or edited in this attempt was put right, or what was refused is let in again.",
    NOT_RESTARTING: "No restart is under way.",
    RESTARTING: "The attempt has ended and the next one has not begun.",
    PODS_ENDING: "The ended attempt's pods are being removed.",
    BACK_OFF: "The next attempt begins at `status.nextRetryTime`.",
    SUSPENDING: "`spec.suspend` is true, the budget is spent, or the queue needs the room: the trainer saves, then the engines go.",
    SUSPENDED: "No pod is left; the run goes on when `spec.suspend` is false, its budget allows it and the queue has room.",
    NOT_SUSPENDED: "The run is not suspended.",
    COMPLETING: "All steps are trained, or every policy is measured; the pods with GPUs are being removed.",
    GUESTS_JOINED: "All steps are trained; trainer and engines stay for the runs that share them.",
    COMPLETED: "All steps are trained, or every policy is measured.",
    NOT_FAILED: "The run has not failed.",
    RUN_OVER: "The run has ended; its pods are removed, but for the orchestrator's finished one.",
    PERMANENT_FAILURE: "A role ended with an exit code from 64 to 78: starting again cannot help.",
    MAX_RESTARTS_EXCEEDED: "One more failure than `failurePolicy.maxRestarts`.",
    DEADLINE_EXCEEDED: "The run was active for `activeDeadlineSeconds`; it saves and ends.",
    FAILED_TO_START: "The run's pods and what the queue's admission adds to them contradict each other; the message names the field.",
    FAILED_BY_RULE: "A rule of `failurePolicy.rules` with the action FailRun fits; the message names it.",
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
GIVES_BACK = frozenset({PREEMPTED, RELEASED, EVICTED})
"""Reasons of Admitted for which the queue suspends a run."""
NEVER_STARTS = frozenset(
    {REFERENCE_NOT_FOUND, IMAGE_PULL_FAILED, CONTAINER_CONFIG_INVALID, CONTAINER_FAILING, MOUNT_FAILED}
)
"""Reasons why a role that has not started never will without a person: after `progress.startupDeadlineSeconds` the run fails with them."""
VOLUME = frozenset({STORAGE_FULL, STORAGE_READ_ONLY, STORAGE_FAILING, STORAGE_SLOW})
"""Reasons that the roles report of a bound volume; no restart helps."""
ENDING = frozenset({COMPLETING, GUESTS_JOINED})
"""Reasons of Complete while it is False: the phase is Completing."""
HOST_NEEDS_A_PERSON = frozenset(
    {HOST_NOT_FOUND, HOST_IS_GUEST, HOST_NOT_SHARED, HOST_NOT_NAMED, HOST_INCOMPATIBLE, HOST_COMPLETE, HOST_FAILED}
)
"""Reasons of HostAvailable that do not pass by themselves."""
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
"""Reasons that a person should hear of: each becomes a Warning event of the same name when it appears."""

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
    SERVED_BY_ANOTHER: "Another operator looks after this namespace's runs, and the one that tells this does not act.",
    REQUEST_REFUSED: "The API server refuses what the operator cannot look after the run without, as its status; the message has the fix.",
    ATTEMPT_STARTED: "StatefulSet, Deployment and orchestrator pod of an attempt were applied.",
    TRAINING: "The attempt's first step is done.",
    ANSWERING: "The attempt's first answer is there (task Eval).",
    ENQUEUED: "The run waits until all of its pods have room.",
    ADMITTED: "All pods of the run have room, and are made.",
    RESUMED: "The attempt started from a checkpoint, or found answers; the message says how many steps are trained again.",
    ATTEMPT_FAILED: "A pod failed; the whole run restarts, and the restart counts.",
    DISRUPTED: "A pod was deleted, preempted or lost its node; the whole run restarts, and the restart does not count.",
    ATTEMPT_TAKEN: "The volume knows a newer attempt than the status does; the next free number is taken at once.",
    MAX_RESTARTS_EXCEEDED: CONDITION_REASONS[MAX_RESTARTS_EXCEEDED],
    PERMANENT_FAILURE: CONDITION_REASONS[PERMANENT_FAILURE],
    FAILED_BY_RULE: CONDITION_REASONS[FAILED_BY_RULE],
    FAILED_TO_START: CONDITION_REASONS[FAILED_TO_START],
    ENGINES_AVAILABLE: "At least `inference.minAvailable` engines are ready.",
    ENGINES_UNAVAILABLE: "Fewer than `inference.minAvailable` engines are ready, after there were enough.",
    NODE_EXCLUDED: "The run failed twice on a node and keeps away from it for an hour.",
    INFERENCE_SCALED: "The number of engines follows an edit of `inference`, or `inference.autoscale` chose it; the message says why.",
    SPOT_ENGINES_LOST: "Interruptible nodes were taken from the run, and engines (`inference.spot`) with them; the run goes on without.",
    SPOT_ENGINES_READY: "All engines on interruptible nodes are ready again.",
    TRAINER_RESIZED: "An elastic trainer goes on with fewer pods, or with more again (`trainer.elastic`); the message says why.",
    HEARTBEAT_RESUMED: "The orchestrator renews its Lease again.",
    COMPLETED: CONDITION_REASONS[COMPLETED],
    SUSPENDING: CONDITION_REASONS[SUSPENDING],
    SUSPENDED: CONDITION_REASONS[SUSPENDED],
    DEADLINE_EXCEEDED: CONDITION_REASONS[DEADLINE_EXCEEDED],
    RESTART_REQUESTED: "The annotation `rlrun.io/restart-requested-at` asks for a restart, which does not count.",
    RESTART_REQUEST_INVALID: "The value of the annotation `rlrun.io/restart-requested-at` is no time; nothing is done.",
    KEY_ROTATION_REQUESTED: "The annotation `rlrun.io/rotate-key-requested-at` asks for another API key; the restart does not count.",
    KEY_ROTATION_REQUEST_INVALID: "The value of the annotation `rlrun.io/rotate-key-requested-at` is no time; nothing is done.",
}
"""Every reason of an event, with its meaning."""
