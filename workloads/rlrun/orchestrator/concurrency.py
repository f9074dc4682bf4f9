"""How many requests one engine gets at once: additive increase, multiplicative decrease on what the engine says of itself. Pure.

The rule is that of TCP's congestion avoidance (Chiu & Jain 1989), with the engine's own signs in the place of lost packets:

- Preemptions since the last look: the KV cache is too small for what runs, and vLLM computes sequences again. The limit falls to 3/4 of
  what is in flight.
- A queue longer than a tenth of what runs: more requests only wait, and are held by an engine that cannot give them back. The limit falls
  to what runs and that tenth.
- Otherwise, where the limit binds and the KV cache is not nearly full, it grows by 1/16 of the ceiling.

After a decrease it rests for a few looks: what was sent before still runs. Without a look, or with an engine that says nothing, the limit
is the ceiling: `maxConcurrency`, as if there were no control.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlrun.inference.client import EngineMetrics

DECREASE = 0.75
INCREASES = 16
"""Steps from nothing to the ceiling."""
QUEUE_SHARE = 0.1
"""Requests that may wait, relative to those that run: the engine is not to run dry between two looks."""
KV_FULL = 0.9
"""Share of the KV cache from which the limit no longer grows."""
BINDING = 0.9
"""The limit binds from this share of it in flight."""
REST_LOOKS = 3


@dataclass
class Concurrency:
    """The limit of one engine.

    Args:
        ceiling: the most that is ever in flight.
    """

    ceiling: int
    _limit: float = 0.0
    _preemptions: int | None = None
    """The counter at the last look."""
    _rest: int = 0

    def __post_init__(self) -> None:
        self._limit = float(self.ceiling)

    @property
    def limit(self) -> int:
        """Continuations that may be in flight, from 1."""
        return max(1, int(self._limit))

    def observe(self, metrics: EngineMetrics, in_flight: int) -> None:
        """Take in a look.

        Args:
            metrics: what the engine says of itself.
            in_flight: continuations that it is asked for.
        """
        preempted = self._preempted(metrics.preemptions)
        room = metrics.running + max(1, int(QUEUE_SHARE * metrics.running))
        if self._rest:
            self._rest -= 1
        elif preempted:
            self._lower(DECREASE * min(self._limit, in_flight))
        elif metrics.waiting > room - metrics.running and in_flight > room:
            self._lower(room)
        elif metrics.kv_usage < KV_FULL and in_flight >= BINDING * self.limit:
            self._limit = min(float(self.ceiling), self._limit + max(1.0, self.ceiling / INCREASES))

    def forget(self) -> None:
        """The engine says nothing of itself, or is another one: no control until it does."""
        self._limit, self._preemptions, self._rest = float(self.ceiling), None, 0

    def _lower(self, limit: float) -> None:
        self._limit = max(1.0, min(self._limit, limit))
        self._rest = REST_LOOKS

    def _preempted(self, counter: int | None) -> bool:
        before, self._preemptions = self._preemptions, counter
        return before is not None and counter is not None and counter > before
