"""The engines: which replica holds which version, which one gets the next request, and requests that survive a failing replica.

A request goes to the replica that would answer first by what is known: the fewest continuations in flight, weighed by how slow it is of
late. The members of a group and the turns of an episode share a prefix, hence go to the same replica as long as that is not overloaded.

A replica that fails a request is out of rotation until it has got weights again, later each time; one that failed twice in a row gets a
single request then, and more once it has answered. So a replica that answers errors quickly does not draw all the work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from loguru import logger

from rlrun.backoff import backoff
from rlrun.orchestrator.aio.condition import Signal, Turns
from rlrun.orchestrator.engines.load_control import Concurrency
from rlrun.orchestrator.engines.load_order import LoadOrder
from rlrun.orchestrator.engines.replica import UNLIMITED, Replica

NOBODY = "no engine is known"
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 15.0


@dataclass
class Lost:
    """Cost of failing replicas so far."""

    requests: int = 0
    """Requests that were asked elsewhere."""
    seconds: float = 0.0
    """Time that they had taken until then, all together."""
    longest: float = 0.0
    """Longest time of one of them, in seconds."""


class EnginePool:
    """All replicas, which may come and go. The only writer of `load`; `version` and `updating` are written by the hand-over, and by
    `fail`.

    Args:
        replicas: those that are known from the start.
        signal: notified after each change.
        max_concurrency: the most continuations that one replica is asked for at once.
        token_limit: number of token ids that the model has; None: unknown.
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
        """Notified when a replica comes or goes."""
        self._signal, self._max_concurrency = signal, max_concurrency
        self._freed = Signal()
        """Notified also when a request ends; only waiting requests listen to it."""
        signal.follow(self._freed)
        self._turns: dict[int | None, Turns] = {}
        self.waiting = 0
        """Continuations for which no replica has room at the moment."""
        self.waiting_for_version = 0
        """Those of them that are meant for a named version: the answers of an evaluation."""
        self.last_available = time.monotonic()
        """Last time when a replica was known to hold weights."""
        self.nobody = NOBODY
        """Reason why there is no replica at all; the discovery refines it."""
        self.lost = Lost()
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """Take a new replica in; it gets requests once the hand-over has given it weights."""
        replica.concurrency = Concurrency(self._max_concurrency, on_change=partial(self._order.update, replica))
        self.replicas.append(replica)
        self._order.add(replica)
        self.members.notify()
        self._signal.notify()

    def remove(self, replica: Replica, reason: str) -> None:
        """Forget a replica. What it is asked at the moment is asked elsewhere: a machine that lost its power never answers."""
        self.replicas.remove(replica)
        self._order.remove(replica)
        self.members.notify()
        self.abandon(replica, reason)

    def abandon(self, replica: Replica, reason: str) -> None:
        """Take a replica out of rotation, and ask elsewhere what it is asked at the moment."""
        self.fail(replica, reason)
        for request in list(replica.requests):
            request.cancel()

    def problems(self) -> str:
        """Reasons why replicas are out of rotation, one after the other."""
        return "; ".join(f"{r.url}: {r.failure}" for r in self.replicas) or self.nobody

    @property
    def in_use(self) -> list[Replica]:
        """Replicas that take requests, or will once their hand-over is over."""
        return [replica for replica in self.replicas if replica.version is not None and not replica.draining]

    @property
    def version(self) -> int | None:
        """The version that new rollouts are sampled with: the newest that a replica holds.

        While others still load it, it waits for them as long as the fastest took, lest that one gets all the work of a step.
        """
        return self._order.newest()

    def candidates(self, version: int | None = None) -> list[Replica]:
        """Replicas that may get a request for this version (default: the one for new rollouts)."""
        loads = self._order.loads_of(self.version if version is None else version)
        return [] if loads is None else loads.candidates

    @property
    def in_flight(self) -> int:
        """Continuations that all replicas are asked for."""
        return self._order.in_flight

    @property
    def usable(self) -> bool:
        """True if a replica takes requests for new rollouts."""
        loads = self._order.loads_of(self.version)
        return loads is not None and loads.open > 0

    @property
    def limited(self) -> bool:
        """True if the engines' load, and not the run's settings, bounds the number of rollouts."""
        loads = self._order.loads_of(self.version)
        return loads is not None and loads.limited > 0

    def room(self) -> int:
        """Continuations that the engines may be asked for in addition to those in flight and the waiting ones."""
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
        """Wait for a replica that holds the version and has room: the preferred one (its cache has the prefix) unless it is overloaded,
        else the one that would answer first.

        Args:
            prefer: the replica of the rollout's last request, or of its group.
            version: the version that the request is meant for; default: the one for new rollouts.
            count: continuations that are asked for.
            avoid: replicas that failed this request; taken only where there is no other.
            first: whether to come before those that have not begun: an episode that goes on, or a request that moves.
        """
        turns = self._turns.get(version)
        chosen = None if turns is not None else self._choose(prefer, version, count, avoid)
        if chosen is None:
            turns = turns or self._turns.setdefault(version, Turns())
            reserved = 0 if version is None else count
            self.waiting += count
            self.waiting_for_version += reserved
            try:
                async with turns.mine(first=first):
                    await self._freed.until(lambda: self._choose(prefer, version, count, avoid) is not None)
                    chosen = self._choose(prefer, version, count, avoid)
                    assert chosen is not None
                    chosen.load += count
            finally:
                self.waiting -= count
                self.waiting_for_version -= reserved
                if not turns.busy:
                    self._turns.pop(version, None)
                    self._signal.notify()
        else:
            chosen.load += count
        return chosen

    def release(self, replica: Replica, count: int) -> None:
        """End a request for `count` continuations that was answered or given up."""
        replica.load -= count
        if self.waiting:
            self._freed.notify()

    def fail(self, replica: Replica, reason: str) -> None:
        """Take a replica out of rotation; the hand-over brings it back."""
        if replica.version is not None:
            logger.warning(f"engine {replica.url} is out of rotation: {reason}")
            self.last_available = time.monotonic()
        replica.version, replica.failure = None, reason
        replica.concurrency.forget()
        self._signal.notify()

    def rest(self, reason: str) -> None:
        """Take all replicas out of rotation until the next hand-over; none of them has failed."""
        for replica in self.replicas:
            replica.version, replica.failure = None, reason
        self._signal.notify()

    def fail_request(self, replica: Replica, rotation: int, reason: str) -> None:
        """Rest a replica after a failed request of this `rotation`, twice as long each time in a row."""
        if replica.rotation != rotation or replica.version is None:
            return
        replica.failures += 1
        pause = backoff(replica.failures, first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        replica.rest_until = time.monotonic() + pause
        self.fail(replica, reason)

    def moved(self, seconds: float) -> None:
        """Count a request that is asked elsewhere after a replica had it for `seconds`."""
        self.lost.requests += 1
        self.lost.seconds += seconds
        self.lost.longest = max(self.lost.longest, seconds)

    def metrics(self) -> dict[str, float]:
        """Engines in rotation and known, what they may be asked for at once, and what failing ones have cost since the start."""
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

    def _choose(
        self, prefer: Replica | None, version: int | None, count: int, avoid: Sequence[Replica]
    ) -> Replica | None:
        loads = self._order.loads_of(self.version if version is None else version)
        return None if loads is None else loads.choose(prefer, count, avoid)
