"""Kueue's Workload of a run: its fields, its status, and the translation of its conditions.

The Workload is built for a run and compared with its needs. Its status has the form that an integration of Kueue must write. Kueue's
conditions become reason and message of the run's condition Admitted. Field names are those of `kueue.x-k8s.io/v1beta2`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

from rlrun_operator.names import GROUP, SPOT_LABEL, SPOT_SET, Role
from rlrun_operator.providers.queue_answers import QueuedRun, queue_object, refused_answer
from rlrun_operator.state import Admission, Json, Manifest
from rlrun_operator.status import reasons
from rlrun_operator.times import format_rfc3339

KUEUE = "kueue.x-k8s.io"
QUEUE_LABEL = f"{KUEUE}/queue-name"
"""On an RLRun: its LocalQueue. Children never have it, because Kueue would then hold them back separately."""
PRIORITY_LABEL = f"{KUEUE}/priority-class"
"""On an RLRun: its WorkloadPriorityClass."""
UID_LABEL = f"{KUEUE}/job-uid"
SUSPENDED_ANNOTATION = f"{GROUP}/suspended"
"""On a Workload: its user suspended the run, and only the user's resumption activates the Workload again."""
ROLES: dict[str, Role] = {"StatefulSet": "trainer", "Deployment": "inference", "Pod": "orchestrator"}
_POD_FIELDS = ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName", "overhead", "resources")
_DEACTIVATED = "Deactivated"
_PASSES = ("Preempted", "NodeFailures")
"""Evictions after which the run may be retried at once; after other evictions Kueue sets the time."""


def pod_sets(workloads: Iterable[Manifest]) -> tuple[Json, ...]:
    """Return the pod sets of a run's rendered workloads, without the additions of an admission.

    Args:
        workloads: StatefulSet, Deployment and Pod, and the Deployment of spot engines.
    """
    result = []
    for child in workloads:
        spec = child["spec"]
        single = child["kind"] == "Pod"
        pod = spec if single else spec["template"]["spec"]
        count = 1 if single else int(spec.get("replicas", 1))
        spot = SPOT_LABEL in ((child.get("metadata") or {}).get("labels") or {})
        name = SPOT_SET if spot else ROLES[child["kind"]]
        result.append({"name": name, "count": count, "template": {"spec": _pod_shape(pod)}})
    return tuple(result)


def _pod_shape(pod: Manifest) -> Json:
    """Return the fields of a pod that determine where it fits, without the nodes that the run avoids for a while."""
    shape: Json = {name: pod[name] for name in _POD_FIELDS if pod.get(name)}
    affinity = (pod.get("affinity") or {}).get("nodeAffinity")
    if affinity and (kept := _by_labels(affinity)):
        shape["affinity"] = {"nodeAffinity": kept}
    for group in ("initContainers", "containers"):
        if pod.get(group):
            shape[group] = [
                {k: one[k] for k in ("name", "resources", "restartPolicy") if one.get(k)} for one in pod[group]
            ]
    return shape


def _by_labels(affinity: Manifest) -> Json:
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    kept = [{"matchExpressions": term["matchExpressions"]} for term in terms if term.get("matchExpressions")]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": kept}} if kept else {}


