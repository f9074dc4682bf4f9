"""Requests of one rollout: to the same replica while it holds the right version, and to another one after a failure."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from rlrun.config.models.rollout import CompleteSampling, SamplingConfig
from rlrun.environments.protocol import Tool
from rlrun.inference.client.engine_client import ROUTES_START, Completion, EngineError, EngineUnavailableError
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Affinity, Replica
from rlrun.orchestrator.rollouts.message_forms import ReplyParts
from rlrun.protocol.messages.packed_columns import integer_column

MAX_TRIES = 5
"""Limit of replicas for one request; then the rollout fails."""
_REFUSALS = (400, 413, 422)
"""Statuses for an invalid token request. Any other failure counts for the replica, also a missing route or a wrong key.
"""
_CLIENT_ERRORS = range(400, 500)
"""Statuses that end the parsing of a reply, because every engine of the run would answer the same."""


LEAST_CHOICES = 2
"""Least number of experts of a token. With one, dense layers, which contain zeros, would look like layers with a router."""


def derived_seed(*parts: int) -> int:
    """Return a seed below 2**31 derived from these numbers, the same in every process."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class Sample(Protocol):
    """Sender of one request for several continuations."""

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, n: int) -> list[Completion]: ...


class Session:
    """Requests of one rollout.

    Args:
        pool: pool of the engines.
        sampling: sampling parameters.
        stop_token_ids: tokens that end a reply.
        version: required version of the replicas. Default: the newest at each request.
        opening: first request shared with the group's other rollouts, if any.
        affinity: preferred replica shared with the group's other rollouts.
        seed: seed of the first request. Later requests have derived seeds, so that no two turns are sampled alike.
            None: no seed.
        with_routes: request the experts of each token.
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
        with_routes: bool = False,
    ) -> None:
        self._with_routes = with_routes
        self._pool, self._sampling, self._stop, self._version = pool, sampling, stop_token_ids, version
        self._seed, self._requests = seed, 0
        self._replica: Replica | None = None
        self._opening = opening
        self._affinity = affinity or Affinity()
        self._moved = False
        self._sampled = 0
        """Number of tokens of the answers so far."""
        self._waits: tuple[float, int] | None = None
        """Time (monotonic seconds) of the running request, and the token limit of its answer."""
        self._sent: float | None = None
        """Time at which it was sent to a replica; None while it waits or if it is part of the group's first request."""

    @property
    def troubled(self) -> bool:
        """Whether an engine delayed this rollout: a request failed, or the engine does not answer now."""
        replica = self._replica
        return self._moved or (replica is not None and (replica.suspect or replica.version is None))

    async def __call__(
        self, token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = (), routes_start: int = 0
    ) -> Completion:
        """Sample one continuation.

        Args:
            token_ids: prompt.
            max_tokens: limit of the continuation in tokens.
            stop: additional stop texts, on top of the run's.
            routes_start: first token whose experts are returned, in a session with routes.

        Raises:
            EngineUnavailableError: several replicas failed one after the other; the rollout is not the cause.
            EngineError: an engine refused the request.
        """
        opening, self._opening = self._opening, None
        self._waits, self._sent = (time.monotonic(), max_tokens), None
        try:
            shared = None
            if opening is not None and not stop:
                shared = await opening.take(token_ids, max_tokens, self.sample)
            found = (
                shared
                or (await self.sample(token_ids, max_tokens=max_tokens, n=1, stop=stop, routes_start=routes_start))[0]
            )
        except BaseException:
            self._sampled, self._waits = self.tokens_so_far(), None
            raise
        self._sampled, self._waits = self._sampled + len(found.token_ids), None
        return found

    def tokens_so_far(self) -> int:
        """Return the number of tokens sampled for this rollout.

        Engines do not report the tokens of a running request; they are estimated from its duration and the engine's
        mean time per token.
        """
        replica = self._replica or self._affinity.replica
        sent = self._sent or (None if self._replica is not None else self._affinity.since)
        if self._waits is None or replica is None or not replica.seconds_per_token or not sent:
            return self._sampled
        made, most = self._waits
        return self._sampled + min(most, int((time.monotonic() - max(made, sent)) / replica.seconds_per_token))

    async def sample(
        self, token_ids: Sequence[int], *, max_tokens: int, n: int, stop: Sequence[str] = (), routes_start: int = 0
    ) -> list[Completion]:
        """Sample `n` continuations in one request; raises the same errors as a call."""
        error: EngineError | None = None
        failed: list[Replica] = []
        parameters = self._sampling.engine_parameters(self._next_seed())
        if stop:
            parameters |= {"stop": list(dict.fromkeys((*self._sampling.stop, *stop)))}
        if self._with_routes:
            parameters |= {ROUTES_START: routes_start}
        for _ in range(MAX_TRIES):
            prefer, first = self._replica or self._affinity.replica, bool(self._replica)
            replica = await self._pool.acquire(prefer, self._version, n, avoid=failed, first=first)
            began, rotation = time.monotonic(), replica.rotation
            self._replica = self._affinity.replica = replica
            # From here on the group is load of this replica. Before, the dispatcher counts it as a
            # future request.
            self._affinity.asked, self._affinity.since, self._sent = True, began, began
            try:
                completions = await self._send_request(
                    replica, token_ids, max_tokens=max_tokens, n=n, parameters=parameters
                )
                replica.succeed(time.monotonic() - began, [len(c.token_ids) for c in completions])
                return completions
            except EngineError as failure:
                if failure.status in _REFUSALS:
                    # An engine refuses this request itself, for example a prompt that is too long.
                    # Another replica would refuse it as well.
                    raise
                error, self._moved = failure, True
                failed.append(replica)
                self._pool.count_moved_request(time.monotonic() - began)
                self._pool.fail_request(replica, rotation, str(failure))
            finally:
                # Also after a cancellation; otherwise the replica would look busy until the end of
                # the attempt.
                self._pool.release(replica, n)
        raise EngineUnavailableError(f"{MAX_TRIES} tries failed, the last one with: {error}") from error

    async def parse(self, token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> ReplyParts:
        """Parse a reply with an engine's parser. Any engine can do it, whatever weights it holds.

        Raises:
            EngineUnavailableError: no engine answers.
            EngineError: an engine refused the request.
        """
        if not token_ids:
            return ReplyParts()
        error: object = self._pool.nobody
        for replica in islice(self._parsing_replicas(), MAX_TRIES):
            try:
                found = await replica.client.parse(token_ids, tools, self._sampling.chat_template_arguments)
                return ReplyParts(found.content, tuple(found.calls), found.reasoning)
            except EngineError as failure:
                if failure.status in _CLIENT_ERRORS:
                    raise
                error = failure
        raise EngineUnavailableError(f"no engine parsed the reply; the last error: {error}")

    def _parsing_replicas(self) -> Iterator[Replica]:
        """Yield the engines that may parse a reply, the rollout's engine first. The others are sorted only if it fails."""
        first = [r for r in (self._replica,) if r is not None and r.version is not None and not r.suspect]
        yield from first
        others = (r for r in self._pool.replicas if r not in first)
        yield from sorted(others, key=lambda r: (r.version is None or r.suspect, r is not self._replica))

    def _next_seed(self) -> int | None:
        """Return the seed of the next request, which is the same for each tried replica."""
        number, self._requests = self._requests, self._requests + 1
        return self._seed if self._seed is None or not number else derived_seed(self._seed, number)

    async def _send_request(
        self,
        replica: Replica,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        n: int,
        parameters: Mapping[str, object],
    ) -> list[Completion]:
        version = replica.version
        assert version is not None
        request = asyncio.ensure_future(
            replica.client.generate(
                token_ids,
                n=n,
                max_tokens=max_tokens,
                temperature=self._sampling.temperature,
                top_p=1.0,
                stop_token_ids=self._stop,
                # The salt separates versions: cached keys of older weights must not serve requests of newer ones.
                cache_salt=str(version),
                parameters=parameters,
            )
        )
        replica.requests.add(request)
        try:
            completions = await request
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and not current.cancelling():  # the pool abandoned the replica, not this rollout
                raise EngineUnavailableError(f"{replica.url}: {replica.failure}") from None
            raise
        finally:
            replica.requests.discard(request)
        _check_versions(replica, version, completions)
        _check_tokens(replica, self._pool.token_limit, completions)
        _check_routes(replica, len(token_ids), completions)
        return completions


def _check_versions(replica: Replica, asked: int, completions: Sequence[Completion]) -> None:
    """Refuse tokens of a version older than the requested one, or of a version that was never sent to this replica."""
    columns = [completion.versions for completion in completions if completion.versions]
    # Only minimum and maximum: numpy reads a million tokens in the time in which a set takes a thousand.
    found = {int(end(np.asarray(column))) for column in columns for end in (np.min, np.max)}
    if wrong := sorted(version for version in found if not asked <= version <= max(asked, replica.handed)):
        replica.trusted = False
        raise EngineError(
            f"{replica.url} returned tokens of version {wrong[0]} instead of {asked}: another program has changed its weights"
        )


def _check_tokens(replica: Replica, limit: int | None, completions: Sequence[Completion]) -> None:
    """Refuse ids outside of the model's vocabulary, because the tokenizer and the trainer's embedding would fail on
    them and end the run.
    """
    for completion in completions:
        ids = np.asarray(completion.token_ids)
        if not len(ids):
            continue
        lowest, highest = int(np.min(ids)), int(np.max(ids))
        if lowest < 0 or (limit is not None and highest >= limit):
            wrong = lowest if lowest < 0 else highest
            bound = "ids from 0" if limit is None else f"ids 0 to {limit - 1}"
            raise EngineError(f"{replica.url} returned token id {wrong}, but the run's model has {bound}")


def _check_routes(replica: Replica, prompt: int, completions: Sequence[Completion]) -> None:
    """Refuse experts that do not belong to the tokens of a request: all but the last token have a row."""
    for completion in completions:
        if completion.routes is None:
            continue
        start, experts = completion.routes.start, completion.routes.experts
        rows, _, top_k = experts.shape
        expected = prompt + len(completion.token_ids) - 1 - start
        if rows != expected or top_k < LEAST_CHOICES:
            raise EngineError(
                f"{replica.url} returned {rows} rows of {top_k} experts instead of {expected} rows of {LEAST_CHOICES} or more"
            )


class Opening:
    """First turn of all rollouts of a group in one request, because they have the same prompt.

    Only for single-turn environments: the request ends with its slowest continuation, for which the group waits anyway.

    Args:
        count: number of rollouts of the group.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._asked: tuple[bytes, int] | None = None
        self._request: asyncio.Task[list[Completion]] | None = None
        self._waiting = 0
        self._taken = 0

    async def take(self, token_ids: Sequence[int], max_tokens: int, sample: Sample) -> Completion | None:
        """Return one of the shared continuations, or None if the rollout's request differs or comes too late and has to
        be sent separately.
        """
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
                self._request.cancel()  # no rollout waits for it, so the engine can stop
