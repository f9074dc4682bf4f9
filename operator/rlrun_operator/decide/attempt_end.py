"""End of an attempt: the record of its cause, and corrections of that record until its pods are gone. Pure.

The cause is recorded before pods are removed, because the removal destroys the evidence. The next pass removes the pods (`restart`).

If a process of a group or its node dies, its peers fail too, with their own errors, and Kubernetes may report a peer first. Therefore a pod
that failed by itself, or a node that does not answer, corrects the record; the restart after a lost node is not counted. Independent of the
order of the reports, the same pod is recorded in the end:

    a pod that reports a cause, before a pod that may have lost a peer, before a pod that reports a lost peer (NCCL)
    of two equal pods, the one that ended first, by the clocks of their nodes
    within one second (the resolution of Kubernetes), the trainer before the orchestrator, and then by name

A pod that was requested to end is never recorded as the cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_status import ExcludedNode, FailureRecord, RLRunStatus
from rlrun_operator.decide import status_builder
from rlrun_operator.decide.running import configuration_condition, engine_report, standing_conditions
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.decide.status_builder import finish_decision
from rlrun_operator.failures import detect, failure_policy, node_failures
from rlrun_operator.failures.detect import Cause
from rlrun_operator.names import ROLES
from rlrun_operator.pods import Pod
from rlrun_operator.render import pod_placement
from rlrun_operator.state import AT_ONCE, NO_ACTIONS, Actions, Decision
from rlrun_operator.status import failure_reasons, reasons, run_progress
from rlrun_operator.status.conditions import NO_CHANGE, ConditionUpdate, StatusChange, find_condition
from rlrun_operator.times import format_rfc3339, seconds_of

FAILURES_KEPT = 5
"""Maximum number of entries in `status.failures`."""


def record_end(run: RunSnapshot, cause: Cause) -> Decision:
    """Record why the current attempt ends and what follows; the next pass acts on the record."""
    # Without a valid specification there are no failure policy and no next attempt.
    if run.spec is None:
        told = f"attempt {run.past.attempt} ended ({detect.describe_cause(cause)}), and the specification is invalid: {run.problems}"
        return fail_run(run, reasons.INVALID_CONFIGURATION, told, failure_record(run, cause, counted=False))
    past, policy_spec = run.past, run.spec.failure_policy
    report = run_progress.read_lease(run.observed.lease, past.attempt)
    # New steps reset the budget. The steps of the last report count before this failure is judged.
    reached = run_progress.progress_after(past, report, run.total_steps, run.now)
    budget = failure_policy.budget_of(past, reached, policy_spec)
    what = failure_policy.apply_policy(cause, budget=budget, policy=policy_spec, random=run.random)
    if what.rule is not None:
        cause = replace(cause, message=f"{what.rule}: {cause.message}")
    # The record is written even if the run fails: it names the pod, its node and its exit code.
    failure = failure_record(run, cause, counted=what.counted)
    if what.fails is not None:
        return fail_run(run, *what.fails, failure)
    # The field has whole seconds. Rounded down, the attempt would start before its backoff is over.
    retry = format_rfc3339(math.ceil(run.now + what.wait_seconds)) if what.wait_seconds else None
    return report_restart(
        run,
        f"attempt {past.attempt} ended: {detect.describe_cause(cause)}",
        reasons.PODS_ENDING,
        StatusChange(
            last_failure=failure,
            failures=[*past.failures, failure][-FAILURES_KEPT:],
            restarts=past.restarts + 1,
            restarts_counted_towards_max=budget.counted + what.counted,
            counted_at_step=reached.furthest_step if what.counted else past.counted_at_step,
            restarts_without_step=budget.without_step + 1,
            excluded_nodes=_exclude_node(run, run.spec, failure) or None,
            next_retry_time=retry,
        ),
        AT_ONCE,
    )


def _exclude_node(run: RunSnapshot, spec: RLRunSpec, failure: FailureRecord) -> list[ExcludedNode]:
    """Exclude the failed node. A guest has no nodes of its own, and a volume of one node keeps its run there."""
    movable = run.host_name is None and not pod_placement.one_node(spec)
    nodes = [pod.node for pod in run.pods if pod.node is not None]
    return node_failures.exclusions_after(run.past, failure, nodes, movable=movable, now=run.now)


def ends_run(run: RunSnapshot, cause: Cause, spec: RLRunSpec) -> bool:
    """Return whether the failure policy would fail the run for `cause`."""
    budget = failure_policy.budget_of(run.past, run.past.progress, spec.failure_policy)
    what = failure_policy.apply_policy(cause, budget=budget, policy=spec.failure_policy, random=run.random)
    return what.fails is not None


def give_up(run: RunSnapshot, cause: Cause) -> Decision:
    """Fail a hanging run, as its specification demands."""
    return fail_run(run, cause.reason, detect.describe_cause(cause), failure_record(run, cause, counted=False))


def fail_run(
    run: RunSnapshot, reason: str, message: str, failure: FailureRecord | None = None, *, corrects: bool = False
) -> Decision:
    """Fail the run; the next pass frees its GPUs.

    Args:
        run: snapshot of the run.
        reason: reason of the condition Failed.
        message: message of the condition Failed.
        failure: record of the failure, or None.
        corrects: whether `failure` replaces the last record.
    """
    past, attempt = run.past, run.past.attempt
    report = run_progress.read_lease(run.observed.lease, attempt)
    updates = {
        reasons.FAILED: ConditionUpdate("True", reason, message),
        reasons.CONFIGURATION_VALID: configuration_condition(run, pending=False),
        reasons.RESTARTING: ConditionUpdate("False", reasons.NOT_RESTARTING, "the run has failed"),
        **run_over(run, "the run has failed"),
    }
    change = StatusChange(completion_time=format_rfc3339(run.now), next_retry_time=None)
    change |= run_progress.measured_fields(past, report, run.total_steps, run.now)
    if failure is not None:
        # A correction replaces the entry of the same end, so that one failure is not listed twice.
        before = past.failures[:-1] if corrects else past.failures
        change |= StatusChange(last_failure=failure, failures=[*before, failure][-FAILURES_KEPT:])
    return finish_decision(run, updates, change, AT_ONCE)


def run_over(run: RunSnapshot, message: str) -> dict[str, ConditionUpdate]:
    """Return the conditions of an ended run."""
    engines = (reasons.INFERENCE_AVAILABLE,) if run.has_own_engines else ()
    host = (reasons.HOST_AVAILABLE,) if run.host_name is not None else ()
    waits = _end_waits(run, reasons.SCHEDULED, reasons.CHILDREN_INTACT)
    kinds = (reasons.PODS_READY, *engines, *host, *waits, reasons.PROGRESSING)
    return {kind: ConditionUpdate("False", reasons.RUN_OVER, message) for kind in kinds}


def _end_waits(run: RunSnapshot, *kinds: str) -> list[str]:
    """Return conditions of `kinds` that end the waits of the ended attempt: its pods no longer wait."""
    past = {kind: find_condition(run.past.conditions, kind) for kind in kinds}
    return [kind for kind, known in past.items() if known is not None and known.status != "True"]


def report_restart(
    run: RunSnapshot, message: str, reason: str, change: StatusChange = NO_CHANGE, actions: Actions = NO_ACTIONS
) -> Decision:
    """Return the decision that reports a restart with its reason; `change`: further fields of the status."""
    attempt = run.past.attempt
    report = run_progress.read_lease(run.observed.lease, attempt)
    updates: dict[str, ConditionUpdate | None] = {
        reasons.RESTARTING: ConditionUpdate("True", reason, message),
        reasons.PODS_READY: ConditionUpdate("False", reasons.PODS_ENDING, "the ended attempt's pods are being removed"),
        **dict.fromkeys(
            (*_end_waits(run, reasons.SCHEDULED), reasons.PROGRESSING),
            ConditionUpdate("False", reasons.RESTARTING, "the run restarts"),
        ),
        reasons.COMPLETE: None,  # a run that only served its guests is completed again later
        **engine_report(run, attempt),
        **standing_conditions(run, pending=True),
    }
    fields = StatusChange(attempt=attempt, completion_time=None)
    fields |= status_builder.role_status(run, attempt, report)
    fields |= run_progress.measured_fields(run.past, report, run.total_steps, run.now)
    return finish_decision(run, updates, fields | change, actions)


def status_before_attempt(run: RunSnapshot) -> RLRunStatus:
    """Return the previous status. If the start of the newest attempt is not recorded, the start of the one before is removed."""
    if run.attempt == run.past.attempt:
        return run.past
    return StatusChange(checkpoint=run_progress.unresumed_checkpoint(run.past.checkpoint)).applied_to(run.past)


def failure_record(run: RunSnapshot, cause: Cause, *, counted: bool) -> FailureRecord:
    """Return the record of the end of the current attempt."""
    # The Lease may report a later step than the status, whose progress is written at intervals.
    report = run_progress.read_lease(run.observed.lease, run.past.attempt)
    step = report.step if report is not None and report.step is not None else run.past.progress.step
    return FailureRecord(
        time=format_rfc3339(cause.at if cause.at is not None else run.now),
        attempt=run.past.attempt,
        role=cause.role,
        pod_name=cause.pod,
        node_name=cause.node,
        exit_code=cause.exit_code,
        reason=cause.reason,
        message=cause.message,
        counted=counted,
        step=step,
    )


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
    # A node that does not answer comes first, because only it takes the count back. The peer that reported an
    # error stays in the message.
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
    # Both sides are compared by the order of this module's docstring, so that any order of the reports leads
    # to the same record.
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
    # Only a strictly earlier end replaces the record: the correction is made again in every pass.
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
        time=format_rfc3339(cause.at) if cause.at is not None else known.time,
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
