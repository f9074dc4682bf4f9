"""Advice for every reason of a condition, a failure or an event, in one line for a terminal.

The reasons and their meanings come from the operator (`reasons` and `failure_reasons` of `rlrun_operator.status`); a test compares this
table with them. The placeholders NAME, HOST, NAMESPACE, POD and NODE are replaced by those of the run and of the failure; after `rlrun`,
NAME and HOST get their namespace. docs/troubleshooting.md contains more details.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["fine", "waits", "problem", "ended"]
"""fine: nothing is wrong; waits: it resolves itself; problem: a person should act; ended: the run ended before its last step."""


class Advice(NamedTuple):
    """Kind of a reason, and the suggested action."""

    kind: Kind
    do: str


_NOTHING = "Nothing."
_PASSES = "Nothing: this resolves itself."
_RESUMES = "Nothing: the run continues automatically from the last complete checkpoint."
_FINE = [
    "Valid",
    "HostReady",
    "ClaimBound",
    "AllScheduled",
    "AllReady",
    "Training",
    "Answering",
    "CheckpointsComplete",
    "NotRestarting",
    "NotSuspended",
    "NotFailed",
    "Completed",
    "RunOver",
    "Repaired",
    "EnginesAvailable",
    "InferenceScaled",
    "SpotEnginesLost",
    "SpotEnginesReady",
    "TrainerResized",
    "HeartbeatResumed",
    "AttemptStarted",
    "ResumedFromCheckpoint",
    "RestartRequested",
    "KeyRotationRequested",
    "Admitted",
    "RoomFound",
    "NotQueued",
]

_OF_CONDITIONS: Mapping[str, Advice] = {
    "FieldsIgnored": Advice("fine", "Upgrade the operator, or remove the fields in the message."),
    "ChangePending": Advice(
        "fine", "Nothing, or `rlrun restart NAME`, which does not count towards the restart limit."
    ),
    "InvalidConfiguration": Advice("ended", "Correct the fields in the message and apply the manifest again."),
    "ForbiddenByPolicy": Advice(
        "ended", "Remove the fields in the message, or request permission from the operator's administrator."
    ),
    "HostNotFound": Advice("problem", "Create the host in the same namespace, or correct trainer.sharedWith."),
    "HostIsGuest": Advice("problem", "Set trainer.sharedWith to the host's own host."),
    "HostNotShared": Advice("problem", "Create the host again with trainer.lora and more than one slot."),
    "HostNamesOthers": Advice(
        "problem", "Add this run's name to trainer.guests of the host, which can change at any time."
    ),
    "HostIncompatible": Advice("problem", "Change the field in the message, in this run or in its host."),
    "HostSlotsTaken": Advice(
        "problem", "Wait until another guest ends, or delete a guest; status.guests of the host lists them."
    ),
    "HostNotReady": Advice("waits", "Nothing, unless it lasts: `rlrun why HOST` shows what the host waits for."),
    "HostRestarting": Advice("waits", "Nothing, unless it lasts: `rlrun why HOST` shows the cause."),
    "HostSuspended": Advice("waits", "`rlrun resume HOST`"),
    "HostComplete": Advice("problem", "Increase maxSteps of the host, or run without trainer.sharedWith."),
    "HostFailed": Advice("problem", "Find the cause with `rlrun why HOST`, then run `rlrun restart HOST`."),
    "ClaimPending": Advice(
        "problem",
        "Correct storage.claimTemplate as described in the message (it can change until the volume exists), then run "
        "`kubectl delete pvc NAME-data -n NAMESPACE`: the operator creates the claim again.",
    ),
    "ClaimResizing": Advice("waits", "Nothing: the run continues during the resize."),
    "ClaimResizeRefused": Advice("problem", "Follow the message, or restore the previous storage.claimTemplate.size."),
    "ClaimWaiting": Advice("waits", "Nothing; if it lasts, `kubectl describe pvc NAME-data -n NAMESPACE`."),
    "ClaimNotFound": Advice("problem", "Create the claim in the run's namespace, or correct storage.claimName."),
    "ClaimLost": Advice("problem", "Restore the volume, or start another run with checkpoint.resume.fromRun."),
    "ClaimDeleted": Advice(
        "problem", "Nothing: the next attempt starts on a new claim. Find out why the claim was deleted."
    ),
    "StorageFull": Advice(
        "problem",
        "Free space (traces/, exports/ and logs/ can be deleted; never checkpoints/, attempts/, journal/ or weights/), or increase "
        "storage.claimTemplate.size. The run continues automatically.",
    ),
    "StorageReadOnly": Advice(
        "problem", "Make the volume writable; `dmesg` of the node shows the cause. The run continues automatically."
    ),
    "StorageFailing": Advice(
        "problem",
        "Check the storage server, the network to it and `dmesg` of the node. The run continues automatically, at the latest when the "
        "volume is mounted again.",
    ),
    "StorageSlow": Advice(
        "problem", "Check the storage server and the network to it. The run continues automatically."
    ),
    "Scheduling": Advice("waits", "Nothing: if scheduling fails, a reason follows within seconds."),
    "Unschedulable": Advice(
        "problem", "Free the resources in the message, or request less: GPUs, labels, tolerations, topology."
    ),
    "QuotaExceeded": Advice(
        "problem", "Check `kubectl describe quota -n NAMESPACE`; free resources, or request a larger quota."
    ),
    "PodsRefused": Advice("problem", "Change podTemplate of the role, or the policy of the namespace."),
    "ReferenceNotFound": Advice("problem", "Create the object in the message, or correct the field."),
    "AdmissionRefused": Advice(
        "problem",
        "Repair the webhook or the policy in the message, or follow its message; the operator retries automatically.",
    ),
    "PreviousRunEnding": Advice(
        "waits",
        "Wait; delete a pod on a dead node with `kubectl delete pod POD -n NAMESPACE --force --grace-period=0`.",
    ),
    "NameTaken": Advice("problem", "Delete or rename the object in the message, or rename the run."),
    "KeyLost": Advice(
        "problem", "Nothing: the next attempt starts with a new key. Find out why the Secret was deleted."
    ),
    "WaitingForResources": Advice(
        "waits", "Nothing: the run starts when all of its pods fit. The message shows the missing resources."
    ),
    "WaitingForTurn": Advice("waits", "Nothing: the message names the run ahead. spec.priority changes the order."),
    "NeverFits": Advice(
        "problem", "Request less, or add the nodes in the message: the cluster is too small for this run."
    ),
    "BackingOff": Advice(
        "waits",
        "Nothing: the operator retries. `kubectl get events -n NAMESPACE` shows why the pods were not scheduled.",
    ),
    "Preempted": Advice(
        "problem",
        "Nothing: the run saves and continues at its next turn. A higher spec.priority makes preemption rarer.",
    ),
    "Released": Advice(
        "problem",
        "Nothing: the operator retries. If it lasts, another workload takes the capacity: check `kubectl get events -n NAMESPACE`.",
    ),
    "Evicted": Advice(
        "problem", "Nothing: the run saves and continues at its next admission. The message contains Kueue's reason."
    ),
    "QueueMisconfigured": Advice(
        "problem",
        "Check `kubectl get localqueues -n NAMESPACE` (Volcano: `kubectl get queues.scheduling.volcano.sh`); correct spec.queueName, "
        "or create the object in the message.",
    ),
    "QueueUnavailable": Advice(
        "problem",
        "Install or repair Kueue or Volcano, or set another queue.provider in the operator's chart.",
    ),
    "WorkloadDeactivated": Advice(
        "problem", "Set spec.active of the Workload in the message to true, or suspend the run and resume it."
    ),
    "PodsStarting": Advice("waits", "Nothing; if it lasts, `kubectl describe pod -n NAMESPACE -l rlrun.io/run=NAME`."),
    "ImagePullFailed": Advice("problem", "Correct `image` of the role, or set its imagePullSecrets."),
    "ContainerConfigInvalid": Advice(
        "problem", "Create the Secret, ConfigMap or key in the message; the pod then starts automatically."
    ),
    "ContainerFailing": Advice(
        "problem",
        "Check `rlrun logs NAME --role ROLE --previous`; if it is out of memory, increase resources.limits.memory of the role.",
    ),
    "MountFailed": Advice(
        "problem", "The message comes from the storage driver: check that the driver runs on that node."
    ),
    "NodeNotReady": Advice("problem", "Check `kubectl describe node NODE`; delete the pod to move it to another node."),
    "ModelPreparing": Advice("waits", _PASSES),
    "EngineLoading": Advice(
        "waits", "Nothing: a large model takes minutes. `rlrun logs NAME --role inference -f` shows the progress."
    ),
    "WaitingForFirstStep": Advice("waits", "Nothing: the message shows what the first step waits for."),
    "HeartbeatLost": Advice(
        "problem",
        "Check `rlrun logs NAME --role orchestrator`: it hangs or cannot reach the API server. The run itself may continue.",
    ),
    "NoProgress": Advice(
        "problem",
        "Check the cause of the wait, and the stacks in logs/attempt_N/ROLE/*.stacks.txt on the volume. If a step is only slow, increase "
        "progress.deadlineSeconds.",
    ),
    "NoCheckpointYet": Advice("fine", _NOTHING),
    "CheckpointsOverdue": Advice(
        "problem",
        "`rlrun logs NAME --role trainer --rank 0` shows why saving fails. For a slow volume, increase checkpoint.interval.",
    ),
    "CheckpointsLost": Advice(
        "problem",
        "`rlrun logs NAME --role trainer --rank 0` shows the damaged file. The run trains those steps again. To use a copy of the "
        "checkpoint, suspend the run, restore the folder and resume it.",
    ),
    "CheckpointsOff": Advice("fine", "Nothing; checkpoint.enabled can change while the run is suspended."),
    "BudgetLeft": Advice("fine", _NOTHING),
    "BudgetNearlySpent": Advice(
        "problem",
        "Increase budget.gpuHours; otherwise the run saves and is suspended at the end of the budget. `rlrun cost NAME` shows the use.",
    ),
    "BudgetSpent": Advice(
        "problem",
        "Run `rlrun set NAME budget.gpuHours=N` with a larger number: the run then continues. `rlrun cost NAME` shows the use.",
    ),
    "Drifted": Advice(
        "problem", "Nothing: the operator repairs the objects. Find out why the objects of the run were edited."
    ),
    "Restarting": Advice("waits", _PASSES),
    "PodsEnding": Advice("waits", "Wait; pods on a lost node are removed after nodeLoss.forceDeleteSeconds."),
    "BackOff": Advice("waits", "Wait, or change failurePolicy.backoff; the failure below is the cause."),
    "Suspending": Advice("waits", "Nothing: the trainer saves, then the pods are deleted."),
    "Suspended": Advice("waits", "`rlrun resume NAME`"),
    "Completing": Advice("waits", _PASSES),
    "GuestsJoined": Advice("waits", "Nothing; delete the runs in the message to free the GPUs now."),
    "FailedToStart": Advice(
        "ended", "Remove the fields in the message from the manifest: the queue's admission sets them."
    ),
    "PermanentFailure": Advice("ended", "Follow the message of the failure, then run `rlrun restart NAME`."),
    "MaxRestartsExceeded": Advice("ended", "Repair the cause of the failures below, then run `rlrun restart NAME`."),
    "DeadlineExceeded": Advice(
        "ended", "Increase activeDeadlineSeconds if the run needs more time, then run `rlrun restart NAME`."
    ),
    "FailedByRule": Advice(
        "ended",
        "The message names the rule of failurePolicy.rules; repair the cause or edit the rule, then run `rlrun restart NAME`.",
    ),
}
_OF_EVENTS: Mapping[str, Advice] = {
    "ServedByAnotherOperator": Advice(
        "problem", "Remove the namespace from watchNamespaces of one of the two operators."
    ),
    "RequestRefused": Advice(
        "problem",
        "Grant the operator the right in the message (helm upgrade of its chart), or repair the policy.",
    ),
    "Queued": Advice("waits", "Nothing: `rlrun why NAME` shows the missing resources."),
    "AttemptFailed": Advice("problem", "See the failure of that attempt."),
    "Disrupted": Advice("waits", _RESUMES),
    "EnginesUnavailable": Advice("problem", "Check `rlrun logs NAME --role inference --previous`."),
    "NodeExcluded": Advice("problem", "Check the node with `kubectl describe node NODE` and `dmesg`."),
    "RestartRequestInvalid": Advice("problem", "`rlrun restart NAME` writes a valid time."),
    "KeyRotationRequestInvalid": Advice("problem", "Write the current time in the format of `date -u +%FT%TZ`."),
}
_OF_FAILURES: Mapping[str, Advice] = {
    "OOMKilled": Advice(
        "problem",
        "Increase ROLE.resources.limits.memory; for a trainer, decreasing trainer.microBatchTokens also helps.",
    ),
    "Killed": Advice(
        "problem", "A signal ended the process: check its last log lines, and `dmesg` on the node for a lack of memory."
    ),
    "CudaOutOfMemory": Advice(
        "problem",
        "Decrease trainer.microBatchTokens, shard more, or recompute activations; `rlrun fit` estimates the memory.",
    ),
    "CudaError": Advice(
        "problem", "Check `dmesg` on the node for Xid errors; without them, the cause is code on the GPU."
    ),
    "NcclError": Advice(
        "problem", "A peer or the network failed: `rlrun logs NAME --role ROLE --attempt N` shows the other ranks."
    ),
    "ExitCode": Advice(
        "problem", "The message contains the last call of the traceback; `rlrun logs NAME --attempt N` shows all of it."
    ),
    "StorageError": Advice("problem", "Free space on the volume, or make it writable."),
    "PodFailed": Advice(
        "problem", "Check `kubectl describe pod POD -n NAMESPACE`: the message comes from the kubelet."
    ),
    "DataError": Advice(
        "problem",
        "The data, or code that reads it, is wrong: the message contains the first error. Correct data, environments or rewards.",
    ),
    "ConfigurationError": Advice("problem", "The message names field, value and fix."),
    "PermanentError": Advice(
        "problem", "The message comes from the role: a command line (64), a port or a device (69)."
    ),
    "AttemptNumberTaken": Advice("waits", _RESUMES),
    "PodDeleted": Advice("waits", "Nothing; find out why the pod was deleted."),
    "PodReplaced": Advice("waits", "Nothing; find out why the pod was deleted."),
    "PodEvicted": Advice("waits", "Nothing; it was a drain or a preemption. A priorityClassName makes it rarer."),
    "NodeLost": Advice("waits", "Nothing; `kubectl describe node NODE` shows the state of the node."),
    "SpecChanged": Advice("waits", _RESUMES),
    "HostRestarted": Advice("waits", "Nothing; `rlrun why HOST` shows why the host restarted."),
    "HostGone": Advice("waits", "Create the host again, or restart it."),
    "NodeAllowedAgain": Advice("waits", _RESUMES),
    "ExcludedNodeNeeded": Advice("waits", "Nothing, or more nodes."),
}
_OF_PHASES: Mapping[str, Advice] = {
    "Unserved": Advice(
        "problem",
        "Install an operator that watches the namespace (`kubectl get deploy -A -l app.kubernetes.io/name=rlrun-operator` finds them); "
        "managedBy of the run, if set, must be its operatorName.",
    ),
}
ADVICE: Mapping[str, Advice] = {
    **{reason: Advice("fine", _NOTHING) for reason in _FINE},
    **_OF_CONDITIONS,
    **_OF_EVENTS,
    **_OF_FAILURES,
    **_OF_PHASES,
}
"""Advice by reason."""
ON_THIS_MACHINE: Mapping[str, Advice] = {
    "LauncherGone": Advice("problem", "The launcher was killed, or the machine restarted: continue with `GO_ON`."),
    "NotRunning": Advice("waits", "Continue with: GO_ON"),
    "Launching": Advice("waits", "Nothing: the manifest, its code, its model and its data are checked first."),
    "NotBegun": Advice("ended", "Correct the fields in the message, and start the run again."),
    "Interrupted": Advice("waits", "Continue with `GO_ON`."),
    "RoleFailed": Advice("ended", "Repair the cause, then continue with `GO_ON`."),
    "StorageFull": Advice(
        "problem",
        "Free space: traces/, exports/ and logs/ can be deleted; never checkpoints/, attempts/, journal/ or weights/.",
    ),
    "HeartbeatLost": Advice(
        "problem", "Check `rlrun logs WHERE --role orchestrator`: the orchestrator does not respond."
    ),
    "WaitingForFirstStep": Advice("waits", "Nothing; `rlrun logs WHERE -f` shows the roles."),
    "ExitCode": Advice("problem", "`rlrun logs WHERE --role ROLE` shows the complete traceback."),
    "Killed": Advice("problem", "A signal ended the process, usually because of a lack of memory: check `dmesg`."),
    "OOMKilled": Advice("problem", "Decrease trainer.microBatchTokens."),
    "StorageError": Advice("problem", "Free space on the volume, or make it writable."),
}
"""Advice for a run on one machine, if it differs from the cluster's."""


def find_advice(reason: str, *, local: bool) -> Advice:
    """Return the advice for a reason; for an unknown reason (of a newer operator), a reference to its page."""
    found = ON_THIS_MACHINE.get(reason) if local else None
    return found or ADVICE.get(reason) or Advice("problem", f"See {reason} in docs/troubleshooting.md.")
