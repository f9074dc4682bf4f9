"""Failures of nodes: nodes that a run avoids, and pods that cannot end because their node does not answer. Pure.

A run avoids a node for a while if it failed there repeatedly. Only failures that a node may have caused count. An exclusion applies to one
run, is rendered into the next attempt, and never holds the run back for long: if no other node accepts a pod, the excluded node is used
again.

A terminating pod disappears when its kubelet reports that its containers have ended. A kubelet that never answers would hold the next
attempt back forever, so the operator waits and then deletes the pod by force. This breaks Kubernetes' guarantee of one pod per name: on a
disconnected node that is still running, the old trainer may continue. It does no harm: all of its files contain its attempt's number, which
later attempts do not read, and the next attempt's group has its own rendezvous. A pod on an answering node is never deleted by force,
however slow it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlrun.api.run_status import ExcludedNode, FailureRecord, RLRunStatus
from rlrun_operator.failures.detect import Cause
from rlrun_operator.names import USE_NODES_ANNOTATION
from rlrun_operator.pods import Pod
from rlrun_operator.state import Delete, Manifest
from rlrun_operator.status import failure_reasons, reasons
from rlrun_operator.status.conditions import ConditionUpdate, attempt_started_at, true_since
from rlrun_operator.times import format_rfc3339, seconds_of

WINDOW_SECONDS = 3600.0
"""Age after which a failure no longer counts."""
EXCLUDED_SECONDS = 3600.0
FAILURES = 2
"""Failures on one node for its exclusion; it must also have more than all other nodes together, otherwise the node is not the cause."""
SHARE = 2
"""At most one in this many of the run's known nodes is excluded."""
NEEDED_AFTER_SECONDS = 300.0
"""Seconds without a node for a pod after which an excluded node is used again."""
_BLAMED = frozenset(
    {
        failure_reasons.SIGNALLED,
        failure_reasons.CUDA_ERROR,
        failure_reasons.NCCL_ERROR,
        failure_reasons.POD_FAILED,
        failure_reasons.NODE_LOST,
    }
)
"""Reasons that may be caused by a node. Not the role's own exit codes, requested memory, a full volume, or evictions."""
_BY_PEOPLE = frozenset({130, 143})
"""Exit codes of SIGINT and SIGTERM: the process was requested to end."""
NAME_FIELD = "metadata.name"


def active_exclusions(past: RLRunStatus, now: float) -> list[ExcludedNode]:
    """Return the exclusions that have not expired."""
    return [node for node in past.excluded_nodes or () if (seconds_of(node.until) or 0.0) > now]


def lift_older_exclusions(past: RLRunStatus, asked: str | None, now: float) -> RLRunStatus:
    """Return a status without the exclusions that started before the time of an annotation.

    The annotation needs no acknowledgment: later exclusions apply although the annotation stays. A value that is not a time is reported
    in the reason of each exclusion.

    Args:
        past: last written status.
        asked: value of the annotation, or None.
        now: seconds since the epoch; a later time in the annotation counts as now.
    """
    if not past.excluded_nodes or not asked:
        return past
    when = seconds_of(asked)
    if when is None:
        fault = f"; {USE_NODES_ANNOTATION} ({asked[:64]}) is not a time: write the current time in the format of `date -u +%FT%TZ`"
        noted = [
            node if fault in node.reason else node.model_copy(update={"reason": node.reason + fault})
            for node in past.excluded_nodes
        ]
        return past.model_copy(update={"excluded_nodes": noted})
    since = min(when, now)
    kept = [node for node in past.excluded_nodes if (seconds_of(node.until) or 0.0) - EXCLUDED_SECONDS > since]
    return past.model_copy(update={"excluded_nodes": kept or None})


