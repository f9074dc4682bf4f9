"""The rest of Kubernetes and what runs in the pods: controllers, nodes, kubelets, the volume and the roles on it."""

from __future__ import annotations

from typing import Any

from rlrun.protocol import annotations as keys
from rlrun.protocol import exit_codes
from rlrun_operator.names import ROLE_LABEL, RUN_LABEL, SPEC_HASH_ANNOTATION, attempt_of
from rlrun_operator.times import rfc3339, seconds_of
from tests.sim.api import Api, Ident, Json
from tests.sim.process import Clock

NODES = ("node-1", "node-2", "node-3")
CHECKPOINT_EVERY = 5
"""Steps."""
SIDECAR_SECONDS = 12.0
"""For which a native sidecar outlives the role's own container."""


class Volume:
    """What the roles have written: it outlives all of them."""

    def __init__(self) -> None:
        self.attempts: dict[int, str] = {}
        """Attempts that have begun, each with the trainer pod that began it."""
        self.complete = 0
        """Step of the newest complete checkpoint."""
        self.begun_at: dict[int, int] = {}
        """Attempt -> step that it resumed from."""
        self.step: dict[int, int] = {}
        """Attempt -> the last step that it has trained."""

    def claim(self, attempt: int, pod: str) -> int | None:
        """Begin an attempt, with O_EXCL; returns the next free number if it has begun before."""
        if attempt in self.attempts:
            return max(self.attempts) + 1
        self.attempts[attempt] = pod
        self.begun_at[attempt] = self.step[attempt] = self.complete
        return None


