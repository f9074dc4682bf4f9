"""HTTP server of a role: clients can use only bounded resources, and their mistakes do not fill the log with tracebacks."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

MAX_SILENT = 512
"""Maximum number of idle connections; a further one closes the connection that has been idle for longest."""
SILENT_SECONDS = 120.0
"""Maximum seconds for which a connection may be idle; longer than clients keep their connections for reuse."""
LOOK_SECONDS = 1.0
ALL_OF_BOTH_FAMILIES = "::"
ERRORS_PER_MINUTE = 10
"""Maximum number of request errors per minute in the log."""
log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    """Listening socket of an application.

    Args:
        application: request handlers.
        most_silent: maximum number of idle connections.
        shutdown_timeout: seconds that current requests get at a shutdown.
        handler_cancellation: whether a request is cancelled if its client disconnects.
    """

    def __init__(
        self,
        application: web.Application,
        *,
        most_silent: int = MAX_SILENT,
        shutdown_timeout: float = 1.0,
        handler_cancellation: bool = False,
    ) -> None:
        self._most_silent = most_silent
        self._busy: dict[asyncio.BaseProtocol, int] = {}
        """Number of current requests by connection."""
        self._silent_since: dict[asyncio.BaseProtocol, float] = {}
        """Time since which a connection has been idle, by the monotonic clock."""
        application.middlewares.insert(0, self._middleware())
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=log,
            shutdown_timeout=shutdown_timeout,
            handler_cancellation=handler_cancellation,
        )
        self._closing: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str | None, port: int) -> None:
        """Bind and serve.

        Args:
            host: address to bind; None: all, as `::`, which also accepts IPv4.
            port: port to bind; 0: a free one, which the attribute `port` then has.

        Raises:
            OSError: the address cannot be bound.
        """
        await self._runner.setup()
        try:
            await self._make_listener(host, port).start()
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = int(self._runner.addresses[0][1])
        self._closing = asyncio.create_task(self._close_silent())

    def _make_listener(self, host: str | None, port: int) -> web.BaseSite:
        """Return the listener. asyncio's own on `::` would accept only IPv6, but a pod connects to itself by 127.0.0.1."""
        if host == ALL_OF_BOTH_FAMILIES and socket.has_dualstack_ipv6():
            listener = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
            return web.SockSite(self._runner, listener)
        return web.TCPSite(self._runner, host, port)

    async def close(self) -> None:
        """Stop serving."""
        if self._closing is not None:
            self._closing.cancel()
        await self._runner.cleanup()

    def _middleware(self) -> Middleware:
        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = request.protocol
            self._busy[connection] = self._busy.get(connection, 0) + 1
            self._silent_since.pop(connection, None)
            try:
                return await handler(request)
            except web.HTTPException:
                raise
            except Exception:
                log.exception("%s %.200r failed", request.method, request.path)
                return web.json_response({"error": "the request failed; see the log of this role"}, status=500)
            finally:
                self._busy[connection] -= 1

        return answer

    async def _close_silent(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            server = self._runner.server
            assert server is not None
            connections, now = server.connections, time.monotonic()
            open_now = frozenset(connections)
            for known in (self._busy, self._silent_since):
                for gone in known.keys() - open_now:
                    del known[gone]
            idle = [connection for connection in connections if not self._busy.get(connection)]
            idle.sort(key=lambda connection: self._silent_since.setdefault(connection, now))
            too_many = len(idle) - self._most_silent
            for place, connection in enumerate(idle):
                if place < too_many or now - self._silent_since[connection] > SILENT_SECONDS:
                    connection.force_close()


class Few(logging.Filter):
    """Filter that passes a limited number of records per minute, because clients can cause any number.

    Records about requests that are not HTTP lose their traceback, which only shows the parser.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._minute, self._count = clock, -1, 0

    def filter(self, record: logging.LogRecord) -> bool:
        minute = int(self._clock() // 60)
        self._minute, self._count = minute, self._count + 1 if minute == self._minute else 1
        reason = record.exc_info[1] if record.exc_info else None
        if isinstance(reason, HttpProcessingError):
            record.msg, record.args = f"{record.getMessage()}: {type(reason).__name__}", ()
            record.exc_info = record.exc_text = None
        return self._count <= ERRORS_PER_MINUTE


log.addFilter(Few())
