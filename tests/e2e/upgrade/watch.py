"""State that an exchange of releases must not change: snapshots, and all conditions and events of the time between
them."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.cluster.api import Cluster

Json = dict[str, Any]
SAME = (
    "phase",
    "attempt",
    "restarts",
    "restartsCountedTowardsMax",
    "launchedAttempt",
    "maxSteps",
    "nextRetryTime",
)
"""Status fields of an unedited run that no release changes."""
QUIET = ("ChangePending", "Drifted", "Repaired", "FieldsIgnored", "HeartbeatLost", "NameTaken", "InvalidConfiguration")
"""Reasons of conditions that would be false reports."""
EVENTS_EACH = 6
"""Largest number of events of one run during an exchange."""


@dataclass(frozen=True)
class Snapshot:
    """State of all runs, their workloads and pods, by `namespace/name`."""

    runs: Mapping[str, Json]
    objects: Mapping[str, str]
    """UID, generation and container restarts of each workload and pod."""


def snapshot(cluster: Cluster, namespaces: Iterable[str]) -> Snapshot:
    """Return the present state."""
    runs, objects = {}, {}
    for namespace in namespaces:
        found = json.loads(cluster.kubectl("get", "rlr,pods,sts,deploy,pvc", "-n", namespace, "-o", "json"))["items"]
        for item in found:
            metadata, status = item["metadata"], item.get("status") or {}
            key = f"{namespace}/{metadata['name']}"
            if item["kind"] == "RLRun":
                runs[key] = item
            else:
                restarts = sum(c.get("restartCount", 0) for c in status.get("containerStatuses", []))
                objects[f"{item['kind']} {key}"] = f"{metadata['uid']} {metadata.get('generation')} {restarts}"
    return Snapshot(runs, objects)


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """Return a description of each changed value."""
    found = [
        f"{name}: {what}, was {before.objects.get(name)}"
        for name, what in after.objects.items()
        if before.objects.get(name) != what
    ]
    found += [f"{name} is gone" for name in before.objects if name not in after.objects]
    for key, run in after.runs.items():
        old = before.runs[key]
        found += [
            f"{key}: status.{name} is {new}, was {was}"
            for name in SAME
            if (new := run["status"].get(name)) != (was := old["status"].get(name))
        ]
        if run["metadata"]["generation"] != old["metadata"]["generation"]:
            found.append(f"{key}: generation {run['metadata']['generation']}, was {old['metadata']['generation']}")
        was, now = _read_conditions(old), _read_conditions(run)
        found += [
            f"{key}: {kind} is {now.get(kind)}, was {was.get(kind)}"
            for kind in {*was, *now}
            if now.get(kind) != was.get(kind)
        ]
    return found


def _read_conditions(run: Json) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in run["status"].get("conditions", ())}


class Between:
    """Recorder of all states of runs, and of events, from its start to its end.

    Args:
        cluster: cluster to watch.
        folder: folder for the recorded states.
        name: name of the exchange.
    """

    def __init__(self, cluster: Cluster, folder: Path, name: str) -> None:
        self._cluster, self._seen = cluster, folder / f"{name}.json"
        self._uids = {event["metadata"]["uid"]: event.get("count", 1) for event in self._events()}

    def __enter__(self) -> Self:
        self._output = self._seen.open("w")
        command = [
            str(self._cluster.bin / "kubectl"),
            "get",
            "rlr",
            "-A",
            "-o",
            "json",
            "--watch-only",
            "--output-watch-events",
        ]
        self._watch = subprocess.Popen(
            command, env=self._cluster.environment, stdout=self._output, stderr=subprocess.STDOUT
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.terminate()
        self._watch.wait(10)
        self._output.close()

    def _events(self) -> list[Json]:
        found: list[Json] = json.loads(self._cluster.kubectl("get", "events", "-A", "-o", "json"))["items"]
        return [event for event in found if event["involvedObject"]["kind"] == "RLRun"]

    def events(self) -> Counter[str]:
        """Return the number of events of runs by `run reason`."""
        found: Counter[str] = Counter()
        for event in self._events():
            times = (event.get("count") or 1) - self._uids.get(event["metadata"]["uid"], 0)
            if times > 0:
                found[f"{event['involvedObject']['name']} {event['type']} {event['reason']}"] += times
        return found

    def states(self) -> list[Json]:
        """Return each state of a run from the watch, after its end."""
        decoder, text, states, at = json.JSONDecoder(), self._seen.read_text(), [], 0
        while at < len(text):
            document, at = decoder.raw_decode(text, at)
            states.append(document["object"])
            while at < len(text) and text[at].isspace():
                at += 1
        return states
