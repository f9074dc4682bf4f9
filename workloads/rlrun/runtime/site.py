"""An HTTP server of a role: what any client may cost it is bounded, and no client's mistake is a traceback in its log."""

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
"""Connections without a request under way; one more costs the one that has been silent for longest."""
SILENT_SECONDS = 120.0
"""Time for which a connection may have no request under way; longer than the clients keep theirs for the next one."""
LOOK_SECONDS = 1.0
ALL_OF_BOTH_FAMILIES = "::"
ERRORS_PER_MINUTE = 10
"""Errors of requests that are written to the log."""
log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    """An application's listening socket.

    Args:
        application: what answers.
        most_silent: connections without a request under way that are kept.
        shutdown_timeout: seconds that requests under way have when it closes.
        handler_cancellation: whether a request whose client has gone is cancelled.
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
        """Requests under way on a connection."""
        self._silent_since: dict[asyncio.BaseProtocol, float] = {}
        """Start of silence, on the monotonic clock, of connections without a request under way."""
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
            host: address to bind; None: all, as `::`, which takes IPv4 as well.
            port: port to bind; 0 takes a free one, see the attribute.

        Raises:
            OSError: the address cannot be bound.
        """
        await self._runner.setup()
        try:
            await self._site(host, port).start()
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = int(self._runner.addresses[0][1])
        self._closing = asyncio.create_task(self._close_silent())

    def _site(self, host: str | None, port: int) -> web.BaseSite:
        """The listener. asyncio's own on `::` would take IPv6 alone, and a pod asks itself on 127.0.0.1."""
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
                return web.json_response({"error": "the request failed here; the log has the reason"}, status=500)
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
    """Lets some records pass each minute: a client can cause as many as it likes.

    Those of requests that were no HTTP lose their traceback, which is of the parser.
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
