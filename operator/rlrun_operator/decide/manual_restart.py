"""Start of a new attempt on request: more steps, a restart by hand, another API key, or an edit before every role has started."""

from __future__ import annotations

from dataclasses import replace

from rlrun_operator.decide.attempt_end import restarting
from rlrun_operator.decide.lifetime import has_more_steps, restart_request, rotation_request
from rlrun_operator.decide.objects import unstarted
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.names import RESTART_ANNOTATION, ROTATE_ANNOTATION
from rlrun_operator.state import AT_ONCE, Decision, EventRecord
from rlrun_operator.status import reasons
from rlrun_operator.status.change import StatusChange
from rlrun_operator.status.conditions import is_true
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
        StatusChange(
            restarts=case.past.restarts + 1,
            restarts_counted_towards_max=0,
            restarts_without_step=0,
            counted_at_step=None,
            next_retry_time=None,
            restart_requested_at=request,
            launched_attempt=case.past.attempt,
            active_seconds=0,
        ),
        AT_ONCE,
    )


def more_steps(case: Case) -> Decision:
    """The attempt has trained all the steps that it was made for, and `maxSteps` has grown since."""
    message = f"maxSteps has grown from {case.past.max_steps} to {case.total_steps}: the next attempt trains the rest"
    return restarting(case, message, reasons.PODS_ENDING, StatusChange(next_retry_time=None), AT_ONCE)


def asked(case: Case, *, is_restarting: bool) -> Decision | None:
    """A restart by hand, which does not count; one that is under way need not wait for the end of its backoff.

    So does another key. Where a restart is under way anyway, the attempt that begins has it.
    """
    request, rotation = restart_request(case), rotation_request(case)
    restarts = seconds_of(request) is not None
    rotates = seconds_of(rotation) is not None and not is_restarting
    begins = case.attempt != case.past.attempt or not case.attempt
    if begins or case.spec is None or not (restarts or rotates):
        return None  # the attempt that begins has heard of it
    if is_restarting and case.past.next_retry_time is None:
        return None
    asks = f"{ROTATE_ANNOTATION} asks ({rotation})" if rotates else f"{RESTART_ANNOTATION} asks ({request})"
    change = StatusChange(
        attempt=case.attempt,
        launched_attempt=case.attempt,
        restarts=case.past.restarts + (not is_restarting),
        next_retry_time=None,
    )
    if restarts:
        change |= StatusChange(restart_requested_at=request)
    if rotates:
        change |= StatusChange(key_rotation_requested_at=rotation, key_attempt=case.attempt + 1)
    message = f"attempt {case.attempt} ends, as the annotation {asks}"
    return restarting(case, message, reasons.PODS_ENDING, change, AT_ONCE)


def renewed(case: Case) -> Decision | None:
    """Restart of an attempt whose specification was edited before every role had started; it does not count."""
    attempt = case.past.attempt
    if case.spec is None or case.spec_hash == case.past.spec_hash or not unstarted.remaining(case, attempt):
        return None
    message = f"attempt {attempt} is made again: the specification was edited before all of its roles had started"
    change = StatusChange(launched_attempt=attempt, next_retry_time=None)
    return restarting(case, message, reasons.PODS_ENDING, change, AT_ONCE)


def told_of_nonsense(case: Case, decision: Decision) -> Decision:
    """Report a value of an annotation that is no time, once, and do nothing else."""
    fix = "write the time of now, as `date -u +%FT%TZ` prints it"
    requests = (
        (restart_request(case), RESTART_ANNOTATION, reasons.RESTART_REQUEST_INVALID, "restartRequestedAt"),
        (rotation_request(case), ROTATE_ANNOTATION, reasons.KEY_ROTATION_REQUEST_INVALID, "keyRotationRequestedAt"),
    )
    for request, annotation, reason, heard in requests:
        if request is None or seconds_of(request) is not None:
            continue
        event = EventRecord("Warning", reason, f"{annotation} ({request}) is no time; {fix}")
        status = {**decision.status, heard: request}
        decision = replace(decision, status=status, urgency="now", events=(*decision.events, event))
    return decision
