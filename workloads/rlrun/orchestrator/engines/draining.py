"""Draining of engines that are to go: no new request, an end for those under way, and only then the word that nobody uses them.

Which one goes is chosen here, where it is known what each has to do: one that is out of rotation, else the one with the fewest requests,
of several the newest. What has not ended after a while is asked elsewhere, from the tokens of its rollout so far: no rollout is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from loguru import logger

from rlrun.orchestrator.aio.condition import Signal
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.protocol.messages.spot_wish import SpotWish, plain_host

LOOK_SECONDS = 0.25
DRAIN_SECONDS = 300.0
"""Longest time for requests that an engine has when its drain begins; then they are asked elsewhere."""


def _replica_host(replica: Replica) -> str:
    return plain_host(str(urlsplit(replica.url).hostname))


class Drain:
    """Keeps as many engines in use as are wanted, as far as there are so many.

    Args:
        pool: the engines.
        signal: notified after each change.
        wanted: number of engines to leave in use; None: all.
        spot: those of them on interruptible nodes; None: no engine is.
        patience: see `DRAIN_SECONDS`.
        clock: steady seconds.
    """

    def __init__(
        self,
        pool: EnginePool,
        signal: Signal,
        *,
        wanted: Callable[[], int | None],
        spot: Callable[[], SpotWish | None] = lambda: None,
        patience: float = DRAIN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._signal, self._wanted, self._spot = pool, signal, wanted, spot
        self._patience, self._clock = patience, clock
        self._since: dict[Replica, float] = {}
        """Engines that are drained, and when that began; the last one last."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Begin a drain, or take an engine back into use, and move what has taken too long."""
        known = self._pool.replicas
        self._since = {replica: since for replica, since in self._since.items() if replica in known}
        for members, surplus in self._surplus(known):
            kind = set(members)
            drained = [replica for replica in self._since if replica in kind]
            while len(drained) > surplus:
                self._resume(drained.pop())
            while len(drained) < surplus and (replica := self._next(members)) is not None:
                self._begin(replica)
                drained.append(replica)
        for replica, since in self._since.items():
            if replica.load and self._clock() - since >= self._patience:
                self._pool.abandon(replica, f"it is to go, and has had {self._patience:g} s for its requests")

    def drained(self) -> tuple[str, ...]:
        """Hosts of the engines that have no request and get none."""
        return tuple(_replica_host(replica) for replica in self._since if not replica.load)

    def _surplus(self, known: Sequence[Replica]) -> list[tuple[list[Replica], int]]:
        """Engines of each kind of nodes, and how many of them are to go."""
        wanted, spot = self._wanted(), self._spot()
        if wanted is None or spot is None:
            return [(list(known), 0 if wanted is None else max(0, len(known) - max(1, wanted)))]
        kinds: tuple[list[Replica], list[Replica]] = ([], [])
        for replica in known:
            kinds[_replica_host(replica) in spot.hosts].append(replica)
        numbers = (max(0, wanted - spot.engines), spot.engines)
        return [(some, max(0, len(some) - number)) for some, number in zip(kinds, numbers, strict=True)]

    def _next(self, members: Sequence[Replica]) -> Replica | None:
        """The one of these engines that goes next; None: the last one in use stays."""
        left = [replica for replica in self._pool.replicas if not replica.draining]
        useful = [replica for replica in left if replica.version is not None]
        candidates = [replica for replica in left if replica.version is None] if len(useful) <= 1 else left
        newest = {replica: -place for place, replica in enumerate(left)}
        chosen = set(members)
        some = [replica for replica in candidates if replica in chosen]
        return min(some, key=lambda r: (r.version is not None, r.load, newest[r]), default=None)

    def _begin(self, replica: Replica) -> None:
        logger.info(f"engine {replica.url} is to go: it gets no more requests, and ends the {replica.load} that it has")
        replica.draining, self._since[replica] = True, self._clock()
        self._signal.notify()

    def _resume(self, replica: Replica) -> None:
        logger.info(f"engine {replica.url} stays after all")
        del self._since[replica]
        replica.draining = False
        self._signal.notify()
