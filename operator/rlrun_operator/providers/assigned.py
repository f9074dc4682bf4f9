"""Fields that a Kueue admission adds to a run's pods: flavors, updates of admission checks, and the labels that Kueue expects."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun_operator.names import ROLES, SPOT_SET
from rlrun_operator.providers.model import Flavor, Subject
from rlrun_operator.providers.workload import KUEUE
from rlrun_operator.state import Manifest, Placed

TOPOLOGY_GATE = f"{KUEUE}/topology"
_UNCONSTRAINED = f"{KUEUE}/podset-unconstrained-topology"


def flavors_of(workload: Manifest) -> frozenset[str]:
    """Return the names of the ResourceFlavors of an admission."""
    return frozenset(name for one in _pod_set_assignments(workload) for name in (one.get("flavors") or {}).values())


def pod_set_additions(run: Subject, workload: Manifest, flavors: Mapping[str, Flavor]) -> tuple[dict[str, Placed], str]:
    """Return the additions for each pod set, and a message about contradictions, or an empty string.

    Args:
        run: run of the Workload.
        workload: admitted Workload.
        flavors: the flavors that `flavors_of` names.
    """
    result: dict[str, Placed] = {}
    problems: list[str] = []
    for one in _pod_set_assignments(workload):
        role = next((name for name in (*ROLES, SPOT_SET) if name == one.get("name")), None)
        if role is not None:
            result[role] = _role_additions(role, run, workload, one, flavors, problems)
    return result, "; ".join(problems)


def _role_additions(
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
                    problems.append(
                        f"{source} sets {field} {key}={value} for pods of {role}, another one {values[key]}"
                    )
        tolerations += [each for each in part.get("tolerations") or () if each not in tolerations]
    labels = found["labels"] | {f"{KUEUE}/podset": role, f"{KUEUE}/local-queue-name": run.queue}
    cluster_queue = ((workload.get("status") or {}).get("admission") or {}).get("clusterQueue")
    labels |= {f"{KUEUE}/cluster-queue-name": cluster_queue} if cluster_queue else {}
    annotations = found["annotations"] | {f"{KUEUE}/workload": workload["metadata"]["name"]}
    gates: tuple[str, ...] = ()
    if one.get("topologyAssignment"):
        annotations |= {_UNCONSTRAINED: "true"}  # otherwise Kueue counts the pods a second time, as foreign pods
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
