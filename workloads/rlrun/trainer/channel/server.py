"""The HTTP server of the channels: a thread of its own, one guard, and the routes of every run that the trainer has."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Protocol

from aiohttp import web
from pydantic import ValidationError

from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.shared import channel_of
from rlrun.protocol.messages.api_key import calling_guest
from rlrun.protocol.messages.channel import GONE
from rlrun.protocol.messages.endpoints import TRAINER_READY
from rlrun.runtime import exit_codes
from rlrun.runtime.site import Handler, Site

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0


class Answering(Protocol):
    """One run's end of the channel."""

    async def answer(self, request: web.Request, route: str) -> web.StreamResponse:
        """Answer a request that had the key; `route` is without the run's prefix."""
        ...


class ChannelServer:
    """Serves the trainer's own run at the root, and others below `channel_of(run)`."""

    def __init__(self, api_key: str) -> None:
        """Args: api_key: expected as `Authorization: Bearer`, on every route but the probe's; a guest's key opens its channel."""
        self._key = api_key
        self._runs: dict[str, Answering] = {}
        self._thread: threading.Thread | None = None
        self.loop = asyncio.new_event_loop()
        self.port = 0

    def start(self, host: str, port: int) -> None:
        """Bind and serve.

        Args:
            host: address to bind.
            port: port to bind; 0 takes a free one, see `port`.

        Raises:
            RoleError: the address cannot be bound.
        """
        started: queue.Queue[OSError | int] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, args=(host, port, started), name="channel", daemon=True)
        self._thread.start()
        outcome = started.get(timeout=_START_SECONDS)
        if isinstance(outcome, OSError):
            reason = outcome.strerror or str(outcome)
            raise RoleError(f"trainer.port: cannot listen on {host}:{port}: {reason}", exit_codes.UNAVAILABLE)
        self.port = outcome

    def open(self, run: str, channel: Answering) -> None:
        """Answer for a run from now on; the empty name is the trainer's own run."""
        self._runs[run] = channel

    def drop(self, run: str) -> None:
        """The run has left: its routes answer 410."""
        self._runs.pop(run, None)

    def close(self) -> None:
        """Stop serving."""
        if self._thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_STOP_SECONDS)

    def _serve(self, host: str, port: int, started: queue.Queue[OSError | int]) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        application = web.Application(middlewares=[guard])
        application.router.add_route("*", "/{path:.*}", self._route)
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

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # A probe carries no key and is no contact.
        keyless = request.method in ("GET", "HEAD") and request.path == TRAINER_READY
        if not keyless:
            who = calling_guest(request.headers.getall("Authorization", ()), self._key)
            if who is None:
                return refuse_request(401, "wrong or missing API key")
            if who and not request.path.startswith(f"{channel_of(who)}/"):
                return refuse_request(403, f"the key of run {who} opens {channel_of(who)} alone")
        try:
            return await handler(request)
        except ValidationError as error:
            return refuse_request(422, f"the request's body is wrong: {error.errors(include_url=False)}")

    async def _route(self, request: web.Request) -> web.StreamResponse:
        run, route = "", request.path
        base = channel_of("")
        if route.startswith(base):
            run, _, rest = route.removeprefix(base).partition("/")
            route = f"/{rest}"
        channel = self._runs.get(run)
        if channel is None:
            return refuse_request(GONE, f"this trainer does not train run {run!r}")
        return await channel.answer(request, route)


def refuse_request(status: int, message: str) -> web.Response:
    """A refusal, with its reason for people."""
    return web.json_response({"error": message}, status=status)
