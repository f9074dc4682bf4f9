"""State of kopf's watches, seen from below: every request that kopf makes passes through one HTTP session of ours.

kopf reports to handlers neither that a list is complete nor that a watch is alive. The session can see both: a list request, the opening
of a watch, and every chunk that a watch brings (the API server's bookmarks, about one a minute, included).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientHandlerType, ClientRequest, ClientResponse, StreamReader
from pydantic_core import to_json

from rlrun_operator.kube.json_reader import UnreadableError, parse_json
from rlrun_operator.kube.resources import PARTS, Resource
from rlrun_operator.runtime.cache_fields import keep_identity, slim_object
from rlrun_operator.state import Manifest

HEADER_SECONDS = 15.0
"""The API server begins to answer a list or a watch at once. One that is starting or stopping may never; kopf then tries again."""
STALE_SECONDS = 150.0
"""A watch that brought nothing for so long is dead: bookmarks come every 60 s, and kopf opens a silent watch again after 70 s."""
DEAD_SECONDS = 180.0
"""A watch that brought nothing for so long while the API server answers other requests does not come back by itself."""
_METADATA_OF = {False: "PartialObjectMetadataList", True: "PartialObjectMetadata"}
log = logging.getLogger(__name__)


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
    """Time at which the watch brought anything last."""
    told: dict[str, int] = field(default_factory=dict)
    """UID -> hash of the object as kopf was given it last."""


@dataclass
class Watches:
    """Follows the watches of some streams.

    Args:
        streams: what kopf is going to watch.
        on_listed: called when a watch opens that follows a list: it reports nothing that was there or had gone before.
        known: whether the operator has this state of an object already, from the answer to its own write; asked in the watches' thread.
        clock: steady seconds.
    """

    streams: Iterable[Stream]
    on_listed: Callable[[Stream], None] = lambda stream: None
    known: Callable[[Manifest], bool] = lambda found: False
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

    def dead(self, answering: float) -> list[Stream]:
        """Watches that have brought nothing for long although the API server answers other requests.

        Args:
            answering: seconds since which it does.
        """
        return [stream for stream in self._states if min(self.age(stream), answering) > DEAD_SECONDS]

    async def middleware(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Looks at one request of kopf's."""
        stream = self._by_path.get(request.url.path)
        if stream is None or request.method != "GET":
            return await handler(request)
        watch = request.url.query.get("watch") == "true"
        if stream.resource in PARTS or not watch:
            request.headers["Accept"] = f"application/json;as={_METADATA_OF[watch]};g=meta.k8s.io;v=v1"
        async with asyncio.timeout(HEADER_SECONDS):
            response = await handler(request)
        if response.status != 200:
            return response
        state = self._states[stream]
        if not watch:
            response._body = _empty_list(await response.read())
            state.listed = True
            return response
        state.alive_at = self.clock()
        tap = _Tap(response.content, stream.resource, lambda: self._heard(state), state.told, self.known)
        response.content = tap  # type: ignore[assignment]
        if state.listed:
            state.listed = False
            state.told.clear()
            self.on_listed(stream)
        return response

    def _heard(self, state: _State) -> None:
        state.alive_at = self.clock()


class _Tap:
    """A watch's content that reports each chunk, and whose events are thinned out before kopf handles them.

    Most of what a watch brings is never read here: managed fields, pod templates, counts of other controllers. An event that changes
    nothing but those ends here, and so does the echo of an own write; it would cost kopf a millisecond.
    """

    def __init__(
        self,
        content: StreamReader,
        resource: Resource,
        heard: Callable[[], None],
        told: dict[str, int],
        known: Callable[[Manifest], bool],
    ) -> None:
        self._content = content
        self._resource = resource
        self._heard = heard
        self._told = told
        self._known = known

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        rest = b""
        async for chunk in self._content.iter_chunked(size):
            self._heard()
            *lines, rest = (rest + chunk).split(b"\n")
            thinned = b"".join(self._thinned(line) for line in lines)
            if thinned:
                yield thinned
        if thinned := self._thinned(rest):
            yield thinned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    def _thinned(self, line: bytes) -> bytes:
        """One watch event as kopf is to get it; bookmarks and errors are left as they are, what cannot be read is left out."""
        try:
            event = parse_json(line)
            kind = event["type"]
            if kind not in ("ADDED", "MODIFIED", "DELETED"):
                return to_json(event) + b"\n"
            slim = keep_identity(_slim_item(event["object"], self._resource))
            metadata = slim["metadata"]
            uid = metadata["uid"]
            content = hash(to_json({**slim, "metadata": {**metadata, "resourceVersion": ""}}))
        except (UnreadableError, LookupError, TypeError, AttributeError) as error:
            if line.strip():
                log.error("an event of a watch was left out: %s: %s", type(error).__name__, error)
            return b""
        if kind == "DELETED":
            self._told.pop(uid, None)
        elif self._told.get(uid) == content:
            return b""
        else:
            self._told[uid] = content
            if self._known(slim):
                return b""
        return to_json({"type": kind, "object": slim}) + b"\n"


def _empty_list(raw: bytes) -> bytes:
    """A list as kopf is to get it: where its watch begins, and no item or further page.

    kopf would make a task for each item. The receiver of `on_listed` asks for the items itself.
    """
    page = parse_json(raw)
    begin = (page.get("metadata") or {}).get("resourceVersion")
    return to_json({**page, "metadata": {"resourceVersion": begin}, "items": []})


def _slim_item(found: Manifest, resource: Resource) -> Manifest:
    """Part of an object that decisions read; a list or a watch of metadata calls the object by another kind."""
    return slim_object({**found, "apiVersion": resource.api_version, "kind": resource.kind})
