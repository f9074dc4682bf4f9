"""Limits for HTTP connections to an engine that do not send a complete request.

A client that reaches the port can open connections without a key. uvicorn limits the time between two requests, but not the time before the
first request nor endless headers, and each connection uses a file descriptor. The other roles' servers have the same limits from
`runtime.http_site`.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rlrun.runtime.http_site import MAX_SILENT, SILENT_SECONDS


class Connection(HttpToolsProtocol):
    """HTTP connection of one client."""

    silent: ClassVar[dict[Connection, asyncio.TimerHandle]] = {}
    """Connections of this process that wait for complete request headers, ordered by the start of the wait."""
    most_silent: ClassVar[int] = MAX_SILENT
    """Maximum number of waiting connections; another one closes the oldest."""
    silent_seconds: ClassVar[float] = SILENT_SECONDS

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer of a new connection."""
        # asyncio's interface has the base class, but a stream's protocol gets a `Transport`; uvicorn's method declares only this one.
        super().connection_made(cast(asyncio.Transport, transport))
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a closed connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received bytes; the first bytes of another request restart the timer for its headers."""
        if self not in self.silent and (self.cycle is None or self.cycle.response_complete):
            self._start_timer()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """Stop the timer when the headers are complete."""
        self._stop_timer()
        super().on_headers_complete()

    def _start_timer(self) -> None:
        if len(self.silent) >= self.most_silent:
            next(iter(self.silent))._give_up()
        self.silent[self] = self.loop.call_later(self.silent_seconds, self._give_up)

    def _stop_timer(self) -> None:
        timer = self.silent.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self) -> None:
        self._stop_timer()
        self.transport.abort()
