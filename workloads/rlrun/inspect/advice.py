"""Advice on every reason of a condition, a failure or an event. One line each, for a terminal.

The reasons and their meanings are the operator's (`reasons` and `failure_reasons` of `rlrun_operator.status`); a test holds this table
to them. In a text NAME, HOST, NAMESPACE, POD and NODE stand for those of the run and of the failure; behind
`rlrun`, NAME and HOST bear their namespace. docs/troubleshooting.md says more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["fine", "waits", "problem", "ended"]
"""Nothing is wrong; it passes by itself; a person should look; the run is over without all its steps."""


class Advice(NamedTuple):
    """Meaning of a reason for a person, and the remedy."""

    kind: Kind
    do: str


_NOTHING = "Nothing."
_PASSES = "Nothing: it passes."
_RESUMES = "Nothing: it goes on by itself, from the last complete checkpoint."
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
    "FieldsIgnored": Advice("fine", "Upgrade the operator, or remove the fields that the message names."),
    "ChangePending": Advice("fine", "Nothing, or `rlrun restart NAME`: it does not count."),
    "InvalidConfiguration": Advice("ended", "Change what the message names, and apply: the run is judged again."),
    "ForbiddenByPolicy": Advice(
        "ended", "Remove the fields that the message names, or ask the operator's administrator to allow them."
    ),
    "HostNotFound": Advice("problem", "Create the host in the same namespace, or correct trainer.sharedWith."),
    "HostIsGuest": Advice("problem", "Name the host's own host in trainer.sharedWith."),
    "HostNotShared": Advice(
        "problem", "Give the host trainer.lora with more than one slot; it has to be created again."
    ),
    "HostNamesOthers": Advice(
        "problem", "Add this run's name to trainer.guests of the host; it may be edited at any time."
    ),
    "HostIncompatible": Advice("problem", "Change the field that the message names in this run or in its host."),
    "HostSlotsTaken": Advice(
        "problem", "Wait until another guest is over, or delete one: status.guests of the host names them."
    ),
    "HostNotReady": Advice("waits", "Nothing, unless it lasts: `rlrun why HOST` says what that waits for."),
    "HostRestarting": Advice("waits", "Nothing, unless it lasts: `rlrun why HOST` says why."),
    "HostSuspended": Advice("waits", "`rlrun resume HOST`"),
    "HostComplete": Advice("problem", "Raise maxSteps of the host, or run without trainer.sharedWith."),
    "HostFailed": Advice("problem", "`rlrun why HOST` says why; then `rlrun restart HOST`."),
    "ClaimPending": Advice(
        "problem",
        "Correct storage.claimTemplate as the message says (it may be edited until there is a volume), then "
        "`kubectl delete pvc NAME-data -n NAMESPACE`: the claim is made again.",
    ),
    "ClaimResizing": Advice("waits", "Nothing: the run goes on meanwhile."),
    "ClaimResizeRefused": Advice("problem", "Do what the message says, or set storage.claimTemplate.size back."),
    "ClaimWaiting": Advice("waits", "Nothing; if it lasts, `kubectl describe pvc NAME-data -n NAMESPACE`."),
    "ClaimNotFound": Advice("problem", "Create the claim in the run's namespace, or correct storage.claimName."),
    "ClaimLost": Advice("problem", "Restore the volume, or begin another run with checkpoint.resume.fromRun."),
    "ClaimDeleted": Advice("problem", "Nothing: the next attempt begins on a new claim. Find out who deleted it."),
    "StorageFull": Advice(
        "problem",
        "Make space (traces/, exports/ and logs/ may be deleted; never checkpoints/, attempts/, journal/ or weights/), or raise "
        "storage.claimTemplate.size. The run goes on by itself.",
    ),
    "StorageReadOnly": Advice(
        "problem", "Make the volume writable: `dmesg` of the node says why it is not. The run goes on by itself."
    ),
    "StorageFailing": Advice(
        "problem",
        "Look at the storage server, at the network to it and at `dmesg` of the node. The run goes on by itself, at the latest with the "
        "volume mounted anew.",
    ),
    "StorageSlow": Advice("problem", "Look at the storage server and at the network to it. The run goes on by itself."),
    "Scheduling": Advice("waits", "Nothing: a reason follows within seconds if there is one."),
    "Unschedulable": Advice(
        "problem", "Free what the message says is short, or ask for less: GPUs, labels, tolerations, topology."
    ),
    "QuotaExceeded": Advice("problem", "`kubectl describe quota -n NAMESPACE`: free some of it, or have it raised."),
    "PodsRefused": Advice("problem", "Change what podTemplate of that role adds, or the namespace's policy."),
    "ReferenceNotFound": Advice("problem", "Create the object that the message names, or correct the field."),
    "AdmissionRefused": Advice(
        "problem", "Repair the webhook or the policy that refuses, or do what it asks for; it is tried again."
    ),
    "PreviousRunEnding": Advice(
        "waits", "Wait; a pod on a dead node goes by `kubectl delete pod POD -n NAMESPACE --force --grace-period=0`."
    ),
    "NameTaken": Advice("problem", "Delete or rename the object that the message names, or give the run another name."),
    "KeyLost": Advice("problem", "Nothing: the next attempt begins with another key. Find out who deleted the Secret."),
    "WaitingForResources": Advice(
        "waits", "Nothing: it begins when all of its pods have room. The message says what is missing."
    ),
    "WaitingForTurn": Advice("waits", "Nothing: the message says for which run. spec.priority changes the order."),
    "NeverFits": Advice(
        "problem", "Ask for less, or add the nodes that the message names: the cluster is too small for this run."
    ),
    "BackingOff": Advice(
        "waits", "Nothing: it is tried again. `kubectl get events -n NAMESPACE` says what kept its pods out."
    ),
    "Preempted": Advice(
        "problem", "Nothing: it saves and goes on at its next turn. A higher spec.priority makes it rarer."
    ),
    "Released": Advice(
        "problem",
        "Nothing: it is tried again. If it lasts, something else takes the room: `kubectl get events -n NAMESPACE` says what.",
    ),
    "Evicted": Advice(
        "problem", "Nothing: it saves and goes on at its next admission. The message says why Kueue took its room."
    ),
    "QueueMisconfigured": Advice(
        "problem",
        "`kubectl get localqueues -n NAMESPACE`, of Volcano `kubectl get queues.scheduling.volcano.sh`: correct spec.queueName, "
        "or have made what the message names.",
    ),
    "QueueUnavailable": Advice(
        "problem",
        "Have Kueue or Volcano installed or repaired, or queue.provider of the operator's chart set to another.",
    ),
    "WorkloadDeactivated": Advice(
        "problem", "Set spec.active of the Workload that the message names to true, or suspend the run and resume it."
    ),
    "PodsStarting": Advice("waits", "Nothing; if it lasts, `kubectl describe pod -n NAMESPACE -l rlrun.io/run=NAME`."),
    "ImagePullFailed": Advice("problem", "Correct `image` of the role, or set its imagePullSecrets."),
    "ContainerConfigInvalid": Advice(
        "problem", "Create the Secret, ConfigMap or key that the message names: the pod starts by itself."
    ),
    "ContainerFailing": Advice(
        "problem", "`rlrun logs NAME --role ROLE --previous`; out of memory: raise resources.limits.memory of the role."
    ),
    "MountFailed": Advice("problem", "The message is the storage driver's: see that it runs on that node."),
    "NodeNotReady": Advice("problem", "`kubectl describe node NODE`; deleting the pod has it placed on another node."),
    "ModelPreparing": Advice("waits", _PASSES),
    "EngineLoading": Advice(
        "waits", "Nothing: a large model takes minutes. `rlrun logs NAME --role inference -f` shows it."
    ),
    "WaitingForFirstStep": Advice("waits", "Nothing: the message says what the first step waits for."),
    "HeartbeatLost": Advice(
        "problem",
        "`rlrun logs NAME --role orchestrator`: its way to the API server is broken, or it hangs. The run itself may go on.",
    ),
    "NoProgress": Advice(
        "problem",
        "See what it waited for, and the stacks in logs/attempt_N/ROLE/*.stacks.txt of the volume. A step that is only slow: raise "
        "progress.deadlineSeconds.",
    ),
    "NoCheckpointYet": Advice("fine", _NOTHING),
    "CheckpointsOverdue": Advice(
        "problem",
        "`rlrun logs NAME --role trainer --rank 0` says why saving fails; a slow volume: raise checkpoint.interval.",
    ),
    "CheckpointsLost": Advice(
        "problem",
        "`rlrun logs NAME --role trainer --rank 0` names the damaged file. The run trains those steps again; to use a copy of the "
        "checkpoint, suspend the run, restore the folder and resume it.",
    ),
    "CheckpointsOff": Advice("fine", "Nothing; checkpoint.enabled can be set while the run is suspended."),
    "BudgetLeft": Advice("fine", _NOTHING),
    "BudgetNearlySpent": Advice(
        "problem",
        "`rlrun cost NAME` says what it was spent on; raise budget.gpuHours, or let the run save and be suspended when all is spent.",
    ),
    "BudgetSpent": Advice(
        "problem",
        "`rlrun set NAME budget.gpuHours=N` with a larger number: the run goes on by itself. `rlrun cost NAME` says what it was spent on.",
    ),
    "Drifted": Advice("problem", "Nothing: it is put right. Find out who edits the objects of the run."),
    "Restarting": Advice("waits", _PASSES),
    "PodsEnding": Advice("waits", "Wait; pods on a lost node are removed after nodeLoss.forceDeleteSeconds."),
    "BackOff": Advice("waits", "Wait, or change failurePolicy.backoff; the failure below is the cause."),
    "Suspending": Advice("waits", "Nothing: the trainer saves, then the pods go."),
    "Suspended": Advice("waits", "`rlrun resume NAME`"),
    "Completing": Advice("waits", _PASSES),
    "GuestsJoined": Advice("waits", "Nothing; delete the runs that the message names to free the GPUs now."),
    "FailedToStart": Advice(
        "ended", "Remove from the manifest what the message names: the queue's admission decides it."
    ),
    "PermanentFailure": Advice("ended", "Change what the message of the failure says, then `rlrun restart NAME`."),
    "MaxRestartsExceeded": Advice("ended", "Repair the cause of the failures below, then `rlrun restart NAME`."),
    "DeadlineExceeded": Advice(
        "ended", "Raise activeDeadlineSeconds if it needs more time, then `rlrun restart NAME`."
    ),
    "FailedByRule": Advice(
        "ended",
        "The message names the rule of failurePolicy.rules; repair the cause or edit the rule, then `rlrun restart NAME`.",
    ),
}
_OF_EVENTS: Mapping[str, Advice] = {
    "ServedByAnotherOperator": Advice(
        "problem", "Take the namespace out of watchNamespaces of one of the two operators."
    ),
    "RequestRefused": Advice(
        "problem",
        "Give the operator the right that the message names (a helm upgrade of its chart), or repair the policy.",
    ),
    "Queued": Advice("waits", "Nothing: `rlrun why NAME` says what is missing."),
    "AttemptFailed": Advice("problem", "See the failure of that attempt."),
    "Disrupted": Advice("waits", _RESUMES),
    "EnginesUnavailable": Advice("problem", "`rlrun logs NAME --role inference --previous`"),
    "NodeExcluded": Advice("problem", "Look at that node: `kubectl describe node NODE`, `dmesg`."),
    "RestartRequestInvalid": Advice("problem", "`rlrun restart NAME` writes a valid time."),
    "KeyRotationRequestInvalid": Advice("problem", "Write the time of now, as `date -u +%FT%TZ` prints it."),
}
_OF_FAILURES: Mapping[str, Advice] = {
    "OOMKilled": Advice(
        "problem", "Raise ROLE.resources.limits.memory; of a trainer, lowering trainer.microBatchTokens does as well."
    ),
    "Killed": Advice(
        "problem", "A signal ended it: see its last lines, and on the node who killed it (`dmesg`: lack of memory)."
    ),
    "CudaOutOfMemory": Advice(
        "problem",
        "Lower trainer.microBatchTokens, shard more, or recompute activations; `rlrun fit` counts the memory.",
    ),
    "CudaError": Advice(
        "problem", "`dmesg` on the node tells of Xid errors; otherwise it is code that runs on the GPU."
    ),
    "NcclError": Advice(
        "problem", "A peer died or the network did: `rlrun logs NAME --role ROLE --attempt N` shows the other ranks."
    ),
    "ExitCode": Advice(
        "problem", "The message has the last call of the traceback; `rlrun logs NAME --attempt N` has all of it."
    ),
    "StorageError": Advice("problem", "Make space on the volume, or make it writable."),
    "PodFailed": Advice("problem", "`kubectl describe pod POD -n NAMESPACE`: the message is the kubelet's."),
    "DataError": Advice(
        "problem",
        "The data, or code that reads it, is wrong: the message has the first error. Change data, environments or rewards.",
    ),
    "ConfigurationError": Advice("problem", "The message names field, value and fix."),
    "PermanentError": Advice("problem", "The message is the role's own: a command line (64), a port or a device (69)."),
    "AttemptNumberTaken": Advice("waits", _RESUMES),
    "PodDeleted": Advice("waits", "Nothing; find out who deleted the pod."),
    "PodReplaced": Advice("waits", "Nothing; find out who deleted the pod."),
    "PodEvicted": Advice("waits", "Nothing; a drain or a preemption. A priorityClassName makes it rarer."),
    "NodeLost": Advice("waits", "Nothing; `kubectl describe node NODE` says what became of it."),
    "SpecChanged": Advice("waits", _RESUMES),
    "HostRestarted": Advice("waits", "Nothing; `rlrun why HOST` says why that restarted."),
    "HostGone": Advice("waits", "Create the host again, or restart it."),
    "NodeAllowedAgain": Advice("waits", _RESUMES),
    "ExcludedNodeNeeded": Advice("waits", "Nothing, or more nodes."),
}
_OF_PHASES: Mapping[str, Advice] = {
    "Unserved": Advice(
        "problem",
        "Install an operator that watches the namespace (`kubectl get deploy -A -l app.kubernetes.io/name=rlrun-operator` finds them); "
        "managedBy of the run, if set, has to be its operatorName.",
    ),
}
ADVICE: Mapping[str, Advice] = {
    **{reason: Advice("fine", _NOTHING) for reason in _FINE},
    **_OF_CONDITIONS,
    **_OF_EVENTS,
    **_OF_FAILURES,
    **_OF_PHASES,
}
"""By reason."""
ON_THIS_MACHINE: Mapping[str, Advice] = {
    "LauncherGone": Advice("problem", "Its launcher was killed, or the machine restarted: go on with `GO_ON`."),
    "NotRunning": Advice("waits", "Go on with: GO_ON"),
    "Launching": Advice("waits", "Nothing: the manifest, its code, its model and its data are looked at first."),
    "NotBegun": Advice("ended", "Repair what the message names, and start it again."),
    "Interrupted": Advice("waits", "Go on with `GO_ON`."),
    "RoleFailed": Advice("ended", "Repair the cause, then go on with `GO_ON`."),
    "StorageFull": Advice(
        "problem",
        "Make space: traces/, exports/ and logs/ may be deleted; never checkpoints/, attempts/, journal/ or weights/.",
    ),
    "HeartbeatLost": Advice("problem", "`rlrun logs WHERE --role orchestrator`: it does not answer."),
    "WaitingForFirstStep": Advice("waits", "Nothing; `rlrun logs WHERE -f` shows the roles."),
    "ExitCode": Advice("problem", "`rlrun logs WHERE --role ROLE` has all of it."),
    "Killed": Advice("problem", "A signal ended it, for lack of memory as a rule: `dmesg` tells."),
    "OOMKilled": Advice("problem", "Lower trainer.microBatchTokens."),
    "StorageError": Advice("problem", "Make space on the volume, or make it writable."),
}
"""Advice for a run on one machine, where it needs other words."""


def find_advice(reason: str, *, local: bool) -> Advice:
    """Advice on a reason; on one that is not known here (a newer operator's), a pointer to its page."""
    found = ON_THIS_MACHINE.get(reason) if local else None
    return found or ADVICE.get(reason) or Advice("problem", f"See {reason} in docs/troubleshooting.md.")
