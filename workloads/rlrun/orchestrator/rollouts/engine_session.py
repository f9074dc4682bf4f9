"""One rollout's requests: to the same replica as long as that holds the right version, and once more elsewhere when it fails."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from rlrun.config.models.rollout import CompleteSampling, SamplingConfig
from rlrun.environments.protocol import Tool
from rlrun.inference.client.engine_client import Completion, EngineError, EngineUnavailableError
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Affinity, Replica
from rlrun.orchestrator.rollouts.tool_parsing import Said
from rlrun.protocol.messages.packed import integer_column

MAX_TRIES = 5
"""Replicas that one request is sent to before its rollout gives up."""
_REFUSALS = (400, 413, 422)
"""Answers that blame the request for tokens. Any other failure is the replica's, a missing route or a wrong key too."""
_CLIENT_ERRORS = range(400, 500)
"""Answers that end the parsing of a reply: no engine of the run would parse it."""


def derived_seed(*parts: int) -> int:
    """A seed below 2**31 that is made of these numbers, in every process the same."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class Sample(Protocol):
    """Sends one request for several continuations."""

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, n: int) -> list[Completion]: ...


class Session:
    """One rollout's requests: to the same replica as long as that holds the right version.

    Args:
        pool: the engines.
        sampling: how tokens are drawn.
        stop_token_ids: tokens that end a reply.
        version: send requests only to replicas that hold this version; default: the newest at the time of each request.
        opening: where the first request is shared with the group's other rollouts.
        affinity: shared with the group's other rollouts.
        seed: of the first request; the n-th has one that is made of it, so that no two turns are drawn alike. None: none.
    """

    def __init__(
        self,
        pool: EnginePool,
        sampling: SamplingConfig | CompleteSampling,
        stop_token_ids: Sequence[int],
        version: int | None = None,
        opening: Opening | None = None,
        affinity: Affinity | None = None,
        seed: int | None = None,
    ) -> None:
        self._pool, self._sampling, self._stop, self._version = pool, sampling, stop_token_ids, version
        self._seed, self._requests = seed, 0
        self._replica: Replica | None = None
        self._opening = opening
        self._affinity = affinity or Affinity()
        self._moved = False
        self._sampled = 0
        """Tokens of the answers so far."""
        self._waits: tuple[float, int] | None = None
        """Time (monotonic seconds) at which the running request of this rollout was made, and the most tokens of its answer."""
        self._sent: float | None = None
        """Time at which it was sent to a replica; None: it waits, or is part of the group's first request."""

    @property
    def troubled(self) -> bool:
        """True if an engine cost this rollout time: it failed one of the requests, or does not answer now."""
        replica = self._replica
        return self._moved or (replica is not None and (replica.suspect or replica.version is None))

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
        """Sample one continuation; `stop` are texts that end it beyond those of the run.

        Raises:
            EngineUnavailableError: several replicas failed one after the other; the rollout is not to blame.
            EngineError: an engine refused the request.
        """
        opening, self._opening = self._opening, None
        self._waits, self._sent = (time.monotonic(), max_tokens), None
        try:
            shared = None
            if opening is not None and not stop:
                shared = await opening.take(token_ids, max_tokens, self.sample)
            found = shared or (await self.sample(token_ids, max_tokens=max_tokens, n=1, stop=stop))[0]
        except BaseException:
            self._sampled, self._waits = self.tokens_so_far(), None
            raise
        self._sampled, self._waits = self._sampled + len(found.token_ids), None
        return found

    def tokens_so_far(self) -> int:
        """Return the tokens that were sampled for this rollout.

        Engines do not report the tokens of a running request: they are estimated from its time and the engine's mean time per token.
        """
        replica = self._replica or self._affinity.replica
        sent = self._sent or (None if self._replica is not None else self._affinity.since)
        if self._waits is None or replica is None or not replica.seconds_per_token or not sent:
            return self._sampled
        made, most = self._waits
        return self._sampled + min(most, int((time.monotonic() - max(made, sent)) / replica.seconds_per_token))

    async def sample(
        self, token_ids: Sequence[int], *, max_tokens: int, n: int, stop: Sequence[str] = ()
    ) -> list[Completion]:
        """Sample `n` continuations in one request; raises as a call does."""
        error: EngineError | None = None
        failed: list[Replica] = []
        seed = self._next_seed()
        for _ in range(MAX_TRIES):
            prefer, first = self._replica or self._affinity.replica, bool(self._replica)
            replica = await self._pool.acquire(prefer, self._version, n, avoid=failed, first=first)
            began, rotation = time.monotonic(), replica.rotation
            self._replica = self._affinity.replica = replica
            self._affinity.asked, self._affinity.since, self._sent = True, began, began
            try:
                completions = await self._ask(replica, token_ids, max_tokens=max_tokens, n=n, seed=seed, stop=stop)
                replica.succeed(time.monotonic() - began, [len(c.token_ids) for c in completions])
                return completions
            except EngineError as failure:
                if failure.status in _REFUSALS:
                    raise
                error, self._moved = failure, True
                failed.append(replica)
                self._pool.moved(time.monotonic() - began)
                self._pool.fail_request(replica, rotation, str(failure))
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
        for replica in islice(self._parsers(), MAX_TRIES):
            try:
                found = await replica.client.parse(token_ids, tools, self._sampling.chat_template_arguments)
                return Said(found.content, tuple(found.calls), found.reasoning)
            except EngineError as failure:
                if failure.status in _CLIENT_ERRORS:
                    raise
                error = failure
        raise EngineUnavailableError(f"no engine parsed a reply, the last one: {error}")

    def _parsers(self) -> Iterator[Replica]:
        """Engines that may parse a reply, the rollout's own one first; the others are sorted only if that one fails."""
        first = [r for r in (self._replica,) if r is not None and r.version is not None and not r.suspect]
        yield from first
        others = (r for r in self._pool.replicas if r not in first)
        yield from sorted(others, key=lambda r: (r.version is None or r.suspect, r is not self._replica))

    def _next_seed(self) -> int | None:
        """Seed of the next request, the same for each replica that it is sent to."""
        number, self._requests = self._requests, self._requests + 1
        return self._seed if self._seed is None or not number else derived_seed(self._seed, number)

    async def _ask(
        self,
        replica: Replica,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        n: int,
        seed: int | None,
        stop: Sequence[str],
    ) -> list[Completion]:
        version = replica.version
        assert version is not None
        ends = {"stop": list(dict.fromkeys((*self._sampling.stop, *stop)))} if stop else {}
        request = asyncio.ensure_future(
            replica.client.generate(
                token_ids,
                n=n,
                max_tokens=max_tokens,
                temperature=self._sampling.temperature,
                top_p=1.0,
                stop_token_ids=self._stop,
                # Prefixes are shared only among requests for one version: cached keys of older weights never serve newer ones.
                cache_salt=str(version),
                parameters=self._sampling.engine_parameters(seed) | ends,
            )
        )
        replica.requests.add(request)
        try:
            completions = await request
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and not current.cancelling():  # the pool has given this replica up, not this rollout
                raise EngineUnavailableError(f"{replica.url}: {replica.failure}") from None
            raise
        finally:
            replica.requests.discard(request)
        _check_versions(replica, version, completions)
        _check_tokens(replica, self._pool.token_limit, completions)
        return completions


