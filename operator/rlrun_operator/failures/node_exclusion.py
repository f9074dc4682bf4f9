"""Nodes that a run avoids for a while because it failed there repeatedly. Pure.

Only failures that a node may have caused count. An exclusion applies to one run, is rendered into the next attempt, and never holds the
run back for long: if no other node accepts a pod, the excluded node is used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rlrun.api.status import ExcludedNode, FailureRecord, RLRunStatus
from rlrun_operator.failures.detect import Cause
from rlrun_operator.names import USE_NODES_ANNOTATION
from rlrun_operator.pods import Pod
from rlrun_operator.state import Manifest
from rlrun_operator.status import failure_reasons, reasons
from rlrun_operator.status.conditions import ConditionUpdate, attempt_started_at, true_since
from rlrun_operator.times import rfc3339, seconds_of

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
    return [*held, ExcludedNode(name=name, until=rfc3339(now + EXCLUDED_SECONDS), reason=f"failed here: {why}")]


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
