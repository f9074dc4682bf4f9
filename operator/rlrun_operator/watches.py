"""State of kopf's watches, seen from below: every request that kopf makes passes through one HTTP session of ours.

kopf tells handlers neither when a list is complete nor that a watch is alive. The session can see both: a list request, the opening
of a watch, and every chunk that a watch brings (the API server's bookmarks, about one a minute, included).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientHandlerType, ClientRequest, ClientResponse
from pydantic_core import from_json, to_json

from rlrun_operator.resources import Resource
from rlrun_operator.slim import slimmed

HEADER_SECONDS = 15.0
"""The API server begins to answer a list or a watch at once. One that is starting or stopping may never; kopf then tries again."""
STALE_SECONDS = 150.0
"""A watch that brought nothing for so long is dead: bookmarks come every 60 s, and kopf opens a silent watch anew after 70 s."""


@dataclass(frozen=True)
class Stream:
    """One watch: a kind in a namespace, or in all of them."""

    resource: Resource
    namespace: str | None

    def __str__(self) -> str:
        return f"{self.resource.plural} in {self.namespace or 'all namespaces'}"


@dataclass
class _State:
    listed: bool = False
    """kopf listed and has not opened its watch yet."""
    alive_at: float | None = None
    """When the watch brought anything last."""
    told: dict[str, int] = field(default_factory=dict)
    """UID -> hash of what kopf was told of the object last."""


@dataclass
class Watches:
    """Follows the watches of some streams.

    Args:
        streams: what kopf is going to watch.
        on_listed: called when a watch opens that follows a list: whatever was deleted before is not going to be told by it.
        clock: steady seconds.
    """

    streams: Iterable[Stream]
    on_listed: Callable[[Stream], None] = lambda stream: None
    clock: Callable[[], float] = time.monotonic
    _by_path: dict[str, Stream] = field(init=False)
    _states: dict[Stream, _State] = field(init=False)

    def __post_init__(self) -> None:
        self._by_path = {stream.resource.path(stream.namespace): stream for stream in self.streams}
        self._states = {stream: _State() for stream in self._by_path.values()}

    def age(self, stream: Stream) -> float:
        """Seconds since the watch brought anything; infinite before it opened."""
        alive_at = self._states[stream].alive_at
        return float("inf") if alive_at is None else self.clock() - alive_at

    def stale(self) -> list[Stream]:
        """Watches that are not open yet or dead."""
        return [stream for stream in self._states if self.age(stream) > STALE_SECONDS]

    async def middleware(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Looks at one request of kopf's."""
        stream = self._by_path.get(request.url.path)
        if stream is None or request.method != "GET":
            return await handler(request)
        watch = request.url.query.get("watch") == "true"
        async with asyncio.timeout(HEADER_SECONDS):
            response = await handler(request)
        if response.status != 200:
            return response
        state = self._states[stream]
        if not watch:
            state.listed = True
            return response
        state.alive_at = self.clock()
        response.content = _Tap(response.content, lambda: self._heard(state), state.told)  # type: ignore[assignment]
        if state.listed:
            state.listed = False
            state.told.clear()
            self.on_listed(stream)
        return response

    def _heard(self, state: _State) -> None:
        state.alive_at = self.clock()


class _Tap:
    """A watch's content that tells of each chunk, and whose events are thinned out before kopf handles them.

    Most of what a watch brings is never read here: managed fields, pod templates, counts of other controllers. An event that changes
    nothing but those ends here; it would cost kopf a millisecond.
    """

    def __init__(self, content: Any, heard: Callable[[], None], told: dict[str, int]) -> None:
        self._content = content
        self._heard = heard
        self._told = told

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        rest = b""
        async for chunk in self._content.iter_chunked(size):
            self._heard()
            *lines, rest = (rest + chunk).split(b"\n")
            thinned = b"".join(self._thinned(line) for line in lines)
            if thinned:
                yield thinned
        if rest:
            yield rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    def _thinned(self, line: bytes) -> bytes:
        """One watch event as kopf is to get it; bookmarks, errors and what cannot be read are left as they are."""
        try:
            event = from_json(line)
            kind = event["type"]
            if kind not in ("ADDED", "MODIFIED", "DELETED"):
                return line + b"\n"
            slim = slimmed(event["object"])
        except (ValueError, KeyError, TypeError):
            return line + b"\n"
        metadata = slim["metadata"]
        content = hash(to_json({**slim, "metadata": {**metadata, "resourceVersion": ""}}))
        if kind == "DELETED":
            self._told.pop(metadata["uid"], None)
        elif self._told.get(metadata["uid"]) == content:
            return b""
        else:
            self._told[metadata["uid"]] = content
        return to_json({"type": kind, "object": slim}) + b"\n"
