"""Periodic check of every engine: liveness, held weights and load.

A request may take as long as an episode, so the requests alone would reveal a hanging machine only then. A working
engine answers a health check at once, even under load. An engine that misses `MISSES` checks in a row is out of
rotation and its requests move. A hang therefore costs each of its requests at most `LONGEST_SILENCE_SECONDS`, plus the
time for sampling it again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rlrun.inference.client.engine_client import EngineError
from rlrun.orchestrator.aio.condition import Signal
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica

INTERVAL_SECONDS = 2.0
ANSWER_SECONDS = 5.0
MISSES = 3
LONGEST_SILENCE_SECONDS = MISSES * (INTERVAL_SECONDS + ANSWER_SECONDS)


@dataclass(frozen=True)
class Pace:
    """Interval and timeout of the checks, in seconds."""

    interval: float = INTERVAL_SECONDS
    answer: float = ANSWER_SECONDS


REGULAR = Pace()


class Monitor:
    """Health checks of all replicas, and control of their concurrency.

    A replica that does not answer, or holds other weights than it was given, leaves the rotation.

    Args:
        pool: pool of the engines.
        signal: signal notified after each change of the pool.
        pace: interval and timeout of the checks.
    """

    def __init__(self, pool: EnginePool, signal: Signal, pace: Pace = REGULAR) -> None:
        self._pool, self._signal, self._pace = pool, signal, pace

    async def run(self) -> None:
        """Check until canceled. Each replica has its own task, so that a hanging one does not delay the others."""
        watching: dict[Replica, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                members = set(self._pool.replicas)
                for gone in watching.keys() - members:
                    watching.pop(gone).cancel()
                for new in members - watching.keys():
                    watching[new] = tasks.create_task(self._watch(new))
                await self._pool.members.until(lambda: set(self._pool.replicas) != watching.keys())

    async def _watch(self, replica: Replica) -> None:
        misses = 0
        while True:
            await asyncio.sleep(self._pace.interval)
            misses = 0 if replica.version is None else await self.look(replica, misses)

    async def look(self, replica: Replica, misses: int = 0) -> int:
        """Check a replica once and return its missed checks in a row.

        Args:
            replica: replica to check.
            misses: missed checks in a row before this one.
        """
        rotation, version = replica.rotation, replica.version
        try:
            async with asyncio.timeout(self._pace.answer):
                status = await replica.client.status()
        except (EngineError, TimeoutError) as error:
            if replica.rotation != rotation or replica.version is None:
                return 0
            replica.suspect = True
            if misses + 1 >= MISSES:
                reason = str(error) or f"no answer within {self._pace.answer:g} s"
                self._pool.abandon(replica, f"it missed {MISSES} health checks in a row: {reason}")
            return misses + 1
        replica.suspect = False
        same = (replica.rotation, replica.version, replica.updating) == (rotation, version, False)
        if same and (problem := _find_problem(status, version)):
            replica.trusted = False
            self._pool.abandon(replica, problem)
            return 0
        await self._steer(replica)
        return 0

    async def _steer(self, replica: Replica) -> None:
        """Set the concurrency limit from the engine's metrics. Without metrics the limit is the ceiling."""
        before = replica.concurrency.limit
        try:
            async with asyncio.timeout(self._pace.answer):
                metrics = await replica.client.metrics()
        except (EngineError, TimeoutError):
            replica.metrics = None
            replica.concurrency.forget()
        else:
            replica.metrics = metrics
            replica.concurrency.observe(metrics, replica.load)
        if replica.concurrency.limit > before:
            self._signal.notify()


def _find_problem(status: dict[str, object], version: int | None) -> str | None:
    """Return the reason why a replica that should hold `version` is unusable, or None. A missing field in the status is
    not a problem.
    """
    if status.get("engine_alive") is False:
        return "its workers do not answer"
    # A server of several runs reports the weights of the latest run.
    if status.get("updating") or status.get("model") is not None or "weight_version" not in status:
        return None
    held = status["weight_version"]
    return None if held == version else f"it holds version {held} instead of {version}"
