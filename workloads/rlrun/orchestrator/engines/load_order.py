"""Replicas by version and by load, updated at each change of a replica, so that a choice costs the same for 64 engines as for 512.

Each version that engines hold has one `VersionLoads`. It keeps its open replicas in heaps: one heap by load for each class of slowness, and
one by room. A change puts a new place of the replica into its heaps and marks the old one as outdated; outdated places are removed when
they come to the top, or when they outnumber the others.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlrun.orchestrator.engines.replica import UNLIMITED, Replica

STICKY_SLACK = 16
"""Additional continuations up to which a replica keeps requests that share a prefix."""
REFRESH_SECONDS = 1.0
"""Interval at which the slowness of all replicas is computed again: the fastest replica changes, and old measurements expire."""
FASTER = 0.9
"""Share of the fastest time per token from which a faster replica changes the slowness of the others at once."""
SLOWNESS_STEP = 1.25
"""Ratio between two classes of slowness."""
LOOKS = 16
"""Replicas without enough room that one choice skips in each heap before it takes the replica with the most room."""
SPARE_PLACES = 64
"""Number of outdated places that a heap may hold in addition to one per current place."""


@dataclass(eq=False, slots=True)
class _Place:
    """State of one replica since its last change."""

    replica: Replica
    number: int
    """Order of entry into the pool, which decides between equals."""
    load: int
    limit: int
    room: int
    """Continuations that it may be asked for; `UNLIMITED` if it has no load; 0 if it takes none."""
    slowness: float
    is_open: bool
    heaps: tuple[_Heap, ...] = ()
    """Heaps that contain it. A place in a heap is outdated if this is empty."""

    def cost(self, count: int) -> float:
        """Return the load with `count` more continuations, weighted by the slowness."""
        return (self.load + count) * self.slowness


class _Heap:
    """Places in the order of a key, the smallest first."""

    def __init__(self) -> None:
        self._items: list[tuple[int, int, int, _Place]] = []
        self._pushes = itertools.count()
        self.current = 0
        """Places that are not outdated."""

    def push(self, key: int, place: _Place) -> None:
        """Add a place whose `heaps` contain this heap."""
        # The counter decides between an outdated place and its successor with the same key: places are not comparable.
        heapq.heappush(self._items, (key, place.number, next(self._pushes), place))
        self.current += 1

    def discard(self) -> None:
        """Count one place as outdated, and remove the outdated ones if they are too many."""
        self.current -= 1
        # Places are outdated at every change and stay in the heap. The rebuild keeps the cost of a
        # change constant on average.
        if len(self._items) > 2 * self.current + SPARE_PLACES:
            self._items = [item for item in self._items if self in item[3].heaps]
            heapq.heapify(self._items)

    def first(self, count: int, excluded: Sequence[Replica], looks: int) -> _Place | None:
        """Return the first place with room for `count`, or None if the first `looks` suitable places have no room."""
        found: _Place | None = None
        skipped: list[tuple[int, int, int, _Place]] = []
        while self._items and found is None and len(skipped) < looks:
            item = self._items[0]
            place = item[3]
            if place.heaps and place.room >= count and place.replica not in excluded:
                found = place
            else:
                heapq.heappop(self._items)
                if place.heaps:
                    skipped.append(item)
        for item in skipped:
            heapq.heappush(self._items, item)
        return found


class VersionLoads:
    """Replicas that hold one version and stay in use, with the sums that the pool reads at every request.

    Args:
        ceiling: largest number of continuations that one replica is asked for at once.
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._places: dict[Replica, _Place] = {}
        self._lanes: dict[int, _Heap] = {}
        """Open replicas with room by load, for each class of slowness."""
        self._by_room = _Heap()
        self._fastest: float | None = None
        self._refreshed = -math.inf
        self.open = 0
        """Replicas that take requests."""
        self.free = 0
        """Continuations that they may be asked for in addition to their load."""
        self.limited = 0
        """Replicas whose load, and not the run's settings, bounds their requests."""
        self.first_due = math.inf
        """Earliest `due` of the replicas that have held the version. It is never raised: a version that was used stays in use."""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def candidates(self) -> list[Replica]:
        """Replicas that take requests, in the order of their entry."""
        places = sorted((place for place in self._places.values() if place.is_open), key=lambda place: place.number)
        return [place.replica for place in places]

    def put(self, replica: Replica, number: int) -> None:
        """Take in a replica, or its change."""
        old = self._places.get(replica)
        load, limit, is_open = replica.load, replica.concurrency.limit, replica.open
        room = UNLIMITED if not load else limit - load if replica.failures < 2 else 0
        slowness = self._measure_slowness(replica)
        self.first_due = min(self.first_due, replica.due)
        if old is not None:
            before = (old.load, old.limit, old.room, old.slowness, old.is_open)
            if before == (load, limit, room, slowness, is_open):
                return
            self._take_out(old)
        place = _Place(replica, number, load, limit, room, slowness, is_open)
        self._places[replica] = place
        if is_open:
            self.open += 1
            self.free += max(0, limit - load)
            self.limited += limit < self._ceiling
            if room > 0:
                self._add_to_heaps(place)

    def remove(self, replica: Replica) -> None:
        """Forget a replica that no longer holds the version, or is no longer in use."""
        self._take_out(self._places.pop(replica))

    def choose(self, prefer: Replica | None, count: int, avoid: Sequence[Replica]) -> Replica | None:
        """Return the replica that would answer `count` continuations first, or None if no replica has room; see `EnginePool.acquire`."""
        self._refresh_slowness()
        avoided = {replica for replica in avoid if (place := self._places.get(replica)) is not None and place.is_open}
        excluded = () if len(avoided) == self.open else tuple(avoided)
        # The replica with the most room comes first: if it has too little, each has, and the heaps by load need no look.
        widest = self._by_room.first(count, excluded, 1 + len(excluded))
        if widest is None:
            return None
        places = [place for heap in self._lanes.values() if (place := heap.first(count, excluded, LOOKS)) is not None]
        best = min(places, key=lambda place: (place.cost(count), place.number), default=widest)
        preferred = None if prefer is None else self._places.get(prefer)
        if preferred is None or not preferred.is_open or preferred.room < count or preferred.replica in excluded:
            return best.replica
        # The cached prefix is worth a few continuations of load, but not an engine that is much
        # slower or fuller.
        return preferred.replica if preferred.cost(count - STICKY_SLACK) <= best.cost(count) else best.replica

    def _add_to_heaps(self, place: _Place) -> None:
        lane = round(math.log(place.slowness, SLOWNESS_STEP))
        heap = self._lanes.setdefault(lane, _Heap())
        place.heaps = (heap, self._by_room)
        heap.push(place.load, place)
        self._by_room.push(-place.room, place)

    def _take_out(self, place: _Place) -> None:
        if place.is_open:
            self.open -= 1
            self.free -= max(0, place.limit - place.load)
            self.limited -= place.limit < self._ceiling
        heaps, place.heaps = place.heaps, ()
        for heap in heaps:
            heap.discard()

    def _measure_slowness(self, replica: Replica) -> float:
        pace = replica.seconds_per_token
        if pace and replica.open and (self._fastest is None or pace < FASTER * self._fastest):
            self._fastest = pace
            self._refreshed = -math.inf  # the next choice computes the slowness of the others again
        return replica.slowness(self._fastest)

    def _refresh_slowness(self) -> None:
        now = time.monotonic()
        if now - self._refreshed < REFRESH_SECONDS:
            return
        self._refreshed = now
        open_paces = (place.replica.seconds_per_token for place in self._places.values() if place.is_open)
        self._fastest = min((pace for pace in open_paces if pace), default=None)
        for place in list(self._places.values()):
            if place.replica.slowness(self._fastest) != place.slowness:
                self.put(place.replica, place.number)
        self._lanes = {lane: heap for lane, heap in self._lanes.items() if heap.current}
        self._refreshed = now


