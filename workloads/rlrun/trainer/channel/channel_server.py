"""HTTP server of the trainer's channels, in its own thread, with authentication and the routes of every run."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Protocol

from aiohttp import web
from pydantic import ValidationError

from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.shared_trainer_files import channel_of
from rlrun.protocol.messages.endpoints import TRAINER_READY, calling_guest
from rlrun.protocol.messages.trainer_channel import GONE
from rlrun.runtime import exit_codes
from rlrun.runtime.http_site import Handler, Site

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0


class Answering(Protocol):
    """Request handler of one run."""

    async def answer_request(self, request: web.Request, route: str) -> web.StreamResponse:
        """Answer an authenticated request; `route` is the path without the run's prefix."""
        ...


class ChannelServer:
    """Server of the trainer's own run at the root, and of guests below `channel_of(run)`."""

    def __init__(self, api_key: str) -> None:
        """Create a server that is not yet listening.

        Args:
            api_key: key expected as `Authorization: Bearer` on every route except the probe; a guest's key opens only its own channel.
        """
        self._key = api_key
        self._runs: dict[str, Answering] = {}
        self._thread: threading.Thread | None = None
        self.loop = asyncio.new_event_loop()
        self.port = 0

    def start(self, host: str, port: int) -> None:
        """Bind the address and serve in a thread.

        Args:
            host: address to bind.
            port: port to bind; 0 selects a free one, see the attribute `port`.

        Raises:
            RoleError: the address cannot be bound.
        """
        started: queue.Queue[OSError | int] = queue.Queue()
        self._thread = threading.Thread(
            target=self._run_server, args=(host, port, started), name="channel", daemon=True
        )
        self._thread.start()
        outcome = started.get(timeout=_START_SECONDS)
        if isinstance(outcome, OSError):
            reason = outcome.strerror or str(outcome)
            raise RoleError(f"trainer.port: cannot listen on {host}:{port}: {reason}", exit_codes.UNAVAILABLE)
        self.port = outcome

    def add_run(self, run: str, channel: Answering) -> None:
        """Register a run's channel; the empty name is the trainer's own run."""
        self._runs[run] = channel

    def remove_run(self, run: str) -> None:
        """Remove a run; its routes answer 410 from now on."""
        self._runs.pop(run, None)

    def close(self) -> None:
        """Stop serving."""
        if self._thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_STOP_SECONDS)

    def _run_server(self, host: str, port: int, started: queue.Queue[OSError | int]) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._check_key(request, handler)

        application = web.Application(middlewares=[guard])
        application.router.add_route("*", "/{path:.*}", self._dispatch_request)
        site = Site(application, handler_cancellation=True)
        try:
            loop.run_until_complete(site.start(host, port))
        except OSError as error:
            started.put(error)
            return
        started.put(site.port)
        loop.run_forever()
        loop.run_until_complete(site.close())
        loop.close()

    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # A probe has no key and does not count as a contact of the orchestrator.
        keyless = request.method in ("GET", "HEAD") and request.path == TRAINER_READY
        if not keyless:
            who = calling_guest(request.headers.getall("Authorization", ()), self._key)
            if who is None:
                return refuse_request(401, "wrong or missing API key")
            if who and not request.path.startswith(f"{channel_of(who)}/"):
                return refuse_request(403, f"the key of run {who} opens only {channel_of(who)}")
        try:
            return await handler(request)
        except ValidationError as error:
            return refuse_request(422, f"invalid request body: {error.errors(include_url=False)}")

    async def _dispatch_request(self, request: web.Request) -> web.StreamResponse:
        run, route = "", request.path
        base = channel_of("")
        if route.startswith(base):
            run, _, rest = route.removeprefix(base).partition("/")
            route = f"/{rest}"
        channel = self._runs.get(run)
        if channel is None:
            return refuse_request(GONE, f"this trainer does not train run {run!r}")
        return await channel.answer_request(request, route)


def refuse_request(status: int, message: str) -> web.Response:
    """Return an error response with a JSON body."""
    return web.json_response({"error": message}, status=status)
