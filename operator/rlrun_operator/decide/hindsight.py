"""Late correction of the recorded cause of an attempt's end. Pure.

If a process of a group or its node dies, its peers fail too, with their own errors, and Kubernetes may report a peer first. Therefore the
record is corrected until the attempt's pods are gone: by a pod that failed by itself, and by a node that does not answer, whose restart is
not counted. Independent of the order of the reports, the same pod is recorded in the end:

    a pod that reports a cause, before a pod that may have lost a peer, before a pod that reports a lost peer (NCCL)
    of two equal pods, the one that ended first, by the clocks of their nodes
    within one second (the resolution of Kubernetes), the trainer before the orchestrator, and then by name

A pod that was requested to end is never recorded as the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.api.status import FailureRecord
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.failures import detect
from rlrun_operator.failures.detect import Cause
from rlrun_operator.names import ROLES
from rlrun_operator.pods import Pod
from rlrun_operator.status import failure_reasons
from rlrun_operator.status.change import NO_CHANGE, StatusChange
from rlrun_operator.times import rfc3339, seconds_of

AFTERMATH = frozenset({failure_reasons.EXIT_CODE, failure_reasons.NCCL_ERROR})
"""Reasons of processes that may have ended because of a lost peer."""
TERMINATED = 128 + 15
"""Exit code of a process that was ended by SIGTERM."""
AFTERMATH_SECONDS = 10.0
"""Maximum time by which the first failed pod may seem to end later than the recorded one: clocks of nodes and time-outs differ."""


def correct_record(run: RunSnapshot, silent: Sequence[Pod]) -> StatusChange:
    """Return the correction of the record of the current attempt's end, or no change.

    Args:
        run: snapshot of a run that restarts.
        silent: pods of the ended attempt on nodes that do not answer.
    """
    known = run.past.last_failure
    if known is None or known.attempt != run.past.attempt or known.reason not in AFTERMATH:
        return NO_CHANGE
    lost = next((pod for pod in silent if pod.name != known.pod_name and pod.attempt == known.attempt), None)
    if lost is not None and known.counted:
        told = f"the node does not answer, so that {known.role} pod {known.pod_name} failed: {known.message}"
        found = _corrected_record(known, _disruption_cause(lost, failure_reasons.NODE_LOST, told), counted=False)
        uncounted = StatusChange(restarts_counted_towards_max=run.past.restarts_counted_towards_max - 1)
        return uncounted | _kept_record(run, found)
    first = _first_failure(run, known)
    return NO_CHANGE if first is None else _kept_record(run, _corrected_record(known, first, counted=known.counted))


def ends_for_good(run: RunSnapshot) -> Cause | None:
    """Return a permanent failure of another pod of the attempt that precedes the recorded one, or None.

    A later one may be a consequence of a lost peer; the next attempt shows whether it is.
    """
    known = run.past.last_failure
    if known is None or known.attempt != run.past.attempt or known.reason not in AFTERMATH:
        return None
    first = _first_failure(run, known)
    return first if first is not None and first.kind == "permanent" else None


def _first_failure(run: RunSnapshot, known: FailureRecord) -> Cause | None:
    """Return the end of another pod of the attempt that explains the recorded one, or None."""
    at = seconds_of(known.time) or run.now
    recorded = (detect.echo_of(known.reason), at, ROLES.index(known.role), known.pod_name)
    ends = [
        _own_failure(pod)
        for pod in (*run.group, *run.gone)
        if pod.attempt == known.attempt and pod.name != known.pod_name
    ]
    found = {
        (detect.echo_of(end.reason), end.at, ROLES.index(end.role), end.pod): end
        for end in ends
        if end is not None and end.at is not None and end.at <= at + (AFTERMATH_SECONDS if end.kind == "failure" else 0)
    }
    first = min(found, default=recorded)
    return found[first] if first < recorded else None


def _own_failure(pod: Pod) -> Cause | None:
    """Return the failure of a pod by itself, or None. A terminating pod that ended by SIGTERM did not fail, even if clocks say that it
    ended before the request."""
    end = detect.end_of(pod)
    return None if end is not None and pod.deleted_at is not None and end.exit_code == TERMINATED else end


def _disruption_cause(pod: Pod, reason: str, message: str) -> Cause:
    return Cause("disruption", pod.deleted_at, pod.role, pod.name, pod.node, None, reason, message)


def _corrected_record(known: FailureRecord, cause: Cause, *, counted: bool) -> FailureRecord:
    return FailureRecord(
        time=rfc3339(cause.at) if cause.at is not None else known.time,
        attempt=known.attempt,
        role=cause.role,
        pod_name=cause.pod,
        node_name=cause.node,
        exit_code=cause.exit_code,
        reason=cause.reason,
        message=cause.message,
        counted=counted,
        step=known.step,
    )


def _kept_record(run: RunSnapshot, found: FailureRecord) -> StatusChange:
    return StatusChange(last_failure=found, failures=[*run.past.failures[:-1], found])
