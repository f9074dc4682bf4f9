"""Answer of the queue in the decisions about a run: the condition Admitted, the position in the queue, and waits for both.

An admission is recorded before a pod is created, and its end is recorded before a pod is removed. Without a queue, `Observed.admission` is
None, and these functions change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_status import Condition, QueueStatus, RLRunStatus
from rlrun_operator import render
from rlrun_operator.decide import gpu_time
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import ConditionUpdate, find_condition, is_true
from rlrun_operator.times import format_rfc3339

_NO_OBSTACLE_REASONS = frozenset({reasons.SCHEDULING, *reasons.SUSPENSION})
"""Reasons of the condition Scheduled that do not name an obstacle: pods are being created or removed."""
LOOK_SECONDS = 10.0
"""Interval of passes (calls of the decision functions) over a waiting run. When the queue admits the run, it starts a pass itself."""


def shall_rest(run: RunSnapshot) -> bool:
    """Return whether the run must not have pods, independent of its queue: its user suspends it, or its budget is spent."""
    return is_suspended_by_user(run) or gpu_time.is_spent(run)


def is_suspended_by_user(run: RunSnapshot) -> bool:
    """Return whether `spec.suspend` is true; the rest of the specification may be invalid."""
    return (run.observed.run.get("spec") or {}).get("suspend") is True


def is_evicted(run: RunSnapshot) -> bool:
    """Return whether the queue's answer requires the run to release its resources (`Admission.stops`). The run is then suspended.

    `Admission.lapsed` is another state: the run has no pods, and only its recorded admission has ended.
    """
    answer = run.observed.admission
    return answer is not None and answer.stops


def admission_message(run: RunSnapshot) -> str:
    """Return the message of the queue's answer; empty without a queue.

    If the queue took the resources back (Released or Evicted) while the run's pods were not scheduled, the message also contains the
    obstacle from the condition Scheduled. The next attempt will meet the same obstacle, but its own condition does not show it in the
    first seconds.
    """
    answer, scheduled = run.observed.admission, find_condition(run.past.conditions, reasons.SCHEDULED)
    if answer is None:
        return ""
    unexplained = scheduled is None or scheduled.status != "False" or scheduled.reason in _NO_OBSTACLE_REASONS
    if unexplained or answer.reason not in (reasons.RELEASED, reasons.EVICTED):
        return answer.message
    assert scheduled is not None
    return f"{answer.message} ({scheduled.reason}: {scheduled.message})"


def pending_admission_condition(run: RunSnapshot) -> ConditionUpdate | None:
    """Return the condition Admitted for a run whose next attempt has to wait until the condition is recorded.

    Returns None if a valid admission is recorded, or if the run has no queue. An answer with `lapsed` makes a recorded admission invalid.
    """
    answer = run.observed.admission
    if answer is None or (is_true(run.past.conditions, reasons.ADMITTED) and not answer.lapsed):
        return None
    return _report_answer(run)


def explain_conflict(run: RunSnapshot, spec: RLRunSpec, attempt: int) -> str:
    """Return the contradictions between the run's pods and the admission's additions to them (`Admission.placed`); empty if they agree.

    `Admission.conflict` contains contradictions between the additions themselves.
    """
    answer = run.observed.admission
    # The additions are applied when an attempt creates its workloads, so an existing attempt is not checked.
    if answer is None or not answer.admitted or run.attempt >= attempt:
        return ""
    return answer.conflict or (render.queue_conflicts(run.context(spec, attempt)) if answer.placed else "")


def with_admission_condition(
    run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None]
) -> Mapping[str, ConditionUpdate | None]:
    """Return `updates` with the condition Admitted."""
    past = run.past.conditions
    if run.observed.admission is None:
        return updates if find_condition(past, reasons.ADMITTED) is None else {**updates, reasons.ADMITTED: None}
    # Pair of status and reason. The type of the condition and its reason after the last pod are the same word, "Suspended".
    suspended = _status_and_reason(run, updates, reasons.SUSPENDED)
    if any(_status_and_reason(run, updates, kind)[0] == "True" for kind in (reasons.COMPLETE, reasons.FAILED)):
        update = ConditionUpdate("False", reasons.RUN_OVER, "the run has ended")
    elif suspended == ("True", reasons.SUSPENDED) and shall_rest(run):
        update = ConditionUpdate("False", reasons.NOT_QUEUED, "a suspended run does not wait in the queue")
    elif suspended == ("False", reasons.SUSPENDING):
        before = find_condition(past, reasons.ADMITTED)
        if before is not None and before.reason in reasons.QUEUE_SUSPENSION:
            return updates  # the queue's reason for the suspension stays until no pod is left
        update = (
            _report_answer(run)
            if is_evicted(run)
            else ConditionUpdate("False", reasons.NOT_QUEUED, "the run is being stopped")
        )
    else:
        update = _report_answer(run)
    return {**updates, reasons.ADMITTED: update}


def queue_status(run: RunSnapshot, conditions: Sequence[Condition]) -> QueueStatus | None:
    """Return the position in the queue; None if the run has ended, is suspended by its user or its budget, or has no queue."""
    answer, admitted = run.observed.admission, find_condition(conditions, reasons.ADMITTED)
    if answer is None or admitted is None or admitted.reason == reasons.RUN_OVER or shall_rest(run):
        return None
    # A run that is being stopped keeps the recorded time of its request, but does not get a new one.
    if admitted.reason == reasons.NOT_QUEUED and run.past.queue is None:
        return None
    # Time of the first request for resources. It survives admissions and preemptions.
    since = run.past.queue.since if run.past.queue is not None else format_rfc3339(run.now)
    waits = admitted.reason in reasons.QUEUED
    return QueueStatus(
        since=since, position=answer.position if waits else None, waiting=answer.waiting if waits else None
    )


def with_admitted_size(run: RunSnapshot, new: RLRunStatus) -> RLRunStatus:
    """Return `new` with the admitted size of an elastic trainer if the queue has just admitted the run with fewer pods than replicas.

    `Admission.room` is the number of trainer pods for which the queue has resources now.
    """
    answer, spec = run.observed.admission, run.spec
    block = spec.trainer.elastic if spec is not None else None
    if answer is None or answer.room is None or block is None or spec is None:
        return new
    # Only a new admission sets the size. Later offers of room are growths, which wait for a checkpoint
    # (`elastic_trainer`).
    replicas, is_new = spec.trainer.replicas, not is_true(run.past.conditions, reasons.ADMITTED)
    if not (is_new and answer.admitted and is_true(new.conditions, reasons.ADMITTED) and answer.room < replicas):
        return new
    update = {
        "size": answer.room,
        "reason": f"{answer.room} of {replicas} pods: the queue has room for these",
        "changed": format_rfc3339(run.now),
        "grow_time": format_rfc3339(run.now + block.grow_seconds),
    }
    return new.model_copy(update={"trainer": new.trainer.model_copy(update=update)})


def _report_answer(run: RunSnapshot) -> ConditionUpdate:
    """Return the condition Admitted that reports the queue's answer, whether the run is admitted, waits or is evicted."""
    answer = run.observed.admission
    assert answer is not None
    ahead = f"position {answer.position} of {answer.waiting}: " if answer.position is not None else ""
    return ConditionUpdate("True" if answer.admitted else "False", answer.reason, ahead + admission_message(run))


def _status_and_reason(run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None], kind: str) -> tuple[str, str]:
    """Return status and reason of a condition as they will be written."""
    if kind in updates:
        update = updates[kind]
        return (update.status, update.reason) if update is not None else ("", "")
    past = find_condition(run.past.conditions, kind)
    return (past.status, past.reason) if past is not None else ("", "")
