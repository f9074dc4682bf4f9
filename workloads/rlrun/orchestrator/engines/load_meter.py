"""Load of the engines over the last steps: how long trainer and orchestrator waited for each other, and whether the
engines had work.

A window consists of complete steps with the same set of engines. A changed set restarts the measurement, so that the
operator never scales by a mixture. The engines are sampled a few times per second; the trainer reports its own waiting
time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.protocol.messages.lease_annotations import EngineLoad

LOOK_SECONDS = 0.25
WINDOW_SECONDS = 120.0
"""Default of the shortest window."""
LEAST_STEPS = 2
LONGEST_STEPS = 1000
"""Limit of the stored steps."""
WAITED = "time/wait_for_batch"
"""Name of the trainer's metric for its waiting time, in seconds per step."""


@dataclass
class _Step:
    """Sums over one step: seconds, or seconds weighted by engines."""

    seconds: float = 0.0
    waited: float = 0.0
    looked: float = 0.0
    ahead: float = 0.0
    idle: float = 0.0
    busy: float = 0.0
    requests: float = 0.0
    waiting: float = 0.0
    kv: float = 0.0


class LoadMeter:
    """Measurement of the load from the attempt's first step.

    Args:
        pool: pool of the engines.
        ahead: whether all allowed rollouts have started, so that only the trainer can cause new ones.
        window: seconds that a report must cover.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        ahead: Callable[[], bool],
        window: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._ahead, self._window, self._clock = pool, ahead, window, clock
        self._steps: deque[_Step] = deque(maxlen=LONGEST_STEPS)
        self._step: _Step | None = None
        """Current step. None if it started with other engines or before the first step."""
        self._engines: frozenset[Replica] = frozenset()
        self._looked = self._began = clock()

    async def run(self) -> None:
        """Sample until canceled."""
        while True:
            self.sample_load()
            await asyncio.sleep(LOOK_SECONDS)

    def sample_load(self) -> None:
        """Add the current state of the engines for the time since the last sample."""
        now, engines = self._clock(), frozenset(self._pool.in_use)
        passed, self._looked = now - self._looked, now
        if engines != self._engines:
            self._engines, self._step = engines, None
            self._steps.clear()
        step = self._step
        if step is None or not engines:
            return
        idle = sum(not engine.load for engine in engines) / len(engines)
        step.looked += passed
        step.busy += passed * (1 - idle)
        if self._ahead():
            step.ahead += passed
            step.idle += passed * idle
        step.requests += passed * sum(engine.load for engine in engines)
        step.waiting += passed * self._pool.waiting
        step.kv += passed * max(engine.kv_usage for engine in engines)

    def trained(self, metrics: Mapping[str, float]) -> None:
        """End a step with the trainer's metrics."""
        self.sample_load()
        now = self._clock()
        step, began = self._step, self._began
        self._step, self._began = _Step(), now
        if step is None or not step.looked or WAITED not in metrics:
            return
        step.seconds = now - began
        step.waited = min(max(0.0, metrics[WAITED]), step.seconds)
        self._steps.append(step)

    def report(self) -> EngineLoad | None:
        """Return the load over the shortest sufficient window of the last steps, otherwise over all steps; None without
        a measured step.
        """
        if not self._steps or not self._engines:
            return None
        chosen = self._recent_steps(self._window() or WINDOW_SECONDS)
        looked, n = sum(step.looked for step in chosen), len(self._engines)

        def capped_share(of: Callable[[_Step], float], whole: float) -> float:
            return min(1.0, sum(of(step) for step in chosen) / whole)

        seconds = sum(step.seconds for step in chosen)
        return EngineLoad(
            engines=n,
            seconds=seconds,
            steps=len(chosen),
            waited=capped_share(lambda step: step.waited, seconds),
            ahead=capped_share(lambda step: step.ahead, looked),
            idle=capped_share(lambda step: step.idle, looked),
            busy=capped_share(lambda step: step.busy, looked),
            requests=sum(step.requests for step in chosen) / looked / n,
            waiting=sum(step.waiting for step in chosen) / looked / n,
            kv=capped_share(lambda step: step.kv, looked),
        )

    def _recent_steps(self, seconds: float) -> Sequence[_Step]:
        chosen: list[_Step] = []
        for step in reversed(self._steps):
            if len(chosen) >= LEAST_STEPS and sum(one.seconds for one in chosen) >= seconds:
                break
            chosen.append(step)
        return chosen
