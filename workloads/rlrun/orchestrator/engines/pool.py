"""The engines: which replica holds which version, which one gets the next request, and requests that survive a failing replica.

A request goes to the replica that would answer first by what is known: the fewest continuations in flight, weighed by how slow it is of
late. The members of a group and the turns of an episode share a prefix, hence go to the same replica as long as that is not overloaded.

A replica that fails a request is out of rotation until it has got weights again, later each time; one that failed twice in a row gets a
single request then, and more once it has answered. So a replica that answers errors quickly does not draw all the work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from loguru import logger

from rlrun.backoff import backoff
from rlrun.inference.client.completions import Completion, ParsedReply
from rlrun.inference.client.engine_metrics import EngineMetrics
from rlrun.orchestrator.aio.condition import Signal, Turns
from rlrun.orchestrator.engines.load_control import Concurrency

NOBODY = "no engine is known"
UNLIMITED = 1 << 20
STICKY_SLACK = 16
"""Continuations that a replica may have more than another before those that share a prefix move."""
SLOW = 1.5
"""A replica counts as slow from this multiple of the fastest one's time per token; below it is noise."""
PACE_WEIGHT = 0.2
"""Weight of the newest answer in the mean time per token."""
PACE_SECONDS = 60.0
"""Seconds after which a replica that got no request is given another chance."""
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 15.0


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
class Lost:
    """Cost of failing replicas so far."""

    requests: int = 0
    """Requests that were asked elsewhere."""
    seconds: float = 0.0
    """Time that they had taken until then, all together."""
    longest: float = 0.0
    """Longest time of one of them, in seconds."""


