"""Volcano as the queue of a run: next write and answer, from the run and its PodGroup. A pure function of its arguments.

    no PodGroup -> created, Pending -> Inqueue: pods are created -> Running ... -> no pods: Pending again -> run over: deleted

A run has one PodGroup for all attempts: engines outlive attempts, and a pod belongs to one group for its life. The group counts the pods
that the run needs, by role, and Volcano binds none of them before all have nodes. Field names are those of
`scheduling.volcano.sh/v1beta1`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlrun.api.resource import RLRunSpec
from rlrun_operator.names import ROLES, SPOT_SET
from rlrun_operator.providers.queue_answers import (
    SHAPE_ANNOTATION,
    Create,
    Edit,
    QueuedRun,
    Remove,
    Step,
    is_of,
    name_of,
    queue_object,
)
from rlrun_operator.state import Admission, Json, Manifest, Placed
from rlrun_operator.status import reasons

VOLCANO = "scheduling.volcano.sh"
SCHEDULER = "volcano"
DEFAULT_QUEUE = "default"
"""Queue of a PodGroup that names none; Volcano creates it."""
GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
"""On pods: their PodGroup. Volcano creates a group of one for a pod without it."""
TASK_ANNOTATION = "volcano.sh/task-spec"
"""On pods: key of `minTaskMember` for which they count."""
BEGUN = ("Inqueue", "Running", "Unknown", "Completed")
"""Phases in which Volcano allows the creation of pods; in Unknown some pods run and others have no node."""


@dataclass(frozen=True)
class QueueState:
    """Readable state of a Volcano Queue."""

    exists: bool | None = None
    """Whether it exists; None: the operator may not read Queues."""
    state: str = ""
    """Open, Closed, Closing or Unknown; empty: no state yet."""


def ignored_field(spec: RLRunSpec) -> str:
    """Return the message about a priority, which a PodGroup does not have, or an empty string."""
    if not spec.priority:
        return ""
    return f"ignored: priority {spec.priority}, because Volcano ranks runs only by trainer.priorityClassName"


def next_step(
    run: QueuedRun, group: Manifest | None, *, queue: QueueState = QueueState(), event_text: str = ""
) -> Step:
    """Return the next write and the answer.

    Args:
        run: run according to its recorded status and the store; `pod_sets` are the pods that it needs, by role: `name`,
            `count`, `requests`, `priorityClassName`.
        group: PodGroup with this run's name, or None.
        queue: Queue that it names; read only for a waiting run.
        event_text: Volcano's last event about a Pending PodGroup.
    """
    step = _next_write(run, group, queue, event_text)
    return replace(step, answer=replace(step.answer, placed=pod_additions(run)))


def _next_write(run: QueuedRun, group: Manifest | None, queue: QueueState, event_text: str) -> Step:
    if group is not None and not is_of(run, group):
        message = f"PodGroup {group['metadata']['name']} exists and belongs to another owner; delete it"
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
            return Step(_admitted_answer(run, "its PodGroup was deleted, and the operator creates it again"), write)
        return Step(_waiting_answer(run, *_explain_wait(run, None, queue, event_text)), write)
    if run.begins and run.pod_sets and _group_mark(group) != shape_of(run):
        return Step(_group_answer(run, group, queue, event_text), Edit(_edit_group(run)))
    return Step(_group_answer(run, group, queue, event_text))


OUT = Admission(False, reasons.NOT_QUEUED, "the run needs no resources now")


def _group_answer(run: QueuedRun, group: Manifest, queue: QueueState, event_text: str) -> Admission:
    name, phase = group["metadata"]["name"], phase_of(group)
    if phase not in BEGUN and not run.has_pods:
        return _waiting_answer(run, *_explain_wait(run, group, queue, event_text))
    why = unschedulable_message(group)
    more = f": {why}" if why and phase != "Running" else ""
    return _admitted_answer(run, f"PodGroup {name} is {phase or 'not processed yet'}{more}")


def _explain_wait(run: QueuedRun, group: Manifest | None, queue: QueueState, event_text: str) -> tuple[str, str]:
    """Return reason and message for a run whose pods may not be created."""
    if queue.exists is False:
        return reasons.QUEUE_MISCONFIGURED, (
            "Volcano has no such Queue; name another one in spec.queueName, or have a cluster administrator create it"
        )
    if queue.exists and queue.state != "Open":
        state = f"is {queue.state}" if queue.state else "has no state yet (is Volcano's controller running?)"
        return reasons.WAITING_FOR_TURN, f"the Queue {state}, and accepts nothing until it is Open"
    if group is None:
        return reasons.WAITING_FOR_TURN, "the run's PodGroup is being created"
    name = group["metadata"]["name"]
    if why := event_text or unschedulable_message(group):
        return reasons.WAITING_FOR_RESOURCES, f"PodGroup {name} is Pending: {why}; it needs {_show_pod_sets(run)}"
    unread = "" if queue.exists else ". Does the Queue exist? This operator may not read Queues"
    if not phase_of(group):
        return reasons.WAITING_FOR_TURN, f"Volcano has not processed PodGroup {name} yet{unread}"
    return reasons.WAITING_FOR_TURN, f"PodGroup {name} is Pending: it needs {_show_pod_sets(run)}{unread}"


def _show_pod_sets(run: QueuedRun) -> str:
    return ", ".join(f"{one['count']} {one['name']}" for one in run.pod_sets if one["count"]) or "nothing"


def _waiting_answer(run: QueuedRun, reason: str, message: str) -> Admission:
    return Admission(False, reason, f"Volcano Queue {run.queue}: {message}", lapsed=True)


def _admitted_answer(run: QueuedRun, message: str) -> Admission:
    return Admission(True, reasons.ROOM_FOUND, f"Volcano Queue {run.queue}: {message}")


def pod_additions(run: QueuedRun) -> dict[str, Placed]:
    """Return the additions to pods of each role and to spot engines: the same for all attempts, so that engines are not renewed."""
    name = name_of(run.name, run.uid)
    return {
        pods: Placed(annotations={GROUP_ANNOTATION: name, TASK_ANNOTATION: pods}, scheduler=SCHEDULER)
        for pods in (*ROLES, SPOT_SET)
    }


def made_for(run: QueuedRun) -> Json:
    """Return the PodGroup of a run."""
    spec = {name: value for name, value in group_spec(run).items() if value is not None}
    return queue_object(run, f"{VOLCANO}/v1beta1", "PodGroup", spec, shape=shape_of(run))


def group_spec(run: QueuedRun) -> Json:
    """Return the fields of a PodGroup's spec; a value None means that the field is absent."""
    counts = {one["name"]: one["count"] for one in run.pod_sets if one["count"]}
    return {
        "minMember": sum(counts.values()),
        "minTaskMember": counts,  # without it, engines beyond the needed number would count as trainer pods
        "minResources": _sum_requests(run.pod_sets),
        "queue": run.queue,
        "priorityClassName": next((name for one in run.pod_sets if (name := one["priorityClassName"])), None),
    }


