"""Reason why the scheduler finds no node for a pod: its requests, the number of nodes that fit, and the fix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rlrun.defaults.words import shorten_text
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
"""Kubernetes' own taints: the node is not ready, or short of something."""
_PREEMPTION = re.compile(r"[.,;]?\s*(?:no new claims to deallocate,\s*)?preemption:.*", re.DOTALL)


def waits_for_claim(pods: Iterable[Pod]) -> bool:
    """True if the scheduler waits for a claim alone: then the claim is what to look at."""
    return any("unbound immediate PersistentVolumeClaim" in pod.unscheduled[1] for pod in pods if pod.unscheduled)


class Unscheduled(NamedTuple):
    """Reason why a role's pods have no node."""

    message: str
    for_good: bool
    """No pod that ends will change it: the nodes lack what is asked for."""


def why_unscheduled(
    role: Role, pods: Sequence[Pod], count: int, nodes: Sequence[Manifest] | None, claim: str, *, one_node: bool
) -> Unscheduled:
    """The message for the unscheduled `pods` of `role`.

    Args:
        role: of the pods.
        pods: those that have no node; at least one.
        count: how many pods the role has in all.
        nodes: the cluster's; None: not known, then the scheduler's own text has to do.
        claim: name of the claim that the run's pods share.
        one_node: its access mode, by which the operator has put all pods on one node.
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
        return Unscheduled("; ".join(filter(None, (need, obstacle, f"the scheduler says: {scheduler_message}"))), False)
    if (lacking := _explain_lacking(role, spec, wanted, demands, nodes)) is not None:
        return Unscheduled(f"{need}; {lacking}", True)
    enough = sum(takes_pod(node, spec, wanted, demands) for node in nodes)
    what = obstacle or ("not enough of that is free" if "Insufficient" in scheduler_message else "none takes it now")
    return Unscheduled(f"{need}; {_show_count(enough)}, but {what}; the scheduler says: {scheduler_message}", False)


def _explain_lacking(
    role: Role,
    spec: Manifest,
    wanted: Mapping[str, set[str]],
    demands: Mapping[str, float],
    nodes: Sequence[Manifest],
) -> str | None:
    """Demand that no node meets, or no node that is otherwise right; None: some node could take the pod if it were free."""
    usable = [node for node in nodes if not (node.get("spec") or {}).get("unschedulable")]
    matching = [node for node in usable if all(label_of(node, key) in values for key, values in wanted.items())]
    if not usable:
        return "the cluster has no node that takes pods"
    if not matching:
        return _no_label(usable, wanted, role)
    tolerated = [node for node in matching if not untolerated_taints(node, spec)]
    if not tolerated:
        return _untolerated_keys(role, matching, spec)
    for key in _topology_keys(spec, "podAffinity"):
        if not any(label_of(node, key) for node in tolerated):
            return (
                f"no such node has the label {key}; correct placement.topology and {role}.affinity, or label the nodes"
            )
    return _too_small(role, demands, tolerated)


def _untolerated_keys(role: Role, nodes: Sequence[Manifest], spec: Manifest) -> str:
    """Taints for which none of these nodes takes the pod; those of a node's conditions only where there are no others."""
    taints = sorted({taint for node in nodes for taint in untolerated_taints(node, spec)})
    own = [taint for taint in taints if not taint.startswith(_CONDITION_TAINTS)]
    fix = (
        f"add a toleration to {role}.tolerations"
        if own
        else f"see kubectl describe node {nodes[0]['metadata']['name']}"
    )
    return f"{_show_count(len(nodes))}, but for the taint {' and '.join(own or taints)}; {fix}"


def _too_small(role: Role, demands: Mapping[str, float], nodes: Sequence[Manifest]) -> str | None:
    """First demand that is larger than any of these nodes; None: each is met by one of them."""
    for resource, amount in demands.items():
        most = max(allocatable_amount(node, resource) for node in nodes)
        if most < amount:
            return (
                f"{_show_count(len(nodes))} otherwise, but none has {show_amount(resource, amount)} {resource} "
                f"(most: {show_amount(resource, most)}); lower {_show_field(role, resource)} or add a larger node"
            )
    return None


def scheduler_text(pod: Pod) -> str:
    """The scheduler's own words, without those about preemption."""
    text = pod.unscheduled[1] if pod.unscheduled else ""
    return shorten_text(_PREEMPTION.sub("", text), _TEXT_MAX).rstrip(". ") or "nothing yet"


def obstacle_in_words(role: Role, spec: Manifest, scheduler_message: str, claim: str, *, one_node: bool) -> str | None:
    """Obstacle between a pod and nodes that have all it asks for, with the fix; None: only that they are full.

    Args:
        role: of the pod.
        spec: its own.
        scheduler_message: the scheduler's words: each of its reasons has a fixed text.
        claim: name of the claim that the run's pods share.
        one_node: whether that lets the pods be on one node only.
    """
    if "ReadWriteOncePod" in scheduler_message:
        fix = "the pods of a run share their claim: name one with access mode ReadWriteMany in storage.claimName"
        return f"claim {claim} has access mode ReadWriteOncePod and another pod uses it; {fix}"
    if "volume node affinity conflict" in scheduler_message:
        fix = "free those nodes, or use a claim that every node can mount (ReadWriteMany)"
        return f"the volume of claim {claim} can be used on other nodes only; {fix}"
    if "non-existent pv" in scheduler_message:
        return f"the volume of claim {claim} is not there; if it does not come, restore it or use another claim"
    if "topology spread constraints" in scheduler_message:
        fix = "relax them (whenUnsatisfiable: ScheduleAnyway), or add nodes"
        return f"the topologySpreadConstraints of {role}.podTemplate leave no node for it; {fix}"
    if "anti-affinity" in scheduler_message:
        if role == "inference" and _topology_keys(spec, "podAntiAffinity"):
            fix = "lower inference.replicas, add nodes, or set placement.spreadInference to Preferred"
            return f"the other engines are there, and each has to be on a node of its own; {fix}"
        return f"pods are there that it must not be with; correct {role}.affinity, or add nodes"
    if "pod affinity" in scheduler_message and (keys := _topology_keys(spec, "podAffinity")):
        if one_node:
            fix = "make room there, or use storage that several nodes can mount (accessModes: [ReadWriteMany])"
            return f"the volume of claim {claim} puts all pods on one node; {fix}"
        fix = "make room there, or set placement.topology.preferred instead of required"
        return f"it has to be where the run's other pods are, by the label {' and '.join(keys)}; {fix}"
    return None


def _topology_keys(spec: Manifest, kind: str) -> list[str]:
    """Labels by which a pod must be with others, or away from them."""
    rules = ((spec.get("affinity") or {}).get(kind) or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or ()
    return sorted({str(rule["topologyKey"]) for rule in rules})


def demands_in_words(demands: Mapping[str, float]) -> str:
    """`8 nvidia.com/gpu`, or CPU and memory where no device is asked for."""
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
            has = f"no node has that {key}; there are: {known}" if known else f"no node has the label {key} at all"
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
