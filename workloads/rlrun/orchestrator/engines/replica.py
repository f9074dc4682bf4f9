"""One engine as the orchestrator sees it: its client, the version that it holds, its load and its health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlrun.inference.client.completions import Completion, ParsedReply
from rlrun.inference.client.engine_metrics import EngineMetrics
from rlrun.orchestrator.aio.condition import Signal
from rlrun.orchestrator.engines.load_control import Concurrency

UNLIMITED = 1 << 20
SLOW = 1.5
"""A replica counts as slow from this multiple of the fastest one's time per token; below it is noise."""
PACE_WEIGHT = 0.2
"""Weight of the newest answer in the mean time per token."""
PACE_SECONDS = 60.0
"""Seconds after which a replica that got no request is given another chance."""
ORDERING_FIELDS = frozenset({"version", "updating", "draining", "load", "due", "failures", "seconds_per_token"})
"""Fields of `Replica` that decide which replica gets the next request."""


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
    """One engine as the orchestrator knows it. Two that had the same address are two."""

    url: str
    client: Engine
    version: int | None = None
    """Policy version that it holds for certain; None: out of rotation until the next successful hand-over."""
    updating: bool = False
    load: int = 0
    """Continuations that it is asked for at the moment."""
    due: float = 0.0
    """Time (monotonic seconds) until which its version waits for the other replicas' hand-over."""
    failure: str = "its first weights are on the way"
    """Reason why it is out of rotation."""
    requests: set[asyncio.Future[list[Completion]]] = field(default_factory=set)
    """Requests in flight to it."""
    concurrency: Concurrency = field(default_factory=lambda: Concurrency(UNLIMITED))
    """Limit on what it is asked for at once."""
    handed: int = -1
    """The newest version that was ever sent to it: no token of a newer one is its own."""
    trusted: bool = False
    """True if it is known to hold what this attempt gave it; else the next hand-over loads again even under an equal number."""
    rotation: int = 0
    """Number of times that it came into rotation: a request that fails late says nothing about the time after."""
    failures: int = 0
    """Failures in a row, without an answer in between."""
    rest_until: float = 0.0
    """Time before which it gets no hand-over (monotonic seconds)."""
    suspect: bool = False
    """True if it did not answer the last question about its health."""
    foreign: bool = False
    """True if its release cannot work with this one, as the last try of a hand-over has shown."""
    seconds_per_token: float | None = None
    """Recent mean over the longest continuation of each request."""
    draining: bool = False
    """True if it is to go: it gets no more requests. Written by `Drain`."""
    answered: float = 0.0
    """Time of its last answer to a request (monotonic seconds)."""
    metrics: EngineMetrics | None = None
    """Its own report at the last look; None: it did not answer."""
    on_change: Callable[[Replica], None] | None = None
    """Called after each change of a field in `ORDERING_FIELDS`; set by the pool."""
    needs_weights: Signal = field(default_factory=Signal)
    """Notified when a version may have to be loaded. Each replica has its own signal: a shared one would wake the hand-over of every
    engine of a large pool at each change."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in ORDERING_FIELDS and self.on_change is not None:
            self.on_change(self)
            if name == "version":
                self.needs_weights.notify()

    @property
    def kv_usage(self) -> float:
        """Use of its KV cache at the last look; 0 also where it does not say."""
        return 0.0 if self.metrics is None else min(1.0, max(0.0, self.metrics.kv_usage))

    @property
    def open(self) -> bool:
        """True if it takes new requests. Not during a hand-over: their first tokens would be computed by neither version."""
        return self.version is not None and not self.updating and not self.draining

    def room(self, count: int) -> bool:
        """True if it may be asked for `count` more; always when it has nothing to do."""
        if self.load == 0:
            return True
        return self.failures < 2 and self.load + count <= self.concurrency.limit

    def succeed(self, seconds: float, tokens: Sequence[int]) -> None:
        """Record an answered request, whose continuations have so many tokens."""
        self.failures, self.suspect, self.answered = 0, False, time.monotonic()
        pace, known = seconds / max(1, *tokens), self.seconds_per_token
        self.seconds_per_token = pace if known is None else known + PACE_WEIGHT * (pace - known)
        self.concurrency.answered(tokens)

    def slowness(self, fastest: float | None) -> float:
        """Time per token as a multiple of the fastest replica's; 1 where nothing is known, or was measured too long ago."""
        if fastest is None or self.seconds_per_token is None or time.monotonic() - self.answered > PACE_SECONDS:
            return 1.0
        multiple = self.seconds_per_token / fastest
        return multiple if multiple > SLOW else 1.0


@dataclass
class Affinity:
    """Replica that has a group's prefix: that of the member that asked first."""

    replica: Replica | None = None
    since: float = 0.0
    """Time (monotonic seconds) at which the latest request was sent to it."""
    asked: bool = False
    """True once a member of the group has got a replica; before, the group counts as a request to come."""
