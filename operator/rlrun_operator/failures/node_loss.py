"""Pods that cannot end because their node does not answer: how long to wait for them, and when to remove them by force. Pure.

A pod that is asked to end goes when its kubelet says that its containers are gone. One that never answers holds the next attempt back for
ever. Removing its object by force ends Kubernetes' promise that there is one pod of a name: on a node that is cut off and not dead, the old
trainer may go on. It does no harm: all that it writes bears its attempt's number, which nothing reads any more, and the next attempt's
group has its own rendezvous. A pod of a node that answers is never removed by force, however slow it is.
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
"""Most pods are gone before; nodes are not asked for until then."""
LOOK_SECONDS = 15.0
"""Nodes are not watched: how often they are asked for while a pod does not end."""
_SHOWN = 3
Answer = Literal["answers", "silent", "unknown"]


@dataclass(frozen=True)
class Overdue:
    """Pods that were asked to end and have not."""

    force: tuple[Delete, ...] = ()
    """To be removed now."""
    told: str = ""
    """Description of what is waited for, for people; empty: nothing that is unusual yet."""
    look_in: float | None = None
    """Look again after so many seconds: a dead node sends no events."""
    nodes_would_help: bool = False
    silent: tuple[Pod, ...] = ()
    """Pods whose node does not answer."""


def delete_overdue(
    pods: Sequence[Pod], nodes: Sequence[Manifest] | None, *, since: float | None, after: float, now: float
) -> Overdue:
    """Writes for pods that do not end.

    Args:
        pods: those that have to be gone; those that were not asked to end do not count.
        nodes: the cluster's; None: the operator may not read them, or has not asked.
        since: when the operator recorded why they have to go, by its own clock. A deletion is timed by the API server's clock; should
            that be ahead, the wait is longer by the difference, and never shorter.
        after: seconds from then until a pod on a node that does not answer is removed by force.
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
        answer, why = _ask_node(pod, nodes)
        silent += [pod] if answer == "silent" else []
        # Hearsay of the pod's own conditions: its grace period has to be over as well.
        due = asked + after + (_grace_seconds(pod) if nodes is None else 0.0)
        if answer == "silent" and now >= due:
            force.append(Delete(pod.ref, pod.uid, grace_seconds=0))
        looks.append(min(LOOK_SECONDS, due - now) if answer == "silent" and now < due else LOOK_SECONDS)
        told.append(_describe_overdue(pod, answer, why, due, now))
    more = f" (and {len(told) - _SHOWN} more)" if len(told) > _SHOWN else ""
    return Overdue(tuple(force), "; ".join(told[:_SHOWN]) + more, min(looks, default=None), helps, tuple(silent))


def _ask_node(pod: Pod, nodes: Sequence[Manifest] | None) -> tuple[Answer, str]:
    """Answer of the pod's node, and words about it, as the node or else the pod itself reports."""
    if nodes is None:
        told = pod.disruption[0] if pod.disruption is not None else ""
        if "Taint" in told or pod.reason == failure_reasons.NODE_LOST:
            return "silent", f"which was given up ({told or pod.reason})"
        return "unknown", ""
    node = next((n for n in nodes if n["metadata"]["name"] == pod.node), None)
    if node is None:
        return "silent", "which does not exist any more"
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = next((c for c in conditions if c.get("type") == "Ready"), None)
    if ready is None or ready.get("status") == "True":
        return "answers", ""
    return "silent", f"which does not answer since {ready.get('lastTransitionTime')} ({ready.get('reason')})"


def _grace_seconds(pod: Pod) -> float:
    return float(pod.manifest["metadata"].get("deletionGracePeriodSeconds") or 0)


def _describe_overdue(pod: Pod, answer: Answer, why: str, due: float, now: float) -> str:
    if answer == "silent":
        when = f"removed by force at {rfc3339(due)}" if now < due else "removed by force"
        return f"pod {pod.name} is on node {pod.node}, {why}; {when}"
    if answer == "answers":
        return f"pod {pod.name} takes its time to end on node {pod.node}, which answers"
    fix = f"if it is gone: kubectl delete pod {pod.argument} --force --grace-period=0"
    return f"pod {pod.name} does not end; whether node {pod.node} answers is not known (readNodes of the chart is false); {fix}"
