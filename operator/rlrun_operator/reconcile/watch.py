"""kopf's part: it watches, and puts what it sees into the store and the queue. The only module that imports kopf.

Only `on.event` handlers are used: they need no finalizer, leave no annotation and keep nothing between events. Retries, timers,
leadership and events are this package's own.
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
"""The API server ends a watch after this long; kopf continues it from where it was."""
INACTIVITY_SECONDS = 70.0
"""A watch without even a bookmark for so long is opened again (bookmarks come every 60 s)."""
RESTART_SECONDS = 2.0
OnObject = Callable[[str | None, Manifest], None]
"""(type, object) of one watch event; type None: from a list."""
log = logging.getLogger(__name__)


class Watcher:
    """kopf in a thread of its own, and in a new event loop each time that it begins: when it ends, it cancels every task of its loop.

    It is started again whenever it gives up: the CRD is gone for a while, or the API server says nonsense.

    Args:
        namespaces: to watch; none: all.
        server: base URL of the API server.
        session: makes the session for kopf's requests; called in kopf's loop.
        on_object: gets every watched object, in the loop that called `start`.
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
        """Begin to watch."""
        home = asyncio.get_running_loop()

        def hand_over(event: str | None, found: Manifest) -> None:
            with contextlib.suppress(RuntimeError):  # the home loop is closed: the process ends
                home.call_soon_threadsafe(self._on_object, event, found)

        self._thread = threading.Thread(target=self._supervise, args=(hand_over,), name="watches", daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """List and watch everything again: a watch from a version that a restored etcd does not have yet brings nothing."""
        with contextlib.suppress(RuntimeError):  # kopf's loop is closed: it is being started again already
            self._stop()

    def has_ended(self) -> bool:
        """True once the thread was started and has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def stop(self) -> None:
        """Ask it to end; the thread does not keep the process alive."""
        self._stopping.set()
        with contextlib.suppress(RuntimeError):
            self._stop()

    def _supervise(self, hand_over: OnObject) -> None:
        while not self._stopping.is_set():
            try:
                asyncio.run(self._kopf(hand_over))
            # Cancelled tasks and exhausted recursion, too: the thread must not end while the process works.
            except BaseException as error:
                log.error(
                    "the watches ended and are started anew: %s",
                    getattr(error, "message", None) or describe_exception(error),
                )
            self._stopping.wait(RESTART_SECONDS)

    async def _kopf(self, hand_over: OnObject) -> None:
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
            _spy_on(registry, resource, hand_over)
        await kopf.operator(
            registry=registry,
            settings=_watch_settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=stop,
        )


def _spy_on(registry: kopf.OperatorRegistry, resource: Resource, on_object: OnObject) -> None:
    @kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)
    async def _seen(event: Manifest, **_: object) -> None:
        found = event["object"]
        on_object(event["type"], {**found, "apiVersion": resource.api_version, "kind": resource.kind})


def _watch_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # no rights on CRDs and namespaces of the cluster
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
    settings.queueing.idle_timeout = 0.5  # a task per object that has just changed is kept no longer
    settings.queueing.exit_timeout = 0.5
    settings.persistence.finalizer = f"{MANAGER}.rlrun.io/unused"
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.persistence.progress_storage = kopf.StatusProgressStorage(name=MANAGER, field=f"status.{MANAGER}")
    for resource in WATCHED:
        if resource not in (RLRUN, CLAIM):
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = SELECTOR
    return settings


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf would copy every object at every event to find out what changed; nothing here asks it."""

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
