"""Draining of engines before their removal, requested by the operator in the answers to the Lease's renewals.

A draining engine gets no new requests and finishes its running ones; then the orchestrator reports that the engine is unused. The
orchestrator chooses the engine, because only it has the load of each: an engine out of rotation, otherwise the engine with the fewest
requests, and the newest of equals. After a timeout the remaining requests move to other engines with the tokens sampled so far, so no
rollout is lost.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from loguru import logger

from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.protocol.messages import lease_annotations as names
from rlrun.protocol.messages.lease_annotations import SpotWish, plain_host


@dataclass
class EngineRequests:
    """Current requests of the operator to a run. The requests of an engine (`Replica.load`) are HTTP requests."""

    engines: int | None = None
    """Number of engines to keep in use. None: no request."""
    spot: SpotWish | None = None
    """Hosts of the engines on interruptible nodes, and how many of these engines to keep. None: no engine is on such a node."""
    window_seconds: float | None = None
    """Seconds that a load report must cover."""

    def read_lease(self, lease: str) -> None:
        """Read the requests from a Lease. An unreadable Lease changes nothing; a missing annotation deletes the request."""
        try:
            found = json.loads(lease)["metadata"].get("annotations") or {}
            engines = int(found[names.ENGINES_WANTED]) if names.ENGINES_WANTED in found else None
            window = float(found[names.ENGINES_WINDOW]) if names.ENGINES_WINDOW in found else None
            spot = SpotWish.read(found[names.ENGINES_SPOT]) if names.ENGINES_SPOT in found else None
        except (ValueError, LookupError, TypeError, AttributeError):
            return
        self.engines = None if engines is None or engines < 1 else engines
        self.spot = spot
        self.window_seconds = window if window is not None and math.isfinite(window) and window >= 0 else None


LOOK_SECONDS = 0.25
"""Interval of the checks for engines to drain."""
DRAIN_SECONDS = 300.0
"""Timeout for the running requests of a draining engine; then they move to other engines."""


def _replica_host(replica: Replica) -> str:
    return plain_host(str(urlsplit(replica.url).hostname))


class Drain:
    """Limit of the number of engines in use.

    Args:
        pool: pool of the engines.
        signal: signal notified after each change.
        wanted: number of engines to keep in use. None: all.
        spot: engines on interruptible nodes and how many of them to keep. None: no engine is on such a node.
        patience: timeout in seconds, see `DRAIN_SECONDS`.
        clock: monotonic clock in seconds.
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
        """Draining engines with the start time of the drain, the latest last."""

    async def run(self) -> None:
        """Check until canceled."""
        while True:
            self.adjust_drains()
            await asyncio.sleep(LOOK_SECONDS)

    def adjust_drains(self) -> None:
        """Start or undo drains, and move the requests of drains that timed out.

        A timed-out drain is moved again in each check until no request is left.
        """
        known = self._pool.replicas
        # Engines that are gone need no drain.
        self._since = {replica: since for replica, since in self._since.items() if replica in known}
        for members, surplus in self._surplus_by_kind(known):
            kind = set(members)
            # Draining engines of this kind, with and without running requests; the latest is resumed first.
            drained = [replica for replica in self._since if replica in kind]
            # Resumed in the reverse order: the engine that drained last has had the least time to
            # finish its requests.
            while len(drained) > surplus:
                self._undo_drain(drained.pop())
            while len(drained) < surplus and (replica := self._choose_engine(members)) is not None:
                self._start_drain(replica)
                drained.append(replica)
        for replica, since in self._since.items():
            # Long requests must not keep the operator from removing the pod. Other engines take
            # them over with their tokens so far lost.
            if replica.load and self._clock() - since >= self._patience:
                self._pool.abandon(replica, f"its drain has timed out after {self._patience:g} s")

    def drained(self) -> tuple[str, ...]:
        """Return the hosts of the draining engines without a request."""
        return tuple(_replica_host(replica) for replica in self._since if not replica.load)

    def _surplus_by_kind(self, known: Sequence[Replica]) -> list[tuple[list[Replica], int]]:
        """Return the engines of each kind of node (all nodes, or regular and interruptible ones) with the number of engines to drain.

        A kind may lose all of its engines. `_choose_engine` keeps the last useful engine of the run.
        """
        wanted, spot = self._wanted(), self._spot()
        if wanted is None or spot is None:
            return [(list(known), 0 if wanted is None else max(0, len(known) - max(1, wanted)))]
        kinds: tuple[list[Replica], list[Replica]] = ([], [])
        for replica in known:  # index 0: regular nodes, 1: interruptible nodes
            kinds[_replica_host(replica) in spot.hosts].append(replica)
        numbers = (max(0, wanted - spot.engines), spot.engines)
        return [(some, max(0, len(some) - number)) for some, number in zip(kinds, numbers, strict=True)]

    def _choose_engine(self, members: Sequence[Replica]) -> Replica | None:
        """Return the next engine of `members` to drain, or None if all of them drain or only the last useful engine is left.

        An engine without a version is out of rotation: it gets no requests until the next hand-over of weights. The others are useful.
        """
        left = [replica for replica in self._pool.replicas if not replica.draining]
        useful = [replica for replica in left if replica.version is not None]
        candidates = [replica for replica in left if replica.version is None] if len(useful) <= 1 else left
        # The pool's order is the order in which engines were added.
        newest = {replica: -place for place, replica in enumerate(left)}
        chosen = set(members)
        some = [replica for replica in candidates if replica in chosen]
        # Engines without weights first, then those with the fewest requests: the drain then moves
        # or delays the least work.
        return min(some, key=lambda r: (r.version is not None, r.load, newest[r]), default=None)

    def _start_drain(self, replica: Replica) -> None:
        logger.info(
            f"engine {replica.url} is draining: it gets no more requests and finishes its {replica.load} running ones"
        )
        replica.draining, self._since[replica] = True, self._clock()
        self._signal.notify()

    def _undo_drain(self, replica: Replica) -> None:
        logger.info(f"engine {replica.url} is no longer draining: the operator keeps it")
        del self._since[replica]
        replica.draining = False
        self._signal.notify()
