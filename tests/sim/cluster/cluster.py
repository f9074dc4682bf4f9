"""Kubernetes around the API server: controllers and garbage collector, on top of nodes and roles."""

from __future__ import annotations

from rlrun_operator.decide.engine_count import DELETION_COST
from rlrun_operator.kube.resources import CLAIM
from rlrun_operator.names import RUN_LABEL, SPEC_HASH_ANNOTATION, attempt_of
from tests.sim.clock import Clock
from tests.sim.cluster.admission import RefusedError
from tests.sim.cluster.api import Api, Ident, Json
from tests.sim.cluster.nodes import Nodes
from tests.sim.cluster.pods import key_of, owners


class Cluster(Nodes):
    """Controllers over one API server.

    Args:
        api: API server.
        clock: clock of the cluster.
    """

    def __init__(self, api: Api, clock: Clock) -> None:
        super().__init__(api, clock)
        self.uncollected: set[str] = set()
        """Kinds that the garbage collector handles later."""
        self.idle: set[str] = set()
        """Kinds whose controller lags: it acts later, and first on its present view."""
        self._unseen: dict[str, Json] = {}
        """First state, by UID, that a lagging controller has yet to handle."""
        self.pool = "rule-000"
        """Provisioner of volumes."""
        self._views: dict[Ident, Json] = {}

    def round(self, stale: bool = False) -> bool:
        """Run controllers, garbage collector, scheduler and kubelets once; return whether anything changed.

        Args:
            stale: whether the workload controllers act on their previous view.
        """
        before = self.api.version
        for kind in ("StatefulSet", "Deployment"):
            for owner in self.api.all(kind):
                if RUN_LABEL not in owner["metadata"]["labels"]:
                    continue
                if kind in self.idle:
                    self._unseen.setdefault(owner["metadata"]["uid"], owner)
                    continue
                late = self._unseen.pop(owner["metadata"]["uid"], None)
                if late is not None:
                    self._views[kind, owner["metadata"]["name"]] = late
                self._workload(owner, stale or late is not None)
        self._collect()
        for claim in self.api.all("PersistentVolumeClaim"):
            if claim["status"]["phase"] == "Pending" and RUN_LABEL in claim["metadata"]["labels"]:
                if not self.binds:
                    about, uid = (CLAIM.kind, claim["metadata"]["name"]), claim["metadata"]["uid"]
                    self.api.warn(about, "ProvisioningFailed", f"pool {self.pool} is full", uid=uid)
                else:
                    self.api.put(claim, status={"phase": "Bound"}, spec=claim["spec"] | {"volumeName": "pv-1"})
        for pod in self.api.all("Pod"):
            if RUN_LABEL in pod["metadata"]["labels"]:
                self._kubelet(pod)
        return self.api.version != before

    def newest_attempt(self) -> int:
        """Return the newest attempt of all present workloads and pods."""
        found = [o for kind in ("StatefulSet", "Deployment", "Pod") for o in self.api.all(kind)]
        return max((attempt_of(o["metadata"]) or 0 for o in found), default=0)

    def _workload(self, owner: Json, stale: bool) -> None:
        ident = (owner["kind"], owner["metadata"]["name"])
        known = self._views.get(ident)
        same = known is not None and known["metadata"]["uid"] == owner["metadata"]["uid"]
        view = known if stale and same and known is not None else owner
        self._views[ident] = view
        uid = owner["metadata"]["uid"]
        names = [f"{ident[1]}-{i}" for i in range(view["spec"].get("replicas", 1))]
        refused = False
        mine = [pod for pod in self.api.all("Pod") if uid in owners(pod)]
        if owner["kind"] == "Deployment":
            names = _cheapest_gone(mine, names)
        revision = _revision(view)
        for pod in mine:
            outdated = owner["kind"] == "Deployment" and pod["metadata"]["annotations"].get("revision") != revision
            if pod["metadata"]["name"] not in names or pod["status"]["phase"] == "Failed" or outdated:
                self.api.end("Pod", pod["metadata"]["name"])
        for name in names:
            there = self.api.get("Pod", name)
            if there is None:
                refused |= not self._make(owner, view, name, revision)
            elif RUN_LABEL not in there["metadata"]["labels"]:
                self._refused(owner, name, f'pods "{name}" already exists')
                refused = True
        seen: Json = {"observedGeneration": view["metadata"]["generation"], "replicas": len(mine)}
        if refused and owner["kind"] == "Deployment":
            seen["conditions"] = [{"type": "ReplicaFailure", "status": "True"}]
        current = self.api.get(*ident)
        if current is not None:
            self.api.put(current, status=seen)

    def _make(self, owner: Json, view: Json, name: str, revision: str) -> bool:
        """Create a pod; return False if it is refused."""
        try:
            self.api.admit("Pod", name)
        except RefusedError as error:
            self._refused(owner, name, error.message)
            return False
        template = view["spec"]["template"]
        metadata = template["metadata"] | {
            "name": name,
            "annotations": (template["metadata"].get("annotations") or {}) | {"revision": revision},
            "ownerReferences": [{"kind": owner["kind"], "uid": owner["metadata"]["uid"]}],
        }
        self.api.add({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
        return True

    def _refused(self, owner: Json, name: str, message: str) -> None:
        """Report that the controller may not create a pod."""
        of = owner["metadata"]["name"]
        if owner["kind"] == "StatefulSet":
            self.api.warn(
                ("StatefulSet", of), "FailedCreate", f"create Pod {name} in StatefulSet {of} failed error: {message}"
            )
        else:
            self.api.warn(("ReplicaSet", f"{of}-5d4f"), "FailedCreate", f"Error creating: {message}")

    def _collect(self) -> None:
        """Delete objects without a living owner."""
        living = {o["metadata"]["uid"] for kind in ("RLRun", "StatefulSet", "Deployment") for o in self.api.all(kind)}
        for kind, found in self.api.kinds.items():
            if kind in self.uncollected:
                continue
            for name, child in list(found.items()):
                if (uids := owners(child)) and not uids & living:
                    self.api.end(kind, name)
                elif kind == CLAIM.kind and "deletionTimestamp" in child["metadata"] and not self.api.mounts(name):
                    self.api.drop(kind, name)


def _revision(view: Json) -> str:
    """Return the distinguishing part of a Deployment's pods: specification, images and API key."""
    key = key_of(view["spec"]["template"])
    images = [container.get("image") for container in view["spec"]["template"]["spec"].get("containers") or ()]
    return f"{(view['metadata'].get('annotations') or {}).get(SPEC_HASH_ANNOTATION)} {images} {key}"


def _cheapest_gone(pods: list[Json], names: list[str]) -> list[str]:
    """Return the names of a Deployment's remaining or new pods: pods with a deletion cost are removed first."""
    there = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    costs = {p["metadata"]["name"]: int((p["metadata"].get("annotations") or {}).get(DELETION_COST, 0)) for p in there}
    if len(there) <= len(names) or not any(costs.values()):
        return names
    return sorted(costs, key=lambda name: -costs[name])[: len(names)]
