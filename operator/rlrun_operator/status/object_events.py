"""Events of the cluster, by the object that they are about; of several the latest counts."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun_operator.state import Manifest
from rlrun_operator.times import seconds_of


def newest_event(
    events: Sequence[Manifest], kind: str, name: str, reason: str | None = None, uid: str | None = None
) -> Manifest | None:
    """The latest event about an object; a `name` that ends in '-' is a prefix (a ReplicaSet's name has a hash).

    `uid`: of the object. A StatefulSet's pods bear the names of those before them, and events outlive what they are about.
    """
    found = [
        event for event in events if is_about_object(event, kind, name, uid) and reason in (None, event.get("reason"))
    ]
    return max(found, key=event_time, default=None)


def is_about_object(event: Manifest, kind: str, name: str, uid: str | None) -> bool:
    """True if an event is about the object; see `newest_event` for `name` and `uid`."""
    target: Manifest = event.get("involvedObject") or event.get("regarding") or {}
    known = str(target.get("name", ""))
    if target.get("kind") != kind or not (known.startswith(name) if name.endswith("-") else known == name):
        return False
    return uid is None or target.get("uid") in (None, uid)


def event_time(event: Manifest) -> float:
    """Time at which an event was seen last, in seconds since the epoch; 0: it bears none."""
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
    )
    return next((t for text in times if (t := seconds_of(text)) is not None), 0.0)
