"""Volcano as a run's queue: from the run and its PodGroup to the next write and the answer. A pure function of its arguments.

    no PodGroup -> created, Pending -> Inqueue: pods are made -> Running ... -> all pods gone: Pending again -> the run is over: deleted

One PodGroup for a run, not for each attempt: engines outlive attempts, and a pod belongs to one group for its life. It counts the pods
without which the run does not go on, by role, and Volcano binds none of them before all have nodes. Field names are those of
`scheduling.volcano.sh/v1beta1`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlrun_operator.names import ROLES, SPOT_SET
from rlrun_operator.providers.model import Create, Edit, Remove, Step, Subject
from rlrun_operator.providers.workload import SHAPE_ANNOTATION, is_of, name_of, queue_object
from rlrun_operator.state import Admission, Json, Manifest, Placed
from rlrun_operator.status import reasons

VOLCANO = "scheduling.volcano.sh"
SCHEDULER = "volcano"
DEFAULT_QUEUE = "default"
"""Queue of a PodGroup that names none; Volcano makes it itself."""
GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
"""On pods: their PodGroup. Of a pod without it Volcano makes a group of one."""
TASK_ANNOTATION = "volcano.sh/task-spec"
"""On pods: the key of `minTaskMember` that they count for."""
BEGUN = ("Inqueue", "Running", "Unknown", "Completed")
"""Phases in which Volcano lets pods be made; in Unknown some run and others have no node."""


@dataclass(frozen=True)
class QueueState:
    """A Queue of Volcano's, as far as the operator may read it."""

    exists: bool | None = None
    """None: it may not be read."""
    state: str = ""
    """Open, Closed, Closing or Unknown; empty: it has none yet."""


def next_step(run: Subject, group: Manifest | None, *, queue: QueueState = QueueState(), told: str = "") -> Step:
    """The next write and the answer.

    Args:
        run: as its status, which is on record, and the store say; `pod_sets` are the pods that it needs, by role: `name`,
            `count`, `requests`, `priorityClassName`.
        group: the PodGroup of this run's name; None: there is none.
        queue: the Queue that it names; read for a run that waits.
        told: Volcano's last words about a PodGroup that is Pending.
    """
    made = _next_write(run, group, queue, told)
    return replace(made, answer=replace(made.answer, placed=pod_additions(run)))


def _next_write(run: Subject, group: Manifest | None, queue: QueueState, told: str) -> Step:
    if group is not None and not is_of(run, group):
        message = f"PodGroup {group['metadata']['name']} exists and is not of this run; delete it"
        return Step(
            _admitted_answer(run, message) if run.has_pods else _waiting_answer(run, reasons.QUEUE_UNAVAILABLE, message)
        )
    if run.over is not None or run.suspended:
        leaves = group is not None and not run.holds and "deletionTimestamp" not in group["metadata"]
        return Step(OUT, Remove() if leaves else None)
    if not run.pod_sets and not run.has_pods:
        return Step(OUT)
    if group is None or "deletionTimestamp" in group["metadata"]:
        write = Create(made_for(run)) if group is None and run.pod_sets else None
        if run.has_pods:
            return Step(_admitted_answer(run, "its PodGroup was deleted, and is made again"), write)
        return Step(_waiting_answer(run, *_explain_wait(run, None, queue, told)), write)
    if run.begins and run.pod_sets and _group_mark(group) != shape_of(run):
        return Step(_group_answer(run, group, queue, told), Edit(_edit_group(run)))
    return Step(_group_answer(run, group, queue, told))


OUT = Admission(False, reasons.NOT_QUEUED, "the run asks for no room now")


def _group_answer(run: Subject, group: Manifest, queue: QueueState, told: str) -> Admission:
    name, phase = group["metadata"]["name"], phase_of(group)
    if phase not in BEGUN and not run.has_pods:
        return _waiting_answer(run, *_explain_wait(run, group, queue, told))
    why = unschedulable_message(group)
    more = f": {why}" if why and phase != "Running" else ""
    return _admitted_answer(run, f"PodGroup {name} is {phase or 'not judged yet'}{more}")