def exclusions_after(
    past: RLRunStatus, failure: FailureRecord, known: Iterable[str], *, movable: bool, now: float
) -> list[ExcludedNode]:
    """Return the exclusions after a failure.

    Args:
        past: status before it.
        failure: new failure.
        known: nodes of the run's pods.
        movable: whether the pods may move to another node; a volume that attaches to one node prevents it.
        now: seconds since the epoch.
    """
    if failure.reason == failure_reasons.NODE_NEEDED:
        return []
    # Blame the node only if it has more of the recent failures than all others together, and few nodes are excluded already.
    held, name = active_exclusions(past, now), failure.node_name
    recent = [*past.failures, failure]
    blamed = Counter(f.node_name for f in recent if _is_blamed(f, now))
    if name is None or not movable or not _is_blamed(failure, now) or any(node.name == name for node in held):
        return held
    nodes = {*known, *(f.node_name for f in recent if f.node_name is not None), *(node.name for node in held)}
    too_many = (len(held) + 1) * SHARE > len(nodes)
    if blamed[name] < FAILURES or blamed[name] <= blamed.total() - blamed[name] or too_many:
        return held
    why = ", ".join(f.reason for f in recent if f.node_name == name and _is_blamed(f, now))
    return [*held, ExcludedNode(name=name, until=format_rfc3339(now + EXCLUDED_SECONDS), reason=f"failed here: {why}")]


def avoided_nodes(pod: Manifest) -> set[str]:
    """Return the nodes that an unscheduled pod avoids by name."""
    affinity = ((pod.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    fields = [f for term in required.get("nodeSelectorTerms") or () for f in term.get("matchFields") or ()]
    fields = [f for f in fields if f.get("key") == NAME_FIELD and f.get("operator") == "NotIn"]
    return {str(name) for f in fields for name in f.get("values") or ()}


def lift_exclusions(pods: Sequence[Pod], past: RLRunStatus, now: float) -> Cause | None:
    """Return the cause to restart an attempt without its exclusions because its pods find no node, or None.

    Args:
        pods: pods of the attempt.
        past: last written status.
        now: seconds since the epoch.
    """
    held = {node.name for node in active_exclusions(past, now)}
    waiting, began = true_since(past.conditions, reasons.SCHEDULED, true=False), attempt_started_at(past.conditions)
    for pod in pods:
        names = avoided_nodes(pod.manifest) if pod.node is None and pod.unscheduled is not None else set()
        if not names:
            continue
        shown = ", ".join(sorted(names))
        free = names - held
        if free:
            message = f"node {', '.join(sorted(free))} is no longer excluded, and the pod has no other node"
            return _exclusion_cause(pod, failure_reasons.NODE_ALLOWED, message)
        if waiting is not None and began is not None and now - max(waiting, began) >= NEEDED_AFTER_SECONDS:
            message = f"only the excluded node accepts the pod within {NEEDED_AFTER_SECONDS:g} s; {shown} is used again"
            return _exclusion_cause(pod, failure_reasons.NODE_NEEDED, message)
    return None


def with_excluded_nodes(update: ConditionUpdate, past: RLRunStatus, now: float) -> ConditionUpdate:
    """Return the condition about scheduling, with the excluded nodes in its message."""
    held = active_exclusions(past, now)
    if update.reason != reasons.UNSCHEDULABLE or not held:
        return update
    nodes = "; ".join(f"node {node.name} is excluded until {node.until} ({node.reason})" for node in held)
    return ConditionUpdate(update.status, update.reason, f"{update.message}; {nodes}")


def _is_blamed(failure: FailureRecord, now: float) -> bool:
    when = seconds_of(failure.time)
    recent = when is not None and now - when <= WINDOW_SECONDS
    return (
        recent and failure.reason in _BLAMED and failure.exit_code not in _BY_PEOPLE and failure.node_name is not None
    )


def _exclusion_cause(pod: Pod, reason: str, message: str) -> Cause:
    return Cause("disruption", None, pod.role, pod.name, None, None, reason, message)


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
        when = f"it is deleted by force at {format_rfc3339(due)}" if now < due else "it is deleted by force"
        return f"pod {pod.name} is on node {pod.node}, {why}; {when}"
    if answer == "answers":
        return f"pod {pod.name} is slow to end on node {pod.node}, which answers"
    fix = f"if the node is gone: kubectl delete pod {pod.kubectl_argument} --force --grace-period=0"
    return f"pod {pod.name} does not end, and the state of node {pod.node} is unknown (readNodes of the chart is false); {fix}"
