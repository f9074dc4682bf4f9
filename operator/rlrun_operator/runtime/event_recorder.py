"""Posting and logging of the operator's events. A repeated event increases its count, as `kubectl describe` expects; no retries."""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.kube.resources import EVENT, RLRUN
from rlrun_operator.names import MANAGER
from rlrun_operator.state import EventRecord, Manifest

SAME_SECONDS = 3000.0
"""Seconds within which a repeated event is counted as the same one; the API server keeps events for an hour."""
REMEMBERED = 4096
MESSAGE_MAX = 1000
"""Characters; the API server accepts 1024 bytes."""
log = logging.getLogger(__name__)


class Poster:
    """Poster of one operator process.

    Args:
        client: client of the API server.
        instance: name of the operator's pod.
        clock: steady seconds.
    """

    def __init__(self, client: Client, instance: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._instance = instance
        self._clock = clock
        self._posted: OrderedDict[tuple[str, str, str], tuple[str, int, float]] = OrderedDict()

    async def post_event(self, run: Manifest, event: EventRecord) -> None:
        """Post one event. Errors of the API server are only logged."""
        metadata = run["metadata"]
        level = logging.WARNING if event.type == "Warning" else logging.INFO
        log.log(level, "run %s/%s: %s: %s", metadata["namespace"], metadata["name"], event.reason, event.message)
        key = (metadata["uid"], event.reason, event.message)
        name, count, since = self._posted.get(key, ("", 0, 0.0))
        if name and self._clock() - since > SAME_SECONDS:
            name, count = "", 0
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            if name:
                patch = {"count": count + 1, "lastTimestamp": now}
                await self._client.merge_patch(EVENT, run["metadata"]["namespace"], name, patch)
            else:
                name, since = f"{run['metadata']['name']}.{secrets.token_hex(6)}", self._clock()
                await self._client.create(self._event_manifest(run, event, name, now))
        except ApiError as error:
            self._posted.pop(key, None)
            log.warning("cannot post event %s of run %s: %s", event.reason, run["metadata"]["name"], error)
        except UnavailableError as error:
            log.info("event %s of run %s was lost: %s", event.reason, run["metadata"]["name"], error)
        else:
            self._posted[key] = (name, count + 1, since)
            self._posted.move_to_end(key)
            while len(self._posted) > REMEMBERED:
                self._posted.popitem(last=False)

    def _event_manifest(self, run: Manifest, event: EventRecord, name: str, now: str) -> dict[str, object]:
        metadata = run["metadata"]
        message = event.message if len(event.message) <= MESSAGE_MAX else event.message[: MESSAGE_MAX - 1] + "…"
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": RLRUN.api_version,
                "kind": RLRUN.kind,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "type": event.type,
            "reason": event.reason,
            "message": message,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self._instance,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
