"""One namespace with runs, and the part of their pods.

kwok makes pods Running and Ready. Everything that a process inside a pod would cause is caused here: renewed progress Leases, exit
codes, failed pods.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from rlrun.protocol.messages import lease_annotations as told_by
from tests.cluster import Cluster
from tests.controlplane.harness import WATCHED, Json, Kube, wait_for

RUNS = "/apis/rlrun.io/v1alpha1"
APPS = "/apis/apps/v1"
LEASES = "/apis/coordination.k8s.io/v1"
CORE = "/api/v1"


class World:
    """One namespace, and the pods of the runs in it."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.kube = Kube(cluster.kubeconfig)
        WATCHED.add(self)

    def progress(self) -> object:
        """Versions of the namespace's runs, pods and events."""
        return {item["metadata"]["uid"]: item["metadata"]["resourceVersion"] for item in self._moving()}

    def account(self) -> str:
        """Describe its runs, and its last events, for the report of a wait that failed."""
        lines = [f"namespace {self.namespace}:"]
        for item in self._moving():
            name, status = item["metadata"]["name"], item.get("status") or {}
            if "involvedObject" in item:
                lines.append(f"event on {item['involvedObject']['name']}: {item['reason']}: {item['message']}")
            else:
                lines.append(f"{name}: {status.get('phase')}: {status.get('message') or ''}")
        return "\n".join(lines[-40:])

    def _moving(self) -> list[Json]:
        try:
            return [item for api, plural in MOVING for item in self.kube.items(self.path(api, plural))]
        except (OSError, AssertionError):  # the API server is away on purpose
            return []

    def path(self, api: str, plural: str, name: str = "") -> str:
        """Path of an object or of a list."""
        return f"{api}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def create(self, name: str, **spec: Any) -> None:
        """Create a run: the smallest spec, with `spec` over it."""
        self.kube("POST", self.path(RUNS, "rlruns"), run(name, **spec))

    def edit(self, name: str, spec: Json) -> None:
        """Merge into a run's spec."""
        self.kube("PATCH", self.path(RUNS, "rlruns", name), {"spec": spec})

    def run(self, name: str) -> Json:
        """The run."""
        return self.kube("GET", self.path(RUNS, "rlruns", name))

    def status(self, name: str) -> Json:
        """Its status."""
        return dict(self.run(name).get("status") or {})

    def wait_phase(self, name: str, phase: str, *, attempt: int | None = None) -> Json:
        """The status, once the run is in this phase (of this attempt)."""
        return wait_for(
            lambda: self.status(name),
            lambda status: status.get("phase") == phase and attempt in (None, status.get("attempt")),
            f"run {name} is {phase}" + (f" in attempt {attempt}" if attempt else ""),
        )

    def wait_told(self, name: str, words: str) -> Json:
        """The status, once its message matches."""
        return wait_for(
            lambda: self.status(name),
            lambda status: re.search(words, status.get("message") or "") is not None,
            f"run {name} says /{words}/",
        )

    def condition(self, name: str, kind: str) -> Json:
        """One condition; empty when it is not there."""
        found = [c for c in self.status(name).get("conditions", ()) if c["type"] == kind]
        return dict(found[0]) if found else {}

    def pods(self, name: str) -> list[Json]:
        """Pods of a run that have not ended or been deleted."""
        found = self.kube.items(self.path(CORE, "pods") + f"?labelSelector=rlrun.io/run={name}")
        return [p for p in found if "deletionTimestamp" not in p["metadata"] and p["status"]["phase"] != "Succeeded"]

    def wait_pods_ready(self, name: str, count: int) -> None:
        """Wait until the status counts so many ready trainer and inference pods together."""
        wait_for(
            lambda: self.status(name),
            lambda s: (s.get("trainer") or {}).get("ready", 0) + (s.get("inference") or {}).get("ready", 0) == count,
            f"{count} pods of {name} are ready",
        )

    def renew(self, name: str, step: int, *, attempt: int = 1, ok: bool = True, **more: object) -> None:
        """The orchestrator tells how far it is; `more`: annotation names in snake case -> values."""
        told = {told_by.STEP: step, told_by.ATTEMPT: attempt, told_by.REWARD: 0.5 + step / 1000}
        told |= {f"rlrun.io/{key.replace('_', '-')}": value for key, value in more.items()}  # type: ignore[misc]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        patch = {
            "metadata": {"annotations": {key: str(value) for key, value in told.items()}},
            "spec": {"renewTime": now, "holderIdentity": f"{name}-orchestrator-{attempt}"},
        }
        self.kube("PATCH", self.path(LEASES, "leases", f"{name}-progress"), patch, ok=ok)

    def start(self, name: str, *, step: int = 1, **spec: Any) -> None:
        """Create a run and let its first attempt train."""
        self.create(name, **spec)
        self.wait_phase(name, "Starting")
        self.wait_pods_ready(name, 2)
        self.renew(name, step)
        self.wait_phase(name, "Running")

    def end_pod(self, pod: str, code: int, message: str = "") -> None:
        """A pod that never restarts (the orchestrator's) ends with this exit code."""
        phase = "Failed" if code else "Succeeded"
        self._set_status(pod, {"phase": phase}, {"state": _terminated(code, message), "ready": False})

    def set_ready(self, pod: str, *, ready: bool) -> None:
        """What the pod's kubelet finds of its container, which runs on."""
        running = {"state": {"running": {"startedAt": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}}}
        self._set_status(pod, {}, {**running, "ready": ready})

    def end_container(self, pod: str, code: int, message: str = "") -> None:
        """The container of a pod that always restarts (a trainer's) ends with this exit code; the exit shim then holds."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        held = {"lastState": _terminated(code, message), "restartCount": 1, "ready": False}
        self._set_status(pod, {}, {**held, "state": {"running": {"startedAt": now}}})

    def _set_status(self, pod: str, status: Json, container: Json) -> None:
        found = wait_for(
            lambda: self.kube("GET", self.path(CORE, "pods", pod))["status"],
            lambda status: bool(
                status.get("containerStatuses")
            ),  # a pod that kwok has not started yet ends as little as a real one
            f"pod {pod} runs",
        )
        containers = [{**found["containerStatuses"][0], **container}, *found["containerStatuses"][1:]]
        conditions = [
            {**c, "status": "False"} if c["type"] in ("Ready", "ContainersReady") else c for c in found["conditions"]
        ]
        patch = {"status": {**status, "containerStatuses": containers, "conditions": conditions}}
        self.kube("PATCH", self.path(CORE, "pods", pod) + "/status", patch)

    def delete(self, plural: str, name: str, api: str = CORE) -> None:
        """Delete an object, with a pod's own grace."""
        self.kube("DELETE", self.path(api, plural, name))

    def versions(self, name: str, *, leave_out: tuple[str, ...] = ()) -> dict[str, tuple[str, int]]:
        """All children of a run: kind and name -> mark of its content and generation.

        Their status is of other controllers, which write it when they come to it.
        """
        found = {}
        for api, plural in CHILDREN:
            if plural in leave_out:
                continue
            for child in self.kube.items(self.path(api, plural) + f"?labelSelector=rlrun.io/run={name}"):
                meta = child["metadata"]
                found[f"{plural}/{meta['name']}"] = (_mark(child), meta.get("generation", 0))
        return found

    def settled(self, name: str, *, leave_out: tuple[str, ...] = ("leases",)) -> dict[str, tuple[str, int]]:
        """Its `versions`, once every pod has a node and nothing changes any more by itself."""
        previous: dict[str, tuple[str, int]] = {}

        def look() -> dict[str, tuple[str, int]]:
            nonlocal previous
            before, previous = previous, self.versions(name, leave_out=leave_out)
            return previous if previous == before and all("nodeName" in pod["spec"] for pod in self.pods(name)) else {}

        return wait_for(look, bool, f"the children of {name} rest", pause=1.0)

    def events(self, name: str) -> list[str]:
        """Reasons of the events on a run, oldest first."""
        found = self.kube.items(
            self.path(CORE, "events") + f"?fieldSelector=involvedObject.kind=RLRun,involvedObject.name={name}"
        )
        return [
            e["reason"]
            for e in sorted(found, key=lambda e: (e["firstTimestamp"], int(e["metadata"]["resourceVersion"])))
        ]

    def wait_event(self, name: str, reason: str) -> list[str]:
        """Reasons of the events on a run, once one is this: it is posted after the status that it is about was written."""
        return wait_for(lambda: self.events(name), lambda found: reason in found, f"an event {reason} on run {name}")


