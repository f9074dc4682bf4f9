"""Packing of a gang: the largest pods first, each into the room with the least left over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlrun_operator.node_fit import label_of
from rlrun_operator.queue.model import Amounts, PodSet
from rlrun_operator.queue.rooms import Rooms, sum_amounts

Placement = Mapping[str, Amounts]
"""Requests of a gang's pods by room."""
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
            (r for r in allowed if rooms.fits(r, pods.requests)),
            key=lambda r: _remaining_room(rooms, r, pods),
            default=None,
        )
        if best is None:
            return False
        rooms.charge(best, pods.requests)
        placed.append((best, pods.requests))
        if pods.apart and rooms.by_name[best].node is not None:
            allowed.remove(best)
    return True


def rooms_of_domain(rooms: Rooms, pods: PodSet, domain: Mapping[str, str]) -> list[str]:
    """Return the rooms of a domain that accept such a pod."""
    keys = [key for key in pods.together if key in domain]
    return [
        name
        for name in rooms.qualifying(pods)
        if all((node := rooms.by_name[name].node) is None or label_of(node, key) == domain[key] for key in keys)
    ]


def count_places(rooms: Rooms, pods: PodSet) -> dict[str, int]:
    """Return how many of these pods fit into each qualifying room, ignoring topology domains."""
    result = {}
    for name in rooms.qualifying(pods):
        most = 1 if pods.apart and rooms.by_name[name].node is not None else pods.count
        result[name] = min(most, rooms.times(name, pods.requests, most))
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
