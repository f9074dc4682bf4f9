"""End of attempts, as it is put on record: the cause comes before anything is removed, because removing the pods destroys the evidence.

What is removed is up to the next pass (`restart`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlrun.api.resource import RLRunSpec
from rlrun.api.status import ExcludedNode, FailureRecord, RLRunStatus
from rlrun_operator.decide import status_builder
from rlrun_operator.decide.running import configuration, of_inference, standing
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.decide.status_builder import finish
from rlrun_operator.failures import detect, node_exclusion, policy
from rlrun_operator.failures.detect import Cause
from rlrun_operator.render import placement
from rlrun_operator.state import AT_ONCE, NO_ACTIONS, Actions, Decision
from rlrun_operator.status import progress, reasons
from rlrun_operator.status.change import NO_CHANGE, StatusChange
from rlrun_operator.status.conditions import Say, find
from rlrun_operator.times import rfc3339

FAILURES_KEPT = 5
"""Most entries of `status.failures`."""


def record(case: Case, cause: Cause) -> Decision:
    """Put on record why the current attempt ends, and what follows; the next pass acts."""
    if case.spec is None:
        told = f"attempt {case.past.attempt} ended ({detect.told_of(cause)}), and the specification is invalid: {case.problems}"
        return fail(case, reasons.INVALID_CONFIGURATION, told, failure_record(case, cause, counted=False))
    past, policy_spec = case.past, case.spec.failure_policy
    heard = progress.read_lease(case.observed.lease, past.attempt)
    reached = progress.progressed(past, heard, case.total_steps, case.now)
    budget = policy.budget_of(past, reached, policy_spec)
    what = policy.verdict(cause, budget=budget, policy=policy_spec, random=case.random)
    if what.rule is not None:
        cause = replace(cause, message=f"{what.rule}: {cause.message}")
    failure = failure_record(case, cause, counted=what.counted)
    if what.fails is not None:
        return fail(case, *what.fails, failure)
    retry = rfc3339(math.ceil(case.now + what.wait_seconds)) if what.wait_seconds else None
    return restarting(
        case,
        f"attempt {past.attempt} ended: {detect.told_of(cause)}",
        reasons.PODS_ENDING,
        StatusChange(
            last_failure=failure,
            failures=[*past.failures, failure][-FAILURES_KEPT:],
            restarts=past.restarts + 1,
            restarts_counted_towards_max=budget.counted + what.counted,
            counted_at_step=reached.furthest_step if what.counted else past.counted_at_step,
            restarts_without_step=budget.without_step + 1,
            excluded_nodes=_excluded(case, case.spec, failure) or None,
            next_retry_time=retry,
        ),
        AT_ONCE,
    )


def _excluded(case: Case, spec: RLRunSpec, failure: FailureRecord) -> list[ExcludedNode]:
    """A guest has no node of its own to leave, and a volume of one node holds its run there."""
    movable = case.host_name is None and not placement.one_node(spec)
    nodes = [pod.node for pod in case.pods if pod.node is not None]
    return node_exclusion.after(case.past, failure, nodes, movable=movable, now=case.now)


def ends_run(case: Case, cause: Cause, spec: RLRunSpec) -> bool:
    """True if the failure policy would fail the run for `cause`."""
    budget = policy.budget_of(case.past, case.past.progress, spec.failure_policy)
    what = policy.verdict(cause, budget=budget, policy=spec.failure_policy, random=case.random)
    return what.fails is not None


def give_up(case: Case, cause: Cause) -> Decision:
    """End a hanging run for good, because its specification asks for it."""
    return fail(case, cause.reason, detect.told_of(cause), failure_record(case, cause, counted=False))


def fail(
    case: Case, reason: str, message: str, failure: FailureRecord | None = None, *, corrects: bool = False
) -> Decision:
    """End the run for good; the next pass frees its GPUs.

    Args:
        failure: to put on record.
        corrects: whether it takes the place of the last one.
    """
    past, attempt = case.past, case.past.attempt
    heard = progress.read_lease(case.observed.lease, attempt)
    said = {
        reasons.FAILED: Say("True", reason, message),
        reasons.CONFIGURATION_VALID: configuration(case, pending=False),
        reasons.RESTARTING: Say("False", reasons.NOT_RESTARTING, "the run has failed"),
        **run_over(case, "the run has failed"),
    }
    change = StatusChange(completion_time=rfc3339(case.now), next_retry_time=None)
    change |= progress.measured(past, heard, case.total_steps, case.now)
    if failure is not None:
        before = past.failures[:-1] if corrects else past.failures
        change |= StatusChange(last_failure=failure, failures=[*before, failure][-FAILURES_KEPT:])
    return finish(case, said, change, AT_ONCE)


def run_over(case: Case, message: str) -> dict[str, Say]:
    """Conditions of a run that has ended."""
    engines = (reasons.INFERENCE_AVAILABLE,) if case.serves else ()
    host = (reasons.HOST_AVAILABLE,) if case.host_name is not None else ()
    waits = _waits(case, reasons.SCHEDULED, reasons.CHILDREN_INTACT)
    kinds = (reasons.PODS_READY, *engines, *host, *waits, reasons.PROGRESSING)
    return {kind: Say("False", reasons.RUN_OVER, message) for kind in kinds}


def _waits(case: Case, *kinds: str) -> list[str]:
    """Conditions of `kinds` that name what the ended attempt waited for: with its pods that wait is over."""
    past = {kind: find(case.past.conditions, kind) for kind in kinds}
    return [kind for kind, known in past.items() if known is not None and known.status != "True"]


def restarting(
    case: Case, message: str, reason: str, change: StatusChange = NO_CHANGE, actions: Actions = NO_ACTIONS
) -> Decision:
    """Say that the run restarts, and why; `change`: more fields of the status."""
    attempt = case.past.attempt
    heard = progress.read_lease(case.observed.lease, attempt)
    said: dict[str, Say | None] = {
        reasons.RESTARTING: Say("True", reason, message),
        reasons.PODS_READY: Say("False", reasons.PODS_ENDING, "the ended attempt's pods are being removed"),
        **dict.fromkeys(
            (*_waits(case, reasons.SCHEDULED), reasons.PROGRESSING),
            Say("False", reasons.RESTARTING, "the run restarts"),
        ),
        reasons.COMPLETE: None,  # a run that had stayed for its guests alone goes through its end once more
        **of_inference(case, attempt),
        **standing(case, pending=True),
    }
    fields = StatusChange(attempt=attempt, completion_time=None)
    fields |= status_builder.roles(case, attempt, heard)
    fields |= progress.measured(case.past, heard, case.total_steps, case.now)
    return finish(case, said, fields | change, actions)


def begun(case: Case) -> RLRunStatus:
    """The status before, without where the attempt before began, should the newest one's beginning not be on record."""
    if case.attempt == case.past.attempt:
        return case.past
    return StatusChange(checkpoint=progress.unresumed(case.past.checkpoint)).applied_to(case.past)


def failure_record(case: Case, cause: Cause, *, counted: bool) -> FailureRecord:
    """Record of the current attempt's end."""
    heard = progress.read_lease(case.observed.lease, case.past.attempt)
    step = heard.step if heard is not None and heard.step is not None else case.past.progress.step
    return FailureRecord(
        time=rfc3339(cause.at if cause.at is not None else case.now),
        attempt=case.past.attempt,
        role=cause.role,
        pod_name=cause.pod,
        node_name=cause.node,
        exit_code=cause.exit_code,
        reason=cause.reason,
        message=cause.message,
        counted=counted,
        step=step,
    )
