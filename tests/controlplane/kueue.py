"""Kueue's Workload definition as far as the operator uses it, and the stand-in as a controller on a real control plane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.controlplane.harness import Json, Kube, wait_for
from tests.controlplane.world import CORE, World
from tests.support.kueue import StandIn, is_true, may_have_pods

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
PAUSE = 0.2
"""Time between two passes of the stand-in."""
_ANY: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_TEXT: Json = {"type": "string"}
_CONDITION: Json = {
    "type": "object",
    "required": ["type", "status", "reason", "message", "lastTransitionTime"],
    "properties": {
        "type": _TEXT,
        "status": {"enum": ["True", "False", "Unknown"], "type": "string"},
        "reason": {"type": "string", "minLength": 1},
        "message": {"type": "string", "maxLength": 32768},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
        "observedGeneration": {"type": "integer"},
    },
}


def _map(key: str, item: Json) -> Json:
    return {"type": "array", "items": item, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties}


_POD_SET = _object(name={**_TEXT, "maxLength": 63}, count={"type": "integer", "minimum": 0}, template=_ANY) | {
    "required": ["name", "template"]
}
_ASSIGNED = _object(
    name=_TEXT,
    count={"type": "integer"},
    flavors={"type": "object", "additionalProperties": _TEXT},
    topologyAssignment=_ANY,
) | {"required": ["name"]}
DEFINITION: Json = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "workloads.kueue.x-k8s.io",
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/kueue"},
    },
    "spec": {
        "group": "kueue.x-k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "Workload", "plural": "workloads", "singular": "workload", "listKind": "WorkloadList"},
        "versions": [
            {
                "name": "v1beta2",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": _object(
                        spec=_object(
                            active={"type": "boolean", "default": True},
                            queueName={**_TEXT, "maxLength": 253},
                            priority={"type": "integer"},
                            priorityClassRef=_object(group=_TEXT, kind=_TEXT, name=_TEXT),
                            podSets=_map("name", _POD_SET) | {"maxItems": 18},
                        ),
                        status=_object(
                            admission=_object(clusterQueue=_TEXT, podSetAssignments=_map("name", _ASSIGNED)),
                            conditions=_map("type", _CONDITION),
                            requeueState=_object(count={"type": "integer"}, requeueAt=_TEXT),
                            reclaimablePods=_map(
                                "name", _object(name=_TEXT, count={"type": "integer"}) | {"required": ["name"]}
                            ),
                        ),
                    )
                },
            }
        ],
    },
}


def install(kube: Kube) -> None:
    """Create the definition, and wait until Workloads are served."""
    kube("POST", DEFINITIONS, DEFINITION)
    wait_for(lambda: _served(kube), bool, "Workloads are served")


def _served(kube: Kube) -> bool:
    return kube.get(f"{KUEUE}/workloads") is not None


def uninstall(kube: Kube) -> None:
    """Remove the definition with all Workloads, and wait until it is gone."""
    path = f"{DEFINITIONS}/{DEFINITION['metadata']['name']}"
    kube("DELETE", path, ok=False)
    wait_for(lambda: kube.get(path), lambda found: found is None, "Workloads are not served")


class Controller:
    """The stand-in for Kueue in one namespace, in a thread. Tests act on Workloads through `does`."""

    def __init__(self, world: World, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self.problems: list[str] = []
        self._world = world
        self._kube = Kube(world.cluster.kubeconfig)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kueue", daemon=True)

    @contextmanager
    def at_work(self) -> Iterator[Controller]:
        """Run the thread, and raise its errors at the end."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(10.0)
        assert not self.problems, "\n".join(self.problems)

    def workloads(self, kube: Kube | None = None) -> list[Json]:
        """Return all Workloads of the namespace."""
        return (kube or self._world.kube).items(self._world.path(KUEUE, "workloads"))

    def workload(self) -> Json:
        """Return the only Workload."""
        (found,) = self.workloads()
        return found

    def does(self, change: Callable[[Json], Json]) -> None:
        """Change the status of the only Workload, as Kueue does."""
        wait_for(lambda: self._put(self._world.kube, change(self.workload())), bool, "Kueue's write")

    def _run(self) -> None:
        while not self._stop.wait(PAUSE):
            try:
                with self._lock:
                    found = self.workloads(self._kube)
                    for one in self.stand_in.act(found):
                        self._put(self._kube, one)
                self._hold_pods_to_quota()
            except Exception as error:  # an error of another thread, raised at the end
                self.problems.append(repr(error))

    def _hold_pods_to_quota(self) -> None:
        """Check that no pod runs without quota. Pods are listed before Workloads because quota is granted before and
        removed after the pods."""
        pods = self._kube.items(self._world.path(CORE, "pods"))
        by_run = {one["metadata"]["ownerReferences"][0]["name"]: one for one in self.workloads(self._kube)}
        for pod in pods:
            name, run = pod["metadata"]["name"], pod["metadata"]["labels"]["rlrun.io/run"]
            one = by_run.get(run)
            ended = pod["status"].get("phase") in ("Succeeded", "Failed")
            gone = self._kube.get(self._world.path(CORE, "pods", name)) is None
            if not (ended or gone or may_have_pods(one) or (one is not None and is_true(one, "Finished"))):
                self.problems.append(f"pod {name} has no quota")

    def _put(self, kube: Kube, one: Json) -> bool:
        path = self._world.path(KUEUE, "workloads", one["metadata"]["name"])
        answer: dict[str, Any] = kube("PUT", f"{path}/status", one, ok=False)
        if answer.get("kind") == "Status" and answer.get("reason") not in ("Conflict", "NotFound"):
            self.problems.append(str(answer.get("message")))
        return answer.get("kind") != "Status"
