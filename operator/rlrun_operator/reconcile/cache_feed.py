"""Feed of the cache from watches and lists, and its comparison with the cluster.

Each watched or listed object is stored in the cache, and the runs that it changes are added to the work queue. The cache is compared with
the cluster after every list of kopf, and periodically in case a watch has lost an event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from rlrun.protocol.messages import lease_annotations as lease_keys
from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.kube.resources import CLAIM, LEASE, PARTS, RLRUN
from rlrun_operator.names import RUN_LABEL
from rlrun_operator.reconcile.reconciler import SETTLE_SECONDS
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.runtime.cache_fields import keep_identity
from rlrun_operator.runtime.log_setup import describe_exception
from rlrun_operator.runtime.watch_health import Stream, Watches
from rlrun_operator.state import Manifest, progress_seconds
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import raw_conditions
from rlrun_operator.times import seconds_of

PROGRESS_SETTLE_SECONDS = 5.0
"""Delay of the pass after a new Lease of a run that is Running."""
SELECTOR = RUN_LABEL
"""Children are selected by the presence of this label. Claims are not selected, because a claim of the user does not have it."""
log = logging.getLogger(__name__)


class Feed:
    """Stores objects in the cache, and queues the runs that they belong to.

    Args:
        add: `add(key, seconds)` queues a run.
        on_rewound: callback after a list with older states than the cache: etcd was restored from a backup.
        now: returns seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        client: Client,
        add: Callable[[Key, float], None],
        on_rewound: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._client = client
        self._add = add
        self._on_rewound = on_rewound
        self._now = now

    def on_object(self, event: str | None, found: Manifest) -> None:
        """Store the object of a watch event. `event` is its type; None: the object comes from a list."""
        try:
            self._store_event(event, found)
        except Exception as error:  # an unreadable object must not stop the others
            log.error("%s could not be stored in the cache: %s", _name_object(found), describe_exception(error))

    def _store_event(self, event: str | None, found: Manifest) -> None:
        kind, metadata = str(found["kind"]), found["metadata"]
        if kind == LEASE.kind and event != "DELETED":
            self._store_lease(found)
        elif event == "DELETED":
            keys = self._store.remove(kind, metadata.get("namespace", ""), metadata["name"], metadata["uid"])
            self._queue_runs(kind, keys)
        else:
            self._queue_runs(kind, self._store.put(found, self._now()))

    def _store_lease(self, found: Manifest) -> None:
        metadata = found["metadata"]
        before = self._store.get(LEASE.kind, metadata.get("namespace", ""), metadata["name"])
        for key in self._store.put(found, self._now()):
            run = self._store.get(RLRUN.kind, *key)
            if run is None or (run.get("status") or {}).get("phase") != "Running":
                self._add(key, SETTLE_SECONDS)
            # Every run renews its Lease several times a minute, and most renewals only move the progress.
            # These wait until the status would be written anyway (decision 50).
            elif before is not None and _is_mere_renewal(before, found) and _is_progressing(run):
                self._add(key, max(PROGRESS_SETTLE_SECONDS, self._status_interval(run) - lease_keys.RENEW_SECONDS))
            else:
                self._add(key, PROGRESS_SETTLE_SECONDS)

    def _status_interval(self, run: Manifest) -> float:
        """Return the seconds between two status writes of a run that only reports progress: a pass in between would change nothing."""
        born = seconds_of(run["metadata"].get("creationTimestamp"))
        return progress_seconds(self._now() - born if born is not None else 0.0, self._store.run_count())

    async def compare_stream(self, stream: Stream) -> None:
        """List all objects of a stream. Objects that the list lacks are gone; listed objects replace later states, which a restored etcd
        has lost."""
        kind, namespace = stream.resource.kind, stream.namespace
        selector = "" if stream.resource in (RLRUN, CLAIM) else SELECTOR
        # Both are taken before the request: the list says nothing about objects that are created while it
        # runs.
        before, memory = self._store.idents_of(kind, namespace), self._store.memory(kind, namespace)
        listed, rewound = set(), 0
        metadata_only = stream.resource in PARTS
        async for found in self._client.list(stream.resource, namespace, labels=selector, metadata_only=metadata_only):
            try:
                metadata = keep_identity(found)["metadata"]
            except (LookupError, TypeError, AttributeError) as error:
                log.error(
                    "one object of %s was skipped, because it cannot be read: %s: %s",
                    stream,
                    type(error).__name__,
                    error,
                )
                continue
            listed.add((kind, metadata["namespace"], metadata["name"]))
            rewound += self._store.forget_rewound(found, memory)
            self.on_object(None, found)
        # Objects that the list lacks were deleted while no watch was open. No event reports them any more.
        self._queue_runs(kind, self._store.remove_unlisted(kind, namespace, before, listed))
        if rewound:
            log.warning(
                "%d of %s are older than in the cache: etcd was restored from a backup; all objects are listed again",
                rewound,
                stream,
            )
            self._on_rewound()

    def _queue_runs(self, kind: str, keys: Iterable[Key]) -> None:
        for key in keys:
            self._add(key, 0.0 if kind == RLRUN.kind else SETTLE_SECONDS)