class Cluster:
    """Controllers over one API server.

    Args:
        api: the API server.
        clock: the time.
    """

    def __init__(self, api: Api, clock: Clock) -> None:
        self.api, self.clock = api, clock
        self.volume = Volume()
        self.down: set[str] = set()
        """Nodes whose kubelet is silent."""
        self.lingering: set[str] = set()
        """Roles whose deleted pods take their time to end."""
        self.schedules = self.binds = self.starts = True
        self.ends_in_view = False
        """Whether it takes deleted pods more than a moment to go."""
        self.failures = 0
        """Processes that ended by themselves, with a code that is not 0."""
        self.ended: set[tuple[int, str, int]] = set()
        """Attempt, pod and code of those that ended and were not told to."""
        self._views: dict[Ident, Json] = {}
        self._next = 0

    # ---- looking

    def pods(self, role: str) -> list[Json]:
        """Of a role, ending ones included, by name."""
        found = [o for o in self.api.all("Pod") if o["metadata"]["labels"].get(ROLE_LABEL) == role]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def pod(self, role: str, index: int) -> Json | None:
        """One that is not ending."""
        found = [pod for pod in self.pods(role) if "deletionTimestamp" not in pod["metadata"]]
        return found[index % len(found)] if found else None

    # ---- one round of everybody

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

    def _kubelet(self, pod: Json) -> None:
        metadata, status = pod["metadata"], pod["status"]
        role, node = metadata["labels"].get(ROLE_LABEL), pod["spec"].get("nodeName")
        if "deletionTimestamp" in metadata:
            if node not in self.down and role not in self.lingering:
                self._let_go(pod)
        elif status["phase"] in ("Failed", "Succeeded") or node in self.down:
            return
        elif node is None:
            self._schedule(pod)
        elif "containerStatuses" not in status and self.starts and self._is_furnished(pod):
            self._start(pod, str(role))
        elif (end := end_of(pod)) is not None and self._are_sidecars_done(end):
            self._finish(pod, int(end["exitCode"]))

    def _let_go(self, pod: Json) -> None:
        """Pods go at once, or in view: they are seen to end, and then as the kubelet's last request leaves them, without any grace."""
        metadata, role = pod["metadata"], pod["metadata"]["labels"].get(ROLE_LABEL)
        containers = pod["status"].get("containerStatuses") or ()
        last = not containers or not metadata["deletionGracePeriodSeconds"]
        if last or role == "inference" or not self.ends_in_view:
            self.api.drop("Pod", metadata["name"])
        elif end_of(pod) is None and "lastState" not in containers[0]:
            end = {"exitCode": 143, "reason": "Error", "message": "", "finishedAt": rfc3339(self.clock.now())}
            entry = {"name": role, "ready": False, "restartCount": 0, "state": {"terminated": end}}
            self.api.put(pod, status=pod["status"] | {"phase": "Failed", "containerStatuses": [entry]})
        else:
            times = {"deletionTimestamp": rfc3339(self.clock.now()), "deletionGracePeriodSeconds": 0}
            self.api.put(pod, metadata=metadata | times)

    def _schedule(self, pod: Json) -> None:
        nodes = [node for node in NODES if node not in self.down]
        if not self.schedules or not nodes:
            word = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node is free"}
            self.api.put(pod, status=pod["status"] | {"conditions": [word]})
            return
        self._next += 1
        self.api.put(
            pod,
            spec=pod["spec"] | {"nodeName": nodes[self._next % len(nodes)]},
            status=pod["status"] | {"conditions": []},
        )

    def _is_furnished(self, pod: Json) -> bool:
        """Whether all exists that the pod mounts or runs as."""
        spec = pod["spec"]
        account = spec.get("serviceAccountName", "default")
        if account != "default" and self.api.get("ServiceAccount", account) is None:
            return False
        for volume in spec.get("volumes") or ():
            if "configMap" in volume and self.api.get("ConfigMap", volume["configMap"]["name"]) is None:
                return False
            if "secret" in volume and self.api.get("Secret", volume["secret"]["secretName"]) is None:
                return False
            if "persistentVolumeClaim" in volume:
                claim = self.api.get("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
                if claim is None or claim["status"]["phase"] != "Bound":
                    return False
        return True

    def _start(self, pod: Json, role: str) -> None:
        name, attempt = pod["metadata"]["name"], attempt_of(pod["metadata"]) or 0
        running = {"name": role, "ready": True, "restartCount": 0, "state": {"running": {}}}
        started = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [running],
        }
        new = self.api.put(pod, status=started)
        if role == "trainer" and name.endswith("-0"):
            free = self.volume.claim(attempt, pod["metadata"]["uid"])
            if free is not None:
                said = f"RLRUN_ATTEMPT is {attempt}, which has begun before; the next is {free}"
                self.exit(new, exit_codes.ATTEMPT_TAKEN, message=said)

    # ---- the roles

    def training(self) -> Json | None:
        """The orchestrator whose attempt trains now: all its pods are up."""
        orchestrator = self.pod("orchestrator", -1)
        if orchestrator is None or not is_up(orchestrator):
            return None
        attempt = attempt_of(orchestrator["metadata"])
        owner = self.api.get("StatefulSet", f"{orchestrator['metadata']['labels'][RUN_LABEL]}-trainer")
        trainers = [p for p in self.pods("trainer") if attempt_of(p["metadata"]) == attempt and is_up(p)]
        whole = owner is not None and len(trainers) >= max(1, owner["spec"]["replicas"])
        engines = [pod for pod in self.pods("inference") if is_up(pod)]
        return orchestrator if whole and engines and attempt in self.volume.step else None

    def train(self, steps: int, until: int) -> None:
        """The attempt that can trains some steps and reports; after the last one the orchestrator ends well."""
        orchestrator = self.training()
        if orchestrator is None:
            return
        attempt = attempt_of(orchestrator["metadata"]) or 0
        volume = self.volume
        for _ in range(steps):
            if volume.step[attempt] < until:
                volume.step[attempt] += 1
                if volume.step[attempt] % CHECKPOINT_EVERY == 0:
                    volume.complete = max(volume.complete, volume.step[attempt])
        self.report(attempt, orchestrator["metadata"]["labels"][RUN_LABEL])
        if volume.step[attempt] >= until:
            volume.complete = max(volume.complete, until)
            self.exit(orchestrator, exit_codes.OK)

    def report(self, attempt: int, run: str) -> None:
        """The orchestrator renews its Lease."""
        lease = self.api.get("Lease", f"{run}-progress")
        if lease is None:
            return
        volume = self.volume
        said = {
            keys.ATTEMPT: attempt,
            keys.STEP: volume.step[attempt],
            keys.CHECKPOINT_STEP: volume.complete or None,
            keys.RESUMED_FROM_STEP: volume.begun_at[attempt] or None,
            keys.POLICY_VERSION: volume.step[attempt],
            keys.REWARD: 0.5,
        }
        metadata = lease["metadata"] | {"annotations": {k: str(v) for k, v in said.items() if v is not None}}
        spec = lease["spec"] | {"renewTime": f"{rfc3339(self.clock.now())}+{self.api.version}"}
        self.api.put(lease, metadata=metadata, spec=spec)

    def exit(self, pod: Json, code: int, *, message: str = "", reason: str = "") -> None:
        """The role's process ends. A trainer's container is started again and holds, an engine's starts anew, the orchestrator's not."""
        role = pod["metadata"]["labels"][ROLE_LABEL]
        end = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "message": message}
        ended = {"terminated": end | {"finishedAt": rfc3339(self.clock.now())}}
        taken = code == exit_codes.ATTEMPT_TAKEN and bool(message)
        self.failures += code != exit_codes.OK and not taken
        self.ended.add((attempt_of(pod["metadata"]) or 0, str(pod["metadata"]["name"]), code))
        status = {"conditions": [{"type": "Ready", "status": "False"}], "phase": "Running"}
        entry: dict[str, Any] = {"name": role, "ready": False, "restartCount": 1, "state": {"running": {}}}
        if role == "orchestrator":
            entry |= {"restartCount": 0, "state": ended}
        elif role == "inference":
            status["conditions"] = [{"type": "Ready", "status": "True"}]
            entry |= {"ready": True, "lastState": ended}
        else:
            entry |= {"lastState": ended}
        new = self.api.put(pod, status=pod["status"] | status | {"containerStatuses": [entry]})
        if role == "orchestrator" and not has_sidecar(pod):
            self._finish(new, code)

    def _are_sidecars_done(self, end: Json) -> bool:
        return self.clock.now() >= (seconds_of(end["finishedAt"]) or 0.0) + SIDECAR_SECONDS

    def _finish(self, pod: Json, code: int) -> None:
        """None of its containers runs any more."""
        self.api.put(pod, status=pod["status"] | {"phase": "Failed" if code else "Succeeded"})

    def evict(self, pod: Json, reason: str = "EvictionByEvictionAPI") -> None:
        """A drain, a preemption or the loss of a node takes the pod."""
        word = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "bye"}
        new = self.api.put(pod, status=pod["status"] | {"conditions": [word]})
        self.api.end("Pod", new["metadata"]["name"])

    # ---- nodes

    def stop_node(self, node: str) -> None:
        """Its kubelet falls silent; the node controller marks its pods and, later, takes them away."""
        self.down.add(node)
        for pod in self._on(node):
            self.api.put(pod, status=pod["status"] | {"conditions": [{"type": "Ready", "status": "False"}]})

    def taint(self) -> None:
        """The node controller evicts the pods of nodes that are silent for long."""
        for node in sorted(self.down):
            for pod in self._on(node):
                self.evict(pod, "DeletionByTaintManager")

    def start_node(self, node: str) -> None:
        """It is back after a reboot: its containers have ended and start anew."""
        self.down.discard(node)
        for pod in self._on(node):
            if pod["status"]["phase"] == "Running" and "containerStatuses" in pod["status"] and end_of(pod) is None:
                before = self.failures
                self.exit(pod, 255, reason="Unknown")
                self.failures = before

    def _on(self, node: str) -> list[Json]:
        return [
            pod
            for pod in self.api.all("Pod")
            if pod["spec"].get("nodeName") == node and "deletionTimestamp" not in pod["metadata"]
        ]


def owners(child: Json) -> set[str]:
    """UIDs of an object's owners."""
    return {owner["uid"] for owner in child["metadata"].get("ownerReferences") or ()}


def is_up(pod: Json) -> bool:
    """Whether its process works."""
    status = pod["status"]
    containers = status.get("containerStatuses") or ()
    holds = any("lastState" in c and pod["metadata"]["labels"][ROLE_LABEL] == "trainer" for c in containers)
    ended = holds or end_of(pod) is not None
    return (
        status["phase"] == "Running" and bool(containers) and not ended and "deletionTimestamp" not in pod["metadata"]
    )


def end_of(pod: Json) -> Json | None:
    """How the role's own container ended, where it is not started again."""
    entry = next(iter(pod["status"].get("containerStatuses") or ()), {})
    found: Json | None = (entry.get("state") or {}).get("terminated")
    return found


def has_sidecar(pod: Json) -> bool:
    """Whether an environment in an image of its own runs beside the orchestrator, as in half of them: it ends later."""
    return int(str(pod["metadata"]["uid"]).rpartition("-")[2]) % 2 == 1
