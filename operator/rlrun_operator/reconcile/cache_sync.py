"""Comparison of the cache with the cluster: after every list of kopf, and periodically in case a watch has lost an event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable

from rlrun_operator.kube.client import ApiError, UnavailableError
from rlrun_operator.reconcile.cache_feed import Feed
from rlrun_operator.runtime.cache import Store
from rlrun_operator.runtime.log_setup import describe_exception
from rlrun_operator.runtime.watch_health import Stream, Watches

RESTART_SECONDS = 2.0
PRUNE_SECONDS = 600.0
"""Interval of the comparison of all kinds with the cluster, in case a watch has lost an event."""
log = logging.getLogger(__name__)


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
                    await self._compare(stream)

    async def _compare(self, stream: Stream) -> None:
        try:
            await self._feed.compare(stream)
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