def _is_mere_renewal(before: Manifest, now: Manifest) -> bool:
    """Return whether a Lease only reports progress: the same attempt, no news about its volume, and no first new step."""

    def reported_facts(lease: Manifest) -> object:
        found = lease["metadata"].get("annotations") or {}
        return tuple(
            found.get(key)
            for key in (
                lease_keys.ATTEMPT,
                lease_keys.RESUMED_FROM_STEP,
                lease_keys.STORAGE,
                lease_keys.RESULTS,
                lease_keys.ENGINES_DRAINED,
                lease_keys.START_SECONDS,
            )
        )

    return reported_facts(before) == reported_facts(now)


def _is_progressing(run: Manifest) -> bool:
    """Return whether the status reports neither a lost heartbeat nor a hang, which the next report would end."""
    conditions = raw_conditions(run.get("status") or {})
    return any(c.get("type") == reasons.PROGRESSING and c.get("status") == "True" for c in conditions)


def _name_object(found: Manifest) -> str:
    metadata = found.get("metadata")
    known = metadata if isinstance(metadata, Mapping) else {}
    return f"{found.get('kind')} {known.get('namespace')}/{known.get('name')}"


RESTART_SECONDS = 2.0
PRUNE_SECONDS = 600.0
"""Interval of the comparison of all kinds with the cluster, in case a watch has lost an event."""


class Sync:
    """Keep the cache equal to the cluster, stream by stream.

    Args:
        feed: compares one stream.
        store: cache to compare.
        watches: state of the watches; a stream is compared only while its watch is open.
        streams: all watched streams.
        on_complete: callback each time when the last missing stream has been compared.
    """

    def __init__(
        self, feed: Feed, store: Store, watches: Watches, streams: Iterable[Stream], on_complete: Callable[[], None]
    ) -> None:
        self._feed = feed
        self._store = store
        self._watches = watches
        self._streams = tuple(streams)
        self._on_complete = on_complete
        self._to_sync: set[Stream] = set(self._streams)
        self._sync_wanted = asyncio.Event()
        self._unsynced: set[Stream] = set(self._streams)
        self._synced_before = False

    @property
    def missing(self) -> Collection[Stream]:
        """Streams whose objects are not completely in the cache yet."""
        return self._unsynced

    def request_comparison(self, stream: Stream) -> None:
        """Compare a stream as soon as its watch is open."""
        self._to_sync.add(stream)
        self._sync_wanted.set()

    def start_over(self) -> None:
        """Compare all streams again, and report them as missing until then, if the cache was complete before."""
        if self._synced_before:
            self._unsynced, self._to_sync = set(self._streams), set(self._streams)
            self._sync_wanted.set()

    async def run(self) -> None:
        """Compare the cache with the cluster after every list of kopf, and after `PRUNE_SECONDS` without a list.

        A list of kopf contains the existing objects, but it does not show which objects are gone, or when it is complete. Therefore each
        time when a watch opens after a list, this lists all objects again: an object that is missing there is gone, and the open watch
        reports later deletions.
        """
        while True:
            try:
                async with asyncio.timeout(PRUNE_SECONDS):
                    await self._sync_wanted.wait()
            except TimeoutError:
                self._to_sync = {s for s in self._streams if s not in self._unsynced}
            self._sync_wanted.clear()
            while self._to_sync:
                ready = [stream for stream in self._to_sync if self._watches.age(stream) != float("inf")]
                if not ready:
                    break
                for stream in ready:
                    await self._compare_or_retry(stream)

    async def _compare_or_retry(self, stream: Stream) -> None:
        try:
            await self._feed.compare_stream(stream)
        except (ApiError, UnavailableError) as error:
            log.info("%s were not compared with the cluster: %s", stream, error)
        except Exception as error:  # an unreadable list must not stop the other streams
            log.error("%s were not compared with the cluster: %s", stream, describe_exception(error))
        else:
            self._to_sync.discard(stream)
            self._mark_synced(stream)
            return
        await asyncio.sleep(RESTART_SECONDS)

    def _mark_synced(self, stream: Stream) -> None:
        if stream in self._unsynced:
            self._unsynced.discard(stream)
            if not self._unsynced:
                self._synced_before = True
                counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self._store.count().items()))
                log.info("the cache is complete: %s", counts or "no objects yet")
                self._on_complete()
