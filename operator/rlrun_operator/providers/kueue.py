"""Kueue as the queue of a run: additions of an admission to the pods, and the next write with the answer. Pure.

The additions come from flavors, updates of admission checks, and the labels that Kueue expects. Next write and answer are a function of the
run and its Workload:

    no Workload -> created -> admitted -> evicted: the run stops -> no pods: quota released -> admitted ... -> finished

The rules are those of Kueue's integrations: nothing starts before Admitted; an admission is cleared once no pod exists, and only then; a
Workload whose shape no longer fits the run is replaced; the Workload of an ended run is finished and never created again. Each write
depends only on observed state, so that an operator that is killed between two writes continues with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rlrun.api.resource import RLRunSpec
from rlrun_operator.names import ROLES, SPOT_SET
from rlrun_operator.providers import kueue_workload
from rlrun_operator.providers import kueue_workload as objects
from rlrun_operator.providers.kueue_workload import KUEUE
from rlrun_operator.providers.queue_answers import (
    SHAPE_ANNOTATION,
    Create,
    Edit,
    Flavor,
    PutStatus,
    QueuedRun,
    Remove,
    Step,
    is_of,
    refused_answer,
)
from rlrun_operator.state import Admission, Json, Manifest, Placed
from rlrun_operator.status import reasons

TOPOLOGY_GATE = f"{KUEUE}/topology"
_UNCONSTRAINED = f"{KUEUE}/podset-unconstrained-topology"


def flavors_of(workload: Manifest) -> frozenset[str]:
    """Return the names of the ResourceFlavors of an admission."""
    return frozenset(name for one in _pod_set_assignments(workload) for name in (one.get("flavors") or {}).values())


def pod_set_additions(
    run: QueuedRun, workload: Manifest, flavors: Mapping[str, Flavor]
) -> tuple[dict[str, Placed], str]:
    """Return the additions for each pod set, and a message about contradictions, or an empty string.

    Args:
        run: run of the Workload.
        workload: admitted Workload.
        flavors: the flavors that `flavors_of` names.
    """
    result: dict[str, Placed] = {}
    problems: list[str] = []
    for one in _pod_set_assignments(workload):
        role = next((name for name in (*ROLES, SPOT_SET) if name == one.get("name")), None)
        if role is not None:
            result[role] = _role_additions(role, run, workload, one, flavors, problems)
    return result, "; ".join(problems)


def _role_additions(
    role: str, run: QueuedRun, workload: Manifest, one: Manifest, flavors: Mapping[str, Flavor], problems: list[str]
) -> Placed:
    names = sorted(set((one.get("flavors") or {}).values()))
    parts: list[tuple[str, Manifest]] = [
        (f"flavor {name}", {"nodeSelector": flavors[name].node_labels, "tolerations": flavors[name].tolerations})
        for name in names
    ]
    parts += _admission_updates(workload, role)
    found: dict[str, dict[str, str]] = {"nodeSelector": {}, "labels": {}, "annotations": {}}
    tolerations: list[Manifest] = []
    for source, part in parts:
        for field, values in found.items():
            for key, value in (part.get(field) or {}).items():
                if values.setdefault(key, value) != value:
                    problems.append(
                        f"{source} sets {field} {key}={value} for pods of {role}, another one {values[key]}"
                    )
        tolerations += [each for each in part.get("tolerations") or () if each not in tolerations]
    labels = found["labels"] | {f"{KUEUE}/podset": role, f"{KUEUE}/local-queue-name": run.queue}
    cluster_queue = ((workload.get("status") or {}).get("admission") or {}).get("clusterQueue")
    labels |= {f"{KUEUE}/cluster-queue-name": cluster_queue} if cluster_queue else {}
    annotations = found["annotations"] | {f"{KUEUE}/workload": workload["metadata"]["name"]}
    gates: tuple[str, ...] = ()
    if one.get("topologyAssignment"):
        annotations |= {_UNCONSTRAINED: "true"}  # otherwise Kueue counts the pods a second time, as foreign pods
        gates = (TOPOLOGY_GATE,)
    return Placed(found["nodeSelector"], tuple(tolerations), labels, annotations, gates)


def _pod_set_assignments(workload: Manifest) -> list[Manifest]:
    admission = (workload.get("status") or {}).get("admission") or {}
    return list(admission.get("podSetAssignments") or ())


def _admission_updates(workload: Manifest, role: str) -> list[tuple[str, Manifest]]:
    checks = (workload.get("status") or {}).get("admissionChecks") or ()
    return [
        (f"admission check {check.get('name')}", update)
        for check in checks
        for update in check.get("podSetUpdates") or ()
        if update.get("name") == role
    ]


OUT = Admission(False, reasons.NOT_QUEUED, "the run needs no resources now")


@dataclass(frozen=True)
class _RunWorkload:
    """A run with its own, existing Workload."""

    run: QueuedRun
    workload: Manifest
    flavors: Mapping[str, Flavor]
    now: float

    @property
    def is_active(self) -> bool:
        return (self.workload.get("spec") or {}).get("active") is not False

    @property
    def has_suspension_mark(self) -> bool:
        """Whether the user suspended the run and the Workload has not been activated again."""
        return objects.SUSPENDED_ANNOTATION in self._workload_annotations

    @property
    def is_ending(self) -> bool:
        return "deletionTimestamp" in self.workload["metadata"]

    @property
    def is_evicted(self) -> bool:
        return objects.holds_true(self.workload, "Evicted") or not self.is_active

    @property
    def matches_needs(self) -> bool:
        """Whether the Workload was built for the current needs of the run."""
        return not self.run.pod_sets or self._workload_annotations.get(SHAPE_ANNOTATION) == objects.shape_of(self.run)

    @property
    def is_outgrown(self) -> bool:
        """Whether the run has more engines than admitted, or its next attempt needs other pods. Fewer engines are allowed."""
        sets = (self.workload.get("spec") or {}).get("podSets") or ()
        counts = {one.get("name"): one.get("count", 1) for one in sets}
        has = {"inference": self.run.engines, SPOT_SET: self.run.spot}
        if any(number > counts.get(name, 0) for name, number in has.items()):
            return True
        own = tuple(
            {**one, "count": counts.get(one["name"], 0)} if one["name"] in has else one for one in self.run.pod_sets
        )
        mark = objects.shape_of(replace(self.run, pod_sets=own))
        return self.run.begins and bool(own) and self._workload_annotations.get(SHAPE_ANNOTATION) != mark

    @property
    def _workload_annotations(self) -> Mapping[str, str]:
        return self.workload["metadata"].get("annotations") or {}


def ignored_field(spec: RLRunSpec) -> str:
    """Return an empty string: Kueue uses the queue name and the priority."""
    return ""


def next_step(run: QueuedRun, workload: Manifest | None, *, flavors: Mapping[str, Flavor], now: float) -> Step:
    """Return the next write and the answer.

    Args:
        run: run according to its recorded status and the store.
        workload: Workload with this run's name, or None.
        flavors: ResourceFlavors that its admission names.
        now: seconds since the epoch.
    """
    if workload is None:
        return _without_workload(run)
    if not is_of(run, workload):
        name = workload["metadata"]["name"]
        message = f"Workload {name} exists and belongs to another owner; delete it"
        return Step(refused_answer(reasons.QUEUE_UNAVAILABLE, message, stops=run.holds))
    queued = _RunWorkload(run, workload, flavors, now)
    for rule in _RULES:
        if (found := rule(queued)) is not None:
            return found
    return _answer_waiting(queued)


def _without_workload(run: QueuedRun) -> Step:
    if run.over is not None or run.suspended:
        return Step(OUT)
    if run.holds:
        return Step(kueue_workload.lost_answer())
    if not run.pod_sets:
        return Step(OUT)
    return Step(kueue_workload.not_judged(run), Create(objects.made_for(run)))


def _finish_workload(queued: _RunWorkload) -> Step | None:
    """Finish the Workload of an ended run. Kueue no longer counts a finished Workload, so its last pod must be gone first."""
    if queued.run.over is None:
        return None
    if queued.run.holds or queued.is_ending or objects.holds_true(queued.workload, "Finished"):
        return Step(OUT)
    update = {"Finished": (True, str(queued.run.over), queued.run.outcome)}
    return Step(OUT, PutStatus(objects.with_conditions(queued.workload, update, queued.now)))


def _replace_gone_workload(queued: _RunWorkload) -> Step | None:
    """Replace a Workload that is being deleted, or that was finished by another client or before a restart request."""
    finished = objects.kueue_condition(queued.workload, "Finished")
    if not queued.is_ending and finished.get("status") != "True":
        return None
    if queued.run.holds:
        why = f": {finished.get('message')} ({finished.get('reason')})" if finished else ""
        lost = (
            kueue_workload.lost_answer()
            if queued.is_ending
            else refused_answer(
                reasons.EVICTED, f"the run's Workload was finished{why}, which ends its admission", stops=True
            )
        )
        return Step(lost)
    answer = OUT if queued.run.suspended else kueue_workload.not_judged(queued.run)
    return Step(answer, None if queued.is_ending else Remove())


def _suspend_workload(queued: _RunWorkload) -> Step | None:
    """Apply a suspension by the user: first the pods end, then the Workload is deactivated, then its quota is cleared."""
    if not queued.run.suspended:
        return None
    if queued.run.holds:
        return Step(OUT)
    if queued.is_active or not queued.has_suspension_mark:
        return Step(OUT, _edit_workload({"active": False}, {objects.SUSPENDED_ANNOTATION: "true"}))
    return Step(OUT, _clear_quota(queued))


def _resume_workload(queued: _RunWorkload) -> Step | None:
    """End a suspension by the user. The Workload is activated only after Kueue's eviction, because an inactive Workload holds no quota."""
    if not queued.has_suspension_mark or queued.run.holds:
        return None
    if objects.has_quota(queued.workload):
        return Step(kueue_workload.not_judged(queued.run), _clear_quota(queued))
    return Step(
        kueue_workload.not_judged(queued.run), _edit_workload({"active": True}, {objects.SUSPENDED_ANNOTATION: None})
    )


