"""Start of a new attempt on request: more steps, a manual restart, another API key, or an edit before every role has started."""

from __future__ import annotations

from dataclasses import replace

from rlrun_operator.decide.attempt_end import report_restart
from rlrun_operator.decide.lifetime import has_more_steps, restart_request, rotation_request
from rlrun_operator.decide.objects import unstarted
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import RESTART_ANNOTATION, ROTATE_ANNOTATION
from rlrun_operator.state import AT_ONCE, Decision, EventRecord
from rlrun_operator.status import reasons
from rlrun_operator.status.change import StatusChange
from rlrun_operator.status.conditions import is_true
from rlrun_operator.times import seconds_of


def revive_ended_run(run: RunSnapshot) -> Decision | None:
    """Restart an ended run: a Complete run with more steps, or a Failed run with a restart request, with a fresh budget."""
    if run.spec is None:
        return None
    if is_true(run.past.conditions, reasons.COMPLETE):
        return more_steps(run) if has_more_steps(run) else None
    request = restart_request(run)
    if not is_true(run.past.conditions, reasons.FAILED) or seconds_of(request) is None:
        return None
    return report_restart(
        run,
        f"the run had failed and restarts, as the annotation {RESTART_ANNOTATION} requests ({request})",
        reasons.PODS_ENDING,
        StatusChange(
            restarts=run.past.restarts + 1,
            restarts_counted_towards_max=0,
            restarts_without_step=0,
            counted_at_step=None,
            next_retry_time=None,
            restart_requested_at=request,
            launched_attempt=run.past.attempt,
            active_seconds=0,
        ),
        AT_ONCE,
    )


def more_steps(run: RunSnapshot) -> Decision:
    """Start an attempt for more steps: the current one has trained all its steps, and `maxSteps` was raised."""
    message = f"maxSteps has grown from {run.past.max_steps} to {run.total_steps}: the next attempt trains the rest"
    return report_restart(run, message, reasons.PODS_ENDING, StatusChange(next_retry_time=None), AT_ONCE)


def restart_by_request(run: RunSnapshot, *, is_restarting: bool) -> Decision | None:
    """Restart by request, which is not counted; during a restart the request ends the backoff.

    A request for another key also restarts the attempt. During a restart, the next attempt gets the new key.
    """
    request, rotation = restart_request(run), rotation_request(run)
    restarts = seconds_of(request) is not None
    rotates = seconds_of(rotation) is not None and not is_restarting
    begins = run.attempt != run.past.attempt or not run.attempt
    if begins or run.spec is None or not (restarts or rotates):
        return None  # the starting attempt fulfills the request
    if is_restarting and run.past.next_retry_time is None:
        return None
    asks = f"{ROTATE_ANNOTATION} requests ({rotation})" if rotates else f"{RESTART_ANNOTATION} requests ({request})"
    change = StatusChange(
        attempt=run.attempt,
        launched_attempt=run.attempt,
        restarts=run.past.restarts + (not is_restarting),
        next_retry_time=None,
    )
    if restarts:
        change |= StatusChange(restart_requested_at=request)
    if rotates:
        change |= StatusChange(key_rotation_requested_at=rotation, key_attempt=run.attempt + 1)
    message = f"attempt {run.attempt} ends, as the annotation {asks}"
    return report_restart(run, message, reasons.PODS_ENDING, change, AT_ONCE)


def restart_after_edit(run: RunSnapshot) -> Decision | None:
    """Restart an attempt whose specification was edited before each role had started; the restart does not count."""
    attempt = run.past.attempt
    if run.spec is None or run.spec_hash == run.past.spec_hash or not unstarted.unstarted_roles(run, attempt):
        return None
    message = f"attempt {attempt} is replaced: the specification was edited before all of its roles had started"
    change = StatusChange(launched_attempt=attempt, next_retry_time=None)
    return report_restart(run, message, reasons.PODS_ENDING, change, AT_ONCE)


def warn_invalid_annotation(run: RunSnapshot, decision: Decision) -> Decision:
    """Report an annotation whose value is not a time, once, and ignore it."""
    fix = "write the current time, as `date -u +%FT%TZ` prints it"
    requests = (
        (restart_request(run), RESTART_ANNOTATION, reasons.RESTART_REQUEST_INVALID, "restartRequestedAt"),
        (rotation_request(run), ROTATE_ANNOTATION, reasons.KEY_ROTATION_REQUEST_INVALID, "keyRotationRequestedAt"),
    )
    for request, annotation, reason, report in requests:
        if request is None or seconds_of(request) is not None:
            continue
        event = EventRecord("Warning", reason, f"{annotation} ({request}) is not a time; {fix}")
        status = {**decision.status, report: request}
        decision = replace(decision, status=status, urgency="now", events=(*decision.events, event))
    return decision
