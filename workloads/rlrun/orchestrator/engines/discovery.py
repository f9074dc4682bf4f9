"""Engines of a run: discovery of their addresses, health checks, and the connections for the duration of an attempt.

Discovery looks up all addresses of one host name at intervals. In a cluster the name belongs to a headless Service whose addresses are the
engine pods. Pods come and go during the run; a replaced pod has another address and therefore is another replica. Only a successful answer
changes the pool: an unavailable name server has no information about the engines, and requests to a deleted pod fail anyway.

The health check covers liveness, held weights and load. A request may take as long as an episode, so the requests alone would reveal a
hanging machine only then. A working engine answers a health check at once, even under load. An engine that misses `MISSES` checks in a row
is out of rotation and its requests move. A hang therefore costs each of its requests at most `LONGEST_SILENCE_SECONDS`, plus the time for
sampling it again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.inference.client.engine_client import EngineClient, EngineError
from rlrun.orchestrator.aio.event_loop import Background, Signal
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Engine, Replica
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

INTERVAL_SECONDS = 2.0
LOOK_UP_SECONDS = 10.0
"""Timeout of one look-up."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Resolver of a host and port to addresses; raises `OSError` without an answer."""


async def resolve_addresses(host: str, port: int) -> list[str]:
    """Return all distinct addresses of a name.

    Raises:
        OSError: the name has no address, or the name server does not answer.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Discovery:
    """Synchronization of the pool's replicas with the addresses of a Service.

    Args:
        service: `http://host:port`; the host's addresses are the engines.
        pool: pool to which replicas are added and from which they are removed.
        connect: factory of an engine's client from its address.
        look_up: resolver of the host name.

    Raises:
        RoleError: `service` has no host.
    """

    def __init__(
        self, service: str, pool: EnginePool, *, connect: Callable[[str], Engine], look_up: Resolve = resolve_addresses
    ) -> None:
        parts = urlsplit(service)
        if not parts.hostname:
            message = f"orchestrator.inferenceService: {service!r} has no host; set an address such as http://name:8000"
            raise RoleError(message, exit_codes.CONFIGURATION)
        self._scheme, self._host = parts.scheme, parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._pool, self._connect, self._look_up = pool, connect, look_up
        pool.nobody = f"{self._host} has not been looked up yet"

    async def run(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        """Look up until canceled."""
        while True:
            await self.look()
            await asyncio.sleep(interval_seconds)

    async def look(self) -> None:
        """Look up the addresses once and update the pool."""
        try:
            async with asyncio.timeout(LOOK_UP_SECONDS):
                addresses = await self._look_up(self._host, self._port)
        except (OSError, TimeoutError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "no answer"
            self._pool.nobody = f"{self._host} has no address yet ({reason})"
            return
        if addresses:
            await self._update_members([self._engine_url(address) for address in addresses])

    def _engine_url(self, address: str) -> str:
        host = f"[{address}]" if ":" in address else address
        return f"{self._scheme}://{host}:{self._port}"

    async def _update_members(self, urls: list[str]) -> None:
        known = {replica.url: replica for replica in self._pool.replicas}
        for url in dict.fromkeys(urls):
            if url not in known:
                logger.info(f"engine {url} has appeared")
                self._pool.add(Replica(url, self._connect(url)))
        gone = known.keys() - set(urls)
        for url, replica in known.items():
            if url in gone:
                logger.info(f"engine {url} is gone")
                self._pool.remove(replica, f"it is no longer an address of {self._host}")
                try:
                    await replica.client.close()
                except EngineError:
                    continue


ANSWER_SECONDS = 5.0
MISSES = 3
LONGEST_SILENCE_SECONDS = MISSES * (INTERVAL_SECONDS + ANSWER_SECONDS)


@dataclass(frozen=True)
class Pace:
    """Interval and timeout of the checks, in seconds."""

    interval: float = INTERVAL_SECONDS
    answer: float = ANSWER_SECONDS


REGULAR = Pace()


class Monitor:
    """Health checks of all replicas, and control of their concurrency.

    A replica that does not answer, or holds other weights than it was given, leaves the rotation.

    Args:
        pool: pool of the engines.
        signal: signal notified after each change of the pool.
        pace: interval and timeout of the checks.
    """

    def __init__(self, pool: EnginePool, signal: Signal, pace: Pace = REGULAR) -> None:
        self._pool, self._signal, self._pace = pool, signal, pace

    async def run(self) -> None:
        """Check until canceled. Each replica has its own task, so that a hanging one does not delay the others."""
        watching: dict[Replica, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                members = set(self._pool.replicas)
                for gone in watching.keys() - members:
                    watching.pop(gone).cancel()
                for new in members - watching.keys():
                    watching[new] = tasks.create_task(self._watch_replica(new))
                await self._pool.members.until(lambda: set(self._pool.replicas) != watching.keys())

    async def _watch_replica(self, replica: Replica) -> None:
        misses = 0
        while True:
            await asyncio.sleep(self._pace.interval)
            misses = 0 if replica.version is None else await self.look(replica, misses)

    async def look(self, replica: Replica, misses: int = 0) -> int:
        """Check a replica once and return its missed checks in a row.

        Args:
            replica: replica to check.
            misses: missed checks in a row before this one.
        """
        # Compared after the answer, because the replica may change its version or rotation during the request.
        rotation, version = replica.rotation, replica.version
        try:
            async with asyncio.timeout(self._pace.answer):
                status = await replica.client.status()
        except (EngineError, TimeoutError) as error:
            if replica.rotation != rotation or replica.version is None:
                return 0
            replica.suspect = True
            if misses + 1 >= MISSES:
                reason = str(error) or f"no answer within {self._pace.answer:g} s"
                self._pool.abandon(replica, f"it missed {MISSES} health checks in a row: {reason}")
            return misses + 1
        replica.suspect = False
        same = (replica.rotation, replica.version, replica.updating) == (rotation, version, False)
        if same and (problem := _find_problem(status, version)):
            replica.trusted = False
            self._pool.abandon(replica, problem)
            return 0
        await self._update_limit(replica)
        return 0

    async def _update_limit(self, replica: Replica) -> None:
        """Set the concurrency limit from the engine's metrics. Without metrics the limit is the ceiling."""
        before = replica.concurrency.limit
        try:
            async with asyncio.timeout(self._pace.answer):
                metrics = await replica.client.metrics()
        except (EngineError, TimeoutError):
            replica.metrics = None
            replica.concurrency.forget()
        else:
            replica.metrics = metrics
            replica.concurrency.observe(metrics, replica.load)
        if replica.concurrency.limit > before:
            self._signal.notify()


