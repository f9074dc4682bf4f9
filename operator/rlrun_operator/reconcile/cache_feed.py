"""From what the watches and lists bring to the store, and from the store's changes to the queue."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlrun_operator.kube.client import Client
from rlrun_operator.kube.resources import CLAIM, LEASE, PARTS, RLRUN
from rlrun_operator.names import RUN_LABEL
from rlrun_operator.reconcile.reconciler import SETTLE_SECONDS
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.runtime.cache_fields import identified
from rlrun_operator.runtime.log_setup import where
from rlrun_operator.runtime.watch_health import Stream

PROGRESS_SETTLE_SECONDS = 5.0
"""Of a run that is Running, a mere renewal of its Lease is looked at after this long; its status is written less often anyway."""
SELECTOR = RUN_LABEL
"""Children are selected by the presence of this label. Claims are not: one that a run brings along does not carry it."""
log = logging.getLogger(__name__)


class Feed:
    """Takes in objects and queues the runs that they concern.

    Args:
        add: `add(key, seconds)` queues a run.
        now: seconds since the epoch.
    """

    def __init__(
        self, store: Store, client: Client, add: Callable[[Key, float], None], now: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._client = client
        self._add = add
        self._now = now

    def on_object(self, event: str | None, found: Mapping[str, Any]) -> None:
        """One event of a watch; type None: from a list."""
        try:
            self._take(event, found)
        except Exception as error:  # one object that cannot be taken in is nobody else's matter
            log.error("%s was not taken in: %s", _called(found), where(error))

    def _take(self, event: str | None, found: Mapping[str, Any]) -> None:
        kind, metadata = str(found["kind"]), found["metadata"]
        if event == "DELETED":
            keys = self._store.remove(kind, metadata.get("namespace", ""), metadata["name"], metadata["uid"])
        else:
            keys = self._store.put(found, self._now())
        self._queue(kind, keys)

    async def compare(self, stream: Stream) -> None:
        """List everything: what the list lacks is gone."""
        kind, namespace = stream.resource.kind, stream.namespace
        selector = "" if stream.resource in (RLRUN, CLAIM) else SELECTOR
        before = self._store.idents(kind, namespace)
        listed = set()
        metadata_only = stream.resource in PARTS
        async for found in self._client.list(stream.resource, namespace, labels=selector, metadata_only=metadata_only):
            try:
                metadata = identified(found)["metadata"]
            except (LookupError, TypeError, AttributeError) as error:
                log.error("one of %s was left out: %s: %s", stream, type(error).__name__, error)
                continue
            listed.add((kind, metadata["namespace"], metadata["name"]))
            self.on_object(None, found)
        self._queue(kind, self._store.prune(kind, namespace, before, listed))

    def _queue(self, kind: str, keys: Iterable[Key]) -> None:
        for key in keys:
            delay = 0.0 if kind == RLRUN.kind else SETTLE_SECONDS
            if kind == LEASE.kind:
                run = self._store.get(RLRUN.kind, *key)
                if run is not None and (run.get("status") or {}).get("phase") == "Running":
                    delay = PROGRESS_SETTLE_SECONDS
            self._add(key, delay)


def _called(found: Mapping[str, Any]) -> str:
    metadata = found.get("metadata")
    known = metadata if isinstance(metadata, Mapping) else {}
    return f"{found.get('kind')} {known.get('namespace')}/{known.get('name')}"
