"""Kueue's Workload: made for a run, compared with it, and its status as an integration has to write it.

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
"""On an RLRun: its LocalQueue. Never on a child, which Kueue would then hold back by itself."""
PRIORITY_LABEL = f"{KUEUE}/priority-class"
"""On an RLRun: its WorkloadPriorityClass."""
UID_LABEL = f"{KUEUE}/job-uid"
SHAPE_ANNOTATION = f"{GROUP}/shape"
"""On a Workload: a mark of the pod sets and the queue that it was made with."""
SUSPENDED_ANNOTATION = f"{GROUP}/suspended"
"""On a Workload: its run was suspended by its user, who alone sets it active again."""
NAME_MAX = 63
ROLES: dict[str, Role] = {"StatefulSet": "trainer", "Deployment": "inference", "Pod": "orchestrator"}
_POD_FIELDS = ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName", "overhead", "resources")
_DEACTIVATED = "Deactivated"
_PASSES = ("Preempted", "NodeFailures")
"""Evictions after which the run is to be tried again at once; after all others Kueue says when."""


def name_of(run: str, uid: str) -> str:
    """Name of a run's Workload: the same for each life of an operator, so that a run never has two."""
    mark = hashlib.sha256(uid.encode()).hexdigest()[:8]
    return f"rlrun-{run[: NAME_MAX - len('rlrun--') - len(mark)].rstrip('-')}-{mark}"


def pod_sets(workloads: Iterable[Manifest]) -> tuple[Json, ...]:
    """Pod sets of a run's workloads, as they are rendered before any admission is merged into them.

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
    """Fields of a pod that decide where it fits. Names of nodes that the run avoids for a while are not among them."""
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
    """Mark of what a Workload of this run has to be made with."""
    document = json.dumps([run.queue, run.pod_sets], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def made_for(run: Subject) -> Json:
    """The Workload of a run. It has no finalizer: nobody would remove it if the operator were uninstalled."""
    spec = {"active": True, **workload_spec(run), **rank_fields(run)}
    return queue_object(
        run, f"{KUEUE}/v1beta2", "Workload", spec, shape=shape_of(run), more_labels={UID_LABEL: run.uid}
    )


def queue_object(
    run: Subject, api_version: str, kind: str, spec: Json, *, shape: str, more_labels: Mapping[str, str] | None = None
) -> Json:
    """A run's object in a queue of others: owned by the run, and marked with what it was made for."""
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
    """Fields of a Workload's spec that its shape marks."""
    return {"queueName": run.queue, "podSets": [dict(one) for one in run.pod_sets]}


def rank_fields(run: Subject) -> Json:
    """Fields of a Workload's spec that rank it."""
    reference = run.priority.reference
    return {"priority": run.priority.value} | ({} if reference is None else {"priorityClassRef": reference})


def is_of(run: Subject, workload: Manifest) -> bool:
    """True if the run is the Workload's controller."""
    owners = workload["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") is True and owner.get("uid") == run.uid for owner in owners)


def kueue_condition(workload: Manifest, kind: str) -> Mapping[str, Any]:
    """One condition; empty where there is none."""
    found = (workload.get("status") or {}).get("conditions") or ()
    return next((one for one in found if isinstance(one, Mapping) and one.get("type") == kind), {})


def holds_true(workload: Manifest, kind: str) -> bool:
    """True if a condition holds."""
    return kueue_condition(workload, kind).get("status") == "True"


def has_quota(workload: Manifest) -> bool:
    """True if Kueue counts quota for a Workload, or would after a pass of ours."""
    status = workload.get("status") or {}
    return bool(status.get("admission")) or any(holds_true(workload, kind) for kind in ("QuotaReserved", "Admitted"))


def with_conditions(workload: Manifest, said: Mapping[str, tuple[bool, str, str]], now: float) -> Json:
    """The status with these conditions changed; all else stays as it is, whoever wrote it.

    Args:
        workload: as it is now.
        said: type -> status, reason, message.
        now: seconds since the epoch.
    """
    status = dict(workload.get("status") or {})
    kept = list(status.get("conditions") or ())
    for kind, (holds, reason, message) in said.items():
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
    """The status of an evicted Workload whose run has no pod any more: the quota is given back, and the run waits again."""
    evicted = kueue_condition(workload, "Evicted")
    reason, message = str(evicted.get("reason") or _DEACTIVATED), str(evicted.get("message") or "")
    said = {
        "QuotaReserved": (False, "PendingEvaluation", message),
        "Admitted": (False, "NoReservation", "The workload has no reservation"),
        "Requeued": (reason in _PASSES, _requeued_by(reason), message),
        "PodsReady": (False, "WaitForStart", "the run has no pods"),
    }
    status = with_conditions(workload, said, now)
    return {name: value for name, value in status.items() if name not in ("admission", "reclaimablePods")}


def _requeued_by(eviction: str) -> str:
    """Reason of Requeued. Kueue tries what is active again only where it is this one, without the cause that Evicted has behind it."""
    return _DEACTIVATED if eviction.startswith(_DEACTIVATED) else eviction


def pods_ready(workload: Manifest, *, ready: bool) -> tuple[bool, str, str] | None:
    """PodsReady as it has to be written for an admitted run; None: as it is."""
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
