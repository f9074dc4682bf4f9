"""Watches of the cluster by kopf, which pass every event to the cache. This is the only module that imports kopf.

Only `on.event` handlers are used: they need no finalizer, add no annotations and keep no state between events. This package implements
retries, timers, leader election and events itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

import aiohttp
import kopf

from rlrun_operator.kube.resources import CLAIM, RLRUN, WATCHED, Resource
from rlrun_operator.names import MANAGER
from rlrun_operator.reconcile.cache_feed import SELECTOR
from rlrun_operator.runtime.log_setup import describe_exception
from rlrun_operator.state import Manifest

LIST_PAGE = 250
SERVER_TIMEOUT_SECONDS = 290
"""The API server ends a watch after this time; kopf continues it from the last version."""
INACTIVITY_SECONDS = 70.0
"""A watch without an event or a bookmark for this time is reopened (bookmarks come every 60 s)."""
RESTART_SECONDS = 2.0
OnObject = Callable[[str | None, Manifest], None]
"""(type, object) of one watch event; type None: from a list."""
log = logging.getLogger(__name__)


class Watcher:
    """Run kopf in a separate thread, each time in a new event loop: when kopf ends, it cancels every task of its loop.

    The thread restarts kopf whenever it gives up, for example while the CRD is missing or the API server returns invalid data.

    Args:
        namespaces: namespaces to watch; empty: all.
        server: base URL of the API server.
        session: creates the session for kopf's requests; called in kopf's loop.
        on_object: receives every watched object, in the loop that called `start`.
    """

    def __init__(
        self,
        namespaces: Sequence[str],
        *,
        server: str,
        session: Callable[[], aiohttp.ClientSession],
        on_object: OnObject,
    ) -> None:
        self._namespaces = list(namespaces)
        self._server = server
        self._session = session
        self._on_object = on_object
        self._stopping = threading.Event()
        self._stop: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the watches."""
        home = asyncio.get_running_loop()

        def hand_over(event: str | None, found: Manifest) -> None:
            with contextlib.suppress(RuntimeError):  # the home loop is closed: the process ends
                home.call_soon_threadsafe(self._on_object, event, found)

        self._thread = threading.Thread(target=self._keep_watching, args=(hand_over,), name="watches", daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """List and watch everything again: after a restore of etcd, a watch from a later version receives no events."""
        with contextlib.suppress(RuntimeError):  # kopf's loop is closed, and the thread restarts kopf already
            self._stop()

    def has_ended(self) -> bool:
        """Return whether the thread was started and has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def stop(self) -> None:
        """Request the end of the watches; the thread does not keep the process alive."""
        self._stopping.set()
        with contextlib.suppress(RuntimeError):
            self._stop()

    def _keep_watching(self, hand_over: OnObject) -> None:
        while not self._stopping.is_set():
            try:
                asyncio.run(self._run_kopf(hand_over))
            # Cancelled tasks and recursion errors are included: the thread must not end while the process works.
            except BaseException as error:
                log.error(
                    "the watches ended and are restarted: %s",
                    getattr(error, "message", None) or describe_exception(error),
                )
            self._stopping.wait(RESTART_SECONDS)

    async def _run_kopf(self, hand_over: OnObject) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        if self._stopping.is_set():
            return
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def _login(**_: object) -> kopf.AiohttpSession:
            return kopf.AiohttpSession(server=self._server, aiohttp_session=self._session())

        for resource in WATCHED:
            _register_handler(registry, resource, hand_over)
        await kopf.operator(
            registry=registry,
            settings=_watch_settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=stop,
        )


def _register_handler(registry: kopf.OperatorRegistry, resource: Resource, on_object: OnObject) -> None:
    @kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)
    async def _seen(event: Manifest, **_: object) -> None:
        found = event["object"]
        on_object(event["type"], {**found, "apiVersion": resource.api_version, "kind": resource.kind})


def _watch_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # needs permissions on CRDs and namespaces of the cluster
    settings.peering.standalone = True
    settings.watching.server_timeout = SERVER_TIMEOUT_SECONDS
    settings.watching.client_timeout = SERVER_TIMEOUT_SECONDS + 30
    settings.watching.connect_timeout = 10.0
    settings.watching.inactivity_timeout = INACTIVITY_SECONDS
    settings.watching.chunk_size = LIST_PAGE
    settings.watching.reconnect_backoff = 0.5
    settings.networking.request_timeout = 60.0
    settings.networking.connect_timeout = 10.0
    settings.networking.error_backoffs = (1, 2, 5)
    settings.queueing.idle_timeout = 0.5  # kopf keeps one task for each object that has just changed
    settings.queueing.exit_timeout = 0.5
    settings.persistence.finalizer = f"{MANAGER}.rlrun.io/unused"
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.persistence.progress_storage = kopf.StatusProgressStorage(name=MANAGER, field=f"status.{MANAGER}")
    for resource in WATCHED:
        if resource not in (RLRUN, CLAIM):
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = SELECTOR
    return settings


class _NoDiffs(kopf.DiffBaseStorage):
    """Storage without content: otherwise kopf copies every object at every event to compute differences that nothing reads."""

    def build(self, *, body: object, extra_fields: object = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: object) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: object, patch: object, essence: object) -> None:
        return None


def quiet_kopf(debug: bool) -> None:
    """Let kopf log only while debugging: it logs each retry of each watch, and `Watcher` reports the cause in one line."""
    logging.getLogger("kopf").setLevel(logging.DEBUG if debug else logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.ERROR if debug else logging.CRITICAL)
