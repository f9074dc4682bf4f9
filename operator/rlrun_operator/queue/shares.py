"""Fair shares of namespaces, sizes of elastic runs, and messages about a wait.

The share of a namespace is the weighted dominant share (Ghodsi et al., NSDI 2011), current and past. For an elastic run, a pass chooses the
size that fits now, the size that fits after other runs have left, or the size to which an admitted run may grow. A message names the exact
missing resources.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlrun_operator.node_fit import show_amount
from rlrun_operator.queue.packing import Rooms, count_places, place_gang
from rlrun_operator.queue.queue_model import Amounts, Applicant, Capacity, PodSet, QueueRules

PAST_WEIGHT = 4.0
"""Weight of a namespace's past share relative to its current one: gangs are large, so an error of a few hundredths matters little."""


def total_capacity(capacity: Capacity | None) -> dict[str, float] | None:
    """Return the total of all rooms for runs of the queue, or None if unknown."""
    if capacity is None:
        return None
    total: dict[str, float] = {}
    for room in capacity.rooms:
        for name, amount in room.total.items():
            total[name] = total.get(name, 0.0) + max(0.0, amount - room.others.get(name, 0.0))
    return total


def scarce_resources(amounts: Amounts) -> frozenset[str]:
    """Return the resources that count: devices, or without devices all but the number of pods."""
    return frozenset(name for name in amounts if "/" in name) or frozenset(amounts) - {"pods"}


def dominant_share(amounts: Amounts, total: Amounts | None) -> float:
    """Return the largest share of a resource in its total; only devices count if any are requested. Without a total: number of devices."""
    counted = scarce_resources(amounts)
    if total is None:
        return sum(amounts[name] for name in counted if "/" in name) or 1.0
    return max((amounts[name] / total[name] for name in counted if total.get(name)), default=0.0)


@dataclass
class Shares:
    """Shares of namespaces during an admission pass.

    Attributes:
        rules: settings.
        total: total of all rooms; None: unknown.
        past: mean past share, decayed.
        now: current share.
    """

    rules: QueueRules
    total: Amounts | None
    past: Mapping[str, float]
    now: dict[str, float]
    demand: frozenset[str]
    """Namespaces with a running or waiting run."""

    def share_of(self, run: Applicant) -> float:
        """Return the share of one run."""
        return dominant_share(run.total, self.total)

    def add_run(self, run: Applicant) -> None:
        """Add the share of an admitted run."""
        self.now[run.namespace] = self.now.get(run.namespace, 0.0) + self.share_of(run)

    def sort_key(self, run: Applicant) -> tuple[float, float, float, str]:
        """Return the sort key of a waiting run: priority, its namespace's share, arrival."""
        share = PAST_WEIGHT * self.past.get(run.namespace, 0.0) + self.now.get(run.namespace, 0.0)
        return -run.priority, round(share / self.rules.weight_of(run.namespace), 9), run.since, run.uid

    def entitlement_of(self, namespace: str) -> float:
        """Return the entitlement of a namespace while others have demand."""
        weights = sum(self.rules.weight_of(each) for each in self.demand | {namespace})
        return self.rules.weight_of(namespace) / weights


def shares_of(
    rules: QueueRules,
    total: Amounts | None,
    past: Mapping[str, float],
    runs: Iterable[Applicant],
    waiting: Iterable[Applicant],
) -> Shares:
    """Return the shares with these admitted and waiting runs."""
    runs = list(runs)
    shares = Shares(rules, total, past, {}, frozenset(run.namespace for run in (*runs, *waiting)))
    for run in runs:
        shares.add_run(run)
    return shares


def decay_shares(
    past: Mapping[str, float], now: Mapping[str, float], seconds: float, half_life: float
) -> dict[str, float]:
    """Return the mean shares after `seconds` with the shares of `now`."""
    kept = 0.5 ** (max(0.0, seconds) / half_life)
    mean = {name: past.get(name, 0.0) * kept + now.get(name, 0.0) * (1 - kept) for name in {*past, *now}}
    return {name: share for name, share in mean.items() if share > 1e-6}


