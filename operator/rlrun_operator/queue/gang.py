"""Pods of a run for the queue, read from its manifests."""

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
    """Return the pod sets of a run's rendered workloads.

    Args:
        workloads: StatefulSet, Deployment and Pod.
        engines_needed: minimum number of engines of a running run; None: all.
        trainers_needed: minimum number of trainer pods of an elastic run; None: all.
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
    """Return the pods of a run that hold or request resources."""
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
    """Return the nodes as rooms, charged with pods that belong to no run of the queue."""
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
    """Return one room for the whole cluster, if only its total is known."""
    return Room("the cluster", {name: parse_quantity(amount) for name, amount in capacity.items()})


def _affinity_keys(spec: Manifest, kind: str) -> list[str]:
    """Return the topology labels of a pod's required affinity or anti-affinity to pods of its run."""
    rules = ((spec.get("affinity") or {}).get(kind) or {}).get(REQUIRED) or ()
    return sorted({str(rule["topologyKey"]) for rule in rules})