def _edit_group(run: QueuedRun) -> Json:
    """Return a merge patch to the run's current needs; obsolete keys of maps become null."""
    wanted = group_spec(run)
    wanted["minTaskMember"] = dict.fromkeys(ROLES) | wanted["minTaskMember"]
    return {"metadata": {"annotations": {SHAPE_ANNOTATION: shape_of(run)}}, "spec": wanted}


def shape_of(run: QueuedRun) -> str:
    """Return a hash of the needs for which a PodGroup of this run must be built."""
    return hashlib.sha256(json.dumps(group_spec(run), sort_keys=True).encode()).hexdigest()[:16]


def _group_mark(group: Manifest) -> str | None:
    return (group["metadata"].get("annotations") or {}).get(SHAPE_ANNOTATION)


def _sum_requests(sets: Sequence[Json]) -> dict[str, str]:
    """Return the requests of all needed pods, as quantities."""
    total: dict[str, float] = {}
    for one in sets:
        for name, amount in one["requests"].items():
            total[name] = total.get(name, 0.0) + amount * one["count"]
    return {name: _show_quantity(name, amount) for name, amount in sorted(total.items()) if amount}


def _show_quantity(name: str, amount: float) -> str:
    exact = round(amount, 6)
    return f"{math.ceil(exact * 1000)}m" if name == "cpu" else str(math.ceil(exact))


def phase_of(group: Manifest) -> str:
    """Return the phase of a PodGroup; empty: Volcano has not processed it."""
    return str((group.get("status") or {}).get("phase") or "")


def unschedulable_message(group: Manifest) -> str:
    """Return Volcano's message about a group whose pods have no nodes, or an empty string if it has none or it is obsolete."""
    last: Mapping[str, str] = {}
    for one in (group.get("status") or {}).get("conditions") or ():
        if one.get("status") == "True" and str(one.get("lastTransitionTime")) >= str(
            last.get("lastTransitionTime", "")
        ):
            last = one
    if last.get("type") != "Unschedulable":
        return ""
    return f"{last.get('message') or 'no reason given'} ({last.get('reason') or 'Unschedulable'})"
