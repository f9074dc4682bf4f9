"""Reasons of `status.lastFailure` with their meanings. Like the reasons of conditions (`reasons`), they are part of the interface.

Some failures use the reason of the condition that reports them.
"""

from __future__ import annotations

from rlrun_operator.status import reasons

OUT_OF_MEMORY = "OOMKilled"
SIGNALLED = "Killed"
CUDA_OUT_OF_MEMORY = "CudaOutOfMemory"
CUDA_ERROR = "CudaError"
NCCL_ERROR = "NcclError"
EXIT_CODE = "ExitCode"
STORAGE_ERROR = "StorageError"
NUMBER_TAKEN = "AttemptNumberTaken"
DATA_ERROR = "DataError"
CONFIGURATION_ERROR = "ConfigurationError"
PERMANENT_ERROR = "PermanentError"
POD_FAILED = "PodFailed"
POD_DELETED = "PodDeleted"
POD_REPLACED = "PodReplaced"
POD_EVICTED = "PodEvicted"
NODE_LOST = "NodeLost"
SPEC_CHANGED = "SpecChanged"
HOST_RESTARTED = "HostRestarted"
HOST_GONE = "HostGone"
NODE_ALLOWED = "NodeAllowedAgain"
NODE_NEEDED = "ExcludedNodeNeeded"

FAILURE_REASONS = {
    OUT_OF_MEMORY: "The container used more memory than its limit. Counts.",
    SIGNALLED: "A signal ended the process; 137 is SIGKILL. Counts.",
    CUDA_OUT_OF_MEMORY: "The process requested more memory than its GPU has. Counts.",
    CUDA_ERROR: "A CUDA call failed: a fault of the GPU, or of code that runs on it. Counts.",
    NCCL_ERROR: "The processes of the group lost their connections, or a collective timed out. Counts.",
    EXIT_CODE: "The process ended with an error. Counts.",
    STORAGE_ERROR: "Writes to the volume fail. Does not count; each restart without a new step waits longer.",
    reasons.NO_PROGRESS: "The run hung (`spec.progress`): role and pod name the process that the run waited for. Counts.",
    reasons.IMAGE_PULL_FAILED: "No container of a role has started, because its image cannot be pulled; the run fails for good.",
    reasons.CONTAINER_CONFIG_INVALID: "No container of a role has started, because a Secret, ConfigMap or key that it names does not "
    "exist; the run fails for good.",
    reasons.CONTAINER_FAILING: "No container of a role has started, because its image lacks the program to start; the run fails for good.",
    reasons.MOUNT_FAILED: "No container of a role has started, because a volume cannot be mounted; the run fails for good.",
    reasons.REFERENCE_NOT_FOUND: "The pods of a role are refused, because they name a PriorityClass, RuntimeClass or ServiceAccount that "
    "does not exist; the run fails for good.",
    POD_FAILED: "The pod failed without an exit code. Counts.",
    DATA_ERROR: "Data is wrong (65); the run fails for good.",
    CONFIGURATION_ERROR: "The configuration is wrong (78); the run fails for good.",
    PERMANENT_ERROR: "Another exit code from 64 to 77; the run fails for good.",
    NUMBER_TAKEN: "The attempt's number was used before on the volume. Does not count.",
    POD_DELETED: "Someone deleted the pod. Does not count.",
    POD_REPLACED: "The pod is new: its predecessor was deleted while the operator was not watching. Does not count.",
    POD_EVICTED: "The pod was evicted or preempted. Does not count.",
    reasons.CLAIM_DELETED: "The run's own claim is being deleted, and a pod waits for a node until it is gone. Does not count.",
    reasons.DRIFTED: "A pod waits for the ConfigMap, which was deleted and depends on a specification that was edited since. "
    "Does not count.",
    reasons.KEY_LOST: "A pod waits for the Secret with the run's API key, which was deleted. Does not count.",
    NODE_LOST: "The node shut down, restarted or is gone. Does not count.",
    SPEC_CHANGED: "The specification was edited before all pods existed; the operator creates them again. Does not count.",
    HOST_RESTARTED: "A guest's host started a new attempt. Does not count.",
    reasons.HOST_SUSPENDED: "A guest's host was suspended. Does not count.",
    HOST_GONE: "A guest's host was deleted or has ended. Does not count.",
    NODE_ALLOWED: "A pod without a node may use a node whose exclusion has ended. Does not count.",
    NODE_NEEDED: "Only an excluded node accepts a pod; the run uses it again. Does not count.",
}
