"""Events of the cluster, found by the object that they are about."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun_operator.state import Manifest
from rlrun_operator.times import seconds_of


def newest_event(
    events: Sequence[Manifest], kind: str, name: str, reason: str | None = None, uid: str | None = None
) -> Manifest | None:
    """Return the latest event about an object, or None. A `name` that ends in '-' is a prefix (a ReplicaSet's name has a hash).

    `uid` limits the search to one object: pods of a StatefulSet reuse the names of earlier pods, and events outlive their pods.
    """
    found = [
        event for event in events if is_about_object(event, kind, name, uid) and reason in (None, event.get("reason"))
    ]
    return max(found, key=event_time, default=None)


def is_about_object(event: Manifest, kind: str, name: str, uid: str | None) -> bool:
    """Return whether an event is about the object; see `newest_event` for `name` and `uid`."""
    target: Manifest = event.get("involvedObject") or event.get("regarding") or {}
    known = str(target.get("name", ""))
    if target.get("kind") != kind or not (known.startswith(name) if name.endswith("-") else known == name):
        return False
    return uid is None or target.get("uid") in (None, uid)


def event_time(event: Manifest) -> float:
    """Return when an event was last observed, in seconds since the epoch, or 0 if it has no time."""
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
    )
    return next((t for text in times if (t := seconds_of(text)) is not None), 0.0)
