"""One life of the operator, one request at a time: its store, feed, queue and reconciler over the API in memory.

The operator does not run on its own: `advance` executes the next request of the current pass and continues the pass to
the following request. Any event may occur between two requests, and the process may end there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Generator, Mapping
from random import Random
from typing import Any, NamedTuple

from pydantic_core import to_json

from rlrun_operator.decide.state_machine import decide
from rlrun_operator.kube import client as transport
from rlrun_operator.kube.client import ApiError, Call, Client, UnavailableError
from rlrun_operator.kube.resources import BY_KIND, EVENT, NODE, WATCHED
from rlrun_operator.names import ROLES
from rlrun_operator.reconcile.cache_feed import Feed
from rlrun_operator.reconcile.observe import LookUps
from rlrun_operator.reconcile.reconciler import Dependencies, Reconciler
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.runtime.event_recorder import Poster
from rlrun_operator.runtime.metrics import Metrics
from rlrun_operator.runtime.watch_health import Stream
from rlrun_operator.runtime.workqueue import WorkQueue
from rlrun_operator.settings import RenderSettings
from rlrun_operator.state import Decision, Observed
from tests.sim.clock import Clock
from tests.sim.cluster.admission import RefusedError
from tests.sim.cluster.api import NAMESPACE, Api, Json
from tests.sim.operator.queued import HistoryAdmissions, Others
from tests.sim.operator.watched import WatchedStore

RELEASES = (RenderSettings(), RenderSettings(images=dict.fromkeys(ROLES, "ghcr.io/rlrun/rlrun:0.2.0")))
"""Settings of each release of the operator."""
STREAMS = [Stream(resource, NAMESPACE) for resource in WATCHED]


class Request(NamedTuple):
    """Request of the operator to the API server."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    content: str
    what: str
    """Verb and path."""

    def __await__(self) -> Generator[Request, Any, Json]:
        return (yield self)

    @property
    def writes(self) -> bool:
        return self.method != "GET" and "dryRun" not in self.query

    @property
    def looks_for_others(self) -> bool:
        """Whether the request only checks for a foreign object with the name of an unwatched kind."""
        return self.method == "GET" and self.path.split("/")[-2] in UNWATCHED


UNWATCHED = {resource.plural for resource in BY_KIND.values()} - {
    resource.plural for resource in (*WATCHED, EVENT, NODE)
}


class Wire(Client):
    """The operator's client, whose requests are yielded to the driver of the coroutine."""

    def __init__(self) -> None:
        super().__init__(session=None, server="")  # type: ignore[arg-type]

    async def request(self, call: Call, **how: Any) -> Json:
        query, body, content = how.get("query") or {}, how.get("body"), how.get("content", "application/json")
        return await Request(call.method, call.path, query, body, content, f"{call.verb} {call.path}")


