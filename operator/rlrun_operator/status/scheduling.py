"""Diagnosis of a pod that the scheduler cannot place: its requests, the number of nodes that fit, and the fix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rlrun.runtime.printable import shorten_text
from rlrun_operator.names import GPU_PRODUCT_LABEL, POOL_LABEL, Role
from rlrun_operator.node_fit import (
    allocatable_amount,
    demands_of,
    label_of,
    labels_wanted,
    show_amount,
    takes_pod,
    untolerated_taints,
)
from rlrun_operator.pods import Pod
from rlrun_operator.state import Manifest

_TEXT_MAX = 600
_SHOWN_VALUES = 5
_CONDITION_TAINTS = "node.kubernetes.io/"
"""Prefix of Kubernetes' own taints: the node is not ready, or short of a resource."""
_PREEMPTION = re.compile(r"[.,;]?\s*(?:no new claims to deallocate,\s*)?preemption:.*", re.DOTALL)
"""Part of the scheduler's message about preemption."""


def waits_for_claim(pods: Iterable[Pod]) -> bool:
    """Return whether a pod waits for an unbound claim. The condition of the claim then explains the wait."""
    return any("unbound immediate PersistentVolumeClaim" in pod.unscheduled[1] for pod in pods if pod.unscheduled)


class Unscheduled(NamedTuple):
    """Cause that keeps a role's pods without a node."""

    message: str
    for_good: bool
    """Whether no node meets the requirements even if it is empty, so that the end of other pods does not help."""


def why_unscheduled(
    role: Role, pods: Sequence[Pod], count: int, nodes: Sequence[Manifest] | None, claim: str, *, one_node: bool
) -> Unscheduled:
    """Explain why the `pods` of `role` have no node.

    Args:
        role: role of the pods.
        pods: pods without a node; at least one.
        count: number of pods of the role, scheduled or not.
        nodes: nodes of the cluster, or None if unknown; then the message has no number of fitting nodes.
        claim: name of the claim that the run's pods share.
        one_node: whether the claim's access mode forces all pods onto one node.
    """
    pod = pods[0]
    scheduler_message = scheduler_text(pod)
    spec = pod.manifest.get("spec") or {}
    wanted = labels_wanted(spec)
    demands = demands_of(spec)
    have = f" with {demands_in_words(demands)}{' each' if count != 1 else ''}" if demands else ""
    where = f" on nodes with label {_join_names(wanted)}" if wanted else ""
    need = f"{role} needs {count} pod{'s' if count != 1 else ''}{have}{where}"
    obstacle = obstacle_in_words(role, spec, scheduler_message, claim, one_node=one_node)
    if nodes is None:
        parts = (need, obstacle, f"the scheduler reports: {scheduler_message}")
        return Unscheduled("; ".join(filter(None, parts)), False)
    if (lacking := _explain_lacking(role, spec, wanted, demands, nodes)) is not None:
        return Unscheduled(f"{need}; {lacking}", True)
    enough = sum(takes_pod(node, spec, wanted, demands) for node in nodes)
    what = obstacle or ("not enough of that is free" if "Insufficient" in scheduler_message else "none accepts it now")
    return Unscheduled(f"{need}; {_show_count(enough)}, but {what}; the scheduler reports: {scheduler_message}", False)


def _explain_lacking(
    role: Role,
    spec: Manifest,
    wanted: Mapping[str, set[str]],
    demands: Mapping[str, float],
    nodes: Sequence[Manifest],
) -> str | None:
    """Return the first requirement that no node meets even if it is empty, as text with the fix, or None if there is none."""
    usable = [node for node in nodes if not (node.get("spec") or {}).get("unschedulable")]
    matching = [node for node in usable if all(label_of(node, key) in values for key, values in wanted.items())]
    if not usable:
        return "the cluster has no schedulable node"
    if not matching:
        return _no_label(usable, wanted, role)
    tolerated = [node for node in matching if not untolerated_taints(node, spec)]
    if not tolerated:
        return _untolerated_keys(role, matching, spec)
    # Only the label is checked: whether the pods fit into one topology domain is not.
    for key in _topology_keys(spec, "podAffinity"):
        if not any(label_of(node, key) for node in tolerated):
            return (
                f"no such node has the label {key}; correct placement.topology and {role}.affinity, or label the nodes"
            )
    return _too_small(role, demands, tolerated)


def _untolerated_keys(role: Role, nodes: Sequence[Manifest], spec: Manifest) -> str:
    """Return the text about the taints that keep the pod off these nodes, with the fix. Taints of node conditions: only without others."""
    taints = sorted({taint for node in nodes for taint in untolerated_taints(node, spec)})
    own = [taint for taint in taints if not taint.startswith(_CONDITION_TAINTS)]
    keys = ", ".join(f"{{key: {key}, operator: Exists}}" for key in dict.fromkeys(t.partition("=")[0] for t in own))
    fix = f"write {role}.tolerations: [{keys}]" if own else f"see kubectl describe node {nodes[0]['metadata']['name']}"
    return f"{_show_count(len(nodes))}, except for the taint {' and '.join(own or taints)}; {fix}"


