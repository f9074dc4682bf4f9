"""Page of `tests/e2e/story`. Errors in it would otherwise appear only after minutes on a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.story.__main__ import page
from tests.e2e.story.told import read, table


class _Cluster:
    """Fake cluster that returns `kubectl get events` by namespace."""

    def __init__(self, **events: list[dict[str, Any]]) -> None:
        self._events = events

    def kubectl(self, *words: str) -> str:
        return json.dumps({"items": self._events[words[words.index("-n") + 1]]})


def event(kind: str, name: str, reason: str, first: int, last: int | None = None, message: str = "m") -> dict[str, Any]:
    def stamp(second: int) -> str:
        return f"2026-11-26T06:00:{second:02d}Z"

    return {
        "involvedObject": {"kind": kind, "name": name},
        "metadata": {"resourceVersion": str(first)},
        "firstTimestamp": stamp(first),
        "lastTimestamp": stamp(first if last is None else last),
        "reason": reason,
        "message": message,
    }


def test_story_rows_list_run_and_node_events_in_order() -> None:
    cluster: Any = _Cluster(
        team=[
            event("RLRun", "b", "Admitted", 20, 40, "a|b\nc"),
            event("Pod", "b-trainer-0", "Pulled", 21),
            event("RLRun", "a", "Queued", 10),
        ],
        default=[
            event("Node", "n1", "NodeReady", 5),
            event("Node", "n1", "Starting", 30),
            event("Node", "n1", "NodeNotReady", 30),
        ],
    )
    lines = read(cluster, "team")
    assert [(line.who, line.what) for line in lines] == [
        ("a", "Queued"),
        ("b", "Admitted"),
        ("node n1", "NodeNotReady"),
        ("b", "Admitted"),
    ]
    rows = table(lines).splitlines()
    assert rows[2:4] == ["| 0 | a | `Queued` | m |", "| 10 | b | `Admitted` | a\\|b c |"]
    assert page(table(lines)).endswith("| 30 | b | `Admitted` | a\\|b c |\n")


def test_story_without_run_events_is_an_error() -> None:
    cluster: Any = _Cluster(team=[], default=[])
    with pytest.raises(ValueError, match="no event of a run"):
        read(cluster, "team")
