"""Fit of a pod on a node: requests, labels, taints and affinities. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from rlrun_operator.state import Manifest

_UNITS = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18} | {
    f"{letter}i": 1024.0 ** (i + 1) for i, letter in enumerate("KMGTPE")
}
_QUANTITY = re.compile(r"([0-9.]+)(m|k|[MGTPE]|[KMGTPE]i)?")
_OF_HEALTH = "node.kubernetes.io/"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def labels_wanted(spec: Manifest) -> dict[str, set[str]]:
    """Return the labels that a node must have: the node selector, and a required node affinity with one term of In."""
    wanted = {key: {str(value)} for key, value in (spec.get("nodeSelector") or {}).items()}
    terms = _node_terms(spec)
    if len(terms) == 1:
        for rule in terms[0].get("matchExpressions") or ():
            if rule.get("operator") == "In":
                wanted.setdefault(rule["key"], set()).update(map(str, rule.get("values") or ()))
    return wanted


def demands_of(spec: Manifest) -> dict[str, float]:
    """Return the sum of the containers' requests, devices first."""
    total: Counter[str] = Counter()
    for container in spec.get("containers") or ():
        total.update(_container_requests(container))
    return dict(sorted(((n, a) for n, a in total.items() if a), key=lambda item: ("/" not in item[0], item[0])))


def requests_of(spec: Manifest) -> dict[str, float]:
    """Return the requests that the scheduler counts for a pod, including one of `pods`.

    This is the maximum of all containers together and of each init container with the sidecars before it, or the request of the pod
    itself, plus the overhead of its RuntimeClass (KEP-753, KEP-2837).
    """
    steady: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    for container in spec.get("initContainers") or ():
        asked = _container_requests(container)
        if container.get("restartPolicy") == "Always":
            steady.update(asked)
            peak |= steady
        else:
            peak |= steady + Counter(asked)
    for container in spec.get("containers") or ():
        steady.update(_container_requests(container))
    total = dict(steady | peak) | _container_requests(spec)
    for name, amount in (spec.get("overhead") or {}).items():
        total[name] = total.get(name, 0.0) + parse_quantity(amount)
    return {name: amount for name, amount in total.items() if amount} | {"pods": 1.0}


def takes_pod(node: Manifest, spec: Manifest, wanted: Mapping[str, set[str]], demands: Mapping[str, float]) -> bool:
    """Return whether an empty node of this kind would accept the pod."""
    labelled = all(label_of(node, key) in values for key, values in wanted.items())
    open_to_it = not (node.get("spec") or {}).get("unschedulable") and not untolerated_taints(node, spec)
    return labelled and open_to_it and all(allocatable_amount(node, name) >= amount for name, amount in demands.items())


def obstacle_between(node: Manifest, spec: Manifest) -> str | None:
    """Return why a node would refuse such a pod even if it were empty, in a few words, or None.

    Args:
        node: node from the API server.
        spec: specification of a complete pod; a missing field `tolerations` means no tolerations.
    """
    if (node.get("spec") or {}).get("unschedulable"):
        return "cordoned"
    conditions = (node.get("status") or {}).get("conditions") or ()
    if any(c.get("type") == "Ready" and c.get("status") != "True" for c in conditions):
        return "not ready"
    if taints := untolerated_taints(node, {**spec, "tolerations": spec.get("tolerations") or []}):
        return f"taint {taints[0]}"
    for key, value in (spec.get("nodeSelector") or {}).items():
        if label_of(node, key) != str(value):
            return f"no label {key}={value}"
    terms = _node_terms(spec)
    if terms and not any(_matches_term(term, node) for term in terms):
        return "the pod's node affinity"
    return None


def healthy_node(node: Manifest) -> Manifest:
    """Return the node as it would be if ready, not cordoned and not under pressure: without the taints that Kubernetes sets."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    taints = [taint for taint in spec.get("taints") or () if not str(taint.get("key")).startswith(_OF_HEALTH)]
    conditions = [c for c in status.get("conditions") or () if c.get("type") != "Ready"]
    return {
        **node,
        "spec": {**spec, "unschedulable": False, "taints": taints},
        "status": {**status, "conditions": conditions},
    }


def _node_terms(spec: Manifest) -> Sequence[Manifest]:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    found: Sequence[Manifest] = (affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or []
    return found


def _matches_term(term: Manifest, node: Manifest) -> bool:
    """Return whether a node meets all rules of one term; no node meets a term without rules."""
    rules = [(rule, label_of(node, str(rule.get("key")))) for rule in term.get("matchExpressions") or ()]
    rules += [(rule, str(node["metadata"].get("name"))) for rule in term.get("matchFields") or ()]
    return bool(rules) and all(_rule_holds(rule, value) for rule, value in rules)


def _rule_holds(rule: Manifest, value: str | None) -> bool:
    operator, values = str(rule.get("operator")), [str(v) for v in rule.get("values") or ()]
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    if operator == "NotIn":
        return value not in values
    if operator == "In":
        return value in values
    try:
        limit, number = int(values[0]), int(value or "")
    except (ValueError, IndexError):
        return False
    return number > limit if operator == "Gt" else number < limit


def untolerated_taints(node: Manifest, spec: Manifest) -> list[str]:
    """Return the taints that keep the pod away."""
    if "tolerations" not in spec:  # the API server adds some to every pod, so this is only a part of a pod
        return []
    result = []
    for taint in (node.get("spec") or {}).get("taints") or ():
        if taint.get("effect") == "PreferNoSchedule":
            continue
        if not any(_tolerates_taint(toleration, taint) for toleration in spec.get("tolerations") or ()):
            result.append(f"{taint.get('key')}={taint['value']}" if taint.get("value") else str(taint.get("key")))
    return result


def _tolerates_taint(toleration: Manifest, taint: Manifest) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return toleration.get("key") == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")


def label_of(node: Manifest, key: str) -> str | None:
    """Return the value of a node's label, or None."""
    found = ((node.get("metadata") or {}).get("labels") or {}).get(key)
    return str(found) if found is not None else None


def allocatable_amount(node: Manifest, resource: str) -> float:
    """Return the amount of a resource that a node has for pods."""
    return parse_quantity(((node.get("status") or {}).get("allocatable") or {}).get(resource, 0))


def parse_quantity(value: object) -> float:
    """Return a Kubernetes quantity as a number; 0 if it is unreadable."""
    found = _QUANTITY.fullmatch(str(value))
    return float(found.group(1)) * _UNITS[found.group(2) or ""] if found else 0.0


def show_amount(resource: str, amount: float) -> str:
    """Return an amount of a resource as text for messages."""
    return f"{amount / 2**30:.4g}Gi" if resource in ("memory", "ephemeral-storage") else f"{amount:g}"


def _container_requests(container: Manifest) -> dict[str, float]:
    """Return the requests of a container; a resource with only a limit is requested in the same amount."""
    resources = container.get("resources") or {}
    asked = (resources.get("limits") or {}) | (resources.get("requests") or {})
    return {name: parse_quantity(amount) for name, amount in asked.items()}