def _too_small(role: Role, demands: Mapping[str, float], nodes: Sequence[Manifest]) -> str | None:
    """Return the first demand that exceeds each of these nodes, as text with the fix, or None. Each demand is checked alone."""
    for resource, amount in demands.items():
        most = max(allocatable_amount(node, resource) for node in nodes)
        if most < amount:
            return (
                f"{_show_count(len(nodes))} otherwise, but none has {show_amount(resource, amount)} {resource} "
                f"(most: {show_amount(resource, most)}); lower {_show_field(role, resource)} or add a larger node"
            )
    return None


def scheduler_text(pod: Pod) -> str:
    """Return the scheduler's own message, without its part about preemption."""
    text = pod.unscheduled[1] if pod.unscheduled else ""
    return shorten_text(_PREEMPTION.sub("", text), _TEXT_MAX).rstrip(". ") or "nothing yet"


def obstacle_in_words(role: Role, spec: Manifest, scheduler_message: str, claim: str, *, one_node: bool) -> str | None:
    """Return the reason why large enough nodes do not accept a pod, with the fix, or None if these nodes are only full.

    Args:
        role: role of the pod.
        spec: specification of the pod.
        scheduler_message: message of the scheduler, which has a fixed text for each of its reasons.
        claim: name of the claim that the run's pods share.
        one_node: whether the claim's access mode forces all pods onto one node.
    """
    # A message may have several reasons, each with its number of nodes: only the first match is explained.
    if "ReadWriteOncePod" in scheduler_message:
        fix = "the pods of a run share their claim: name one with access mode ReadWriteMany in storage.claimName"
        return f"claim {claim} has access mode ReadWriteOncePod and another pod uses it; {fix}"
    if "volume node affinity conflict" in scheduler_message:
        fix = "free those nodes, or use a claim that every node can mount (ReadWriteMany)"
        return f"the volume of claim {claim} can be used on other nodes only; {fix}"
    if "non-existent pv" in scheduler_message:
        return f"the volume of claim {claim} does not exist; if it does not appear, restore it or use another claim"
    if "topology spread constraints" in scheduler_message:
        fix = "relax them (whenUnsatisfiable: ScheduleAnyway), or add nodes"
        return f"the topologySpreadConstraints of {role}.podTemplate exclude all nodes; {fix}"
    if "anti-affinity" in scheduler_message:
        if role == "inference" and _topology_keys(spec, "podAntiAffinity"):
            fix = "lower inference.replicas, add nodes, or set placement.spreadInference to Preferred"
            return f"these nodes already run engines, and each engine needs its own node; {fix}"
        return f"these nodes run pods that its anti-affinity excludes; correct {role}.affinity, or add nodes"
    if "pod affinity" in scheduler_message and (keys := _topology_keys(spec, "podAffinity")):
        if one_node:
            fix = "free resources there, or use storage that several nodes can mount (accessModes: [ReadWriteMany])"
            return f"the volume of claim {claim} puts all pods on one node; {fix}"
        fix = "free resources there, or set placement.topology.preferred instead of required"
        return f"it must be near the run's other pods, by the label {' and '.join(keys)}; {fix}"
    return None


def _topology_keys(spec: Manifest, kind: str) -> list[str]:
    """Return the topology labels of a pod's required affinity or anti-affinity."""
    rules = ((spec.get("affinity") or {}).get(kind) or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or ()
    return sorted({str(rule["topologyKey"]) for rule in rules})


def demands_in_words(demands: Mapping[str, float]) -> str:
    """Return the demands as text: `8 nvidia.com/gpu`, or CPU and memory for a pod without devices (resource names with `/`)."""
    devices = {name: amount for name, amount in demands.items() if "/" in name}
    shown = devices or demands
    return (
        " and ".join(f"{show_amount(name, amount)} {name}" for name, amount in shown.items())
        or "no particular resources"
    )


def _no_label(nodes: Sequence[Manifest], wanted: Mapping[str, set[str]], role: Role) -> str:
    for key, values in wanted.items():
        if not any(label_of(node, key) in values for node in nodes):
            there = Counter(value for node in nodes if (value := label_of(node, key)))
            known = ", ".join(
                f"{value} ({count} node{'s' if count != 1 else ''})"
                for value, count in there.most_common(_SHOWN_VALUES)
            )
            has = f"no node has that {key}; known values: {known}" if known else f"no node has the label {key} at all"
            return f"{has}; correct {_show_field(role, key)} or add such a node"
    return "no node has all of these labels together"


def _show_field(role: Role, what: str) -> str:
    fields = {GPU_PRODUCT_LABEL: "placement.gpuProduct", POOL_LABEL: "placement.pool"}
    if what in fields:
        return fields[what]
    if what in ("cpu", "memory", "ephemeral-storage"):
        return f"{role}.resources"
    return f"{role}.gpusPerReplica" if what.endswith("/gpu") else f"{role}.nodeSelector"


def _show_count(count: int) -> str:
    return "1 node qualifies" if count == 1 else f"{count} nodes qualify"


def _join_names(wanted: Mapping[str, set[str]]) -> str:
    return " and ".join(f"{key}={'|'.join(sorted(values))}" for key, values in wanted.items())