def _answer_eviction(queued: _RunWorkload) -> Step | None:
    if not queued.is_evicted:
        return None
    if queued.run.holds:
        return Step(kueue_workload.evicted_answer(queued.workload))
    if not objects.has_quota(queued.workload):
        return None
    return Step(kueue_workload.waiting_answer(queued.run, queued.workload), _clear_quota(queued))


def _replace_reshaped(queued: _RunWorkload) -> Step | None:
    """Stop a run that needs other pods than admitted, then replace its Workload: a new shape needs a new admission."""
    run = queued.run
    if run.holds and queued.is_outgrown:
        message = "the run needs other pods than Kueue admitted: it stops, and requests resources for them"
        return Step(refused_answer(reasons.EVICTED, message, stops=True))
    if run.holds or queued.matches_needs:
        return None
    if objects.has_quota(queued.workload):
        return Step(kueue_workload.not_judged(run), Remove())
    return Step(
        kueue_workload.not_judged(run),
        _edit_workload(objects.workload_spec(run), {SHAPE_ANNOTATION: objects.shape_of(run)}),
    )


def _update_rank(queued: _RunWorkload) -> Step | None:
    """Update the priority of a waiting run; for a run with quota Kueue's webhook accepts only some changes."""
    spec = queued.workload.get("spec") or {}
    wanted, reference = queued.run.priority, spec.get("priorityClassRef")
    same = spec.get("priority", 0) == wanted.value and reference == wanted.reference
    if same or queued.run.holds or objects.has_quota(queued.workload):
        return None
    edit = _edit_workload({"priority": wanted.value, "priorityClassRef": wanted.reference}, {})
    return Step(kueue_workload.waiting_answer(queued.run, queued.workload), edit)


