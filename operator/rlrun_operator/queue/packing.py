"""Packing of gangs: free resources of rooms, the placement of a gang in them, and the pods of runs.

A room is a node, or the whole cluster if only its total is known. The largest pods of a gang are placed first, each in the room with the
least left over. The pods come from the manifests of the runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rlrun_operator.names import ROLE_LABEL, ROLES, SPOT_LABEL, Role
from rlrun_operator.node_fit import (
    REQUIRED,
    allocatable_amount,
    healthy_node,
    label_of,
    obstacle_between,
    parse_quantity,
    requests_of,
)
from rlrun_operator.queue.queue_model import Amounts, Capacity, HeldPod, PodSet, Room
from rlrun_operator.state import Manifest

_CLOSE = 1e-6
"""Tolerance for sums of floats."""


class Rooms:
    """Free resources of each room.

    Args:
        capacity: rooms, with the use by foreign pods.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.by_name: dict[str, Room] = {room.name: room for room in capacity.rooms}
        self.free: dict[str, dict[str, float]] = {
            room.name: {name: amount - room.others.get(name, 0.0) for name, amount in room.total.items()}
            for room in capacity.rooms
        }
        self._obstacles: dict[tuple[int, str], str | None] = {}

    def copy(self) -> Rooms:
        """Return a copy for a trial."""
        new = object.__new__(Rooms)
        new.capacity, new.by_name, new._obstacles = self.capacity, self.by_name, self._obstacles
        new.free = {name: dict(free) for name, free in self.free.items()}
        return new

    def charge_room(self, room: str, amounts: Amounts, times: float = 1.0) -> None:
        """Subtract amounts from a room; an unknown room is ignored."""
        free = self.free.get(room)
        if free is None:
            return
        for name, amount in amounts.items():
            if name in free:
                free[name] -= times * amount

    def charge_all(self, amounts: Mapping[str, Amounts], times: float = 1.0) -> None:
        """Subtract amounts from several rooms."""
        for room, part in amounts.items():
            self.charge_room(room, part, times)

    def fits_pod(self, room: str, requests: Amounts) -> bool:
        """Return whether one pod fits into the free resources; resources that the rooms do not count are ignored."""
        free = self.free[room]
        counted = self.by_name[room].node is not None
        return all(amount <= free.get(name, 0.0 if counted else amount) + _CLOSE for name, amount in requests.items())

    def count_fitting(self, room: str, requests: Amounts, most: int) -> int:
        """Return how many such pods fit into the free resources, at most `most`."""
        free, counted = self.free[room], self.by_name[room].node is not None
        found = float(most)
        for name, amount in requests.items():
            if amount > 0 and (counted or name in free):
                found = min(found, (free.get(name, 0.0) + _CLOSE) // amount)
        return max(0, int(found))

    def without_pods(self, *, recovered: bool = False) -> Rooms:
        """Return the same rooms without pods; `recovered`: also with all nodes ready, uncordoned and without pressure."""
        rooms = [replace(room, others={}) for room in self.capacity.rooms]
        if recovered:
            rooms = [room if room.node is None else replace(room, node=healthy_node(room.node)) for room in rooms]
        return Rooms(replace(self.capacity, rooms=tuple(rooms)))

    def find_obstacle(self, room: str, pods: PodSet) -> str | None:
        """Return why a room accepts none of these pods even if it is empty, or None."""
        node = self.by_name[room].node
        if node is None:
            return None
        key = (id(pods.spec), room)
        if key not in self._obstacles:
            self._obstacles[key] = obstacle_between(node, pods.spec)
        return self._obstacles[key]

    def qualifying_rooms(self, pods: PodSet) -> list[str]:
        """Return the rooms that would accept such a pod if they were empty."""
        return [name for name in self.free if self.find_obstacle(name, pods) is None]


def sum_amounts(parts: Iterable[tuple[str, Amounts]]) -> dict[str, dict[str, float]]:
    """Return the sum of amounts by room."""
    result: dict[str, dict[str, float]] = {}
    for room, amounts in parts:
        into = result.setdefault(room, {})
        for name, amount in amounts.items():
            into[name] = into.get(name, 0.0) + amount
    return result


def larger_amounts(one: Mapping[str, Amounts], other: Mapping[str, Amounts]) -> dict[str, dict[str, float]]:
    """Return the larger of both amounts, room by room."""
    result = {room: dict(amounts) for room, amounts in one.items()}
    for room, amounts in other.items():
        into = result.setdefault(room, {})
        for name, amount in amounts.items():
            into[name] = max(into.get(name, 0.0), amount)
    return result


_DOMAINS_MAX = 512
"""Maximum number of topology domains that are tried."""


def place_gang(rooms: Rooms, gang: Sequence[PodSet]) -> dict[str, dict[str, float]] | None:
    """Return room for all pods of a gang, without charging `rooms`, or None if they do not fit together."""
    if not gang:
        return {}
    if not _has_enough(rooms, gang):
        return None
    ordered = sorted(gang, key=_size_key, reverse=True)
    for domain in _gang_domains(rooms, gang):
        trial = rooms.copy()
        placed: list[tuple[str, Amounts]] = []
        if all(_place_set(trial, pods, domain, placed) for pods in ordered):
            return sum_amounts(placed)
    return None


def _has_enough(rooms: Rooms, gang: Sequence[PodSet]) -> bool:
    """Return False if all rooms together have too little, which is a cheap test for most gangs that do not fit."""
    wanted: dict[str, float] = {}
    for pods in gang:
        for name, amount in pods.requests.items():
            wanted[name] = wanted.get(name, 0.0) + pods.count * amount
    counted = all(room.node is not None for room in rooms.by_name.values())
    for name, amount in wanted.items():
        found = [free[name] for free in rooms.free.values() if name in free]
        if (found or counted) and sum(max(0.0, one) for one in found) < amount - 1e-6:
            return False
    return True


def _place_set(rooms: Rooms, pods: PodSet, domain: Mapping[str, str], placed: list[tuple[str, Amounts]]) -> bool:
    allowed = rooms_of_domain(rooms, pods, domain)
    for _ in range(pods.count):
        best = min(
            (r for r in allowed if rooms.fits_pod(r, pods.requests)),
            key=lambda r: _remaining_room(rooms, r, pods),
            default=None,
        )
        if best is None:
            return False
        rooms.charge_room(best, pods.requests)
        placed.append((best, pods.requests))
        if pods.apart and rooms.by_name[best].node is not None:
            allowed.remove(best)
    return True


def rooms_of_domain(rooms: Rooms, pods: PodSet, domain: Mapping[str, str]) -> list[str]:
    """Return the rooms of a domain that accept such a pod."""
    keys = [key for key in pods.together if key in domain]
    return [
        name
        for name in rooms.qualifying_rooms(pods)
        if all((node := rooms.by_name[name].node) is None or label_of(node, key) == domain[key] for key in keys)
    ]


def count_places(rooms: Rooms, pods: PodSet) -> dict[str, int]:
    """Return how many of these pods fit into each qualifying room, ignoring topology domains."""
    result = {}
    for name in rooms.qualifying_rooms(pods):
        most = 1 if pods.apart and rooms.by_name[name].node is not None else pods.count
        result[name] = min(most, rooms.count_fitting(name, pods.requests, most))
    return result


def _size_key(pods: PodSet) -> tuple[float, float, float, int]:
    """Return the sort key of a pod's size; devices come first because they are scarce."""
    devices = sum(amount for name, amount in pods.requests.items() if "/" in name)
    return devices, pods.requests.get("cpu", 0.0), pods.requests.get("memory", 0.0), len(pods.together)


def _remaining_room(rooms: Rooms, room: str, pods: PodSet) -> tuple[float, float, float, str]:
    """Return the sort key of a room after such a pod: pods without devices go to rooms without devices."""
    free = rooms.free[room]
    left = sum(amount for name, amount in free.items() if "/" in name)
    return left, free.get("cpu", 0.0), free.get("memory", 0.0), room


def _gang_domains(rooms: Rooms, gang: Sequence[PodSet]) -> Iterator[Mapping[str, str]]:
    """Yield values of the labels that pods of the gang must share; one empty domain if they share none."""
    keys = sorted({key for pods in gang for key in pods.together})
    if not keys or all(room.node is None for room in rooms.by_name.values()):
        yield {}
        return
    seen: list[dict[str, str]] = []
    for room in rooms.by_name.values():
        values = {key: label_of(room.node, key) for key in keys} if room.node is not None else {}
        known = {key: value for key, value in values.items() if value is not None}
        if len(known) == len(keys) and known not in seen and len(seen) < _DOMAINS_MAX:
            seen.append(known)
            yield known


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
