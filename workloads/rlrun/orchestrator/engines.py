"""The engines: which replica holds which version, which one gets the next request, and requests that survive a failing replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from loguru import logger

from rlrun.config.rollout import SamplingConfig
from rlrun.environments.protocol import Tool
from rlrun.inference.client import Completion, EngineError, EngineUnavailableError
from rlrun.orchestrator.parsing import Said
from rlrun.orchestrator.signals import Signal

MAX_TRIES = 5
"""Replicas that one request is sent to before its rollout gives up."""
NOBODY = "no engine is known"
_CLIENT_ERRORS = range(400, 500)


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
    ) -> list[Completion]: ...

    async def parse(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[tuple[str, str]]]: ...

    async def update_weights(self, path: str, version: int, *, force: bool = False) -> dict[str, float]: ...

    async def reload_weights(self, version: int, *, force: bool = False) -> dict[str, float]: ...

    async def status(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class Sample(Protocol):
    """Sends one request for several continuations."""

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, n: int) -> list[Completion]: ...


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
    """Until then (monotonic seconds) its version waits for the other replicas' hand-over."""
    failure: str = "it has got no weights yet"
    """Why it is out of rotation."""
    requests: set[asyncio.Future[list[Completion]]] = field(default_factory=set)
    """What it is asked at the moment."""
    removed: bool = False
    """Whether it has left the pool for good."""

    @property
    def open(self) -> bool:
        """Whether it takes new requests. Not during a hand-over: their first tokens would be computed by neither version."""
        return self.version is not None and not self.updating


class EnginePool:
    """All replicas, which may come and go. The only writer of `load`; `version` and `updating` are written by the hand-over, and by
    `fail`."""

    def __init__(self, replicas: Sequence[Replica], signal: Signal) -> None:
        self.replicas = list(replicas)
        self._signal = signal
        self.last_available = time.monotonic()
        """When a replica was last known to hold weights."""
        self.nobody = NOBODY
        """Why there is no replica at all; the discovery says more."""

    def add(self, replica: Replica) -> None:
        """Take a new replica in; it gets requests once the hand-over has given it weights."""
        self.replicas.append(replica)
        self._signal.notify()

    def remove(self, replica: Replica, reason: str) -> None:
        """Forget a replica. What it is asked at the moment is asked elsewhere: a machine that lost its power never answers."""
        self.fail(replica, reason)
        replica.removed = True
        self.replicas.remove(replica)
        for request in list(replica.requests):
            request.cancel()
        self._signal.notify()

    def problems(self) -> str:
        """Why the replicas are out of rotation, one after the other."""
        return "; ".join(f"{r.url}: {r.failure}" for r in self.replicas) or self.nobody

    @property
    def version(self) -> int | None:
        """The version that new rollouts are sampled with: the newest that a replica holds.

        While others still load it, it waits for them as long as the fastest took, lest that one gets all the work of a step.
        """
        held = sorted({r.version for r in self.replicas if r.version is not None}, reverse=True)
        loading = any(replica.updating for replica in self.replicas)
        for version in held:
            if not loading or time.monotonic() >= min(r.due for r in self.replicas if r.version == version):
                return version
        return None

    def candidates(self, version: int | None = None) -> list[Replica]:
        """Replicas that may get a request for this version (default: the one for new rollouts)."""
        wanted = self.version if version is None else version
        return [r for r in self.replicas if r.open and r.version == wanted]

    async def acquire(self, prefer: Replica | None, version: int | None, count: int) -> Replica:
        """Wait for a replica that holds the version: the preferred one (its cache has the prefix), else the least loaded.

        Args:
            prefer: the replica of the rollout's last request.
            version: the version that the request is meant for; default: the one for new rollouts.
            count: continuations that are asked for.
        """
        await self._signal.until(lambda: bool(self.candidates(version)))
        candidates = self.candidates(version)
        chosen = prefer if prefer in candidates else min(candidates, key=lambda r: r.load)
        assert chosen is not None
        chosen.load += count
        return chosen

    def release(self, replica: Replica, count: int) -> None:
        """A request for `count` continuations was answered or given up."""
        replica.load -= count

    def fail(self, replica: Replica, reason: str) -> None:
        """Take a replica out of rotation; the hand-over brings it back."""
        if replica.version is not None:
            logger.warning(f"engine {replica.url} is out of rotation: {reason}")
            self.last_available = time.monotonic()
        replica.version, replica.failure = None, reason
        self._signal.notify()