def _explain_wait(run: Subject, group: Manifest | None, queue: QueueState, told: str) -> tuple[str, str]:
    """Reason and words for a run whose pods may not be made."""
    if queue.exists is False:
        return reasons.QUEUE_MISCONFIGURED, (
            "Volcano has no such Queue; name another one in spec.queueName, or have a cluster administrator make it"
        )
    if queue.exists and queue.state != "Open":
        state = f"is {queue.state}" if queue.state else "has no state yet (is Volcano's controller running?)"
        return reasons.WAITING_FOR_TURN, f"the Queue {state}, and takes nothing until it is Open"
    if group is None:
        return reasons.WAITING_FOR_TURN, "the run's PodGroup is being made"
    name = group["metadata"]["name"]
    if why := told or unschedulable_message(group):
        return reasons.WAITING_FOR_RESOURCES, f"PodGroup {name} is Pending: {why}; it asks for {_show_pod_sets(run)}"
    unread = "" if queue.exists else ". Does the Queue exist? This operator may not read Queues"
    if not phase_of(group):
        return reasons.WAITING_FOR_TURN, f"Volcano has not judged PodGroup {name} yet{unread}"
    return reasons.WAITING_FOR_TURN, f"PodGroup {name} is Pending: it asks for {_show_pod_sets(run)}{unread}"


def _show_pod_sets(run: Subject) -> str:
    return ", ".join(f"{one['count']} {one['name']}" for one in run.pod_sets if one["count"]) or "nothing"


def _waiting_answer(run: Subject, reason: str, message: str) -> Admission:
    return Admission(False, reason, f"Volcano Queue {run.queue}: {message}", lapsed=True)


def _admitted_answer(run: Subject, message: str) -> Admission:
    return Admission(True, reasons.ROOM_FOUND, f"Volcano Queue {run.queue}: {message}")


def pod_additions(run: Subject) -> dict[str, Placed]:
    """Additions to the pods of each role and to spot engines: the same for all attempts, so that engines are not renewed for them."""
    name = name_of(run.name, run.uid)
    return {
        pods: Placed(annotations={GROUP_ANNOTATION: name, TASK_ANNOTATION: pods}, scheduler=SCHEDULER)
        for pods in (*ROLES, SPOT_SET)
    }


def made_for(run: Subject) -> Json:
    """The PodGroup of a run."""
    spec = {name: value for name, value in group_spec(run).items() if value is not None}
    return queue_object(run, f"{VOLCANO}/v1beta1", "PodGroup", spec, shape=shape_of(run))


def group_spec(run: Subject) -> Json:
    """Fields of a PodGroup's spec; None: it has none."""
    counts = {one["name"]: one["count"] for one in run.pod_sets if one["count"]}
    return {
        "minMember": sum(counts.values()),
        "minTaskMember": counts,  # else engines beyond the needed ones would count for trainer pods
        "minResources": _sum_requests(run.pod_sets),
        "queue": run.queue,
        "priorityClassName": next((name for one in run.pod_sets if (name := one["priorityClassName"])), None),
    }


def _edit_group(run: Subject) -> Json:
    """Merge patch to what the run needs now; maps lose the keys that they have no more."""
    wanted = group_spec(run)
    wanted["minTaskMember"] = dict.fromkeys(ROLES) | wanted["minTaskMember"]
    return {"metadata": {"annotations": {SHAPE_ANNOTATION: shape_of(run)}}, "spec": wanted}


def shape_of(run: Subject) -> str:
    """Mark of what a PodGroup of this run has to be made with."""
    return hashlib.sha256(json.dumps(group_spec(run), sort_keys=True).encode()).hexdigest()[:16]


def _group_mark(group: Manifest) -> str | None:
    return (group["metadata"].get("annotations") or {}).get(SHAPE_ANNOTATION)


def _sum_requests(sets: Sequence[Json]) -> dict[str, str]:
    """Requests of all pods that are needed, as quantities."""
    total: dict[str, float] = {}
    for one in sets:
        for name, amount in one["requests"].items():
            total[name] = total.get(name, 0.0) + amount * one["count"]
    return {name: _show_quantity(name, amount) for name, amount in sorted(total.items()) if amount}


def _show_quantity(name: str, amount: float) -> str:
    exact = round(amount, 6)
    return f"{math.ceil(exact * 1000)}m" if name == "cpu" else str(math.ceil(exact))


def phase_of(group: Manifest) -> str:
    """Phase of a PodGroup; empty: Volcano has not looked at it."""
    return str((group.get("status") or {}).get("phase") or "")


def unschedulable_message(group: Manifest) -> str:
    """Volcano's words for why the group's pods have no nodes; empty: it says nothing of that, or they have them by now."""
    last: Mapping[str, str] = {}
    for one in (group.get("status") or {}).get("conditions") or ():
        if one.get("status") == "True" and str(one.get("lastTransitionTime")) >= str(
            last.get("lastTransitionTime", "")
        ):
            last = one
    if last.get("type") != "Unschedulable":
        return ""
    return f"{last.get('message') or 'no reason given'} ({last.get('reason') or 'Unschedulable'})"
