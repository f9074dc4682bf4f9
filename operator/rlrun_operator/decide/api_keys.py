"""The run's API key: the check for its Secret, and its renewal.

The operator creates the Secret but cannot read it, so it checks its existence with a dry-run create: when a later attempt starts, and while
a pod waits for it. A new key has a new name, which processes of earlier attempts do not know. It is recorded before an object uses it:
`status.keyAttempt` is the attempt that the key is created for; a number above the current attempt means that it does not exist yet.
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
from rlrun_operator.state import CheckSecret
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import StatusChange
from rlrun_operator.times import seconds_of


class Renewal(NamedTuple):
    """New key for the attempt that starts; it is recorded before an object is created with it."""

    message: str
    reason: str
    change: StatusChange
    """Change of the status."""


def check_secret(run: RunSnapshot, spec: RLRunSpec) -> CheckSecret:
    """Return the check for the Secret with the current key."""
    return CheckSecret(render.api_key_secret(run.context(spec, run.attempt), run.fresh_key))


def secret_name(run: RunSnapshot) -> str:
    """Return the name of the Secret with the current key."""
    return run.names.key_secret(str(run.metadata["uid"]), run.key_attempt)


def is_made_now(run: RunSnapshot) -> bool:
    """Return whether the attempt that starts creates the key: no key was created yet, or `renew_key` has requested a new one."""
    return run.past.launched_attempt == 0 or run.key_attempt > run.past.attempt


def renew_key(run: RunSnapshot, attempt: int) -> Renewal | None:
    """Return the renewal of the key for `attempt`, which has no objects yet, if a user requests it or the Secret is gone, or None."""
    if not run.attempt or run.attempt >= attempt or is_made_now(run):
        return None
    # Only before the first object of the attempt: all of its pods must have the same key.
    request, made = rotation_request(run), f"attempt {attempt} starts with another API key"
    if seconds_of(request) is not None:
        message = f"{made}, as the annotation {ROTATE_ANNOTATION} requests ({request})"
        change = StatusChange(key_attempt=attempt, key_rotation_requested_at=request)
        return Renewal(message, reasons.PODS_ENDING, change)
    if run.observed.lost_key == secret_name(run):
        return Renewal(
            f"Secret {secret_name(run)} was deleted: {made}", reasons.KEY_LOST, StatusChange(key_attempt=attempt)
        )
    return None


def in_doubt(run: RunSnapshot) -> CheckSecret | None:
    """Return the check for the Secret if a pod waits for it and no check has found it deleted: a kubelet's cache may lack a new Secret."""
    if run.spec is None or run.observed.lost_key == secret_name(run) or not _pods_without_key(run):
        return None
    return check_secret(run, run.spec)


def missing_key_cause(run: RunSnapshot) -> Cause | None:
    """Return the cause that ends an attempt whose pod waits for a deleted Secret. A new key would differ from the key of the other pods."""
    may_begin_another = run.spec is not None and not run.forbidden_fields
    if not may_begin_another or run.observed.lost_key != secret_name(run) or not (waiting := _pods_without_key(run)):
        return None
    pod, told = waiting[0], f"Secret {secret_name(run)} with the run's API key was deleted, and the pod waits for it"
    return Cause("disruption", None, pod.role, pod.name, pod.node, None, reasons.KEY_LOST, told)


def _pods_without_key(run: RunSnapshot) -> list[Pod]:
    """Return the pods of the current attempt that cannot start because the Secret of the key is missing."""
    lacks = f'secret "{secret_name(run)}" not found'
    return [
        pod
        for pod in run.pods_of_attempt(run.past.attempt)
        if any(c.waiting_reason == "CreateContainerConfigError" and lacks in c.waiting_message for c in pod.containers)
    ]
