"""Lifetime of a run: deadline, cleanup, more steps, and requests for a restart or a new key. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlrun.api.lifecycle import CleanupPolicySpec
from rlrun.api.run_status import Condition, RLRunStatus
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import RESTART_ANNOTATION, ROTATE_ANNOTATION
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import StatusChange, is_true
from rlrun_operator.times import format_rfc3339, seconds_of

Cleanup = Literal["GPU", "All", "None"]


def count_active_time(past: RLRunStatus, conditions: Sequence[Condition], attempt: int, now: float) -> StatusChange:
    """Return `activeSince` and `activeSeconds`: the clock starts with the first attempt and stops while the run is suspended or over."""
    stopped = any(is_true(conditions, kind) for kind in (reasons.SUSPENDED, reasons.COMPLETE, reasons.FAILED))
    # The time is added when the clock stops. While it runs, only its start is recorded, so that the status
    # does not change with each second.
    since = seconds_of(past.active_since)
    if stopped or not attempt:
        spent = max(0, int(now - since)) if since is not None else 0
        return StatusChange(active_since=None, active_seconds=past.active_seconds + spent)
    return StatusChange(active_since=past.active_since or format_rfc3339(now))


def seconds_left(run: RunSnapshot) -> float | None:
    """Return the seconds until `activeDeadlineSeconds`; None without a deadline, or while the clock is stopped."""
    since, limit = seconds_of(run.past.active_since), _live_number(run, "activeDeadlineSeconds")
    if since is None or limit is None:
        return None
    return limit - run.past.active_seconds - (run.now - since)


def deadline_message(run: RunSnapshot) -> str:
    """Return the message of Failed with reason DeadlineExceeded."""
    limit = _live_number(run, "activeDeadlineSeconds")
    fix = f"the annotation {RESTART_ANNOTATION} with the current time continues it from its last checkpoint, with the same time again"
    return f"the run was active for activeDeadlineSeconds ({limit}); it saves and ends; {fix}"


def effective_cleanup(run: RunSnapshot) -> Cleanup:
    """Return the cleanup policy of an ended run: its own until `ttlSecondsAfterFinished`, then only the volume stays."""
    # The time to live overrides the policy, also the policy None.
    left = seconds_to_live(run)
    if left is not None and left <= 0:
        return "All"
    policy = run.judgement.spec.cleanup_policy if run.judgement.spec is not None else CleanupPolicySpec()
    if not is_true(run.past.conditions, reasons.FAILED):
        return policy.on_complete
    stops = is_true_with(run, reasons.FAILED, reasons.DEADLINE_EXCEEDED)
    return "GPU" if stops and policy.on_failure == "None" else policy.on_failure


def seconds_to_live(run: RunSnapshot) -> float | None:
    """Return the seconds until the children of an ended run are deleted; None if they stay."""
    ended, ttl = seconds_of(run.past.completion_time), _live_number(run, "ttlSecondsAfterFinished")
    return None if ended is None or ttl is None else ended + ttl - run.now


def has_more_steps(run: RunSnapshot) -> bool:
    """Return whether `maxSteps` is larger than the current attempt's."""
    return (
        run.is_training_run
        and run.spec is not None
        and run.past.max_steps is not None
        and run.spec.max_steps > run.past.max_steps
    )


def restart_request(run: RunSnapshot) -> str | None:
    """Return the value of a pending restart annotation, or None."""
    return _requested_time(run, RESTART_ANNOTATION, run.past.restart_requested_at)


def rotation_request(run: RunSnapshot) -> str | None:
    """Return the value of a pending annotation for a new API key, or None."""
    return _requested_time(run, ROTATE_ANNOTATION, run.past.key_rotation_requested_at)


def _requested_time(run: RunSnapshot, annotation: str, known: str | None) -> str | None:
    value = (run.metadata.get("annotations") or {}).get(annotation)
    return str(value)[:64] if value and str(value)[:64] != known else None


def is_true_with(run: RunSnapshot, kind: str, reason: str) -> bool:
    """Return whether a condition is true with this reason."""
    return any(c.type == kind and c.status == "True" and c.reason == reason for c in run.past.conditions)


def _live_number(run: RunSnapshot, name: str) -> int | None:
    """Return a live field as written: the rest of the specification may be invalid."""
    value = (run.observed.run.get("spec") or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
