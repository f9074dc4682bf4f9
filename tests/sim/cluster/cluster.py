"""Everything of Kubernetes around the API server: controllers and garbage collector, over nodes and the roles in the pods."""

from __future__ import annotations

from rlrun_operator.names import SPEC_HASH_ANNOTATION
from tests.sim.clock import Clock
from tests.sim.cluster.api import Api, Ident, Json
from tests.sim.cluster.nodes import Nodes
from tests.sim.cluster.pods import owners


class Cluster(Nodes):
    """Controllers over one API server.

    Args:
        api: the API server.
        clock: the time.
    """

    def __init__(self, api: Api, clock: Clock) -> None:
        super().__init__(api, clock)
        self._views: dict[Ident, Json] = {}

    def round(self, stale: bool = False) -> bool:
        """Controllers, garbage collector, scheduler and kubelets, once; returns whether anything changed.

        Args:
            stale: the workloads' controllers act on what they saw in their last round.
        """
        before = self.api.version
        for kind in ("StatefulSet", "Deployment"):
            for owner in self.api.all(kind):
                self._workload(owner, stale)
        self._collect()
        if self.binds:
            for claim in self.api.all("PersistentVolumeClaim"):
                if claim["status"]["phase"] == "Pending":
                    self.api.put(claim, status={"phase": "Bound"}, spec=claim["spec"] | {"volumeName": "pv-1"})
        for pod in self.api.all("Pod"):
            self._kubelet(pod)
        return self.api.version != before

    def _workload(self, owner: Json, stale: bool) -> None:
        ident = (owner["kind"], owner["metadata"]["name"])
        known = self._views.get(ident)
        same = known is not None and known["metadata"]["uid"] == owner["metadata"]["uid"]
        view = known if stale and same and known is not None else owner
        self._views[ident] = view
        uid = owner["metadata"]["uid"]
        names = [f"{ident[1]}-{i}" for i in range(view["spec"].get("replicas", 1))]
        mine = [pod for pod in self.api.all("Pod") if uid in owners(pod)]
        revision = (view["metadata"].get("annotations") or {}).get(SPEC_HASH_ANNOTATION)
        for pod in mine:
            outdated = owner["kind"] == "Deployment" and pod["metadata"]["annotations"].get("revision") != revision
            if pod["metadata"]["name"] not in names or pod["status"]["phase"] == "Failed" or outdated:
                self.api.end("Pod", pod["metadata"]["name"])
        for name in names:
            if self.api.get("Pod", name) is None:
                self._make(owner, view, name, revision)
        seen = {"observedGeneration": view["metadata"]["generation"], "replicas": len(mine)}
        current = self.api.get(*ident)
        if current is not None:
            self.api.put(current, status=seen)

    def _make(self, owner: Json, view: Json, name: str, revision: str | None) -> None:
        template = view["spec"]["template"]
        metadata = template["metadata"] | {
            "name": name,
            "annotations": (template["metadata"].get("annotations") or {}) | {"revision": revision},
            "ownerReferences": [{"kind": owner["kind"], "uid": owner["metadata"]["uid"]}],
        }
        self.api.add({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})

    def _collect(self) -> None:
        """What has no living owner goes."""
        living = {o["metadata"]["uid"] for kind in ("RLRun", "StatefulSet", "Deployment") for o in self.api.all(kind)}
        for kind, found in self.api.kinds.items():
            for name, child in list(found.items()):
                if (uids := owners(child)) and not uids & living:
                    self.api.end(kind, name)
