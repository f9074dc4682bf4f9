"""Events of a namespace's runs and of the cluster's nodes in their order, as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.cluster import Cluster

NODE_REASONS = ("NodeNotReady", "NodeReady")
"""Reasons of node events in the table; a starting kubelet posts a dozen others."""


@dataclass(frozen=True, order=True)
class Line:
    """One event."""

    at: datetime
    order: int
    """Resource version, because events have whole seconds."""
    who: str
    what: str
    why: str


def read(cluster: Cluster, namespace: str) -> list[Line]:
    """Return events of the namespace's runs, and node events from the first of these on.

    Raises:
        ValueError: the namespace has no events of runs.
    """
    runs = list(_lines(_events(cluster, namespace), "RLRun"))
    if not runs:
        raise ValueError(f"no event of a run in namespace {namespace}")
    nodes = list(_lines(_events(cluster, "default"), "Node"))
    return sorted([*runs, *(line for line in nodes if line.at >= min(runs).at)])


def _events(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cluster.kubectl("get", "events", "-n", namespace, "-o", "json"))["items"]
    return found


def _lines(events: Iterable[dict[str, Any]], kind: str) -> Iterator[Line]:
    for event in events:
        about = event["involvedObject"]
        if about["kind"] != kind or (kind == "Node" and event["reason"] not in NODE_REASONS):
            continue
        order = int(event["metadata"]["resourceVersion"])
        who = f"node {about['name']}" if kind == "Node" else about["name"]
        # A repeated event is the same object with another time, so events between the first and the last one are lost.
        for stamp in dict.fromkeys((event["firstTimestamp"], event["lastTimestamp"])):
            yield Line(datetime.fromisoformat(stamp), order, who, event["reason"], event["message"])


def table(lines: Sequence[Line]) -> str:
    """Return rows: seconds since the first line, object, reason, message."""
    began = lines[0].at
    rows = (
        f"| {(line.at - began).total_seconds():.0f} | {line.who} | `{line.what}` | {_cell(line.why)} |\n"
        for line in lines
    )
    return "| s | who | what | why |\n|---|---|---|---|\n" + "".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