class Session:
    """One rollout's requests: to the same replica as long as that holds the right version.

    Args:
        pool: the engines.
        sampling: how tokens are drawn.
        stop_token_ids: tokens that end a reply.
        version: send requests only to replicas that hold this version; default: the newest at the time of each request.
        opening: where the first request is shared with the group's other rollouts.
    """

    def __init__(
        self,
        pool: EnginePool,
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
        version: int | None = None,
        opening: Opening | None = None,
    ) -> None:
        self._pool, self._sampling, self._stop, self._version = pool, sampling, stop_token_ids, version
        self._replica: Replica | None = None
        self._opening = opening

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        """Sample one continuation.

        Raises:
            EngineUnavailableError: several replicas failed one after the other; the rollout is not to blame.
            EngineError: an engine refused the request.
        """
        opening, self._opening = self._opening, None
        if opening is not None:
            shared = await opening.take(token_ids, max_tokens, self.sample)
            if shared is not None:
                return shared
        return (await self.sample(token_ids, max_tokens=max_tokens, n=1))[0]

    async def sample(self, token_ids: Sequence[int], *, max_tokens: int, n: int) -> list[Completion]:
        """Sample `n` continuations in one request; raises as a call does."""
        error: EngineError | None = None
        for _ in range(MAX_TRIES):
            replica = await self._pool.acquire(self._replica, self._version, n)
            self._replica = replica
            try:
                return await self._ask(replica, token_ids, max_tokens=max_tokens, n=n)
            except EngineError as failure:
                if failure.status in _CLIENT_ERRORS:
                    raise
                error = failure
                self._pool.fail(replica, str(failure))
            finally:
                self._pool.release(replica, n)
        raise EngineUnavailableError(f"{MAX_TRIES} attempts failed, the last one: {error}") from error

    async def parse(self, token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> Said:
        """Take a reply apart by an engine's parser; any engine will do, whatever weights it holds.

        Raises:
            EngineUnavailableError: no engine answers.
            EngineError: an engine refused it.
        """
        if not token_ids:
            return Said()
        error: object = self._pool.nobody
        for replica in sorted(self._pool.replicas, key=lambda replica: replica is not self._replica)[:MAX_TRIES]:
            try:
                content, calls = await replica.client.parse(token_ids, tools)
                return Said(content, tuple(calls))
            except EngineError as failure:
                if failure.status in _CLIENT_ERRORS:
                    raise
                error = failure
        raise EngineUnavailableError(f"no engine parsed a reply, the last one: {error}")

    async def _ask(self, replica: Replica, token_ids: Sequence[int], *, max_tokens: int, n: int) -> list[Completion]:
        request = asyncio.ensure_future(
            replica.client.generate(
                token_ids,
                n=n,
                max_tokens=max_tokens,
                temperature=self._sampling.temperature,
                top_p=1.0,
                stop_token_ids=self._stop,
                # Prefixes are shared only among requests for one version: cached keys of older weights never serve newer ones.
                cache_salt=str(replica.version),
            )
        )
        replica.requests.add(request)
        try:
            return await request
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if replica.removed and current is not None and not current.cancelling():
                raise EngineUnavailableError(f"{replica.url}: {replica.failure}") from None
            raise
        finally:
            replica.requests.discard(request)


class Opening:
    """The first turn of all rollouts of a group in one request, because they have the same prompt.

    Only for environments of a single turn: the request is answered when its slowest continuation is done, and the group waits for that
    one anyway.

    Args:
        count: rollouts of the group.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._asked: tuple[list[int], int] | None = None
        self._request: asyncio.Task[list[Completion]] | None = None
        self._waiting = 0
        self._taken = 0

    async def take(self, token_ids: Sequence[int], max_tokens: int, sample: Sample) -> Completion | None:
        """One of the shared continuations; None when the rollout asks for something else, or too late, and has to ask for itself."""
        wanted = (list(token_ids), max_tokens)
        if self._request is None:
            self._asked = wanted
            self._request = asyncio.ensure_future(sample(token_ids, max_tokens=max_tokens, n=self._count))
        if self._asked != wanted or self._request.cancelled():
            return None
        index, self._taken = self._taken, self._taken + 1
        self._waiting += 1
        try:
            return (await asyncio.shield(self._request))[index]
        finally:
            self._waiting -= 1
            if not self._waiting and not self._request.done():
                self._request.cancel()  # nobody waits any more: the engine is to stop
