"""Record of the end of attempts. The cause is recorded before pods are removed, because the removal destroys the evidence.

The next pass removes the pods (`restart`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlrun.api.resource import RLRunSpec
from rlrun.api.status import ExcludedNode, FailureRecord, RLRunStatus
from rlrun_operator.decide import status_builder
from rlrun_operator.decide.running import configuration_condition, engine_report, standing_conditions
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.decide.status_builder import finish_decision
from rlrun_operator.failures import detect, node_exclusion, policy
from rlrun_operator.failures.detect import Cause
from rlrun_operator.render import placement
from rlrun_operator.state import AT_ONCE, NO_ACTIONS, Actions, Decision
from rlrun_operator.status import progress, reasons
from rlrun_operator.status.change import NO_CHANGE, StatusChange
from rlrun_operator.status.conditions import ConditionUpdate, find_condition
from rlrun_operator.times import rfc3339

FAILURES_KEPT = 5
"""Maximum number of entries in `status.failures`."""


def record_end(run: RunSnapshot, cause: Cause) -> Decision:
    """Record why the current attempt ends and what follows; the next pass acts on the record."""
    if run.spec is None:
        told = f"attempt {run.past.attempt} ended ({detect.describe_cause(cause)}), and the specification is invalid: {run.problems}"
        return fail_run(run, reasons.INVALID_CONFIGURATION, told, failure_record(run, cause, counted=False))
    past, policy_spec = run.past, run.spec.failure_policy
    report = progress.read_lease(run.observed.lease, past.attempt)
    reached = progress.progress_after(past, report, run.total_steps, run.now)
    budget = policy.budget_of(past, reached, policy_spec)
    what = policy.apply_policy(cause, budget=budget, policy=policy_spec, random=run.random)
    if what.rule is not None:
        cause = replace(cause, message=f"{what.rule}: {cause.message}")
    failure = failure_record(run, cause, counted=what.counted)
    if what.fails is not None:
        return fail_run(run, *what.fails, failure)
    retry = rfc3339(math.ceil(run.now + what.wait_seconds)) if what.wait_seconds else None
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
    movable = run.host_name is None and not placement.one_node(spec)
    nodes = [pod.node for pod in run.pods if pod.node is not None]
    return node_exclusion.exclusions_after(run.past, failure, nodes, movable=movable, now=run.now)


def ends_run(run: RunSnapshot, cause: Cause, spec: RLRunSpec) -> bool:
    """Return whether the failure policy would fail the run for `cause`."""
    budget = policy.budget_of(run.past, run.past.progress, spec.failure_policy)
    what = policy.apply_policy(cause, budget=budget, policy=spec.failure_policy, random=run.random)
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
    report = progress.read_lease(run.observed.lease, attempt)
    updates = {
        reasons.FAILED: ConditionUpdate("True", reason, message),
        reasons.CONFIGURATION_VALID: configuration_condition(run, pending=False),
        reasons.RESTARTING: ConditionUpdate("False", reasons.NOT_RESTARTING, "the run has failed"),
        **run_over(run, "the run has failed"),
    }
    change = StatusChange(completion_time=rfc3339(run.now), next_retry_time=None)
    change |= progress.measured_fields(past, report, run.total_steps, run.now)
    if failure is not None:
        before = past.failures[:-1] if corrects else past.failures
        change |= StatusChange(last_failure=failure, failures=[*before, failure][-FAILURES_KEPT:])
    return finish_decision(run, updates, change, AT_ONCE)


def run_over(run: RunSnapshot, message: str) -> dict[str, ConditionUpdate]:
    """Return the conditions of an ended run."""
    engines = (reasons.INFERENCE_AVAILABLE,) if run.serves else ()
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
    report = progress.read_lease(run.observed.lease, attempt)
    updates: dict[str, ConditionUpdate | None] = {
        reasons.RESTARTING: ConditionUpdate("True", reason, message),
        reasons.PODS_READY: ConditionUpdate("False", reasons.PODS_ENDING, "the ended attempt's pods are being removed"),
        **dict.fromkeys(
            (*_end_waits(run, reasons.SCHEDULED), reasons.PROGRESSING),
            ConditionUpdate("False", reasons.RESTARTING, "the run restarts"),
        ),
        reasons.COMPLETE: None,  # a run that had only stayed for its guests passes through its end again
        **engine_report(run, attempt),
        **standing_conditions(run, pending=True),
    }
    fields = StatusChange(attempt=attempt, completion_time=None)
    fields |= status_builder.role_status(run, attempt, report)
    fields |= progress.measured_fields(run.past, report, run.total_steps, run.now)
    return finish_decision(run, updates, fields | change, actions)


def status_before_attempt(run: RunSnapshot) -> RLRunStatus:
    """Return the previous status. If the start of the newest attempt is not recorded, the start of the one before is removed."""
    if run.attempt == run.past.attempt:
        return run.past
    return StatusChange(checkpoint=progress.unresumed_checkpoint(run.past.checkpoint)).applied_to(run.past)


def failure_record(run: RunSnapshot, cause: Cause, *, counted: bool) -> FailureRecord:
    """Return the record of the end of the current attempt."""
    report = progress.read_lease(run.observed.lease, run.past.attempt)
    step = report.step if report is not None and report.step is not None else run.past.progress.step
    return FailureRecord(
        time=rfc3339(cause.at if cause.at is not None else run.now),
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
