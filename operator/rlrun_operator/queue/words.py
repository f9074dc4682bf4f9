"""Messages about a wait: the exact missing resources."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun_operator.node_fit import show_amount
from rlrun_operator.queue.fit import count_places, place_gang
from rlrun_operator.queue.model import PodSet
from rlrun_operator.queue.rooms import Rooms

_SHOWN = 3
"""Maximum number of named rooms."""


def describe_missing(rooms: Rooms, gang: Sequence[PodSet]) -> str:
    """Return the need of a gang and the available rooms.

    Example: `trainer needs 2 nodes with 8 free nvidia.com/gpu each; 1 qualifies (node-7: 3 free)`.

    Args:
        rooms: free amounts for this gang.
        gang: gang that does not fit.
    """
    for pods in gang:
        if place_gang(rooms, (pods,)) is None:
            return _describe_set(rooms, pods)
    needs = "; ".join(f"{pods.role} needs {_describe_need(rooms, pods)}" for pods in gang)
    return f"{needs}: each role fits by itself, but not all of them together"


def _describe_set(rooms: Rooms, pods: PodSet) -> str:
    found = count_places(rooms, pods)
    fitting = sum(found.values())
    verb = "qualifies" if fitting == 1 else "qualify"
    near = _near_misses(rooms, pods, {name for name, count in found.items() if count})
    apart = " in one domain of " + " and ".join(pods.together) if pods.together and fitting >= pods.count else ""
    return f"{pods.role} needs {_describe_need(rooms, pods)}{apart}; {min(fitting, pods.count)} {verb}{near}"


def _describe_need(rooms: Rooms, pods: PodSet) -> str:
    scarce = _scarce_names(pods)
    amounts = (
        " and ".join(f"{show_amount(name, pods.requests[name])} free {name}" for name in scarce) or "room for a pod"
    )
    single = rooms.capacity.noun if _fills_node(rooms, pods) else "place"
    many = pods.count != 1
    return f"{pods.count} {single}{'s' if many else ''} with {amounts}{' each' if many else ''}"


def _fills_node(rooms: Rooms, pods: PodSet) -> bool:
    """Return whether no node has room for two of these pods."""
    if any(room.node is None for room in rooms.by_name.values()):
        return False
    totals = [rooms.by_name[name].total for name in rooms.qualifying(pods)] or [r.total for r in rooms.by_name.values()]
    two = [all(2 * amount <= total.get(name, 0.0) for name, amount in pods.requests.items()) for total in totals]
    return pods.apart or not any(two)


def _scarce_names(pods: PodSet) -> list[str]:
    devices = [name for name in pods.requests if "/" in name]
    return devices or [name for name in ("cpu", "memory") if name in pods.requests]


def _near_misses(rooms: Rooms, pods: PodSet, fitting: set[str]) -> str:
    """Return the rooms that come closest, and the obstacles of other rooms."""
    qualifying = [name for name in rooms.qualifying(pods) if name not in fitting]
    closest = sorted(qualifying, key=lambda name: (-_free_amount(rooms, name, pods), name))
    shown = [f"{name}: {_first_lacking(rooms, name, pods)}" for name in closest[:_SHOWN]]
    others = sorted(name for name in rooms.free if rooms.obstacle(name, pods) is not None)
    shown += [f"{name}: {rooms.obstacle(name, pods)}" for name in others[: _SHOWN - len(shown)]]
    more = len(closest) + len(others) - len(shown)
    return f" ({'; '.join(shown)}{f'; and {more} more' if more > 0 else ''})" if shown else ""


def _free_amount(rooms: Rooms, room: str, pods: PodSet) -> float:
    return sum(rooms.free[room].get(name, 0.0) for name in _scarce_names(pods))


def _first_lacking(rooms: Rooms, room: str, pods: PodSet) -> str:
    """Return the first resource with too little left."""
    free = rooms.free[room]
    for name in (*_scarce_names(pods), *pods.requests):
        if free.get(name, 0.0) < pods.requests[name]:
            amount = show_amount(name, max(0.0, free.get(name, 0.0)))
            return f"{amount} free" if name in _scarce_names(pods)[:1] else f"{amount} {name} free"
    return "occupied by pods of the same run"
