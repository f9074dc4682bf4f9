"""Volcano's definitions of PodGroup and Queue from release v1.14, and the stand-in as its scheduler on a real control
plane."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.controlplane.harness import Json, Kube, wait_for
from tests.controlplane.world import CORE, World
from tests.support.volcano import StandIn

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
VOLCANO = "/apis/scheduling.volcano.sh/v1beta1"
PAUSE = 0.2
"""Time between two sessions of the stand-in."""
_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "format": "int32", "minimum": 0}
_AMOUNTS: Json = {
    "type": "object",
    "additionalProperties": {"anyOf": [{"type": "integer"}, _TEXT], "x-kubernetes-int-or-string": True},
}
_NAME: Json = {
    **_TEXT,
    "maxLength": 253,
    "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties}


_CONDITION = _object(
    type=_TEXT,
    status=_TEXT,
    transitionID=_TEXT,
    reason=_TEXT,
    message=_TEXT,
    lastTransitionTime={**_TEXT, "format": "date-time"},
)
_GROUP = _object(
    spec=_object(
        minMember=_COUNT,
        minTaskMember={"type": "object", "additionalProperties": {"type": "integer", "format": "int32"}},
        minResources=_AMOUNTS,
        queue={**_NAME, "default": "default"},
        priorityClassName={**_TEXT, "maxLength": 253},
    ),
    status=_object(
        phase={**_TEXT, "enum": ["Pending", "Running", "Unknown", "Inqueue", "Completed"]},
        conditions={"type": "array", "items": _CONDITION},
        running=_COUNT,
        succeeded=_COUNT,
        failed=_COUNT,
    ),
)
_QUEUE = _object(
    spec=_object(weight={"type": "integer", "format": "int32"}, reclaimable={"type": "boolean"}, capability=_AMOUNTS),
    status=_object(state={**_TEXT, "enum": ["Open", "Closed", "Closing", "Unknown"]}, allocated=_AMOUNTS),
)


def _definition(kind: str, plural: str, scope: str, schema: Json, subresources: Json) -> Json:
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.scheduling.volcano.sh"},
        "spec": {
            "group": "scheduling.volcano.sh",
            "scope": scope,
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{**version, "subresources": subresources}],
        },
    }


DEFINED = (
    _definition("PodGroup", "podgroups", "Namespaced", _GROUP, {}),  # the definition has no status subresource
    _definition("Queue", "queues", "Cluster", _QUEUE, {"status": {}}),
)


def install(kube: Kube, *queues: str) -> None:
    """Create the definitions and open Queues, and wait until they are served."""
    for definition in DEFINED:
        kube("POST", DEFINITIONS, definition)
    wait_for(
        lambda: all(_served(kube, plural) for plural in ("podgroups", "queues")), bool, "Volcano's kinds are served"
    )
    for name in queues:
        made = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "Queue", "metadata": {"name": name}}
        kube("POST", f"{VOLCANO}/queues", {**made, "spec": {"weight": 1}})
        kube("PATCH", f"{VOLCANO}/queues/{name}/status", {"status": {"state": "Open"}})


def _served(kube: Kube, plural: str) -> bool:
    return kube.get(f"{VOLCANO}/{plural}") is not None


def uninstall(kube: Kube) -> None:
    """Remove the definitions with all objects, and wait until they are gone."""
    for definition in DEFINED:
        path = f"{DEFINITIONS}/{definition['metadata']['name']}"
        kube("DELETE", path, ok=False)
        wait_for(lambda path=path: kube.get(path), lambda found: found is None, "Volcano's kinds are not served")  # type: ignore[misc]


class Scheduler:
    """The stand-in for Volcano's scheduler in one namespace, in a thread."""

    def __init__(self, world: World, stand_in: StandIn, node: str) -> None:
        self.stand_in = stand_in
        self.problems: list[str] = []
        self._world = world
        self._node = node
        self._kube = Kube(world.cluster.kubeconfig)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="volcano", daemon=True)

    @contextmanager
    def at_work(self) -> Iterator[Scheduler]:
        """Run the thread, and raise its errors at the end."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(10.0)
        assert not self.problems, "\n".join(self.problems)

    def groups(self, kube: Kube | None = None) -> list[Json]:
        """Return all PodGroups of the namespace."""
        return (kube or self._world.kube).items(self._world.path(VOLCANO, "podgroups"))

    def _run(self) -> None:
        while not self._stop.wait(PAUSE):
            try:
                self._session()
            except Exception as error:  # an error of another thread, raised at the end
                self.problems.append(repr(error))

    def _session(self) -> None:
        groups, pods = self.groups(self._kube), self._kube.items(self._world.path(CORE, "pods"))
        for group in self.stand_in.act(groups, pods):
            self._send("PUT", self._world.path(VOLCANO, "podgroups", group["metadata"]["name"]), group)
        for pod in self.stand_in.binds(groups, pods):
            if pod["spec"]["schedulerName"] != "volcano":
                self.problems.append(f"pod {pod['metadata']['name']} is for scheduler {pod['spec']['schedulerName']}")
            target = {"apiVersion": "v1", "kind": "Node", "name": self._node}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]}}
            path = self._world.path(CORE, "pods", pod["metadata"]["name"])
            self._send("POST", f"{path}/binding", {**binding, "target": target})

    def _send(self, verb: str, path: str, body: Json) -> None:
        answer = self._kube(verb, path, body, ok=False)
        if answer.get("status") == "Failure" and answer.get("reason") not in ("Conflict", "NotFound"):
            self.problems.append(f"{verb} {path}: {answer.get('message')}")