def shape_of(run: QueuedRun) -> str:
    """Return a hash of the needs for which a Workload of this run must be built."""
    document = json.dumps([run.queue, run.pod_sets], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def made_for(run: QueuedRun) -> Json:
    """Return the Workload of a run. It has no finalizer, because an uninstalled operator could not remove it."""
    spec = {"active": True, **workload_spec(run), **rank_fields(run)}
    return queue_object(
        run, f"{KUEUE}/v1beta2", "Workload", spec, shape=shape_of(run), more_labels={UID_LABEL: run.uid}
    )


def workload_spec(run: QueuedRun) -> Json:
    """Return the fields of a Workload's spec that its shape covers."""
    return {"queueName": run.queue, "podSets": [dict(one) for one in run.pod_sets]}


def rank_fields(run: QueuedRun) -> Json:
    """Return the fields of a Workload's spec that rank it."""
    reference = run.priority.reference
    return {"priority": run.priority.value} | ({} if reference is None else {"priorityClassRef": reference})


def kueue_condition(workload: Manifest, kind: str) -> Mapping[str, object]:
    """Return one condition, or an empty map."""
    found = (workload.get("status") or {}).get("conditions") or ()
    return next((one for one in found if isinstance(one, Mapping) and one.get("type") == kind), {})


def holds_true(workload: Manifest, kind: str) -> bool:
    """Return whether a condition has status True."""
    return kueue_condition(workload, kind).get("status") == "True"


def has_quota(workload: Manifest) -> bool:
    """Return whether Kueue counts quota for a Workload, or would do so after the operator's next write."""
    status = workload.get("status") or {}
    return bool(status.get("admission")) or any(holds_true(workload, kind) for kind in ("QuotaReserved", "Admitted"))


def with_conditions(workload: Manifest, updates: Mapping[str, tuple[bool, str, str]], now: float) -> Json:
    """Return the status with these conditions changed; all other fields stay, regardless of their writer.

    Args:
        workload: current Workload.
        updates: type -> status, reason, message.
        now: seconds since the epoch.
    """
    status = dict(workload.get("status") or {})
    kept = list(status.get("conditions") or ())
    for kind, (holds, reason, message) in updates.items():
        before = kueue_condition(workload, kind)
        value = "True" if holds else "False"
        when = before["lastTransitionTime"] if before.get("status") == value else format_rfc3339(now)
        new: Json = {"type": kind, "status": value, "reason": reason, "message": message, "lastTransitionTime": when}
        generation = workload["metadata"].get("generation")
        new |= {} if generation is None else {"observedGeneration": generation}
        places = [i for i, one in enumerate(kept) if one.get("type") == kind]
        if places:
            kept[places[0]] = new
        else:
            kept.append(new)
    return {**status, "conditions": kept}


def cleared_status(workload: Manifest, now: float) -> Json:
    """Return the status of an evicted Workload without pods: the quota is released, and the run waits again."""
    evicted = kueue_condition(workload, "Evicted")
    reason, message = str(evicted.get("reason") or _DEACTIVATED), str(evicted.get("message") or "")
    updates = {
        "QuotaReserved": (False, "PendingEvaluation", message),
        "Admitted": (False, "NoReservation", "The workload has no reservation"),
        "Requeued": (reason in _PASSES, _requeued_by(reason), message),
        "PodsReady": (False, "WaitForStart", "the run has no pods"),
    }
    status = with_conditions(workload, updates, now)
    return {name: value for name, value in status.items() if name not in ("admission", "reclaimablePods")}


def _requeued_by(eviction: str) -> str:
    """Return the reason of Requeued. Kueue retries an active Workload only with exactly this reason, without the cause in Evicted."""
    return _DEACTIVATED if eviction.startswith(_DEACTIVATED) else eviction


def pods_ready(workload: Manifest, *, ready: bool) -> tuple[bool, str, str] | None:
    """Return PodsReady for an admitted run, or None if it is unchanged."""
    before = kueue_condition(workload, "PodsReady")
    if ready:
        if before.get("status") == "True":
            return None
        recovers = before.get("reason") == "WaitForRecovery"
        return True, "Recovered" if recovers else "Started", "trainer, orchestrator and enough engines are ready"
    if before.get("status") == "True":
        return False, "WaitForRecovery", "not all pods that the run needs are ready any more"
    if before.get("status") == "False":
        return None
    return False, "WaitForStart", "the run's pods are not ready yet"


REASONS: Mapping[str, str] = {
    "WaitingForQuota": reasons.WAITING_FOR_RESOURCES,
    "ExceedsMaxQuota": reasons.NEVER_FITS,
    "NoMatchingFlavor": reasons.NEVER_FITS,
    "TopologyPlacementFailed": reasons.WAITING_FOR_RESOURCES,
    "WaitingForPreemptedWorkloads": reasons.WAITING_FOR_TURN,
    "WaitingForPodsReady": reasons.WAITING_FOR_TURN,
    "PendingEvaluation": reasons.WAITING_FOR_TURN,
    "Misconfigured": reasons.QUEUE_MISCONFIGURED,
    "Suspended": reasons.WAITING_FOR_TURN,
    "OnHold": reasons.WAITING_FOR_TURN,
    "AdmissionGated": reasons.WAITING_FOR_TURN,
    "Pending": reasons.WAITING_FOR_RESOURCES,  # Pending and Inadmissible: Kueue before 0.19
    "Inadmissible": reasons.QUEUE_MISCONFIGURED,
}
"""Reason of QuotaReserved -> reason of the run's condition Admitted."""
_PENDING = "Pending"
_NEVER = ("> maximum capacity", "unavailable in ClusterQueue")
_LATER = "insufficient unused quota"
"""Texts of releases before 0.19, which have one reason for all waits: Kueue 0.17, flavorassigner.go."""


def waiting_answer(run: QueuedRun, workload: Manifest) -> Admission:
    """Return the answer for a run that Kueue has not admitted."""
    name = workload["metadata"]["name"]
    if (workload.get("spec") or {}).get("active") is False and not _is_suspended(workload):
        evicted = kueue_condition(workload, "Evicted")
        why = f" ({_describe_condition(evicted)})" if evicted.get("status") == "True" else ""
        fix = f"set spec.active of Workload {name} to true, or suspend the run and resume it"
        return refused_answer(
            reasons.DEACTIVATED, f"the run's Workload was deactivated, so Kueue does not admit it{why}; {fix}"
        )
    later = ((workload.get("status") or {}).get("requeueState") or {}) if _is_held_back(workload) else {}
    if at := later.get("requeueAt"):
        count = later.get("count", 1)
        times = "once" if count == 1 else f"{count} times"
        return refused_answer(
            reasons.BACKING_OFF,
            f"Kueue evicted the run {times}, because not all pods were ready in time; it retries at {at}",
        )
    quota = kueue_condition(workload, "QuotaReserved")
    if quota.get("status") == "True":
        return refused_answer(
            reasons.WAITING_FOR_TURN, f"LocalQueue {run.queue}: quota is reserved; {_describe_checks(workload)}"
        )
    if not quota:
        return not_judged(run)
    text, queue = _describe_condition(quota), f"LocalQueue {run.queue}"
    return refused_answer(_waiting_reason(quota), text if text.startswith(queue) else f"{queue}: {text}")


def _waiting_reason(quota: Mapping[str, object]) -> str:
    """Return the reason of Admitted for a condition QuotaReserved; one flavor with room later is enough for a wait."""
    reason, message = str(quota.get("reason")), str(quota.get("message"))
    if reason == _PENDING and _LATER not in message and any(text in message for text in _NEVER):
        return reasons.NEVER_FITS
    return REASONS.get(reason, reasons.WAITING_FOR_RESOURCES)


def not_judged(run: QueuedRun) -> Admission:
    """Return the answer before Kueue's first condition."""
    message = f"LocalQueue {run.queue}: Kueue has not processed the run's Workload yet"
    return refused_answer(reasons.WAITING_FOR_TURN, message)


def evicted_answer(workload: Manifest) -> Admission:
    """Return the answer for a run with pods that has lost its admission."""
    evicted = kueue_condition(workload, "Evicted")
    if evicted.get("status") != "True":
        active = (workload.get("spec") or {}).get("active") is not False
        why = "its Workload is not admitted" if active else "its Workload was deactivated"
        return refused_answer(reasons.EVICTED, f"Kueue evicts the run: {why}", stops=True)
    reason = reasons.PREEMPTED if evicted.get("reason") == "Preempted" else reasons.EVICTED
    return refused_answer(reason, f"Kueue evicts the run: {_describe_condition(evicted)}", stops=True)


def lost_answer() -> Admission:
    """Return the answer for a run with pods and without a Workload."""
    message = (
        "the run's Workload was deleted, which ends its admission; the operator creates it again after the last pod"
    )
    return refused_answer(reasons.EVICTED, message, stops=True)


def _describe_condition(condition: Mapping[str, object]) -> str:
    reason, message = condition.get("reason") or "no reason given", str(condition.get("message") or "").strip()
    return f"{message} ({reason})" if message else str(reason)


def _is_suspended(workload: Manifest) -> bool:
    return SUSPENDED_ANNOTATION in (workload["metadata"].get("annotations") or {})


def _is_held_back(workload: Manifest) -> bool:
    return not holds_true(workload, "QuotaReserved") and kueue_condition(workload, "Requeued").get("status") == "False"


def _describe_checks(workload: Manifest) -> str:
    checks = (workload.get("status") or {}).get("admissionChecks") or ()
    open_ones = [
        f"{one.get('name')} is {one.get('state')}" + (f" ({one['message']})" if one.get("message") else "")
        for one in checks
        if one.get("state") != "Ready"
    ]
    return "admission checks: " + ", ".join(open_ones) if open_ones else "its topology or its checks are not ready"
