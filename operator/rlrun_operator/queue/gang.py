"""Pods of a run as the queue sees them, from its manifests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlrun_operator.names import ROLE_LABEL, ROLES, SPOT_LABEL, Role
from rlrun_operator.node_fit import REQUIRED, allocatable_amount, parse_quantity, requests_of
from rlrun_operator.queue.model import HeldPod, PodSet, Room
from rlrun_operator.state import Manifest

_ROLES: dict[str, Role] = {"StatefulSet": "trainer", "Deployment": "inference", "Pod": "orchestrator"}
_ENDED = ("Succeeded", "Failed")


def gang_of(
    workloads: Iterable[Manifest], *, engines_needed: int | None = None, trainers_needed: int | None = None
) -> tuple[PodSet, ...]:
    """Pod sets of a run's workloads, as they are rendered.

    Args:
        workloads: StatefulSet, Deployment and Pod.
        engines_needed: number of engines with which the run goes on; None: all.
        trainers_needed: number of trainer pods with which an elastic run can go on; None: all.
    """
    result = []
    needed: dict[Role, int | None] = {"inference": engines_needed, "trainer": trainers_needed}
    for child in workloads:
        spec = child["spec"]
        single = child["kind"] == "Pod"
        pod = spec if single else spec["template"]["spec"]
        count = 1 if single else int(spec.get("replicas", 1))
        if count:
            own = _affinity_keys(pod, "podAntiAffinity")
            together = tuple(_affinity_keys(pod, "podAffinity"))
            role = _ROLES[child["kind"]]
            result.append(PodSet(role, count, requests_of(pod), pod, together, bool(own), needed.get(role)))
    return tuple(result)


def held_pods(pods: Iterable[Manifest]) -> tuple[HeldPod, ...]:
    """Pods of a run that hold room, or want it."""
    result = []
    for pod in pods:
        role = (pod["metadata"].get("labels") or {}).get(ROLE_LABEL)
        if role not in ROLES or (pod.get("status") or {}).get("phase") in _ENDED:
            continue
        spec = pod.get("spec") or {}
        ending = "deletionTimestamp" in pod["metadata"]
        spot = SPOT_LABEL in pod["metadata"]["labels"]
        result.append(HeldPod(role, spec.get("nodeName"), requests_of(spec), ending, spot))
    return tuple(result)


def rooms_of(nodes: Sequence[Manifest], pods: Iterable[Manifest]) -> tuple[Room, ...]:
    """Nodes with what these pods, which are of no run of the queue, hold of them."""
    used: dict[str, dict[str, float]] = {str(node["metadata"]["name"]): {} for node in nodes}
    for pod in pods:
        spec = pod.get("spec") or {}
        into = used.get(str(spec.get("nodeName")))
        if into is None or (pod.get("status") or {}).get("phase") in _ENDED:
            continue
        for name, amount in requests_of(spec).items():
            into[name] = into.get(name, 0.0) + amount
    result = []
    for node in nodes:
        name = str(node["metadata"]["name"])
        has = (node.get("status") or {}).get("allocatable") or {}
        result.append(Room(name, {each: allocatable_amount(node, each) for each in has}, used[name], node))
    return tuple(result)


def total_room(capacity: dict[str, float]) -> Room:
    """All that there is, where only a number is known."""
    return Room("the cluster", {name: parse_quantity(amount) for name, amount in capacity.items()})


def _affinity_keys(spec: Manifest, kind: str) -> list[str]:
    """Labels by which a pod has to be with pods of its run, or away from them."""
    rules = ((spec.get("affinity") or {}).get(kind) or {}).get(REQUIRED) or ()
    return sorted({str(rule["topologyKey"]) for rule in rules})
