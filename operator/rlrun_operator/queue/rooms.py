"""Free resources of rooms during an admission pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rlrun_operator.node_fit import healthy_node, obstacle_between
from rlrun_operator.queue.model import Amounts, Capacity, PodSet, Room

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

    def charge(self, room: str, amounts: Amounts, times: float = 1.0) -> None:
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
            self.charge(room, part, times)

    def fits(self, room: str, requests: Amounts) -> bool:
        """Return whether one pod fits into the free resources; resources that the rooms do not count are ignored."""
        free = self.free[room]
        counted = self.by_name[room].node is not None
        return all(amount <= free.get(name, 0.0 if counted else amount) + _CLOSE for name, amount in requests.items())

    def times(self, room: str, requests: Amounts, most: int) -> int:
        """Return how many such pods fit into the free resources, at most `most`."""
        free, counted = self.free[room], self.by_name[room].node is not None
        found = float(most)
        for name, amount in requests.items():
            if amount > 0 and (counted or name in free):
                found = min(found, (free.get(name, 0.0) + _CLOSE) // amount)
        return max(0, int(found))

    def emptied(self, *, recovered: bool = False) -> Rooms:
        """Return the same rooms without pods; `recovered`: also with all nodes ready, uncordoned and without pressure."""
        rooms = [replace(room, others={}) for room in self.capacity.rooms]
        if recovered:
            rooms = [room if room.node is None else replace(room, node=healthy_node(room.node)) for room in rooms]
        return Rooms(replace(self.capacity, rooms=tuple(rooms)))

    def obstacle(self, room: str, pods: PodSet) -> str | None:
        """Return why a room accepts none of these pods even if it is empty, or None."""
        node = self.by_name[room].node
        if node is None:
            return None
        key = (id(pods.spec), room)
        if key not in self._obstacles:
            self._obstacles[key] = obstacle_between(node, pods.spec)
        return self._obstacles[key]

    def qualifying(self, pods: PodSet) -> list[str]:
        """Return the rooms that would accept such a pod if they were empty."""
        return [name for name in self.free if self.obstacle(name, pods) is None]


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
