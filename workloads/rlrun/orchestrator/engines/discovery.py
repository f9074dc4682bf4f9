"""Discovery of the engines: periodic look-up of all addresses of one host name.

In a cluster the name belongs to a headless Service whose addresses are the engine pods. Pods come and go during the
run; a replaced pod has another address and therefore is another replica. Only a successful answer changes the pool: an
unavailable name server has no information about the engines, and requests to a deleted pod fail anyway.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from loguru import logger

from rlrun.inference.client.engine_client import EngineError
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
            await self._settle([self._url(address) for address in addresses])

    def _url(self, address: str) -> str:
        host = f"[{address}]" if ":" in address else address
        return f"{self._scheme}://{host}:{self._port}"

    async def _settle(self, urls: list[str]) -> None:
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
