"""Kueue as a run's queue: from the run and its Workload to the next write and the answer. A pure function of its arguments.

    no Workload -> created -> admitted -> evicted: the run stops -> no pod is left: quota given back -> admitted ... -> finished

The rules are those of Kueue's integrations: nothing starts before Admitted; an admission is cleared only when no pod exists, and always
then; a Workload whose shape the run has outgrown is replaced; one of a run that has ended is finished and never made again. Each write
rests on what is observed, so that an operator that is killed between any two of them goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rlrun_operator.names import SPOT_SET
from rlrun_operator.providers import assigned, words
from rlrun_operator.providers import workload as objects
from rlrun_operator.providers.model import Create, Edit, Flavor, PutStatus, Remove, Step, Subject
from rlrun_operator.state import Admission, Json, Manifest
from rlrun_operator.status import reasons

OUT = Admission(False, reasons.NOT_QUEUED, "the run asks for no room now")


@dataclass(frozen=True)
class _QueuedRun:
    """A run and its Workload, which is its own and exists."""

    run: Subject
    workload: Manifest
    flavors: Mapping[str, Flavor]
    now: float

    @property
    def active(self) -> bool:
        return (self.workload.get("spec") or {}).get("active") is not False

    @property
    def marked(self) -> bool:
        """True if the run's user has suspended it, and nobody has set the Workload active again."""
        return objects.SUSPENDED_ANNOTATION in self._annotations

    @property
    def ending(self) -> bool:
        return "deletionTimestamp" in self.workload["metadata"]

    @property
    def evicted(self) -> bool:
        return objects.holds_true(self.workload, "Evicted") or not self.active

    @property
    def fits(self) -> bool:
        """True if the Workload was made for what the run needs now."""
        return not self.run.pod_sets or self._annotations.get(objects.SHAPE_ANNOTATION) == objects.shape_of(self.run)

    @property
    def outgrown(self) -> bool:
        """True if the run has more engines than were admitted, or its next attempt needs other pods. Fewer engines fit."""
        sets = (self.workload.get("spec") or {}).get("podSets") or ()
        counts = {one.get("name"): one.get("count", 1) for one in sets}
        has = {"inference": self.run.engines, SPOT_SET: self.run.spot}
        if any(number > counts.get(name, 0) for name, number in has.items()):
            return True
        own = tuple(
            {**one, "count": counts.get(one["name"], 0)} if one["name"] in has else one for one in self.run.pod_sets
        )
        mark = objects.shape_of(replace(self.run, pod_sets=own))
        return self.run.begins and bool(own) and self._annotations.get(objects.SHAPE_ANNOTATION) != mark

    @property
    def _annotations(self) -> Mapping[str, str]:
        return self.workload["metadata"].get("annotations") or {}


def next_step(run: Subject, workload: Manifest | None, *, flavors: Mapping[str, Flavor], now: float) -> Step:
    """The next write and the answer.

    Args:
        run: as its status, which is on record, and the store say.
        workload: the Workload of this run's name; None: there is none.
        flavors: ResourceFlavors that its admission names.
        now: seconds since the epoch.
    """
    if workload is None:
        return _without_workload(run)
    if not objects.is_of(run, workload):
        name = workload["metadata"]["name"]
        message = f"Workload {name} exists and is not of this run; delete it"
        return Step(words.refused_answer(reasons.QUEUE_UNAVAILABLE, message, stops=run.holds))
    queued = _QueuedRun(run, workload, flavors, now)
    for rule in _RULES:
        if (found := rule(queued)) is not None:
            return found
    return _answer_waiting(queued)


def _without_workload(run: Subject) -> Step:
    if run.over is not None or run.suspended:
        return Step(OUT)
    if run.holds:
        return Step(words.lost_answer())
    if not run.pod_sets:
        return Step(OUT)
    return Step(words.not_judged(run), Create(objects.made_for(run)))


def _finish_workload(queued: _QueuedRun) -> Step | None:
    """Kueue counts a finished Workload no more, so that it is finished when the last pod is gone."""
    if queued.run.over is None:
        return None
    if queued.run.holds or queued.ending or objects.holds_true(queued.workload, "Finished"):
        return Step(OUT)
    said = {"Finished": (True, str(queued.run.over), queued.run.outcome)}
    return Step(OUT, PutStatus(objects.with_conditions(queued.workload, said, queued.now)))


def _replace_gone_workload(queued: _QueuedRun) -> Step | None:
    """A Workload that is being deleted, or was finished, by others or before its run was asked to begin again: another one is made."""
    finished = objects.kueue_condition(queued.workload, "Finished")
    if not queued.ending and finished.get("status") != "True":
        return None
    if queued.run.holds:
        why = f": {finished.get('message')} ({finished.get('reason')})" if finished else ""
        lost = (
            words.lost_answer()
            if queued.ending
            else words.refused_answer(
                reasons.EVICTED, f"the run's Workload was finished{why}, which takes its room back", stops=True
            )
        )
        return Step(lost)
    answer = OUT if queued.run.suspended else words.not_judged(queued.run)
    return Step(answer, None if queued.ending else Remove())


