"""Pool of engines: versions held by the replicas, choice of the replica for a request, and recovery of requests from a
failed replica.

A request goes to the replica that is expected to answer first: the one with the fewest continuations in flight,
weighted by its recent slowness. The members of a group and the turns of an episode share a prefix and therefore go to
the same replica unless it is overloaded.

A replica that fails a request is out of rotation until it has received weights again, with a delay that grows each
time. After two failures in a row it gets a single request, and more after an answer. So a replica that quickly answers
errors does not attract all the work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from loguru import logger

from rlrun.backoff import backoff
from rlrun.orchestrator.aio.event_loop import Signal, Turns
from rlrun.orchestrator.engines.load_order import LoadOrder
from rlrun.orchestrator.engines.replica import UNLIMITED, Concurrency, Replica

NOBODY = "no engine is known"
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 15.0


@dataclass
class Lost:
    """Cost of failed replicas so far."""

    requests: int = 0
    """Number of requests that moved to another replica."""
    seconds: float = 0.0
    """Total seconds that these requests had taken before the move."""
    longest: float = 0.0
    """Longest time of one of them, in seconds."""


class EnginePool:
    """All replicas of a run, which may come and go.

    Only this class writes `load`. The weight hand-over and `fail` write `version` and `updating`.

    Args:
        replicas: initial replicas.
        signal: signal notified after each change.
        max_concurrency: limit of continuations in flight per replica.
        token_limit: number of token ids of the model, or None if unknown.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        signal: Signal,
        *,
        max_concurrency: int = UNLIMITED,
        token_limit: int | None = None,
    ) -> None:
        self.token_limit = token_limit
        self.replicas: list[Replica] = []
        self._order = LoadOrder(max_concurrency)
        self.members = Signal()
        """Signal notified when a replica is added or removed."""
        self._signal, self._max_concurrency = signal, max_concurrency
        self._freed = Signal()
        """Signal notified also when a request ends; only waiting requests use it."""
        signal.follow(self._freed)
        self._turns: dict[int | None, Turns] = {}
        self.waiting = 0
        """Continuations that wait for a replica with room."""
        self.waiting_for_version = 0
        """Part of `waiting` that needs a specific version: the requests of an evaluation."""
        self.last_available = time.monotonic()
        """Last time (monotonic seconds) at which a replica held weights."""
        self.nobody = NOBODY
        """Reason why the pool is empty; the discovery sets details."""
        self.lost = Lost()
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """Add a replica. It gets requests after the hand-over has sent it weights."""
        replica.concurrency = Concurrency(self._max_concurrency, on_change=partial(self._order.update, replica))
        self.replicas.append(replica)
        self._order.add(replica)
        self.members.notify()
        self._signal.notify()

    def remove(self, replica: Replica, reason: str) -> None:
        """Remove a replica and move its requests: a machine without power never answers them."""
        # Out of the list first: the canceled requests choose another replica at once.
        self.replicas.remove(replica)
        self._order.remove(replica)
        self.members.notify()
        self.abandon(replica, reason)

    def abandon(self, replica: Replica, reason: str) -> None:
        """Take a replica out of rotation and move its requests to other replicas."""
        self.fail(replica, reason)
        for request in list(replica.requests):
            request.cancel()

    def problems(self) -> str:
        """Return the reasons why replicas are out of rotation, separated by semicolons."""
        return "; ".join(f"{r.url}: {r.failure}" for r in self.replicas) or self.nobody

    @property
    def in_use(self) -> list[Replica]:
        """Replicas that take requests now or after their hand-over."""
        return [replica for replica in self.replicas if replica.version is not None and not replica.draining]

    @property
    def version(self) -> int | None:
        """Version for new rollouts: the newest that a replica holds.

        While other replicas still load it, it is used only after they had as much time as the fastest; otherwise the
        fastest would get all the work of a step.
        """
        return self._order.newest()

    def candidates(self, version: int | None = None) -> list[Replica]:
        """Return the replicas that may get a request for this version. Default: the version for new rollouts."""
        loads = self._order.loads_of(self.version if version is None else version)
        return [] if loads is None else loads.candidates

    @property
    def in_flight(self) -> int:
        """Continuations requested from all replicas."""
        return self._order.in_flight

    @property
    def usable(self) -> bool:
        """Whether a replica takes requests for new rollouts."""
        loads = self._order.loads_of(self.version)
        return loads is not None and loads.open > 0

    @property
    def limited(self) -> bool:
        """Whether the engines' load, and not the run's settings, limits the number of rollouts."""
        loads = self._order.loads_of(self.version)
        return loads is not None and loads.limited > 0

    def room(self) -> int:
        """Return the number of continuations that fit in addition to those in flight and waiting."""
        loads = self._order.loads_of(self.version)
        return 0 if loads is None else max(0, loads.free - self.waiting)

    async def acquire(
        self,
        prefer: Replica | None,
        version: int | None,
        count: int,
        *,
        avoid: Sequence[Replica] = (),
        first: bool = False,
    ) -> Replica:
        """Wait for a replica that holds the version and has room, and reserve the continuations.

        The preferred replica is used unless it is overloaded, because its cache holds the prefix. Otherwise the replica
        that is expected to answer first is used.

        Args:
            prefer: replica of the rollout's last request or of its group.
            version: required version. Default: the version for new rollouts.
            count: number of continuations.
            avoid: replicas that failed this request; used only without an alternative.
            first: whether to precede requests of new episodes, as for a running episode or a moved request.
        """
        # While others wait for this version, a new request joins their queue; otherwise it could
        # take the room for which they wait.
        turns = self._turns.get(version)
        chosen = None if turns is not None else self._choose_replica(prefer, version, count, avoid)
        if chosen is None:
            turns = turns or self._turns.setdefault(version, Turns())
            reserved = 0 if version is None else count
            self.waiting += count
            self.waiting_for_version += reserved
            try:
                async with turns.mine(first=first):
                    await self._freed.until(lambda: self._choose_replica(prefer, version, count, avoid) is not None)
                    chosen = self._choose_replica(prefer, version, count, avoid)
                    assert chosen is not None
                    chosen.load += count
            finally:
                self.waiting -= count
                self.waiting_for_version -= reserved
                # `room` depends on the waiting requests, so the dispatcher looks again after the
                # last one has left.
                if not turns.busy:
                    self._turns.pop(version, None)
                    self._signal.notify()
        else:
            # No `await` between the choice and the reservation, so two requests cannot take the
            # same place.
            chosen.load += count
        return chosen

    def release(self, replica: Replica, count: int) -> None:
        """End a request for `count` continuations, answered or not."""
        replica.load -= count
        if self.waiting:
            self._freed.notify()

    def fail(self, replica: Replica, reason: str) -> None:
        """Take a replica out of rotation until the next successful hand-over."""
        if replica.version is not None:
            logger.warning(f"engine {replica.url} is out of rotation: {reason}")
            self.last_available = time.monotonic()
        replica.version, replica.failure = None, reason
        replica.concurrency.forget()
        self._signal.notify()

    def rest(self, reason: str) -> None:
        """Take all replicas out of rotation until the next hand-over, without a failure."""
        for replica in self.replicas:
            replica.version, replica.failure = None, reason
        self._signal.notify()

    def fail_request(self, replica: Replica, rotation: int, reason: str) -> None:
        """Take a replica out of rotation after a failed request of this `rotation`, with a pause that doubles for each
        failure in a row.
        """
        # The replica has been repaired since this request was sent, or is out of rotation already.
        # Its old error says nothing about it now.
        if replica.rotation != rotation or replica.version is None:
            return
        replica.failures += 1
        pause = backoff(replica.failures, first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        replica.rest_until = time.monotonic() + pause
        self.fail(replica, reason)

    def count_moved_request(self, seconds: float) -> None:
        """Count a request that moved after a replica had it for `seconds`."""
        self.lost.requests += 1
        self.lost.seconds += seconds
        self.lost.longest = max(self.lost.longest, seconds)

    def metrics(self) -> dict[str, float]:
        """Return the engines in rotation and in the pool, their limit of requests, and the cost of failed engines so
        far.
        """
        limits = sum(min(r.concurrency.limit, self._max_concurrency) for r in self.replicas if r.open)
        return {
            "engines/in_rotation": float(sum(r.version is not None for r in self.replicas)),
            "engines/known": float(len(self.replicas)),
            "engines/limit": float(min(limits, UNLIMITED)),
            "engines/waiting": float(self.waiting),
            "engines/moved_requests": float(self.lost.requests),
            "engines/lost_seconds": self.lost.seconds,
            "engines/lost_seconds_longest": self.lost.longest,
        }

    def _choose_replica(
        self, prefer: Replica | None, version: int | None, count: int, avoid: Sequence[Replica]
    ) -> Replica | None:
        loads = self._order.loads_of(self.version if version is None else version)
        return None if loads is None else loads.choose(prefer, count, avoid)
