"""Health of the operator and of kopf's watches, and the HTTP port for /livez, /readyz and /metrics.

kopf does not report to handlers that a list is complete or that a watch is alive. Therefore every request of kopf passes through a session
of the operator, which observes a list request, the opening of a watch, and every chunk of a watch, including the API server's bookmarks,
about one a minute.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientHandlerType, ClientRequest, ClientResponse, StreamReader, web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import to_json

from rlrun.runtime.http_site import Site
from rlrun_operator.kube.json_reader import UnreadableError, parse_json
from rlrun_operator.kube.resources import PARTS, Resource
from rlrun_operator.runtime.cache_fields import keep_identity, slim_object
from rlrun_operator.state import Manifest

STANDSTILL_SECONDS = 60.0
"""Seconds without a taken run after which waiting workers count as hanging. The wait of one run proves nothing: new runs may queue."""
WORK_SECONDS = 180.0
"""Seconds after which work on one run counts as hanging: each of its requests has a deadline of seconds."""
LAG_SECONDS = 5.0
"""Delay, in seconds, of the event loop's once-a-second beat that counts as a fault. A loop that is blocked completely does not answer at
all, which the kubelet also treats as a failed probe."""


@dataclass
class Health:
    """Inputs of the probes, set by the process."""

    standstill: Callable[[], float] = lambda: 0.0
    """Seconds for which runs have waited without a worker taking one."""
    longest_work: Callable[[], float] = lambda: 0.0
    """Seconds since the oldest current work started."""
    lag: Callable[[], float] = lambda: 0.0
    """Largest delay of the event loop in the last minute, in seconds."""
    dead: Callable[[], list[str]] = list
    """Watches that do not recover."""
    stands_by: Callable[[], str | None] = lambda: None
    """Process that leads instead of this one, or None."""
    served_by_others: Callable[[], list[str]] = list
    """Configured namespaces that another operator serves."""
    not_ready: Callable[[], list[str]] = lambda: ["starting"]
    """Reasons why the store is not a complete copy of the cluster yet."""
    before_scrape: list[Callable[[], None]] = field(default_factory=list)

    def find_faults(self) -> list[str]:
        """Return the reasons to restart the process; empty if it is healthy."""
        problems = []
        if self.standstill() > STANDSTILL_SECONDS:
            problems.append(
                f"runs wait and no worker has taken one for {self.standstill():.0f} s (limit {STANDSTILL_SECONDS:.0f} s)"
            )
        if self.longest_work() > WORK_SECONDS:
            problems.append(f"work on a run takes {self.longest_work():.0f} s (limit {WORK_SECONDS:.0f} s)")
        if self.lag() > LAG_SECONDS:
            problems.append(f"the event loop was blocked for {self.lag():.1f} s (limit {LAG_SECONDS:g} s)")
        return problems + self.dead()


async def serve_health(health: Health, registry: CollectorRegistry, port: int) -> Site:
    """Start to serve on all interfaces; `close()` of the result stops it.

    Raises:
        OSError: the port is in use.
    """

    def respond(problems: list[str], well: str = "ok") -> web.Response:
        return web.Response(status=503 if problems else 200, text="\n".join(problems or [well]) + "\n")

    async def livez(_: web.Request) -> web.Response:
        return respond(health.find_faults())

    async def readyz(_: web.Request) -> web.Response:
        leader = health.stands_by()
        well = f"ok, standing by: {leader} leads" if leader else "ok"
        return respond(health.not_ready() + health.find_faults(), "\n".join([well, *health.served_by_others()]))

    async def metrics(_: web.Request) -> web.Response:
        for refresh in health.before_scrape:
            refresh()
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    site = Site(app)
    await site.start(None, port)
    return site


HEADER_SECONDS = 15.0
"""Seconds to wait for the first bytes of a list or a watch. A starting or stopping API server may never answer; kopf then retries."""
STALE_SECONDS = 150.0
"""Seconds without data after which a watch is stale: bookmarks come every 60 s, and kopf reopens a silent watch after 70 s."""
DEAD_SECONDS = 180.0
"""Seconds without data, while the API server answers other requests, after which a watch does not recover by itself."""
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
    """Whether kopf has listed and has not opened its watch yet."""
    alive_at: float | None = None
    """Time of the watch's last data."""
    passed_on: dict[str, int] = field(default_factory=dict)
    """UID -> hash of the object's last state that kopf received."""


