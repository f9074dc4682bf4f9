"""A story as its cluster tells it: the events of runs and nodes, in their order, as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.cluster import Cluster


@dataclass(frozen=True, order=True)
class Line:
    """One event."""

    at: datetime
    order: int
    """Resource version: events have whole seconds."""
    who: str
    what: str
    why: str


def read(cluster: Cluster, namespace: str) -> list[Line]:
    """Events of the namespace's runs, and those of nodes from the first of these on."""
    runs = list(_lines(_events(cluster, namespace), "RLRun"))
    nodes = list(_lines(_events(cluster, "default"), "Node"))
    return sorted([*runs, *(line for line in nodes if line.at >= min(runs).at)])


def _events(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cluster.kubectl("get", "events", "-n", namespace, "-o", "json"))["items"]
    return found


def _lines(events: Iterable[dict[str, Any]], kind: str) -> Iterable[Line]:
    for event in events:
        about = event["involvedObject"]
        stamp = event.get("firstTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
        if about["kind"] == kind:
            order = int(event["metadata"]["resourceVersion"])
            who = f"node {about['name']}" if kind == "Node" else about["name"]
            yield Line(datetime.fromisoformat(stamp), order, who, event["reason"], event.get("message", ""))


def table(lines: Sequence[Line]) -> str:
    """Rows: seconds from the first line, who, reason, message."""
    began = lines[0].at
    rows = (
        f"| {(line.at - began).total_seconds():.0f} | {line.who} | `{line.what}` | {_cell(line.why)} |\n"
        for line in lines
    )
    return "| s | who | what | why |\n|---|---|---|---|\n" + "".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
