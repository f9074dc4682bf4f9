"""Scheduler and kubelets."""

from __future__ import annotations

from rlrun.runtime import exit_codes
from rlrun_operator.names import ROLE_LABEL, SPOT_LABEL, attempt_of
from rlrun_operator.times import format_rfc3339
from tests.sim.clock import Clock
from tests.sim.cluster.api import Api, Json, claim_of
from tests.sim.cluster.pods import end_of, has_started, key_of
from tests.sim.cluster.roles import Roles

NODES = ("node-1", "node-2", "node-3")


class Nodes(Roles):
    """Nodes of the cluster and the scheduler.

    Args:
        api: API server.
        clock: clock of the cluster.
    """

    def __init__(self, api: Api, clock: Clock) -> None:
        super().__init__(api, clock)
        self.down: set[str] = set()
        """Nodes whose kubelet is silent."""
        self.lingering: set[str] = set()
        """Roles whose deleted pods end slowly."""
        self.room: int | None = None
        """Number of trainer pods with nodes; None: all."""
        self.spot_room: int | None = None
        """Number of engines with interruptible nodes; None: all."""
        self.schedules = self.binds = self.starts = True
        self.ends_in_view = False
        """Whether deleted pods stay for more than a moment."""
        self.keys: dict[str, str] = {}
        """API key at the start of each pod, by UID."""
        self._next = self._address = 0

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
        elif not has_started(pod) and self.starts and self._is_furnished(pod):
            self._start(pod, str(role))
        elif (end := end_of(pod)) is not None and self._are_sidecars_done(end):
            self._finish(pod, int(end["exitCode"]))

    def _let_go(self, pod: Json) -> None:
        """Remove pods immediately, or visibly: they end first and then have the state of the kubelet's last request,
        without a grace period.
        """
        metadata, role = pod["metadata"], pod["metadata"]["labels"].get(ROLE_LABEL)
        containers = pod["status"].get("containerStatuses") or ()
        last = not has_started(pod) or not metadata["deletionGracePeriodSeconds"]
        if last or role == "inference" or not self.ends_in_view:
            self.api.drop("Pod", metadata["name"])
        elif end_of(pod) is None and "lastState" not in containers[0]:
            end = {"exitCode": 143, "reason": "Error", "message": "", "finishedAt": format_rfc3339(self.clock.now())}
            entry = {"name": role, "ready": False, "restartCount": 0, "state": {"terminated": end}}
            self.api.put(pod, status=pod["status"] | {"phase": "Failed", "containerStatuses": [entry]})
        else:
            times = {"deletionTimestamp": format_rfc3339(self.clock.now()), "deletionGracePeriodSeconds": 0}
            self.api.put(pod, metadata=metadata | times)

    def _schedule(self, pod: Json) -> None:
        nodes = [node for node in NODES if node not in self.down]
        lacks = "" if self.schedules and nodes else "no node is free"
        if self.room is not None and pod["metadata"]["labels"].get(ROLE_LABEL) == "trainer":
            placed = sum("nodeName" in other["spec"] for other in self.pods("trainer"))
            lacks = lacks or ("no node has as many GPUs" if placed >= self.room else "")
        if self.spot_room is not None and SPOT_LABEL in pod["metadata"]["labels"]:
            on_spot = [other for other in self.pods("inference") if SPOT_LABEL in other["metadata"]["labels"]]
            placed = sum("nodeName" in other["spec"] for other in on_spot)
            lacks = lacks or ("no node is interruptible" if placed >= self.spot_room else "")
        if (name := claim_of(pod)) is not None:
            claim = self.api.get("PersistentVolumeClaim", name)
            if claim is None:
                lacks = f'persistentvolumeclaim "{name}" not found'
            elif "deletionTimestamp" in claim["metadata"]:
                lacks = f'persistentvolumeclaim "{name}" is being deleted'
        if lacks:
            word = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": lacks}
            self.api.put(pod, status=pod["status"] | {"conditions": [word]})
            return
        self._next += 1
        self.api.put(
            pod,
            spec=pod["spec"] | {"nodeName": nodes[self._next % len(nodes)]},
            status=pod["status"] | {"conditions": [], "startTime": format_rfc3339(self.clock.now())},
        )

    def _is_furnished(self, pod: Json) -> bool:
        """Whether all mounts and accounts of the pod exist; an event reports missing ones."""
        spec, name = pod["spec"], pod["metadata"]["name"]
        account = spec.get("serviceAccountName", "default")
        if account != "default" and self.api.get("ServiceAccount", account) is None:
            return False
        for volume in spec.get("volumes") or ():
            if "persistentVolumeClaim" in volume:
                claim = self.api.get("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
                if claim is None or claim["status"]["phase"] != "Bound":
                    return False
            for kind, source, key in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
                if source in volume and self.api.get(kind, volume[source][key]) is None:
                    lacks = f'{kind.lower()} "{volume[source][key]}" not found'
                    self.api.warn(
                        ("Pod", name),
                        "FailedMount",
                        f'MountVolume.SetUp failed for volume "{volume["name"]}" : {lacks}',
                    )
                    return False
        return True

    def _start(self, pod: Json, role: str) -> None:
        name, attempt = pod["metadata"]["name"], attempt_of(pod["metadata"]) or 0
        secret = key_of(pod)
        found = self.api.get("Secret", secret) if secret is not None else None
        if secret is not None and found is None:
            waits = {"reason": "CreateContainerConfigError", "message": f'secret "{secret}" not found'}
            entry = {"name": role, "ready": False, "restartCount": 0, "state": {"waiting": waits}}
            self.api.put(pod, status=pod["status"] | {"containerStatuses": [entry]})
            return
        self.keys[pod["metadata"]["uid"]] = str(found["stringData"]) if found is not None else ""
        running = {"name": role, "ready": True, "restartCount": 0, "state": {"running": {}}}
        started = {
            **({"startTime": pod["status"]["startTime"]} if "startTime" in pod["status"] else {}),
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [running],
        }
        if self.fleet is not None and role == "inference":
            self._address += 1
            started["podIP"] = f"10.{self._address >> 16}.{self._address >> 8 & 255}.{self._address & 255}"
        new = self.api.put(pod, status=started)
        if role == "trainer" and name.endswith("-0"):
            free = self.volume.claim(attempt, pod["metadata"]["uid"])
            if free is not None:
                said = f"RLRUN_ATTEMPT is {attempt}, which has begun before; the next is {free}"
                self.exit(new, exit_codes.ATTEMPT_TAKEN, message=said)

    def evict(self, pod: Json, reason: str = "EvictionByEvictionAPI") -> None:
        """Evict the pod by a drain, a preemption or the loss of a node."""
        word = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "bye"}
        new = self.api.put(pod, status=pod["status"] | {"conditions": [word]})
        self.api.end("Pod", new["metadata"]["name"])

    # ---- nodes

    def stop_node(self, node: str) -> None:
        """Silence the node's kubelet; the node controller marks its pods and evicts them later."""
        self.down.add(node)
        for pod in self._on(node):
            self.api.put(pod, status=pod["status"] | {"conditions": [{"type": "Ready", "status": "False"}]})

    def taint(self) -> None:
        """Evict the pods of long-silent nodes."""
        for node in sorted(self.down):
            for pod in self._on(node):
                self.evict(pod, "DeletionByTaintManager")

    def start_node(self, node: str) -> None:
        """Return the node after a reboot: its containers have ended and start again."""
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
