"""Connections to an engine: what those without a request may cost it is bounded.

A client that reaches the port needs no key to open a connection. uvicorn limits the time between two requests, but not that until the
first one, nor headers that never end, and each connection costs a descriptor. The other roles' servers have the same bounds by
`runtime.site`.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rlrun.runtime.site import MAX_SILENT, SILENT_SECONDS


class Connection(HttpToolsProtocol):
    """One client's connection."""

    silent: ClassVar[dict[Connection, asyncio.TimerHandle]] = {}
    """Connections of this process whose next request's headers are not complete, those that began to wait first before the others."""
    most_silent: ClassVar[int] = MAX_SILENT
    """Most such connections; one more costs the first of them."""
    silent_seconds: ClassVar[float] = SILENT_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those that begin another request have the same time for its headers."""
        if self not in self.silent and (self.cycle is None or self.cycle.response_complete):
            self._wait()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        self._done()
        super().on_headers_complete()

    def _wait(self) -> None:
        if len(self.silent) >= self.most_silent:
            next(iter(self.silent))._give_up()
        self.silent[self] = self.loop.call_later(self.silent_seconds, self._give_up)

    def _done(self) -> None:
        timer = self.silent.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self) -> None:
        self._done()
        self.transport.abort()