class Patience:
    """Elastic runs that wait for leaving runs, so that none starts with fewer pods a moment too early.

    Args:
        since: start of each wait from the previous pass, by UID.
        waiting: UIDs of the waiting runs.
        seconds: maximum wait of a run, summed over all of its waits.
        now: seconds, of the same clock as the times of runs.
    """

    def __init__(self, since: Mapping[str, float], waiting: Collection[str], seconds: float, now: float) -> None:
        self.since = {uid: at for uid, at in since.items() if uid in waiting}
        self.hoped: dict[str, int] = {}
        """Expected numbers of trainer pods, by UID."""
        self._seconds, self._now = seconds, now

    def find_larger(
        self, run: Applicant, now: int, leaving: Iterable[Mapping[str, Amounts]], rooms: Rooms
    ) -> tuple[Applicant, dict[str, dict[str, float]]] | None:
        """Return the run in a larger size that fits after other runs have left, with its room, or None if it need not wait.

        Args:
            run: waiting run with all of its trainer pods.
            now: number of trainer pods that fit now.
            leaving: resources of each leaving run, by room.
            rooms: rooms that the run may use; changed.
        """
        held = [each for each in leaving if each]
        if not held or self._now - self.since.get(run.uid, self._now) >= self._seconds:
            return None
        for each in held:
            rooms.charge_all(each, -1.0)
        for size in sorted({*run.sizes, run.trainers}, reverse=True):
            sized = run.sized(size)
            if now < size <= run.trainers and (placed := place_gang(rooms, sized.gang)) is not None:
                self.since.setdefault(run.uid, self._now)
                self.hoped[run.uid] = size
                return sized, placed
        return None

    def explain_wait(self, uid: str) -> str:
        """Return a message if a run waits for leaving runs, else an empty string."""
        size = self.hoped.get(uid)
        if not size:
            return ""
        return f"there is room for fewer of its trainer pods; {size} fit when the leaving runs have ended"


def by_size(run: Applicant) -> Iterator[Applicant]:
    """Yield a waiting run with all of its trainer pods, then in the smaller sizes of an elastic run."""
    yield run
    yield from (run.sized(size) for size in reversed(run.sizes) if size < run.trainers)


def choose_growth(rooms: Rooms, run: Applicant, sizes: Sequence[int], held: dict[str, dict[str, float]]) -> int:
    """Return the first size for which there is room, and charge it; 0 if there is none."""
    rooms.charge_all(held, -1.0)
    for size in sizes:
        if (placed := place_gang(rooms, run.sized(size).gang)) is not None:
            rooms.charge_all(placed)
            return size
    rooms.charge_all(held)
    return 0


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
    totals = [rooms.by_name[name].total for name in rooms.qualifying_rooms(pods)] or [
        r.total for r in rooms.by_name.values()
    ]
    two = [all(2 * amount <= total.get(name, 0.0) for name, amount in pods.requests.items()) for total in totals]
    return pods.apart or not any(two)


def _scarce_names(pods: PodSet) -> list[str]:
    devices = [name for name in pods.requests if "/" in name]
    return devices or [name for name in ("cpu", "memory") if name in pods.requests]


def _near_misses(rooms: Rooms, pods: PodSet, fitting: set[str]) -> str:
    """Return the rooms that come closest, and the obstacles of other rooms."""
    qualifying = [name for name in rooms.qualifying_rooms(pods) if name not in fitting]
    closest = sorted(qualifying, key=lambda name: (-_free_amount(rooms, name, pods), name))
    shown = [f"{name}: {_first_lacking(rooms, name, pods)}" for name in closest[:_SHOWN]]
    others = sorted(name for name in rooms.free if rooms.find_obstacle(name, pods) is not None)
    shown += [f"{name}: {rooms.find_obstacle(name, pods)}" for name in others[: _SHOWN - len(shown)]]
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