@dataclass
class Watches:
    """Health of a set of watches.

    Args:
        streams: watches that kopf opens.
        on_listed: callback when a watch opens after a list: kopf does not report objects that existed or were deleted before.
        known: whether the operator already has this state of an object, from the answer to its own write; called in the watches' thread.
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
        """Return the seconds since the watch's last data; infinite before it opens."""
        alive_at = self._states[stream].alive_at
        return float("inf") if alive_at is None else self.clock() - alive_at

    def stale_streams(self) -> list[Stream]:
        """Return the watches that are not open yet, or stale."""
        return [stream for stream in self._states if self.age(stream) > STALE_SECONDS]

    def dead(self, answering: float) -> list[Stream]:
        """Return the watches without data for long, although the API server answers other requests.

        Args:
            answering: seconds since which it has answered.
        """
        return [stream for stream in self._states if min(self.age(stream), answering) > DEAD_SECONDS]

    async def observe_request(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Observe one request of kopf, and slim its response."""
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
        tap = _Tap(response.content, stream.resource, lambda: self._mark_alive(state), state.passed_on, self.known)
        response.content = tap  # type: ignore[assignment]
        if state.listed:
            state.listed = False
            state.passed_on.clear()
            self.on_listed(stream)
        return response

    def _mark_alive(self, state: _State) -> None:
        state.alive_at = self.clock()


class _Tap:
    """Content of a watch: it reports each chunk, and slims events before kopf handles them.

    The operator never reads most of an event: managed fields, pod templates, counts of other controllers. An event that changes only
    such fields is dropped here, and so is the echo of an own write; each would cost kopf a millisecond.
    """

    def __init__(
        self,
        content: StreamReader,
        resource: Resource,
        mark_alive: Callable[[], None],
        passed_on: dict[str, int],
        known: Callable[[Manifest], bool],
    ) -> None:
        self._content = content
        self._resource = resource
        self._mark_alive = mark_alive
        self._passed_on = passed_on
        self._known = known

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        rest = b""
        async for chunk in self._content.iter_chunked(size):
            self._mark_alive()
            *lines, rest = (rest + chunk).split(b"\n")
            slimmed = b"".join(self._slim_event(line) for line in lines)
            if slimmed:
                yield slimmed
        if slimmed := self._slim_event(rest):
            yield slimmed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    def _slim_event(self, line: bytes) -> bytes:
        """Return one watch event for kopf; bookmarks and errors are unchanged, unreadable and redundant events are dropped."""
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
                log.error("dropped an unreadable event of a watch: %s: %s", type(error).__name__, error)
            return b""
        if kind == "DELETED":
            self._passed_on.pop(uid, None)
        elif self._passed_on.get(uid) == content:
            return b""
        else:
            self._passed_on[uid] = content
            if self._known(slim):
                return b""
        return to_json({"type": kind, "object": slim}) + b"\n"


def _empty_list(raw: bytes) -> bytes:
    """Return a list for kopf: the version at which its watch starts, without items or further pages.

    kopf would create a task for each item. The receiver of `on_listed` lists the items itself.
    """
    page = parse_json(raw)
    start = (page.get("metadata") or {}).get("resourceVersion")
    return to_json({**page, "metadata": {"resourceVersion": start}, "items": []})


def _slim_item(found: Manifest, resource: Resource) -> Manifest:
    """Return the part of an object that decisions read; lists and watches of metadata have another kind, which is corrected here."""
    return slim_object({**found, "apiVersion": resource.api_version, "kind": resource.kind})
