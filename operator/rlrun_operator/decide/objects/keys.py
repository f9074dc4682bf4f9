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
from rlrun_operator.decide.snapshot import RunSnapshot
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


def render_secret(run: RunSnapshot, spec: RLRunSpec) -> Manifest:
    """The Secret with the present key, as it would be made."""
    return render.api_key_secret(run.context(spec, run.attempt), run.fresh_key)


def secret_name(run: RunSnapshot) -> str:
    """Name of that Secret."""
    return run.names.secret(str(run.metadata["uid"]), run.key_attempt)


def is_made_now(run: RunSnapshot) -> bool:
    """True if the present key is made with the attempt that begins: it was never made, or `renew_key` has asked for it."""
    return run.past.launched_attempt == 0 or run.key_attempt > run.past.attempt


def renew_key(run: RunSnapshot, attempt: int) -> Renewal | None:
    """Renewal of the key with `attempt`, of which nothing was made yet: a user has asked for it, or the Secret is gone; else None."""
    if not run.attempt or run.attempt >= attempt or is_made_now(run):
        return None
    request, made = rotation_request(run), f"attempt {attempt} begins with another API key"
    if seconds_of(request) is not None:
        message = f"{made}, as the annotation {ROTATE_ANNOTATION} asks ({request})"
        change = StatusChange(key_attempt=attempt, key_rotation_requested_at=request)
        return Renewal(message, reasons.PODS_ENDING, change)
    if run.observed.lost_key == secret_name(run):
        return Renewal(
            f"Secret {secret_name(run)} was deleted: {made}", reasons.KEY_LOST, StatusChange(key_attempt=attempt)
        )
    return None


def in_doubt(run: RunSnapshot) -> Manifest | None:
    """The Secret, where a pod waits for it and nobody has asked yet: a kubelet's cache may lack what was made a moment ago."""
    if run.spec is None or run.observed.lost_key == secret_name(run) or not _pods_without_key(run):
        return None
    return render_secret(run, run.spec)


def missing_key_cause(run: RunSnapshot) -> Cause | None:
    """Cause of an attempt's end: a pod waits for a Secret that is gone. Another key of its name would not be that of the other pods."""
    may_begin_another = run.spec is not None and not run.forbidden
    if not may_begin_another or run.observed.lost_key != secret_name(run) or not (waiting := _pods_without_key(run)):
        return None
    pod, told = waiting[0], f"Secret {secret_name(run)} with the run's API key was deleted, and the pod waits for it"
    return Cause("disruption", None, pod.role, pod.name, pod.node, None, reasons.KEY_LOST, told)


def _pods_without_key(run: RunSnapshot) -> list[Pod]:
    """Pods of the current attempt that the kubelet cannot start for want of the present key."""
    lacks = f'secret "{secret_name(run)}" not found'
    return [
        pod
        for pod in run.pods_of_attempt(run.past.attempt)
        if any(c.waiting_reason == "CreateContainerConfigError" and lacks in c.waiting_message for c in pod.containers)
    ]