def _check_versions(replica: Replica, asked: int, completions: Sequence[Completion]) -> None:
    """No token may be of a version before the one that the request was sent for, nor of one that this replica never got from us."""
    columns = [completion.versions for completion in completions if completion.versions]
    # Both ends of the range: numpy reads a million tokens in the time in which a set takes a thousand.
    found = {int(end(np.asarray(column))) for column in columns for end in (np.min, np.max)}
    if wrong := sorted(version for version in found if not asked <= version <= max(asked, replica.handed)):
        replica.trusted = False
        raise EngineError(
            f"{replica.url} answered with tokens of version {wrong[0]} where it should hold {asked}: it has got other weights"
        )


def _check_tokens(replica: Replica, limit: int | None, completions: Sequence[Completion]) -> None:
    """Refuse ids that the model does not have: the tokenizer and the trainer's embedding would fail on them, and end the run."""
    for completion in completions:
        ids = np.asarray(completion.token_ids)
        if not len(ids):
            continue
        lowest, highest = int(np.min(ids)), int(np.max(ids))
        if lowest < 0 or (limit is not None and highest >= limit):
            wrong = lowest if lowest < 0 else highest
            bound = "ids from 0" if limit is None else f"ids 0 to {limit - 1}"
            raise EngineError(f"{replica.url} answered with token id {wrong}, but the run's model has {bound}")


class Opening:
    """The first turn of all rollouts of a group in one request, because they have the same prompt.

    Only for environments of a single turn: the request is answered when its slowest continuation is done, and the group waits for that
    one anyway.

    Args:
        count: rollouts of the group.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._asked: tuple[bytes, int] | None = None
        self._request: asyncio.Task[list[Completion]] | None = None
        self._waiting = 0
        self._taken = 0

    async def take(self, token_ids: Sequence[int], max_tokens: int, sample: Sample) -> Completion | None:
        """One of the shared continuations; None when the rollout asks for something else, or too late, and has to ask for itself."""
        wanted = (integer_column(token_ids).tobytes(), max_tokens)
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
