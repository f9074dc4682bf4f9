"""Start of a new attempt of a healthy or finished run: more steps, or a restart by hand."""

from __future__ import annotations

from dataclasses import replace

from rlrun_operator import reasons
from rlrun_operator.attempts import restarting
from rlrun_operator.case import Case
from rlrun_operator.conditions import is_true
from rlrun_operator.life import has_more_steps, restart_request
from rlrun_operator.names import RESTART_ANNOTATION
from rlrun_operator.state import Decision, EventRecord
from rlrun_operator.times import seconds_of


def revived(case: Case) -> Decision | None:
    """A run that is over begins again: Complete with more steps to train, or Failed and asked to restart, with a fresh budget."""
    if case.spec is None:
        return None
    if is_true(case.past.conditions, reasons.COMPLETE):
        return more_steps(case) if has_more_steps(case) else None
    request = restart_request(case)
    if not is_true(case.past.conditions, reasons.FAILED) or seconds_of(request) is None:
        return None
    return restarting(
        case,
        f"the run had failed and begins again, as the annotation {RESTART_ANNOTATION} asks ({request})",
        reasons.PODS_ENDING,
        wake_in=0.0,
        restarts=case.past.restarts + 1,
        restarts_counted_towards_max=0,
        restarts_without_step=0,
        counted_at_step=None,
        next_retry_time=None,
        restart_requested_at=request,
        launched_attempt=case.past.attempt,
        active_seconds=0,
    )


def more_steps(case: Case) -> Decision:
    """The attempt has trained all the steps that it was made for, and `maxSteps` has grown since."""
    message = f"maxSteps has grown from {case.past.max_steps} to {case.total_steps}: the next attempt trains the rest"
    return restarting(case, message, reasons.PODS_ENDING, wake_in=0.0, next_retry_time=None)


def asked(case: Case, *, is_restarting: bool) -> Decision | None:
    """A restart by hand, which does not count; one that is under way need not wait for the end of its backoff."""
    request = restart_request(case)
    begins = case.attempt != case.past.attempt or not case.attempt
    if begins or case.spec is None or seconds_of(request) is None:
        return None  # the attempt that begins has heard of it
    if is_restarting and case.past.next_retry_time is None:
        return None
    return restarting(
        case,
        f"attempt {case.attempt} ends, as the annotation {RESTART_ANNOTATION} asks ({request})",
        reasons.PODS_ENDING,
        wake_in=0.0,
        attempt=case.attempt,
        launched_attempt=case.attempt,
        restarts=case.past.restarts + (not is_restarting),
        next_retry_time=None,
        restart_requested_at=request,
    )


def told_of_nonsense(case: Case, decision: Decision) -> Decision:
    """Report a value of the annotation that is no time, once, and do nothing else."""
    request = restart_request(case)
    if request is None or seconds_of(request) is not None:
        return decision
    fix = "write the time of now, as `date -u +%FT%TZ` prints it"
    event = EventRecord(
        "Warning", reasons.RESTART_REQUEST_INVALID, f"{RESTART_ANNOTATION} ({request}) is no time; {fix}"
    )
    status = {**decision.status, "restartRequestedAt": request}
    return replace(decision, status=status, urgency="now", events=(*decision.events, event))
