"""Pods that cannot end because their node does not answer: how long to wait for them, and when to delete them by force. Pure.

A terminating pod disappears when its kubelet reports that its containers have ended. A kubelet that never answers would hold the next
attempt back forever. A forced deletion breaks Kubernetes' guarantee of one pod per name: on a disconnected node that is still running, the
old trainer may continue. It does no harm: all of its files contain its attempt's number, which later attempts do not read, and the next
attempt's group has its own rendezvous. A pod on an answering node is never deleted by force, however slow it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlrun_operator.pods import Pod
from rlrun_operator.state import Delete, Manifest
from rlrun_operator.status import failure_reasons
from rlrun_operator.times import rfc3339

LOOK_AFTER_SECONDS = 10.0
"""Seconds after which the operator reads the nodes; most pods have ended by then."""
LOOK_SECONDS = 15.0
"""Seconds between two reads of the nodes, which are not watched, while a pod does not end."""
_SHOWN = 3
Answer = Literal["answers", "silent", "unknown"]


@dataclass(frozen=True)
class Overdue:
    """Terminating pods that have not ended."""

    force: tuple[Delete, ...] = ()
    """Forced deletions to make now."""
    told: str = ""
    """Message about the wait; empty while it is not unusual."""
    look_in: float | None = None
    """Seconds until the next look: a dead node sends no events."""
    nodes_would_help: bool = False
    silent: tuple[Pod, ...] = ()
    """Pods whose node does not answer."""


def delete_overdue(
    pods: Sequence[Pod], nodes: Sequence[Manifest] | None, *, since: float | None, after: float, now: float
) -> Overdue:
    """Return the writes for terminating pods that do not end.

    Args:
        pods: pods that must end; pods without a deletion request do not count.
        nodes: nodes of the cluster; None: the operator may not read them, or has not yet.
        since: time at which the operator recorded why they must end, by its own clock. Deletions have times of the API server's clock; if
            that clock is ahead, the wait is longer by the difference, and never shorter.
        after: seconds from then until a pod on a silent node is deleted by force.
        now: seconds since the epoch, by the operator's clock.
    """
    force, told, looks, silent, helps = [], [], [], [], False
    for pod in pods:
        if pod.deleted_at is None or pod.node is None:
            continue
        asked = max(pod.deleted_at, since or pod.deleted_at)
        if now - asked < LOOK_AFTER_SECONDS:
            looks.append(asked + LOOK_AFTER_SECONDS - now)
            continue
        helps = True
        answer, why = _node_answer(pod, nodes)
        silent += [pod] if answer == "silent" else []
        # Without nodes only the pod's own conditions report the loss, so its grace period must be over as well.
        due = asked + after + (_grace_seconds(pod) if nodes is None else 0.0)
        if answer == "silent" and now >= due:
            force.append(Delete(pod.ref, pod.uid, grace_seconds=0))
        looks.append(min(LOOK_SECONDS, due - now) if answer == "silent" and now < due else LOOK_SECONDS)
        told.append(_describe_overdue(pod, answer, why, due, now))
    more = f" (and {len(told) - _SHOWN} more)" if len(told) > _SHOWN else ""
    return Overdue(tuple(force), "; ".join(told[:_SHOWN]) + more, min(looks, default=None), helps, tuple(silent))


def _node_answer(pod: Pod, nodes: Sequence[Manifest] | None) -> tuple[Answer, str]:
    """Return whether the pod's node answers, with a clause about it, from the node or else from the pod's own conditions."""
    if nodes is None:
        reason = pod.disruption[0] if pod.disruption is not None else ""
        if "Taint" in reason or pod.reason == failure_reasons.NODE_LOST:
            return "silent", f"which Kubernetes has given up ({reason or pod.reason})"
        return "unknown", ""
    node = next((n for n in nodes if n["metadata"]["name"] == pod.node), None)
    if node is None:
        return "silent", "which no longer exists"
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = next((c for c in conditions if c.get("type") == "Ready"), None)
    if ready is None or ready.get("status") == "True":
        return "answers", ""
    return "silent", f"which has not answered since {ready.get('lastTransitionTime')} ({ready.get('reason')})"


def _grace_seconds(pod: Pod) -> float:
    return float(pod.manifest["metadata"].get("deletionGracePeriodSeconds") or 0)


def _describe_overdue(pod: Pod, answer: Answer, why: str, due: float, now: float) -> str:
    if answer == "silent":
        when = f"it is deleted by force at {rfc3339(due)}" if now < due else "it is deleted by force"
        return f"pod {pod.name} is on node {pod.node}, {why}; {when}"
    if answer == "answers":
        return f"pod {pod.name} is slow to end on node {pod.node}, which answers"
    fix = f"if the node is gone: kubectl delete pod {pod.argument} --force --grace-period=0"
    return f"pod {pod.name} does not end, and the state of node {pod.node} is unknown (readNodes of the chart is false); {fix}"