def _suspend_workload(queued: _QueuedRun) -> Step | None:
    """The user's suspension: pods go first, then the Workload is deactivated, then the quota is cleared."""
    if not queued.run.suspended:
        return None
    if queued.run.holds:
        return Step(OUT)
    if queued.active or not queued.marked:
        return Step(OUT, _edit_workload({"active": False}, {objects.SUSPENDED_ANNOTATION: "true"}))
    return Step(OUT, _clear_quota(queued))


def _resume_workload(queued: _QueuedRun) -> Step | None:
    """The end of the user's suspension: active again only when Kueue has evicted, as it counts an inactive Workload's quota no more."""
    if not queued.marked or queued.run.holds:
        return None
    if objects.has_quota(queued.workload):
        return Step(words.not_judged(queued.run), _clear_quota(queued))
    return Step(words.not_judged(queued.run), _edit_workload({"active": True}, {objects.SUSPENDED_ANNOTATION: None}))


def _answer_eviction(queued: _QueuedRun) -> Step | None:
    if not queued.evicted:
        return None
    if queued.run.holds:
        return Step(words.evicted_answer(queued.workload))
    if not objects.has_quota(queued.workload):
        return None
    return Step(words.waiting_answer(queued.run, queued.workload), _clear_quota(queued))


def _replace_reshaped(queued: _QueuedRun) -> Step | None:
    """Another shape needs another admission: the run stops first, then its Workload is replaced."""
    run = queued.run
    if run.holds and queued.outgrown:
        message = "the run needs other pods than Kueue admitted: it stops, and asks for room for them"
        return Step(words.refused_answer(reasons.EVICTED, message, stops=True))
    if run.holds or queued.fits:
        return None
    if objects.has_quota(queued.workload):
        return Step(words.not_judged(run), Remove())
    return Step(
        words.not_judged(run),
        _edit_workload(objects.workload_spec(run), {objects.SHAPE_ANNOTATION: objects.shape_of(run)}),
    )


def _update_rank(queued: _QueuedRun) -> Step | None:
    """Another priority while the run waits; of one that has quota Kueue's webhook lets in only some changes."""
    spec = queued.workload.get("spec") or {}
    wanted, reference = queued.run.priority, spec.get("priorityClassRef")
    same = spec.get("priority", 0) == wanted.value and reference == wanted.reference
    if same or queued.run.holds or objects.has_quota(queued.workload):
        return None
    edit = _edit_workload({"priority": wanted.value, "priorityClassRef": wanted.reference}, {})
    return Step(words.waiting_answer(queued.run, queued.workload), edit)


def _answer_admitted(queued: _QueuedRun) -> Step | None:
    admission = (queued.workload.get("status") or {}).get("admission") or {}
    asks = queued.run.holds or bool(queued.run.pod_sets)
    if not admission or not objects.holds_true(queued.workload, "Admitted") or not asks:
        return None
    placed, conflict = assigned.pod_set_additions(queued.run, queued.workload, queued.flavors)
    used = ", ".join(sorted(assigned.flavors_of(queued.workload)))
    message = f"admitted by ClusterQueue {admission.get('clusterQueue')}" + (f", flavor {used}" if used else "")
    answer = Admission(True, reasons.ROOM_FOUND, message, placed=placed, conflict=conflict)
    ready = objects.pods_ready(queued.workload, ready=queued.run.ready)
    return Step(answer, _put_condition(queued, ready) if ready is not None else None)


_RULES: tuple[Callable[[_QueuedRun], Step | None], ...] = (
    _finish_workload,
    _replace_gone_workload,
    _suspend_workload,
    _resume_workload,
    _answer_eviction,
    _replace_reshaped,
    _update_rank,
    _answer_admitted,
)
"""Rules in the order of their precedence."""


def _answer_waiting(queued: _QueuedRun) -> Step:
    """No admission: one that runs stops, one that does not waits."""
    if queued.run.holds:
        return Step(words.evicted_answer(queued.workload))
    if not queued.run.pod_sets:
        return Step(OUT)
    before = objects.kueue_condition(queued.workload, "PodsReady")
    said = (False, "WaitForStart", "the run has no pods") if before.get("status") != "False" else None
    return Step(
        words.waiting_answer(queued.run, queued.workload), _put_condition(queued, said) if said is not None else None
    )


def _clear_quota(queued: _QueuedRun) -> PutStatus | None:
    """Give the quota back, once Kueue has evicted: what it writes at an eviction has to be there before."""
    if not objects.holds_true(queued.workload, "Evicted") or not objects.has_quota(queued.workload):
        return None
    return PutStatus(objects.cleared_status(queued.workload, queued.now))


def _put_condition(queued: _QueuedRun, ready: tuple[bool, str, str]) -> PutStatus:
    return PutStatus(objects.with_conditions(queued.workload, {"PodsReady": ready}, queued.now))


def _edit_workload(spec: Json, annotations: Json) -> Edit:
    return Edit({"metadata": {"annotations": annotations}, "spec": spec} if annotations else {"spec": spec})
