"""Scopes of a ResourceQuota: the pods that it counts, by the rules of the API server's pod evaluator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlrun_operator.node_fit import parse_quantity
from rlrun_operator.state import Manifest

_QOS_RESOURCES = ("cpu", "memory")
"""Resources that determine a pod's quality of service: a pod with only devices is BestEffort."""


@dataclass(frozen=True)
class Scope:
    """One requirement of a quota; a pod must meet all of them."""

    name: str
    operator: str = "Exists"
    values: tuple[str, ...] = ()

    def holds(self, pod: Manifest) -> bool:
        """Return whether a pod with this spec meets this requirement."""
        if self.name == "PriorityClass":
            return self._selects(str(pod.get("priorityClassName") or ""))
        found = {
            "Terminating": _has_deadline(pod),
            "NotTerminating": not _has_deadline(pod),
            "BestEffort": _is_best_effort(pod),
            "NotBestEffort": not _is_best_effort(pod),
            "CrossNamespacePodAffinity": _looks_across(pod),
        }
        return found.get(self.name, False)

    def _selects(self, value: str) -> bool:
        """Match like a label selector on a pod whose only label is its class: a pod without a class is in no list."""
        holds = {
            "In": value in self.values and bool(value),
            "NotIn": value not in self.values,
            "Exists": bool(value),
            "DoesNotExist": not value,
        }
        return holds.get(self.operator, False)


def scopes_of(spec: Manifest) -> tuple[Scope, ...]:
    """Return the scopes of a ResourceQuota's spec."""
    listed = [Scope(str(name)) for name in spec.get("scopes") or ()]
    selected = [
        Scope(str(one.get("scopeName")), str(one.get("operator")), tuple(map(str, one.get("values") or ())))
        for one in (spec.get("scopeSelector") or {}).get("matchExpressions") or ()
    ]
    return (*listed, *selected)


def counts_pod(scopes: Iterable[Scope], pod: Manifest) -> bool:
    """Return whether a quota with these scopes counts a pod with this spec."""
    return all(scope.holds(pod) for scope in scopes)


def _has_deadline(pod: Manifest) -> bool:
    return (pod.get("activeDeadlineSeconds") or -1) >= 0


def _is_best_effort(pod: Manifest) -> bool:
    parts = [pod, *(pod.get("initContainers") or ()), *(pod.get("containers") or ())]
    blocks = [(part.get("resources") or {}).get(kind) or {} for part in parts for kind in ("requests", "limits")]
    return not any(parse_quantity(block.get(name, 0)) > 0 for block in blocks for name in _QOS_RESOURCES)


def _looks_across(pod: Manifest) -> bool:
    affinity = pod.get("affinity") or {}
    for kind in ("podAffinity", "podAntiAffinity"):
        block = affinity.get(kind) or {}
        terms = list(block.get("requiredDuringSchedulingIgnoredDuringExecution") or ())
        weighted = block.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
        terms += [one.get("podAffinityTerm") or {} for one in weighted]
        if any(term.get("namespaces") or term.get("namespaceSelector") is not None for term in terms):
            return True
    return False
