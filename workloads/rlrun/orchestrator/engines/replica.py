"""State of one engine in the orchestrator: client, version, load and health."""

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
