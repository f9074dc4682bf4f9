"""Nodes that a run keeps away from for a while, because it failed there again and again. Pure.

Blame is for what a node may have done. An exclusion is of this run alone, is rendered into the next attempt, and never holds the run back
for long: where no other node takes a pod, the node is used again.
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
"""Older failures are forgotten."""
EXCLUDED_SECONDS = 3600.0
FAILURES = 2
"""Failures on one node; and more than on all others together, or it is not the node."""
SHARE = 2
"""Exclusion of at most one in so many of the nodes that the run is known to use."""
NEEDED_AFTER_SECONDS = 300.0
"""Time without a node for a pod after which an excluded node is used again."""
_BLAMED = frozenset(
    {
        failure_reasons.SIGNALLED,
        failure_reasons.CUDA_ERROR,
        failure_reasons.NCCL_ERROR,
        failure_reasons.POD_FAILED,
        failure_reasons.NODE_LOST,
    }
)
"""Not: the role's own exit codes, memory that it asked for, a full volume, evictions."""
_BY_PEOPLE = frozenset({130, 143})
"""SIGINT and SIGTERM: the process was asked to end."""
NAME_FIELD = "metadata.name"


def active_exclusions(past: RLRunStatus, now: float) -> list[ExcludedNode]:
    """Exclusions that hold."""
    return [node for node in past.excluded_nodes or () if (seconds_of(node.until) or 0.0) > now]


def used_again(past: RLRunStatus, asked: str | None, now: float) -> RLRunStatus:
    """Return a status without the exclusions that began before the time of an annotation.

    The annotation needs no acknowledgment: a later exclusion holds although the annotation stays. A value that is not a time is reported
    in the reason of each exclusion.

    Args:
        past: status as it was written last.
        asked: value of the annotation; None: there is none.
        now: seconds since the epoch; a later time of the annotation counts as now.
    """
    if not past.excluded_nodes or not asked:
        return past
    when = seconds_of(asked)
    if when is None:
        fault = f"; {USE_NODES_ANNOTATION} ({asked[:64]}) is not a time: write the time of now, as `date -u +%FT%TZ` prints it"
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
    """The exclusions after a failure.

    Args:
        past: the status before it.
        failure: the new one.
        known: nodes that the run's pods are on.
        movable: whether the pods may go to another node at all; a volume of one node holds them.
        now: seconds since the epoch.
    """
    if failure.reason == failure_reasons.NODE_NEEDED:
        return []
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
    """Nodes that a pod without a node keeps away from by name."""
    affinity = ((pod.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    fields = [f for term in required.get("nodeSelectorTerms") or () for f in term.get("matchFields") or ()]
    fields = [f for f in fields if f.get("key") == NAME_FIELD and f.get("operator") == "NotIn"]
    return {str(name) for f in fields for name in f.get("values") or ()}


def lift_exclusions(pods: Sequence[Pod], past: RLRunStatus, now: float) -> Cause | None:
    """Reason to make an attempt again without its exclusions because its pods find no node; None: there is no reason to.

    Args:
        pods: the attempt's.
        past: the status as it was written last.
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
            told = f"node {', '.join(sorted(free))} is no longer excluded, and the pod has no other"
            return _exclusion_cause(pod, failure_reasons.NODE_ALLOWED, told)
        if waiting is not None and began is not None and now - max(waiting, began) >= NEEDED_AFTER_SECONDS:
            told = (
                f"no node but the excluded one takes the pod within {NEEDED_AFTER_SECONDS:g} s; {shown} is used again"
            )
            return _exclusion_cause(pod, failure_reasons.NODE_NEEDED, told)
    return None


def with_excluded_nodes(update: ConditionUpdate, past: RLRunStatus, now: float) -> ConditionUpdate:
    """Statement about scheduling, with the nodes that are left out."""
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


def _exclusion_cause(pod: Pod, reason: str, told: str) -> Cause:
    return Cause("disruption", None, pod.role, pod.name, None, None, reason, told)
