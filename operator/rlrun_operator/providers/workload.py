"""Kueue's Workload: built for a run, compared with its needs, and its status in the form that an integration must write.

Field names are those of `kueue.x-k8s.io/v1beta2`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from rlrun_operator.names import GROUP, KIND, SPOT_LABEL, SPOT_SET, VERSION, Role, child_labels
from rlrun_operator.providers.model import Subject
from rlrun_operator.state import Json, Manifest
from rlrun_operator.times import rfc3339

KUEUE = "kueue.x-k8s.io"
QUEUE_LABEL = f"{KUEUE}/queue-name"
"""On an RLRun: its LocalQueue. Children never have it, because Kueue would then hold them back separately."""
PRIORITY_LABEL = f"{KUEUE}/priority-class"
"""On an RLRun: its WorkloadPriorityClass."""
UID_LABEL = f"{KUEUE}/job-uid"
SHAPE_ANNOTATION = f"{GROUP}/shape"
"""On a Workload: hash of the pod sets and the queue for which it was built."""
SUSPENDED_ANNOTATION = f"{GROUP}/suspended"
"""On a Workload: its user suspended the run, and only the user's resumption activates the Workload again."""
NAME_MAX = 63
ROLES: dict[str, Role] = {"StatefulSet": "trainer", "Deployment": "inference", "Pod": "orchestrator"}
_POD_FIELDS = ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName", "overhead", "resources")
_DEACTIVATED = "Deactivated"
_PASSES = ("Preempted", "NodeFailures")
"""Evictions after which the run may be retried at once; after other evictions Kueue sets the time."""


def name_of(run: str, uid: str) -> str:
    """Return the name of a run's Workload, which is the same after a restart of the operator, so that a run never has two."""
    mark = hashlib.sha256(uid.encode()).hexdigest()[:8]
    return f"rlrun-{run[: NAME_MAX - len('rlrun--') - len(mark)].rstrip('-')}-{mark}"


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


def shape_of(run: Subject) -> str:
    """Return a hash of the needs for which a Workload of this run must be built."""
    document = json.dumps([run.queue, run.pod_sets], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def made_for(run: Subject) -> Json:
    """Return the Workload of a run. It has no finalizer, because an uninstalled operator could not remove it."""
    spec = {"active": True, **workload_spec(run), **rank_fields(run)}
    return queue_object(
        run, f"{KUEUE}/v1beta2", "Workload", spec, shape=shape_of(run), more_labels={UID_LABEL: run.uid}
    )


def queue_object(
    run: Subject, api_version: str, kind: str, spec: Json, *, shape: str, more_labels: Mapping[str, str] | None = None
) -> Json:
    """Return a run's object in an external queue: owned by the run, with the hash of its needs."""
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": run.name, "uid": run.uid, "controller": True}
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name_of(run.name, run.uid),
            "namespace": run.namespace,
            "labels": {**child_labels(run.name), **(more_labels or {})},
            "annotations": {SHAPE_ANNOTATION: shape},
            "ownerReferences": [{**owner, "blockOwnerDeletion": False}],
        },
        "spec": spec,
    }


def workload_spec(run: Subject) -> Json:
    """Return the fields of a Workload's spec that its shape covers."""
    return {"queueName": run.queue, "podSets": [dict(one) for one in run.pod_sets]}


def rank_fields(run: Subject) -> Json:
    """Return the fields of a Workload's spec that rank it."""
    reference = run.priority.reference
    return {"priority": run.priority.value} | ({} if reference is None else {"priorityClassRef": reference})


def is_of(run: Subject, workload: Manifest) -> bool:
    """Return whether the run is the Workload's controller."""
    owners = workload["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") is True and owner.get("uid") == run.uid for owner in owners)


def kueue_condition(workload: Manifest, kind: str) -> Mapping[str, Any]:
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
        when = before["lastTransitionTime"] if before.get("status") == value else rfc3339(now)
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
