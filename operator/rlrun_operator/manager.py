"""The running operator: watches fill the store, changes of the store fill the queue, and the leader's workers reconcile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.kube.connection import Connection, api_server_rules
from rlrun_operator.kube.resources import RLRUN, WATCHED
from rlrun_operator.reconcile import watch
from rlrun_operator.reconcile.cache_feed import Feed, Sync
from rlrun_operator.reconcile.observe import LookUps
from rlrun_operator.reconcile.queue_objects import Cluster
from rlrun_operator.reconcile.queues import queue_of
from rlrun_operator.reconcile.reconciler import Decide, Dependencies, Queue, Reconciler
from rlrun_operator.reconcile.run_memory import request_refused
from rlrun_operator.runtime import preflight, watch_health
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.runtime.defaults_files import DefaultsFiles
from rlrun_operator.runtime.event_recorder import Poster
from rlrun_operator.runtime.leases import (
    TERRITORY_DURATION_SECONDS,
    Leader,
    LeadershipLostError,
    NotLeadingError,
    Place,
    Territory,
)
from rlrun_operator.runtime.log_setup import describe_exception
from rlrun_operator.runtime.metrics import Metrics
from rlrun_operator.runtime.watch_health import Stream, Watches
from rlrun_operator.runtime.workqueue import Workers
from rlrun_operator.settings import OperatorSettings
from rlrun_operator.state import EventRecord, Manifest
from rlrun_operator.status import reasons

PREFLIGHT_SECONDS = 5.0
REMIND_SECONDS = 60.0
ADDRESS_SECONDS = 60.0
"""Seconds between two reads of the API server's addresses."""
DEFAULTS_SECONDS = 5.0
"""Seconds between two reads of the files with defaults for runs."""
STOP_SECONDS = 4.0
BEAT_SECONDS = 1.0
log = logging.getLogger(__name__)