class Process:
    """The operator from its start to its end.

    Args:
        api: API server.
        clock: clocks.
        seed: seed of the jitter.
        unexpected: callback for errors that must never be raised.
        release: number of the release, each with its own images.
        others: effects of other runs with a queue; None: without a queue.
    """

    def __init__(
        self,
        api: Api,
        clock: Clock,
        seed: int,
        unexpected: Callable[[Exception], None],
        release: int = 0,
        others: Others | None = None,
    ) -> None:
        self.release = release
        self._api, self._clock, self._unexpected = api, clock, unexpected
        self.store = WatchedStore()
        self.queue: WorkQueue[Key] = WorkQueue()
        self._client = Wire()
        self._feed = Feed(self.store, self._client, self._add, now=clock.wall)
        look_ups = LookUps(self._client, read_nodes=False, clock=clock.steady)
        queue = (
            None
            if others is None
            else HistoryAdmissions(self.store, look_ups, RELEASES[release], others, self._add, clock)
        )
        self._reconciler = Reconciler(
            decide=self._decide,
            outside=Dependencies(
                client=self._client,
                store=self.store,
                look_ups=look_ups,
                poster=Poster(self._client, "operator-0", clock=clock.steady),
                metrics=_metrics(self.store),
                queue=queue,
            ),
            settings=RELEASES[release],
            requeue=self._add,
            now=clock.wall,
            clock=clock.steady,
            random=Random(seed),
        )
        self.decided_on: Json = {}
        """The run in the view of the current pass."""
        self._key: Key | None = None
        self._work: Coroutine[Request, Any, None] | None = None
        self.asked: Request | None = None
        """The request that the current pass waits for."""
        self.passes = 0
        self.requests = 0
        self.relist()
        self.wake()

    def _decide(self, observed: Observed, now: float, **how: Any) -> Decision:
        self.decided_on = observed.run
        return decide(observed, now, **how)

    def _add(self, key: Key, seconds: float) -> None:
        self.queue.add(key, self._clock.steady(), seconds)

    def wake(self) -> None:
        """Wake the operator after a new plan of the queue."""
        for run in self.store.runs():
            self._add((NAMESPACE, run["metadata"]["name"]), 0.0)

    # ---- the watches

    def see(self, event: str, found: Json) -> None:
        """Deliver one event of a watch."""
        self._feed.on_object(event, found)

    def relist(self) -> None:
        """Compare the store with the cluster."""
        for stream in STREAMS:
            work = self._feed.compare_stream(stream)
            try:
                asked = work.send(None)
                while True:
                    asked = work.send(self._api.answer(*asked[:5]))
            except StopIteration:
                pass

    # ---- the worker

    def advance(self, fault: str = "") -> bool:
        """Start a pass, or execute its next request with `fault`. Return whether there was work."""
        if self._work is None:
            self._key = self.queue.pop(self._clock.steady())
            if self._key is None:
                return False
            self.passes += 1
            self._work = self._reconciler.reconcile(self._key)  # type: ignore[assignment]
            self._go_on(None, None)
            return True
        assert self.asked is not None
        asked, self.asked = self.asked, None
        self.requests += 1
        try:
            answer = self._asked(asked, fault)
        except (ApiError, UnavailableError) as error:
            self._go_on(None, error)
        else:
            self._go_on(answer, None)
        return True

    def deliver(self) -> None:
        """Execute the current request without a recipient of its response."""
        if self.asked is not None:
            with contextlib.suppress(RefusedError):
                self._api.answer(*self.asked[:5])

    def _asked(self, asked: Request, fault: str) -> Json:
        if fault == "lost":  # only the response is lost
            with contextlib.suppress(RefusedError):
                self._api.answer(*asked[:5])
            raise UnavailableError(f"{asked.what}: no answer within 10 s")
        try:
            if fault and (asked.writes or fault in READS_TOO):
                raise RefusedError(*FAULTS[fault])
            return self._api.answer(*asked[:5])
        except RefusedError as refused:
            document = {"reason": refused.reason, "message": refused.message}
            return transport._read_answer(refused.status, to_json(document), asked.what, reads=asked.method == "GET")

    def _go_on(self, answer: Json | None, error: Exception | None) -> None:
        assert self._work is not None
        assert self._key is not None
        try:
            self.asked = self._work.throw(error) if error is not None else self._work.send(answer)
            return
        except StopIteration:
            self.queue.record_success(self._key, self._clock.steady())
        except (ApiError, UnavailableError):
            self.queue.record_failure(self._key, self._clock.steady())
        except Exception as unexpected:
            self.queue.record_failure(self._key, self._clock.steady())
            self._unexpected(unexpected)
        self._work = None

    def work(self, most: int = 200) -> int:
        """Advance until idle; return the number of requests."""
        before = self.requests
        while self.requests - before < most and self.advance():
            pass
        return self.requests - before

    def die(self) -> None:
        """End between two requests."""
        if self._work is not None:
            self._work.close()
        self._work = self.asked = None


FAULTS = {
    "conflict": (409, "Conflict", "the object has been modified; please apply your changes to the latest version"),
    "throttled": (429, "TooManyRequests", "too many requests"),
    "broken": (500, "InternalError", "etcdserver: request timed out"),
    "away": (503, "ServiceUnavailable", "the API server is away"),
    "quota": (403, "Forbidden", "exceeded quota: team, requested: pods=1, used: pods=8, limited: pods=8"),
}
"""Faults of a request; with `lost` it is executed and its response is lost."""
READS_TOO = ("throttled", "broken", "away")
_kept: list[Metrics] = []


def _metrics(store: Store) -> Metrics:
    """Shared metrics, created once: scrapes are not tested, and a registry costs as much as ten passes."""
    if not _kept:
        _kept.append(Metrics(store))
    return _kept[0]
