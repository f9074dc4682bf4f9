"""Kubernetes objects of runs that are broken in different ways, with messages as the operator writes them."""

from __future__ import annotations

from typing import Any

NOW = 1_800_000_000.0
MINUTE_AGO = "2027-01-15T07:59:00Z"
Json = dict[str, Any]


def condition(kind: str, status: str, reason: str, message: str = "") -> Json:
    """Build a condition."""
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": MINUTE_AGO}


GOOD = [
    condition("ConfigurationValid", "True", "Valid"),
    condition("StorageReady", "True", "ClaimBound"),
    condition("Scheduled", "True", "AllScheduled"),
    condition("PodsReady", "True", "AllReady"),
    condition("InferenceAvailable", "True", "AllReady"),
    condition("Progressing", "True", "Training"),
    condition("CheckpointHealthy", "True", "CheckpointsComplete"),
    condition("Restarting", "False", "NotRestarting"),
    condition("Suspended", "False", "NotSuspended"),
    condition("Complete", "False", "NotFailed"),
    condition("Failed", "False", "NotFailed"),
]


def run(phase: str, *changed: Json, **status: Any) -> Json:
    """Build an RLRun in a phase with these conditions; the first one is the decisive one."""
    kinds = {one["type"]: one for one in changed}
    conditions = [kinds.pop(one["type"], one) for one in GOOD] + list(kinds.values())
    first = changed[0] if changed else condition("Progressing", "True", "Training", "step 7 of 100")
    known = {
        "phase": phase,
        "conditions": conditions,
        "reason": first["reason"],
        "message": first["message"],
        "attempt": 1,
        "trainer": {"desired": 1, "ready": 1},
        "progress": {"step": 7, "totalSteps": 100, "reward": 0.5},
    }
    return {
        "metadata": {"name": "a", "namespace": "team", "creationTimestamp": "2027-01-15T07:00:00Z"},
        "spec": {"maxSteps": 100, "failurePolicy": {"maxRestarts": 3}},
        "status": known | status,
    }


def failure(reason: str, message: str, *, role: str = "trainer", code: int | None = 1, **more: Any) -> Json:
    """Build one record of `status.failures`."""
    pod = {"trainer": "a-trainer-0", "inference": "a-inference-x", "orchestrator": "a-orchestrator-1"}[role]
    known: Json = {"time": MINUTE_AGO, "attempt": 1, "role": role, "podName": pod, "nodeName": "node-7"}
    return known | {"reason": reason, "message": message, "counted": True, "step": 6, "exitCode": code} | more


def restarting(*failures: Json, **status: Any) -> Json:
    """Build a run that waits for its next attempt."""
    back_off = condition("Restarting", "True", "BackOff", "the next attempt starts at 08:01:00")
    progress = condition("Progressing", "False", "Restarting", "the run restarts")
    return run(
        "Restarting", back_off, progress, failures=list(failures), nextRetryTime="2027-01-15T08:01:00Z", **status
    )


def over(reason: str, message: str, *failures: Json) -> Json:
    """Build a failed run."""
    last = condition("Failed", "True", reason, message)
    return run("Failed", last, condition("Stalled", "True", reason, message), failures=list(failures))