class Operator:
    """One operator process.

    Args:
        settings: settings from the environment.
        connection: API server and credentials.
        decide: function that decides on each observed run.
    """

    def __init__(self, settings: OperatorSettings, connection: Connection, decide: Decide) -> None:
        self._settings = settings
        self._connection = connection
        self._store = Store()
        self._metrics = Metrics(self._store)
        self._session = connection.session()
        self._client = Client(self._session, connection.server, self._metrics.count_request)
        self._leader = Leader(
            self._client,
            settings.pod_namespace,
            settings.pod_name,
            name=settings.lease_name,
            on_start=self._start_leading,
            on_pause=self._pause_workers,
            on_rewound=self._distrust_store,
        )
        self._client.may_write = self._leader.check_leading
        self._territory = Territory(
            self._client,
            f"{settings.pod_namespace}/{settings.lease_name}",
            is_leading=self._leader.is_leading,
            with_runs=lambda: {place for run in self._store.runs() if (place := self._place_of(run)) is not None},
            on_change=self._place_changed,
        )
        self._poster = Poster(self._client, settings.pod_name)
        self._workers: Workers[Key] = Workers(self._reconcile_run, self._log_failure, is_new=self._is_new)
        self._feed = Feed(self._store, self._client, self._workers.add, on_rewound=self._restart_watches)
        look_ups = LookUps(self._client, read_nodes=settings.read_nodes)
        self._queue = self._queue_of(look_ups)
        self._reconciler = Reconciler(
            decide=decide,
            outside=Dependencies(self._client, self._store, look_ups, self._poster, self._metrics, self._queue),
            settings=settings.render,
            name=settings.name,
            requeue=self._workers.add,
        )
        self._streams = [Stream(resource, ns) for resource in WATCHED for ns in settings.namespaces or (None,)]
        self._watches = Watches(self._streams, on_listed=self._request_sync, known=self._store.knows)
        self._watcher = watch.Watcher(
            settings.namespaces,
            server=connection.server,
            session=lambda: connection.session([self._watches.observe_request]),
            on_object=self._feed.on_object,
        )
        self._sync = Sync(self._feed, self._store, self._watches, self._streams, self._open_if_allowed)
        self._network = settings.render.network
        self._defaults = DefaultsFiles(settings.defaults_folder, f"{settings.pod_namespace}/{settings.defaults_name}")
        self._reported_addresses = False
        self._unreported_places: set[Place] = set()
        """Places that another operator holds, not yet reported to their runs."""
        self._waiting_for: list[str] = ["the API server has not answered yet"]
        self._lags: deque[float] = deque(maxlen=60)
        self._stop = asyncio.Event()

    def _queue_of(self, look_ups: LookUps) -> Queue | None:
        """Return the queue in which this operator's runs wait."""
        cluster = Cluster(
            client=self._client,
            store=self._store,
            feed=self._feed,
            look_ups=look_ups,
            namespaces=self._settings.namespaces,
            serves=lambda run: self._place_of(run) is not None,
            is_active=lambda: self._workers.is_open,
            requeue=self._workers.add,
        )
        return queue_of(cluster, self._settings.queue, self._settings.render)

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            LeadershipLostError: another process leads.
            OSError: the health port is in use.
        """
        self._take_signals()
        site = await watch_health.serve_health(self._make_health(), self._metrics.registry, self._settings.http_port)
        tasks: list[asyncio.Task[None]] = []
        try:
            tasks.append(asyncio.create_task(self._measure_loop_delay(), name="beat"))
            if not await self._ready_to_start():
                return
            self._loop = asyncio.get_running_loop()
            await self._find_api_server()
            self._read_defaults()
            self._watcher.start()
            tasks += [
                asyncio.create_task(self._workers.run(), name="workers"),
                asyncio.create_task(self._sync.run(), name="sync"),
                asyncio.create_task(self._run_election(), name="leader"),
                asyncio.create_task(self._follow_api_server(), name="addresses"),
                asyncio.create_task(self._follow_defaults(), name="defaults"),
                asyncio.create_task(self._territory.run(), name="territory"),
            ]
            if self._queue is not None:
                tasks.append(asyncio.create_task(self._queue.run(), name="queue"))
            stopped = asyncio.create_task(self._stop.wait(), name="stop")
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            for task in done & set(tasks):
                task.result()
        finally:
            await self._shut_down(tasks, site.close)

    async def _shut_down(self, tasks: list[asyncio.Task[None]], close_http: Callable[[], Awaitable[None]]) -> None:
        self._watcher.stop()
        await self._workers.close()
        await self._leader.release()  # after the last write: the next leader may start at once
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        await close_http()
        await self._session.close()

    async def _ready_to_start(self) -> bool:
        """Wait for the API server, the CRD and the rights. Returns whether the operator can start; False after a stop signal."""
        reminded = float("-inf")
        logged: list[str] = []
        while not self._stop.is_set():
            try:
                self._waiting_for = await preflight.find_problems(
                    self._client, self._settings.namespaces, self._settings.pod_namespace
                )
            except (UnavailableError, ApiError) as error:
                self._waiting_for = [f"the API server {self._connection.server} cannot be used: {error}"]
            if not self._waiting_for:
                return True
            if self._waiting_for != logged or time.monotonic() - reminded > REMIND_SECONDS:
                for problem in self._waiting_for:
                    log.error("cannot start yet: %s", problem)
                logged, reminded = self._waiting_for, time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), PREFLIGHT_SECONDS)
        return False

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    def _request_sync(self, stream: Stream) -> None:
        """Compare a listed stream with the store; called in the watches' thread."""
        self._loop.call_soon_threadsafe(self._sync.request_comparison, stream)

    async def _run_election(self) -> None:
        await self._leader.run()

    async def _start_leading(self) -> None:
        """Start as the leader, possibly after an outage in which this process may have missed any change."""
        self._sync.start_over()
        self._store.rebase_leases(time.time())
        self._open_if_allowed()

    def _distrust_store(self) -> None:
        """Read everything again: the leader's Lease shows that etcd was restored, so the store may hold objects of a lost history."""
        self._sync.start_over()
        self._restart_watches()

    def _restart_watches(self) -> None:
        """Open all watches again; each then compares its objects with the store (`Sync.request_comparison`)."""
        self._store.rebase_leases(time.time())
        self._watcher.restart()

    async def _pause_workers(self) -> None:
        await self._workers.close()

    def _open_if_allowed(self) -> None:
        """Start the workers, but only as the leader and with a complete store: an unlisted child is not a missing child.

        The condition is that the leader acts, not that its last renewal is fresh: a late renewal triggers no callback that would call
        this method again.
        """
        if self._sync.missing or not self._leader.is_acting or self._workers.is_open:
            return
        self._wake_all()
        self._workers.open()

    async def _follow_api_server(self) -> None:
        while True:
            await asyncio.sleep(ADDRESS_SECONDS)
            if await self._find_api_server():
                self._wake_all()

    async def _follow_defaults(self) -> None:
        while True:
            await asyncio.sleep(DEFAULTS_SECONDS)
            if self._read_defaults():
                self._wake_all()

    def _read_defaults(self) -> bool:
        """Read the defaults for runs. Returns whether they have changed."""
        changed = self._defaults.reload_files()
        self._store.defaults = self._defaults.current
        return changed

    async def _find_api_server(self) -> bool:
        """Read the API server's addresses for the orchestrators' policies. Returns whether they have changed."""
        before = self._network
        if before.given:
            return False
        try:
            rules = await api_server_rules(self._client)
        except (LookupError, TypeError, AttributeError, UnavailableError) as error:  # the answer may have any shape
            if not self._reported_addresses and not before.discovered:
                log.warning(
                    "cannot read the API server's addresses (%s): policies let orchestrators reach any host on ports 443 and 6443. Grant "
                    "the operator the right to read them, or set networkPolicy.apiServer in the chart's values",
                    error,
                )
                self._reported_addresses = True
            return False
        self._network = replace(before, api_server=rules, discovered=True)
        self._reconciler.settle_network(self._network)
        return self._network != before

    def _wake_all(self, namespace: str | None = None) -> None:
        for run in self._store.runs():
            if namespace in (None, run["metadata"]["namespace"]):
                self._workers.add((run["metadata"]["namespace"], run["metadata"]["name"]))

    async def _reconcile_run(self, key: Key) -> None:
        try:
            await self._reconcile_served(key)
        except ApiError as error:
            run, event = self._store.get(RLRUN.kind, *key), request_refused(error)
            if run is not None and event is not None:
                await self._poster.post_event(run, event)
            raise

    async def _reconcile_served(self, key: Key) -> None:
        """Reconcile a run, unless another operator serves its namespace; the run then gets an event, once."""
        run = self._store.get(RLRUN.kind, *key)
        if run is not None and (place := self._place_of(run)) is not None and not await self._territory.may_act(place):
            if place in self._unreported_places and (other := self._territory.places_of_others().get(place)):
                self._unreported_places.discard(place)
                await self._poster.post_event(
                    run, EventRecord("Warning", reasons.SERVED_BY_ANOTHER, _served_namespaces(place, other))
                )
            return
        await self._reconciler.reconcile(key)

    def _is_new(self, key: Key) -> bool:
        """Return whether a run has no attempt yet: its first pass takes twenty requests, later passes one or none."""
        run = self._store.get(RLRUN.kind, *key)
        return run is not None and not (run.get("status") or {}).get("attempt")

    def _place_of(self, run: Manifest) -> Place | None:
        """Return namespace and operator name for a run of this operator, or None if the run names another operator."""
        named = (run.get("spec") or {}).get("managedBy")
        return (run["metadata"]["namespace"], named) if named in (None, self._settings.name) else None

    def _place_changed(self, place: Place, other: str) -> None:
        if other:
            self._unreported_places.add(place)
            log.warning("%s", _served_namespaces(place, other))
        else:
            self._unreported_places.discard(place)
            self._wake_all(place[0])

    def _log_failure(self, key: Key, error: Exception, pause: float) -> None:
        if isinstance(error, NotLeadingError):
            return
        if isinstance(error, ApiError) and error.lacks_permission:
            log.error("run %s/%s: the operator lacks a right: %s; retry in %g s", *key, error, pause)
        elif isinstance(error, ApiError | UnavailableError):
            log.warning("run %s/%s: %s; retry in %g s", *key, error, pause)
        else:
            log.error("run %s/%s: unexpected %s; retry in %g s", *key, describe_exception(error), pause)

    async def _measure_loop_delay(self) -> None:
        """Measure the delay of the event loop."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(BEAT_SECONDS)
            self._lags.append(max(0.0, time.monotonic() - began - BEAT_SECONDS))

    def _not_ready(self) -> list[str]:
        if self._waiting_for:
            return self._waiting_for
        if self._sync.missing:
            return [f"the store is not filled yet: {', '.join(sorted(map(str, self._sync.missing)))}"]
        return [f"the watch of {stream} has been silent for too long" for stream in self._watches.stale_streams()]

    def _find_dead_watches(self) -> list[str]:
        """Return broken watches that only a new process can repair; none before the watches start."""
        if self._waiting_for or self._stop.is_set():
            return []
        if self._watcher.has_ended():
            return ["the watches' thread has ended"]
        return [
            f"the watch of {stream} returns no events, although the API server answers"
            for stream in self._watches.dead(self._client.answering_seconds())
        ]

    def _make_health(self) -> watch_health.Health:
        self._metrics.observe_queue(
            lambda: float(self._workers.count_ready()), self._workers.age, lambda: float(self._leader.is_leading())
        )
        for stream in self._streams:
            self._metrics.observe_watch(stream.resource.plural, stream.namespace, partial(self._watches.age, stream))
        return watch_health.Health(
            standstill=self._workers.standstill,
            longest_work=self._workers.longest_work,
            lag=lambda: max(self._lags, default=0.0),
            dead=self._find_dead_watches,
            stands_by=lambda: self._leader.stands_by,
            not_ready=self._not_ready,
            served_by_others=lambda: [
                _served_namespaces(place, other) for place, other in self._territory.places_of_others().items()
            ],
            before_scrape=[
                lambda: self._metrics.observe_objects(self._store.count()),
                lambda: self._metrics.observe_places(self._territory.held_places(), self._territory.places_of_others()),
            ],
        )


def _served_namespaces(place: Place, other: str) -> str:
    return (
        f"namespace {place[0]}: operator {other} serves its runs; this one takes over {TERRITORY_DURATION_SECONDS} s after that operator "
        "ends. Remove the namespace from watchNamespaces of one of them, or set operatorName for one"
    )


__all__ = ["LeadershipLostError", "Operator"]