def _find_problem(status: dict[str, object], version: int | None) -> str | None:
    """Return the reason why a replica that should hold `version` is unusable, or None. A missing field in the status is
    not a problem.
    """
    if status.get("engine_alive") is False:
        return "its workers do not answer"
    # A server of several runs reports the weights of the latest run.
    if status.get("updating") or status.get("model") is not None or "weight_version" not in status:
        return None
    held = status["weight_version"]
    return None if held == version else f"it holds version {held} instead of {version}"


@asynccontextmanager
async def open_engines(
    config: OrchestratorConfig,
    api_key: str,
    signal: Signal,
    background: Background,
    *,
    connect: Callable[[str], Engine] | None,
    look_up: Resolve,
    token_limit: int | None = None,
) -> AsyncIterator[EnginePool]:
    """Open the pool of engines: the configured list, or all addresses of the Service. Connections close at the end of
    the block.

    Args:
        config: addresses of the engines, and the timeouts of replies and weight updates.
        api_key: key of the run.
        signal: signal notified of every change in the pool.
        background: function that starts the endless discovery.
        connect: factory of an engine's client from its address. Default: over HTTP.
        look_up: resolver of the addresses of `inference_service`.
        token_limit: number of token ids of the model, or None if unknown.
    """

    def over_http(url: str) -> Engine:
        longest = max(environment.timeout_seconds for environment in config.environments)
        update = config.weight_sync.timeout_seconds
        return EngineClient(url, api_key, generate_timeout=longest, update_timeout=update)

    pool = EnginePool([], signal, max_concurrency=config.max_concurrency, token_limit=token_limit)
    open_one = connect or over_http
    try:
        if config.inference_service is None:
            for url in config.inference_urls:
                pool.add(Replica(url, open_one(url)))
        else:
            background(Discovery(config.inference_service, pool, connect=open_one, look_up=look_up).run())
        yield pool
    finally:
        for replica in pool.replicas:
            await replica.client.close()