MOVING = ((RUNS, "rlruns"), (CORE, "pods"), (CORE, "events"))
CHILDREN = (
    (CORE, "pods"),
    (CORE, "services"),
    (CORE, "configmaps"),
    (CORE, "secrets"),
    (CORE, "serviceaccounts"),
    (CORE, "persistentvolumeclaims"),
    (APPS, "statefulsets"),
    (APPS, "deployments"),
    (LEASES, "leases"),
    ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    ("/apis/networking.k8s.io/v1", "networkpolicies"),
    ("/apis/policy/v1", "poddisruptionbudgets"),
)


def run(name: str, **spec: Any) -> Json:
    """A small run."""
    small = {
        "model": {"tiny": {}},
        "maxSteps": 100,
        "seqLen": 512,
        "environments": [{"id": "reverse-text", "groupSize": 8}],
        "orchestrator": {"batchSize": 16},
    }
    metadata = {"name": name}
    return {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": metadata, "spec": {**small, **spec}}


def _mark(child: Json) -> str:
    """Mark of what somebody wants of an object; any write of it that changes something changes the mark."""
    apart = ("resourceVersion", "managedFields")
    metadata = {name: value for name, value in child["metadata"].items() if name not in apart}
    content = {name: value for name, value in child.items() if name != "status"} | {"metadata": metadata}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _terminated(code: int, message: str) -> Json:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    reason = "Completed" if code == 0 else "Error"
    return {
        "terminated": {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "startedAt": now,
            "finishedAt": now,
        }
    }
