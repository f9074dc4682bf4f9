"""One namespace with runs, and the test's control over their pods.

kwok makes pods Running and Ready. The test causes all effects of processes in pods: renewed progress Leases, exit codes
and failed pods.
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
    """One namespace and the pods of its runs."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.kube = Kube(cluster.kubeconfig)
        WATCHED.add(self)

    def progress(self) -> object:
        """Return versions of the namespace's runs, pods and events."""
        return {item["metadata"]["uid"]: item["metadata"]["resourceVersion"] for item in self._moving()}

    def account(self) -> str:
        """Describe the runs and the last events for the report of a failed wait."""
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
        except (OSError, AssertionError):  # the API server is stopped on purpose
            return []

    def path(self, api: str, plural: str, name: str = "") -> str:
        """Return the path of an object or a list."""
        return f"{api}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def create(self, name: str, **spec: Any) -> None:
        """Create a run from the smallest spec with the fields of `spec`."""
        self.kube("POST", self.path(RUNS, "rlruns"), run(name, **spec))

    def edit(self, name: str, spec: Json) -> None:
        """Merge into a run's spec."""
        self.kube("PATCH", self.path(RUNS, "rlruns", name), {"spec": spec})

    def run(self, name: str) -> Json:
        """Return the run."""
        return self.kube("GET", self.path(RUNS, "rlruns", name))

    def status(self, name: str) -> Json:
        """Return its status."""
        return dict(self.run(name).get("status") or {})

    def wait_phase(self, name: str, phase: str, *, attempt: int | None = None) -> Json:
        """Wait until the run is in this phase (of this attempt); return its status."""
        return wait_for(
            lambda: self.status(name),
            lambda status: status.get("phase") == phase and attempt in (None, status.get("attempt")),
            f"run {name} is {phase}" + (f" in attempt {attempt}" if attempt else ""),
        )

    def wait_told(self, name: str, words: str) -> Json:
        """Wait until the run's message matches; return its status."""
        return wait_for(
            lambda: self.status(name),
            lambda status: re.search(words, status.get("message") or "") is not None,
            f"run {name} says /{words}/",
        )

    def condition(self, name: str, kind: str) -> Json:
        """Return one condition, empty if it does not exist."""
        found = [c for c in self.status(name).get("conditions", ()) if c["type"] == kind]
        return dict(found[0]) if found else {}

    def pods(self, name: str) -> list[Json]:
        """Return pods of a run that have neither ended nor been deleted."""
        found = self.kube.items(self.path(CORE, "pods") + f"?labelSelector=rlrun.io/run={name}")
        return [p for p in found if "deletionTimestamp" not in p["metadata"] and p["status"]["phase"] != "Succeeded"]

    def wait_pods_ready(self, name: str, count: int) -> None:
        """Wait until the status counts this many ready trainer and inference pods in total."""
        wait_for(
            lambda: self.status(name),
            lambda s: (s.get("trainer") or {}).get("ready", 0) + (s.get("inference") or {}).get("ready", 0) == count,
            f"{count} pods of {name} are ready",
        )

    def renew(self, name: str, step: int, *, attempt: int = 1, ok: bool = True, **more: object) -> None:
        """Renew the progress Lease as the orchestrator does; `more`: annotation names in snake case and their values."""
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
        """End a pod that never restarts (the orchestrator's) with this exit code."""
        phase = "Failed" if code else "Succeeded"
        self._set_status(pod, {"phase": phase}, {"state": _terminated(code, message), "ready": False})

    def set_ready(self, pod: str, *, ready: bool) -> None:
        """Set the readiness of a running container, as a kubelet would."""
        running = {"state": {"running": {"startedAt": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}}}
        self._set_status(pod, {}, {**running, "ready": ready})

    def end_container(self, pod: str, code: int, message: str = "") -> None:
        """End the container of a pod that always restarts (a trainer's) with this exit code; the exit shim then waits."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        held = {"lastState": _terminated(code, message), "restartCount": 1, "ready": False}
        self._set_status(pod, {}, {**held, "state": {"running": {"startedAt": now}}})

    def _set_status(self, pod: str, status: Json, container: Json) -> None:
        found = wait_for(
            lambda: self.kube("GET", self.path(CORE, "pods", pod))["status"],
            lambda status: bool(
                status.get("containerStatuses")
            ),  # a pod that kwok has not started cannot end, like a real one
            f"pod {pod} runs",
        )
        containers = [{**found["containerStatuses"][0], **container}, *found["containerStatuses"][1:]]
        conditions = [
            {**c, "status": "False"} if c["type"] in ("Ready", "ContainersReady") else c for c in found["conditions"]
        ]
        patch = {"status": {**status, "containerStatuses": containers, "conditions": conditions}}
        self.kube("PATCH", self.path(CORE, "pods", pod) + "/status", patch)

    def delete(self, plural: str, name: str, api: str = CORE) -> None:
        """Delete an object with the pod's own grace period."""
        self.kube("DELETE", self.path(api, plural, name))

    def versions(self, name: str, *, leave_out: tuple[str, ...] = ()) -> dict[str, tuple[str, int]]:
        """Return all children of a run: kind and name with a mark of content and generation.

        The mark leaves out the status, which other controllers write later.
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
        """Return `versions` once every pod has a node and nothing changes any more."""
        previous: dict[str, tuple[str, int]] = {}

        def look() -> dict[str, tuple[str, int]]:
            nonlocal previous
            before, previous = previous, self.versions(name, leave_out=leave_out)
            return previous if previous == before and all("nodeName" in pod["spec"] for pod in self.pods(name)) else {}

        return wait_for(look, bool, f"the children of {name} rest", pause=1.0)

    def events(self, name: str) -> list[str]:
        """Return reasons of the events on a run, oldest first."""
        found = self.kube.items(
            self.path(CORE, "events") + f"?fieldSelector=involvedObject.kind=RLRun,involvedObject.name={name}"
        )
        return [
            e["reason"]
            for e in sorted(found, key=lambda e: (e["firstTimestamp"], int(e["metadata"]["resourceVersion"])))
        ]

    def wait_event(self, name: str, reason: str) -> list[str]:
        """Wait for an event on a run and return all reasons; the event is posted after the related status was written."""
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
    """Return the manifest of a small run."""
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
    """Return a mark of the desired state of an object; each effective write changes it."""
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
