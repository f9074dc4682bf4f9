"""Additions of an admission of Kueue to a run's pods: flavors, updates of admission checks, and the marks by which Kueue knows them."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun_operator.names import ROLES, SPOT_SET
from rlrun_operator.providers.model import Flavor, Subject
from rlrun_operator.providers.workload import KUEUE
from rlrun_operator.state import Manifest, Placed

TOPOLOGY_GATE = f"{KUEUE}/topology"
_UNCONSTRAINED = f"{KUEUE}/podset-unconstrained-topology"


def flavors_of(workload: Manifest) -> frozenset[str]:
    """Names of the ResourceFlavors of an admission."""
    return frozenset(name for one in _pod_set_assignments(workload) for name in (one.get("flavors") or {}).values())


def pod_set_additions(run: Subject, workload: Manifest, flavors: Mapping[str, Flavor]) -> tuple[dict[str, Placed], str]:
    """Additions for each pod set, and which of them contradict each other; empty: none do.

    Args:
        run: whose Workload it is.
        workload: an admitted one.
        flavors: those that `flavors_of` names.
    """
    result: dict[str, Placed] = {}
    problems: list[str] = []
    for one in _pod_set_assignments(workload):
        role = next((name for name in (*ROLES, SPOT_SET) if name == one.get("name")), None)
        if role is not None:
            result[role] = _of_role(role, run, workload, one, flavors, problems)
    return result, "; ".join(problems)


def _of_role(
    role: str, run: Subject, workload: Manifest, one: Manifest, flavors: Mapping[str, Flavor], problems: list[str]
) -> Placed:
    names = sorted(set((one.get("flavors") or {}).values()))
    parts: list[tuple[str, Manifest]] = [
        (f"flavor {name}", {"nodeSelector": flavors[name].node_labels, "tolerations": flavors[name].tolerations})
        for name in names
    ]
    parts += _admission_updates(workload, role)
    found: dict[str, dict[str, str]] = {"nodeSelector": {}, "labels": {}, "annotations": {}}
    tolerations: list[Manifest] = []
    for source, part in parts:
        for field, values in found.items():
            for key, value in (part.get(field) or {}).items():
                if values.setdefault(key, value) != value:
                    problems.append(f"{source} gives pods of {role} {field} {key}={value}, another one {values[key]}")
        tolerations += [each for each in part.get("tolerations") or () if each not in tolerations]
    labels = found["labels"] | {f"{KUEUE}/podset": role, f"{KUEUE}/local-queue-name": run.queue}
    cluster_queue = ((workload.get("status") or {}).get("admission") or {}).get("clusterQueue")
    labels |= {f"{KUEUE}/cluster-queue-name": cluster_queue} if cluster_queue else {}
    annotations = found["annotations"] | {f"{KUEUE}/workload": workload["metadata"]["name"]}
    gates: tuple[str, ...] = ()
    if one.get("topologyAssignment"):
        annotations |= {_UNCONSTRAINED: "true"}  # else Kueue counts the pods once more, as those of others
        gates = (TOPOLOGY_GATE,)
    return Placed(found["nodeSelector"], tuple(tolerations), labels, annotations, gates)


def _pod_set_assignments(workload: Manifest) -> list[Manifest]:
    admission = (workload.get("status") or {}).get("admission") or {}
    return list(admission.get("podSetAssignments") or ())


def _admission_updates(workload: Manifest, role: str) -> list[tuple[str, Manifest]]:
    checks = (workload.get("status") or {}).get("admissionChecks") or ()
    return [
        (f"admission check {check.get('name')}", update)
        for check in checks
        for update in check.get("podSetUpdates") or ()
        if update.get("name") == role
    ]
