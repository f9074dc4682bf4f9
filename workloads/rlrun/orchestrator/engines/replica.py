"""State of one engine in the orchestrator: client, version, health, load, and the limit of its concurrent requests.

`Concurrency` derives the limit from the load that the engine reports. Pure. The rules follow TCP congestion control (Chiu & Jain 1989; Ha,
Rhee & Xu 2008), with the engine's signals instead of lost packets:

- Preemptions since the last report: the KV cache is too small for the running sequences, and vLLM computes sequences
  again. The limit decreases by 5 to 10 % of the load that the engine holds.
- A queue longer than a tenth of the running requests and than their square root (Halfin & Whitt 1981): further
  requests only wait on an engine that cannot return them. The limit decreases to the running requests plus such a
  queue, or to the running requests if the KV cache is full.
- No queue, a binding limit and a KV cache that is not nearly full: the limit increases by a third of its distance
  from the last value that was too high. It recovers quickly, approaches that value slowly, and passes it quickly if
  that value is outdated.

After a decrease the limit stays for a few reports, because earlier requests still run.

A request for several continuations is answered when the longest is complete. Continuations that finish earlier count as in flight but cause
no load. The limit applies to the load that the engine holds; the lengths of recent answers give the share of the requests in flight that is
such load.

Without reports the limit is the ceiling, `maxConcurrency`, as if there were no control.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlrun.inference.client.completions import Completion, EngineMetrics, ParsedReply
from rlrun.orchestrator.aio.event_loop import Signal

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
        preempted = self._count_preemptions(metrics.preemptions)
        full = metrics.kv_usage >= KV_FULL
        queue = max(1, int(max(QUEUE_SHARE * metrics.running, metrics.running**0.5)))
        # At most one rule applies per report, in order of urgency: pause after a decrease, queue, preemptions, increase.
        if self._rest:
            self._rest -= 1
        elif metrics.waiting > queue and in_flight > metrics.running + queue:
            self._lower_limit(metrics.running + (0 if full else queue))
            self._too_high, self._rest = self._most, REST_LOOKS
        elif preempted:
            ours = min(self._most, in_flight * self._lengths / self._longest)
            self._lower_limit(max(DECREASE * ours, min(SLIGHT_DECREASE * ours, ours - preempted / PREEMPTED)))
            self._too_high, self._rest = ours, REST_LOOKS
        # An increase needs a limit that binds: otherwise a short idle time would raise it without
        # any evidence.
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

    def _lower_limit(self, most: float) -> None:
        self._most = max(1.0, min(self._most, most))

    def _count_preemptions(self, counter: int | None) -> int:
        before, self._preemptions = self._preemptions, counter
        # The counter starts again at 0 if the engine was restarted.
        return 0 if before is None or counter is None else max(0, counter - before)


UNLIMITED = 1 << 20
SLOW = 1.5
"""Multiple of the fastest replica's time per token from which a replica counts as slow; smaller differences are noise.
"""
PACE_WEIGHT = 0.2
"""Weight of the newest answer in the mean time per token."""
PACE_SECONDS = 60.0
"""Seconds after the last answer at which a measured pace expires, so that a slow replica gets requests again."""
ORDERING_FIELDS = frozenset({"version", "updating", "draining", "load", "due", "failures", "seconds_per_token"})
"""Fields of `Replica` that determine which replica gets the next request."""


class Engine(Protocol):
    """The part of `EngineClient` that the orchestrator uses."""

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop_token_ids: Sequence[int],
        cache_salt: str | None,
        parameters: Mapping[str, object] | None = None,
    ) -> list[Completion]: ...

    async def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, object]],
        template_arguments: Mapping[str, object] | None = None,
    ) -> ParsedReply: ...

    async def update_weights(self, path: str, version: int, *, force: bool = False) -> dict[str, float]: ...

    async def reload_weights(self, version: int, *, force: bool = False) -> dict[str, float]: ...

    async def receive_weights(self, trainer_url: str, version: int, *, force: bool = False) -> dict[str, float]: ...

    async def sleep(self) -> None: ...

    async def status(self) -> dict[str, object]: ...

    async def metrics(self) -> EngineMetrics: ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class Replica:
    """State of one engine. A new engine at the same address is another replica."""

    url: str
    client: Engine
    version: int | None = None
    """Policy version that it certainly holds. None: out of rotation until the next successful hand-over."""
    updating: bool = False
    load: int = 0
    """Continuations requested from it."""
    due: float = 0.0
    """Time (monotonic seconds) until which its version waits for the other replicas' hand-over."""
    failure: str = "it waits for its first weights"
    """Reason why it is out of rotation."""
    requests: set[asyncio.Future[list[Completion]]] = field(default_factory=set)
    """Requests in flight."""
    concurrency: Concurrency = field(default_factory=lambda: Concurrency(UNLIMITED))
    """Limit of concurrent requests."""
    handed: int = -1
    """Newest version ever sent to it; no token can come from a newer version."""
    trusted: bool = False
    """Whether it certainly holds the weights of this attempt. Otherwise the next hand-over loads even an equal version
    number.
    """
    rotation: int = 0
    """Number of times that it entered the rotation. A late failure of a request of an earlier rotation is ignored."""
    failures: int = 0
    """Failures in a row."""
    rest_until: float = 0.0
    """Time (monotonic seconds) before which it gets no hand-over."""
    suspect: bool = False
    """Whether it missed the last health check."""
    foreign: bool = False
    """Whether its release was incompatible with this one at the last hand-over."""
    seconds_per_token: float | None = None
    """Recent mean time per token of the longest continuation of each request."""
    draining: bool = False
    """Whether it is being drained and gets no more requests. Written by `Drain`."""
    answered: float = 0.0
    """Time of its last answer to a request (monotonic seconds)."""
    metrics: EngineMetrics | None = None
    """Its last report. None if it did not answer."""
    on_change: Callable[[Replica], None] | None = None
    """Callback after each change of a field in `ORDERING_FIELDS`; set by the pool."""
    needs_weights: Signal = field(default_factory=Signal)
    """Signal notified when a version may have to be loaded. Each replica has its own signal: a shared one would wake
    the hand-over of every engine of a large pool at each change.
    """

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in ORDERING_FIELDS and self.on_change is not None:
            self.on_change(self)
            if name == "version":
                self.needs_weights.notify()

    @property
    def kv_usage(self) -> float:
        """Usage of its KV cache in the last report; 0 if not reported."""
        return 0.0 if self.metrics is None else min(1.0, max(0.0, self.metrics.kv_usage))

    @property
    def open(self) -> bool:
        """Whether it takes new requests. Not during a hand-over, when the first tokens would come from neither version."""
        return self.version is not None and not self.updating and not self.draining

    def room(self, count: int) -> bool:
        """Return whether it may get `count` more continuations. An idle replica always may."""
        # A group that is larger than the limit must not wait forever.
        if self.load == 0:
            return True
        return self.failures < 2 and self.load + count <= self.concurrency.limit

    def succeed(self, seconds: float, tokens: Sequence[int]) -> None:
        """Record an answered request.

        Args:
            seconds: duration of the request.
            tokens: tokens of each continuation.
        """
        self.failures, self.suspect, self.answered = 0, False, time.monotonic()
        pace, known = seconds / max(1, *tokens), self.seconds_per_token
        self.seconds_per_token = pace if known is None else known + PACE_WEIGHT * (pace - known)
        self.concurrency.answered(tokens)

    def slowness(self, fastest: float | None) -> float:
        """Return the time per token as a multiple of the fastest replica's; 1 if unknown or expired."""
        if fastest is None or self.seconds_per_token is None or time.monotonic() - self.answered > PACE_SECONDS:
            return 1.0
        multiple = self.seconds_per_token / fastest
        return multiple if multiple > SLOW else 1.0


@dataclass
class Affinity:
    """Replica that holds a group's prefix: the one that got the group's first request."""

    replica: Replica | None = None
    since: float = 0.0
    """Time (monotonic seconds) at which the latest request was sent to it."""
    asked: bool = False
    """Whether a member of the group has got a replica. Before, the group counts as a future request."""