class LoadOrder:
    """All replicas of a pool by the version that they hold.

    Args:
        ceiling: largest number of continuations that one replica is asked for at once.
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._versions: dict[int, VersionLoads] = {}
        self._held: dict[Replica, int | None] = {}
        """Version under which a replica is listed; None if it is not in use."""
        self._numbers: dict[Replica, int] = {}
        self._count = itertools.count()
        self._updating: set[Replica] = set()
        """Replicas that load a version and are not drained."""
        self._loads: dict[Replica, int] = {}
        self.in_flight = 0
        """Continuations that all replicas are asked for."""

    def add(self, replica: Replica) -> None:
        """Take in a new replica, and follow its changes."""
        self._numbers[replica] = next(self._count)
        replica.on_change = self.update
        self.update(replica)

    def remove(self, replica: Replica) -> None:
        """Forget a replica."""
        replica.on_change = None
        del self._numbers[replica]
        self._updating.discard(replica)
        self.in_flight -= self._loads.pop(replica)
        self._leave_version(replica, self._held.pop(replica))

    def update(self, replica: Replica) -> None:
        """Take in a change of a replica; one that was removed is ignored."""
        # A removed replica may still change when its last requests end.
        if replica not in self._numbers:
            return
        held = self._held.get(replica)
        # A draining engine gets no requests, whatever version it holds.
        version = None if replica.draining else replica.version
        self.in_flight += replica.load - self._loads.get(replica, 0)
        self._loads[replica] = replica.load
        if replica.updating and not replica.draining:
            self._updating.add(replica)
        else:
            self._updating.discard(replica)
        if held != version:
            self._leave_version(replica, held)
        self._held[replica] = version
        if version is not None:
            if version not in self._versions:
                self._versions[version] = VersionLoads(self._ceiling)
            self._versions[version].put(replica, self._numbers[replica])

    def newest(self) -> int | None:
        """Return the newest version that new rollouts may be sampled with; see `EnginePool.version`."""
        if not self._updating:
            return max(self._versions, default=None)
        now = time.monotonic()
        return max((version for version, loads in self._versions.items() if now >= loads.first_due), default=None)

    def loads_of(self, version: int | None) -> VersionLoads | None:
        """Return the replicas that hold this version, or None if there are none."""
        return None if version is None else self._versions.get(version)

    def _leave_version(self, replica: Replica, version: int | None) -> None:
        if version is None:
            return
        loads = self._versions[version]
        loads.remove(replica)
        if not len(loads):
            del self._versions[version]
