"""The run's API key: whether its Secret is still there, and when another one is made.

A Secret is created and never read, so it is asked for with a dry-run create: where a later attempt begins, and while a pod waits for it.
Another key has another name, which no process of an earlier attempt has heard of, and is on record before anything is made with it:
`status.keyAttempt` is the attempt that it is made for, and one beyond the current attempt is still to be made.
"""

from __future__ import annotations

from typing import NamedTuple

from rlrun.api.resource import RLRunSpec
from rlrun_operator import render
from rlrun_operator.decide.lifetime import rotation_request
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.failures.detect import Cause
from rlrun_operator.names import ROTATE_ANNOTATION
from rlrun_operator.pods import Pod
from rlrun_operator.state import Manifest
from rlrun_operator.status import reasons
from rlrun_operator.status.change import StatusChange
from rlrun_operator.times import seconds_of


class Renewal(NamedTuple):
    """Another key for the attempt that begins; on record before anything is made with it."""

    message: str
    reason: str
    change: StatusChange
    """Change of the status."""


def secret(case: Case, spec: RLRunSpec) -> Manifest:
    """The Secret with the present key, as it would be made."""
    return render.api_key_secret(case.context(spec, case.attempt), case.fresh_key)


def name(case: Case) -> str:
    """Name of that Secret."""
    return case.names.secret(str(case.metadata["uid"]), case.key_attempt)


def is_made_now(case: Case) -> bool:
    """True if the present key is made with the attempt that begins: it was never made, or `renewal` has asked for it."""
    return case.past.launched_attempt == 0 or case.key_attempt > case.past.attempt


def renewal(case: Case, attempt: int) -> Renewal | None:
    """Renewal of the key with `attempt`, of which nothing was made yet: a user has asked for it, or the Secret is gone; else None."""
    if not case.attempt or case.attempt >= attempt or is_made_now(case):
        return None
    request, made = rotation_request(case), f"attempt {attempt} begins with another API key"
    if seconds_of(request) is not None:
        message = f"{made}, as the annotation {ROTATE_ANNOTATION} asks ({request})"
        change = StatusChange(key_attempt=attempt, key_rotation_requested_at=request)
        return Renewal(message, reasons.PODS_ENDING, change)
    if case.observed.lost_key == name(case):
        return Renewal(f"Secret {name(case)} was deleted: {made}", reasons.KEY_LOST, StatusChange(key_attempt=attempt))
    return None


def in_doubt(case: Case) -> Manifest | None:
    """The Secret, where a pod waits for it and nobody has asked yet: a kubelet's cache may lack what was made a moment ago."""
    if case.spec is None or case.observed.lost_key == name(case) or not _waiting(case):
        return None
    return secret(case, case.spec)


def withheld(case: Case) -> Cause | None:
    """Cause of an attempt's end: a pod waits for a Secret that is gone. Another key of its name would not be that of the other pods."""
    may_begin_another = case.spec is not None and not case.forbidden
    if not may_begin_another or case.observed.lost_key != name(case) or not (waiting := _waiting(case)):
        return None
    pod, told = waiting[0], f"Secret {name(case)} with the run's API key was deleted, and the pod waits for it"
    return Cause("disruption", None, pod.role, pod.name, pod.node, None, reasons.KEY_LOST, told)


def _waiting(case: Case) -> list[Pod]:
    """Pods of the current attempt that the kubelet cannot start for want of the present key."""
    lacks = f'secret "{name(case)}" not found'
    return [
        pod
        for pod in case.pods_of_attempt(case.past.attempt)
        if any(c.waiting_reason == "CreateContainerConfigError" and lacks in c.waiting_message for c in pod.containers)
    ]