class EnginePool:
    """All replicas, which may come and go. The only writer of `load`; `version` and `updating` are written by the hand-over, and by
    `fail`.

    Args:
        replicas: those that are known from the start.
        signal: notified after each change.
        max_concurrency: the most continuations that one replica is asked for at once.
    """

    def __init__(self, replicas: Sequence[Replica], signal: Signal, *, max_concurrency: int = UNLIMITED) -> None:
        self.replicas: list[Replica] = []
        self._signal, self._max_concurrency = signal, max_concurrency
        self._freed = Signal()
        """Notified also when a request ends; only waiting requests listen to it."""
        signal.follow(self._freed)
        self._turns: dict[int | None, Turns] = {}
        self.waiting = 0
        """Continuations for which no replica has room at the moment."""
        self.last_available = time.monotonic()
        """Last time when a replica was known to hold weights."""
        self.nobody = NOBODY
        """Reason why there is no replica at all; the discovery refines it."""
        self.lost = Lost()
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """Take a new replica in; it gets requests once the hand-over has given it weights."""
        replica.concurrency = Concurrency(self._max_concurrency)
        self.replicas.append(replica)
        self._signal.notify()

    def remove(self, replica: Replica, reason: str) -> None:
        """Forget a replica. What it is asked at the moment is asked elsewhere: a machine that lost its power never answers."""
        self.replicas.remove(replica)
        self.abandon(replica, reason)

    def abandon(self, replica: Replica, reason: str) -> None:
        """Take a replica out of rotation, and ask elsewhere what it is asked at the moment."""
        self.fail(replica, reason)
        for request in list(replica.requests):
            request.cancel()

    def problems(self) -> str:
        """Reasons why replicas are out of rotation, one after the other."""
        return "; ".join(f"{r.url}: {r.failure}" for r in self.replicas) or self.nobody

    @property
    def in_use(self) -> list[Replica]:
        """Replicas that take requests, or will once their hand-over is over."""
        return [replica for replica in self.replicas if replica.version is not None and not replica.draining]

    @property
    def version(self) -> int | None:
        """The version that new rollouts are sampled with: the newest that a replica holds.

        While others still load it, it waits for them as long as the fastest took, lest that one gets all the work of a step.
        """
        held = sorted({r.version for r in self.in_use if r.version is not None}, reverse=True)
        loading = any(replica.updating for replica in self.replicas if not replica.draining)
        for version in held:
            if not loading or time.monotonic() >= min(r.due for r in self.in_use if r.version == version):
                return version
        return None

    def candidates(self, version: int | None = None) -> list[Replica]:
        """Replicas that may get a request for this version (default: the one for new rollouts)."""
        wanted = self.version if version is None else version
        return [r for r in self.replicas if r.open and r.version == wanted]

    @property
    def limited(self) -> bool:
        """True if the engines' load, and not the run's settings, bounds the number of rollouts."""
        return any(r.concurrency.limit < self._max_concurrency for r in self.candidates())

    def room(self) -> int:
        """Continuations that the engines may be asked for beyond those in flight and those that wait."""
        free = sum(max(0, r.concurrency.limit - r.load) for r in self.candidates())
        return max(0, free - self.waiting)

    async def acquire(
        self,
        prefer: Replica | None,
        version: int | None,
        count: int,
        *,
        avoid: Sequence[Replica] = (),
        first: bool = False,
    ) -> Replica:
        """Wait for a replica that holds the version and has room: the preferred one (its cache has the prefix) unless it is overloaded,
        else the one that would answer first.

        Args:
            prefer: the replica of the rollout's last request, or of its group.
            version: the version that the request is meant for; default: the one for new rollouts.
            count: continuations that are asked for.
            avoid: replicas that failed this request; taken only where there is no other.
            first: whether to come before those that have not begun: an episode that goes on, or a request that moves.
        """
        turns = self._turns.get(version)
        chosen = None if turns is not None else self._choose(prefer, version, count, avoid)
        if chosen is None:
            turns = turns or self._turns.setdefault(version, Turns())
            self.waiting += count
            try:
                async with turns.mine(first=first):
                    await self._freed.until(lambda: self._choose(prefer, version, count, avoid) is not None)
                    chosen = self._choose(prefer, version, count, avoid)
                    assert chosen is not None
                    chosen.load += count
            finally:
                self.waiting -= count
                if not turns.busy:
                    self._turns.pop(version, None)
                    self._signal.notify()
        else:
            chosen.load += count
        return chosen

    def release(self, replica: Replica, count: int) -> None:
        """End a request for `count` continuations that was answered or given up."""
        replica.load -= count
        if self.waiting:
            self._freed.notify()

    def fail(self, replica: Replica, reason: str) -> None:
        """Take a replica out of rotation; the hand-over brings it back."""
        if replica.version is not None:
            logger.warning(f"engine {replica.url} is out of rotation: {reason}")
            self.last_available = time.monotonic()
        replica.version, replica.failure = None, reason
        replica.concurrency.forget()
        self._signal.notify()

    def rest(self, reason: str) -> None:
        """Take all replicas out of rotation until the next hand-over; none of them has failed."""
        for replica in self.replicas:
            replica.version, replica.failure = None, reason
        self._signal.notify()

    def fail_request(self, replica: Replica, rotation: int, reason: str) -> None:
        """Rest a replica after a failed request of this `rotation`, twice as long each time in a row."""
        if replica.rotation != rotation or replica.version is None:
            return
        replica.failures += 1
        pause = backoff(replica.failures, first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        replica.rest_until = time.monotonic() + pause
        self.fail(replica, reason)

    def moved(self, seconds: float) -> None:
        """Count a request that is asked elsewhere after a replica had it for `seconds`."""
        self.lost.requests += 1
        self.lost.seconds += seconds
        self.lost.longest = max(self.lost.longest, seconds)

    def metrics(self) -> dict[str, float]:
        """Engines in rotation and known, what they may be asked for at once, and what failing ones have cost since the start."""
        limits = sum(min(r.concurrency.limit, self._max_concurrency) for r in self.replicas if r.open)
        return {
            "engines/in_rotation": float(sum(r.version is not None for r in self.replicas)),
            "engines/known": float(len(self.replicas)),
            "engines/limit": float(min(limits, UNLIMITED)),
            "engines/waiting": float(self.waiting),
            "engines/moved_requests": float(self.lost.requests),
            "engines/lost_seconds": self.lost.seconds,
            "engines/lost_seconds_longest": self.lost.longest,
        }

    def _choose(
        self, prefer: Replica | None, version: int | None, count: int, avoid: Sequence[Replica]
    ) -> Replica | None:
        candidates = self.candidates(version)
        if avoid:
            candidates = [r for r in candidates if r not in avoid] or candidates
        free = [r for r in candidates if r.room(count)]
        if not free:
            return None
        if len(free) == 1:
            return free[0]
        known = [r.seconds_per_token for r in free if r.seconds_per_token]
        fastest = min(known, default=None)
        best = min(free, key=lambda r: (r.load + count) * r.slowness(fastest))
        if prefer not in free:
            return best
        ahead = (prefer.load - STICKY_SLACK + count) * prefer.slowness(fastest)
        return prefer if ahead <= (best.load + count) * best.slowness(fastest) else best