BROKEN: dict[str, tuple[Json, tuple[str, ...]]] = {
    "no operator": (
        {
            "metadata": {"name": "a", "namespace": "team", "creationTimestamp": MINUTE_AGO},
            "spec": {"maxSteps": 100},
            "status": {"phase": "Unserved", "message": "no operator has processed this run yet"},
        },
        ("no operator manages the run", "Install an operator that watches the namespace"),
    ),
    "wrong field": (
        over("InvalidConfiguration", "spec.algorithm.loss.name: unknown loss 'gprpo'; did you mean grpo?"),
        ("InvalidConfiguration", "unknown loss 'gprpo'", "Correct the fields in the message"),
    ),
    "no free GPUs": (
        run(
            "Starting",
            condition(
                "Scheduled", "False", "Unschedulable", "trainer needs 2 nodes with 8 free nvidia.com/gpu; 1 qualifies"
            ),
            condition("Progressing", "Unknown", "WaitingForFirstStep", "the trainer to be scheduled"),
        ),
        (
            "Scheduled: Unschedulable",
            "trainer needs 2 nodes with 8 free nvidia.com/gpu",
            "Free the resources in the message",
        ),
    ),
    "quota": (
        run(
            "Starting",
            condition("Scheduled", "False", "QuotaExceeded", "orchestrator: the quota does not allow its pods"),
        ),
        ("QuotaExceeded", "the quota does not allow its pods", "kubectl describe quota -n team"),
    ),
    "no StorageClass": (
        run("Starting", condition("StorageReady", "False", "ClaimPending", 'storageclass "fast" not found')),
        ("ClaimPending", 'storageclass "fast" not found', "kubectl delete pvc a-data -n team"),
    ),
    "wrong image": (
        run(
            "Starting", condition("PodsReady", "False", "ImagePullFailed", "trainer: cannot pull image x:1: not found")
        ),
        ("ImagePullFailed", "cannot pull image x:1", "Correct `image` of the role"),
    ),
    "missing Secret": (
        run("Starting", condition("PodsReady", "False", "ContainerConfigInvalid", 'secret "hf-token" not found')),
        ("ContainerConfigInvalid", 'secret "hf-token" not found', "Create the Secret"),
    ),
    "full volume": (
        run("Running", condition("StorageReady", "False", "StorageFull", "the volume is full: 12 MiB free of 10 GiB")),
        ("StorageFull", "12 MiB free of 10 GiB", "Free space"),
    ),
    "GPU memory, again and again": (
        over(
            "MaxRestartsExceeded",
            "4 failures, and failurePolicy.maxRestarts is 3",
            failure("CudaOutOfMemory", "CUDA out of memory. Tried to allocate 20 GiB"),
        ),
        (
            "MaxRestartsExceeded",
            "CudaOutOfMemory (a-trainer-0 on node-7, exit code 1; it counted)",
            "Decrease trainer.microBatchTokens",
        ),
    ),
    "host memory": (
        restarting(
            failure("OOMKilled", "the container used more than 64Gi", role="orchestrator", code=137), restarts=1
        ),
        (
            "BackOff",
            "OOMKilled (a-orchestrator-1 on node-7, exit code 137",
            "Increase orchestrator.resources.limits.memory",
        ),
    ),
    "wrong data": (
        over(
            "PermanentFailure",
            "orchestrator: exit code 65",
            failure("DataError", "rewards were NaN in 9 of 16", role="orchestrator", code=65),
        ),
        (
            "PermanentFailure",
            "rewards were NaN",
            "The data, or code that reads it, is wrong",
            "rlrun restart a -n team",
        ),
    ),
    "lost node": (
        restarting(failure("NodeLost", "node-7 is gone", code=None, counted=False), restarts=1),
        ("NodeLost (a-trainer-0 on node-7; it did not count)", "node-7 is gone", "kubectl describe node node-7"),
    ),
    "a hanging environment": (
        restarting(
            failure(
                "NoProgress",
                "no step for 1800 s: the run waited for orchestrator: rollouts for step 8",
                role="orchestrator",
                code=None,
            )
        ),
        ("NoProgress", "rollouts for step 8", "increase progress.deadlineSeconds"),
    ),
    "an unreachable API server": (
        run("Running", condition("Progressing", "Unknown", "HeartbeatLost", "the Lease is not renewed for 95 s")),
        ("HeartbeatLost", "not renewed for 95 s", "rlrun logs a -n team --role orchestrator"),
    ),
    "a webhook": (
        run(
            "Pending",
            condition("Scheduled", "False", "AdmissionRefused", 'admission webhook "gate" denied the request'),
        ),
        ("AdmissionRefused", 'webhook "gate" denied', "Repair the webhook or the policy"),
    ),
    "a host that is not there": (
        run("Pending", condition("HostAvailable", "False", "HostNotFound", "there is no run big in this namespace")),
        ("HostNotFound", "there is no run big", "Create the host in the same namespace"),
    ),
    "suspended": (
        run("Suspended", condition("Suspended", "True", "Suspended", "it goes on from step 7")),
        ("Suspended", "it goes on from step 7", "rlrun resume a -n team"),
    ),
}
"""Run -> texts that `rlrun why` must contain: the cause, the evidence and the fix."""
