"""Lifetime of a run: deadline, cleanup, more steps, a restart by hand. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlrun.api.lifecycle import CleanupPolicySpec
from rlrun.api.status import Condition, RLRunStatus
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.names import RESTART_ANNOTATION, ROTATE_ANNOTATION
from rlrun_operator.status import reasons
from rlrun_operator.status.change import StatusChange
from rlrun_operator.status.conditions import is_true
from rlrun_operator.times import rfc3339, seconds_of

Cleanup = Literal["GPU", "All", "None"]


def active(past: RLRunStatus, conditions: Sequence[Condition], attempt: int, now: float) -> StatusChange:
    """`activeSince` and `activeSeconds`: the clock runs from the first attempt on, except while the run is suspended or over."""
    stopped = any(is_true(conditions, kind) for kind in (reasons.SUSPENDED, reasons.COMPLETE, reasons.FAILED))
    since = seconds_of(past.active_since)
    if stopped or not attempt:
        spent = max(0, int(now - since)) if since is not None else 0
        return StatusChange(active_since=None, active_seconds=past.active_seconds + spent)
    return StatusChange(active_since=past.active_since or rfc3339(now))


def seconds_left(case: Case) -> float | None:
    """Seconds until `activeDeadlineSeconds` is over; None: there is none, or the clock stands still."""
    since, limit = seconds_of(case.past.active_since), _number(case, "activeDeadlineSeconds")
    if since is None or limit is None:
        return None
    return limit - case.past.active_seconds - (case.now - since)


def deadline_message(case: Case) -> str:
    """Message of Failed with reason DeadlineExceeded."""
    limit = _number(case, "activeDeadlineSeconds")
    fix = f"the annotation {RESTART_ANNOTATION} with the time of now lets it go on from its last checkpoint, with as much time again"
    return f"the run was active for activeDeadlineSeconds ({limit}); it saves and ends; {fix}"


def cleanup(case: Case) -> Cleanup:
    """Remainder of a run that is over: the policy until `ttlSecondsAfterFinished` is over, then nothing but the volume."""
    left = seconds_to_live(case)
    if left is not None and left <= 0:
        return "All"
    policy = case.judgement.spec.cleanup_policy if case.judgement.spec is not None else CleanupPolicySpec()
    if not is_true(case.past.conditions, reasons.FAILED):
        return policy.on_complete
    stops = is_true_with(case, reasons.FAILED, reasons.DEADLINE_EXCEEDED)
    return "GPU" if stops and policy.on_failure == "None" else policy.on_failure


def seconds_to_live(case: Case) -> float | None:
    """Seconds until the children of a run that is over are deleted; None: they stay."""
    ended, ttl = seconds_of(case.past.completion_time), _number(case, "ttlSecondsAfterFinished")
    return None if ended is None or ttl is None else ended + ttl - case.now


def has_more_steps(case: Case) -> bool:
    """True if `maxSteps` has grown beyond what the current attempt was made with."""
    return (
        case.trains
        and case.spec is not None
        and case.past.max_steps is not None
        and case.spec.max_steps > case.past.max_steps
    )


def restart_request(case: Case) -> str | None:
    """The value of the annotation that asks for a restart, where it was not acted on yet."""
    return _request(case, RESTART_ANNOTATION, case.past.restart_requested_at)


def rotation_request(case: Case) -> str | None:
    """The value of the annotation that asks for another API key, where it was not acted on yet."""
    return _request(case, ROTATE_ANNOTATION, case.past.key_rotation_requested_at)


def _request(case: Case, annotation: str, heard: str | None) -> str | None:
    value = (case.metadata.get("annotations") or {}).get(annotation)
    return str(value)[:64] if value and str(value)[:64] != heard else None


def is_true_with(case: Case, kind: str, reason: str) -> bool:
    """True if a condition holds for this reason."""
    return any(c.type == kind and c.status == "True" and c.reason == reason for c in case.past.conditions)


def _number(case: Case, name: str) -> int | None:
    """A live field, as it stands there: the rest of the specification may be invalid."""
    value = (case.observed.run.get("spec") or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