def _answer_admitted(queued: _RunWorkload) -> Step | None:
    admission = (queued.workload.get("status") or {}).get("admission") or {}
    asks = queued.run.holds or bool(queued.run.pod_sets)
    if not admission or not objects.holds_true(queued.workload, "Admitted") or not asks:
        return None
    placed, conflict = pod_set_additions(queued.run, queued.workload, queued.flavors)
    used = ", ".join(sorted(flavors_of(queued.workload)))
    message = f"admitted by ClusterQueue {admission.get('clusterQueue')}" + (f", flavor {used}" if used else "")
    answer = Admission(True, reasons.ROOM_FOUND, message, placed=placed, conflict=conflict)
    ready = objects.pods_ready(queued.workload, ready=queued.run.ready)
    return Step(answer, _put_condition(queued, ready) if ready is not None else None)


_RULES: tuple[Callable[[_RunWorkload], Step | None], ...] = (
    _finish_workload,
    _replace_gone_workload,
    _suspend_workload,
    _resume_workload,
    _answer_eviction,
    _replace_reshaped,
    _update_rank,
    _answer_admitted,
)
"""Rules in order of precedence: the first one that applies determines the step."""


def _answer_waiting(queued: _RunWorkload) -> Step:
    """Answer without an admission: a running run stops, any other run waits."""
    if queued.run.holds:
        return Step(kueue_workload.evicted_answer(queued.workload))
    if not queued.run.pod_sets:
        return Step(OUT)
    before = objects.kueue_condition(queued.workload, "PodsReady")
    ready = (False, "WaitForStart", "the run has no pods") if before.get("status") != "False" else None
    return Step(
        kueue_workload.waiting_answer(queued.run, queued.workload),
        _put_condition(queued, ready) if ready is not None else None,
    )


def _clear_quota(queued: _RunWorkload) -> PutStatus | None:
    """Release the quota after Kueue's eviction: the status must first contain what Kueue writes at an eviction."""
    if not objects.holds_true(queued.workload, "Evicted") or not objects.has_quota(queued.workload):
        return None
    return PutStatus(objects.cleared_status(queued.workload, queued.now))


def _put_condition(queued: _RunWorkload, ready: tuple[bool, str, str]) -> PutStatus:
    return PutStatus(objects.with_conditions(queued.workload, {"PodsReady": ready}, queued.now))


def _edit_workload(spec: Json, annotations: Json) -> Edit:
    return Edit({"metadata": {"annotations": annotations}, "spec": spec} if annotations else {"spec": spec})
