"""Control of the number of concurrent requests per engine by the load that the engine reports. Pure.

The rules follow TCP congestion control (Chiu & Jain 1989; Ha, Rhee & Xu 2008), with the engine's signals instead of
lost packets:

- Preemptions since the last report: the KV cache is too small for the running sequences, and vLLM computes sequences
  again. The limit decreases by 5 to 10 % of the load that the engine holds.
- A queue longer than a tenth of the running requests and than their square root (Halfin & Whitt 1981): further
  requests only wait on an engine that cannot return them. The limit decreases to the running requests plus such a
  queue, or to the running requests if the KV cache is full.
- No queue, a binding limit and a KV cache that is not nearly full: the limit increases by a third of its distance
  from the last value that was too high. It recovers quickly, approaches that value slowly, and passes it quickly if
  that value is outdated.

After a decrease the limit stays for a few reports, because earlier requests still run.

A request for several continuations is answered when the longest is complete. Continuations that finish earlier count as
in flight but cause no load. The limit applies to the load that the engine holds; the lengths of recent answers give the
share of the requests in flight that is such load.

Without reports the limit is the ceiling, `maxConcurrency`, as if there were no control.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlrun.inference.client.engine_metrics import EngineMetrics

DECREASE = 0.9
"""Lower bound of the share of its load that an engine keeps after a report with preemptions."""
SLIGHT_DECREASE = 0.95
"""Upper bound of that share."""
PREEMPTED = 4
"""Preempted sequences that lower the limit by one, between these bounds."""
APPROACH = 3
"""Divisor of the distance to the last too-high limit for one increase."""
QUEUE_SHARE = 0.1
"""Allowed queue relative to the running requests, so that the engine has work until the next report. At least the
square root of the running requests, because random arrivals vary by as much.
"""
KV_FULL = 0.9
"""Usage of the KV cache (share) from which the limit does not increase."""
BINDING = 0.9
"""Share of the limit in flight from which the limit is binding."""
REST_LOOKS = 2
SHARE_WEIGHT = 1 / 32
"""Weight of each continuation of the newest answer in the mean lengths."""


@dataclass
class Concurrency:
    """Limit of concurrent requests of one engine.

    Args:
        ceiling: upper bound of the limit.
        on_change: callback after a possible change of `limit`.
    """

    ceiling: int
    on_change: Callable[[], None] | None = None
    _most: float = 0.0
    """Sequences that the engine may hold."""
    _lengths: float = 1.0
    """Recent mean tokens of a continuation."""
    _longest: float = 1.0
    """Recent mean tokens of the longest continuation of each request."""
    _too_high: float = 0.0
    """Limit at its last decrease."""
    _preemptions: int | None = None
    """Preemption counter in the last report."""
    _rest: int = 0

    def __post_init__(self) -> None:
        self.forget()

    @property
    def limit(self) -> int:
        """Continuations that may be in flight, at least 1."""
        return max(1, min(self.ceiling, int(self._most * self._longest / self._lengths)))

    def observe(self, metrics: EngineMetrics, in_flight: int) -> None:
        """Update the limit with a report of the engine's load.

        Args:
            metrics: report of the engine.
            in_flight: continuations requested from it.
        """
        binds = in_flight >= BINDING * self.limit
        preempted = self._preempted(metrics.preemptions)
        full = metrics.kv_usage >= KV_FULL
        queue = max(1, int(max(QUEUE_SHARE * metrics.running, metrics.running**0.5)))
        # At most one rule applies per report, in order of urgency: pause after a decrease, queue, preemptions, increase.
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
        """Update the mean lengths with the tokens of each continuation of an answer."""
        count = len(tokens)
        weight = min(1.0, count * SHARE_WEIGHT)
        self._lengths += weight * (max(1.0, sum(tokens) / count) - self._lengths)
        self._longest += weight * (max(1, *tokens) - self._longest)
        self._report_change()

    def forget(self) -> None:
        """Reset the control after the engine was replaced or stopped reporting."""
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
