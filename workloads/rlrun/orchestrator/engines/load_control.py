"""Number of concurrent requests per engine, controlled by the load that the engine reports. Pure.

The rules are those of TCP's congestion control (Chiu & Jain 1989; Ha, Rhee & Xu 2008), with the engine's own signs in the place of lost
packets:

- Preemptions since the last look: the KV cache is too small for what runs, and vLLM computes sequences again. The limit falls by 5 to
  10 % of what the engine holds.
- A queue longer than a tenth of what runs and than its square root (Halfin & Whitt 1981): more requests only wait, and are held by an
  engine that cannot give them back. The limit falls to what runs and such a queue; to what runs, where it is the KV cache that is full.
- No queue at all, where the limit binds and the KV cache is not nearly full: it grows, by a third of its distance from where it last was
  too high. So it comes back quickly, feels its way there, and leaves quickly what is no longer true.

After a fall it rests for a few looks: what was sent before still runs.

A request for several continuations is answered when the longest is there. Those that are done before still count as in flight but burden
nobody: the limit is on what the engine holds, and of what is in flight it holds the share that the lengths of late answers say.

Without a look, or with an engine that says nothing, the limit is the ceiling: `maxConcurrency`, as if there were no control.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlrun.inference.client.engine_metrics import EngineMetrics

DECREASE = 0.9
"""The least that a look with preemptions leaves of what the engine holds, as a share of it."""
SLIGHT_DECREASE = 0.95
"""The most that such a look leaves, as a share of it."""
PREEMPTED = 4
"""Preempted sequences that lower the limit by one, between the two."""
APPROACH = 3
"""The limit grows by the distance to where it was too high, divided by this."""
QUEUE_SHARE = 0.1
"""Requests that may wait, relative to those that run: the engine is not to run dry between two looks. At least their square root, because
what comes and goes by chance varies by as much."""
KV_FULL = 0.9
"""Share of the KV cache from which the limit no longer grows."""
BINDING = 0.9
"""The limit binds from this share of it in flight."""
REST_LOOKS = 2
SHARE_WEIGHT = 1 / 32
"""Weight of each continuation of the newest answer in the mean lengths."""


@dataclass
class Concurrency:
    """The limit of one engine.

    Args:
        ceiling: the most that is ever in flight.
        on_change: called when `limit` may have changed.
    """

    ceiling: int
    on_change: Callable[[], None] | None = None
    _most: float = 0.0
    """Sequences that the engine is to hold."""
    _lengths: float = 1.0
    """Tokens of a continuation, on average of late."""
    _longest: float = 1.0
    """The same, of the longest continuation of each request."""
    _too_high: float = 0.0
    """The limit at its last fall."""
    _preemptions: int | None = None
    """The counter at the last look."""
    _rest: int = 0

    def __post_init__(self) -> None:
        self.forget()

    @property
    def limit(self) -> int:
        """Continuations that may be in flight, from 1."""
        return max(1, min(self.ceiling, int(self._most * self._longest / self._lengths)))

    def observe(self, metrics: EngineMetrics, in_flight: int) -> None:
        """Take in a look at the engine's load.

        Args:
            metrics: the engine's own report.
            in_flight: continuations that it is asked for.
        """
        binds = in_flight >= BINDING * self.limit
        preempted = self._preempted(metrics.preemptions)
        full = metrics.kv_usage >= KV_FULL
        queue = max(1, int(max(QUEUE_SHARE * metrics.running, metrics.running**0.5)))
        if self._rest:
            self._rest -= 1
        elif metrics.waiting > queue and in_flight > metrics.running + queue:
            self._lower(metrics.running + (0 if full else queue))
            self._too_high, self._rest = self._most, REST_LOOKS
        elif preempted:
            ours = min(self._most, in_flight * self._lengths / self._longest)
            self._lower(max(DECREASE * ours, min(SLIGHT_DECREASE * ours, ours - preempted / PREEMPTED)))
            self._too_high, self._rest = ours, REST_LOOKS
        elif not metrics.waiting and not full and binds:
            self._most = min(float(self.ceiling), self._most + max(1.0, abs(self._too_high - self._most) / APPROACH))
        self._report_change()

    def answered(self, tokens: Sequence[int]) -> None:
        """Take in an answer: the tokens of each of its continuations."""
        count = len(tokens)
        weight = min(1.0, count * SHARE_WEIGHT)
        self._lengths += weight * (max(1.0, sum(tokens) / count) - self._lengths)
        self._longest += weight * (max(1, *tokens) - self._longest)
        self._report_change()

    def forget(self) -> None:
        """Drop the engine's load after it was replaced or stopped reporting: no control until it reports again."""
        self._most, self._preemptions, self._rest = float(self.ceiling), None, 0
        self._report_change()

    def _report_change(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _lower(self, most: float) -> None:
        self._most = max(1.0, min(self._most, most))

    def _preempted(self, counter: int | None) -> int:
        before, self._preemptions = self._preemptions, counter
        return 0 if before is None or counter is None else max(0, counter - before)
