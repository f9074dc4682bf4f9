"""The queue story on real kubelets: order, preemption by a fourth run, and loss of a node, judged by status and events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.cluster import deploy
from tests.cluster.native.cluster import NativeCluster
from tests.e2e.chaos.chaos_run import ChaosRun
from tests.e2e.cluster.kube_run import example

RELEASE = SYSTEM = "rlrun-queue"
NAMESPACE = "queue-story"
INTERVAL = 5
STEP_SECONDS = 0.3
NODES = ("n0", "n1")
NEED = "trainer needs 2 nodes with 1 free nvidia.com/gpu each; "


def manifest(
    name: str, image: str, *, steps: int, script: Mapping[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    """Return a quickstart with stubs whose trainer has two pods with one GPU each, which are all GPUs of the two nodes.

    Args:
        script: faults of the trainer's stub.
    """
    trainer = {"replicas": 2, "processesPerReplica": 1, "gpusPerReplica": 1, **spec.pop("trainer", {})}
    document = example(
        "quickstart", maxSteps=steps, checkpoint={"interval": INTERVAL, "keepLast": 2}, trainer=trainer, **spec
    )
    document["metadata"]["name"] = name
    document["spec"].pop("evaluation", None)
    document["spec"]["orchestrator"] |= {"batchSize": 32}
    told = json.dumps({"trainer": {"stepSeconds": STEP_SECONDS, **(script or {})}})
    for role in ("trainer", "inference", "orchestrator"):
        document["spec"].setdefault(role, {})["image"] = image
        document["spec"][role].setdefault("env", []).append({"name": "STUB_SCRIPT", "value": told})
    return document


@contextmanager
def installed(cluster: NativeCluster, references: Mapping[str, str]) -> Iterator[None]:
    """Install a separate release with the operator's queue, and one GPU on each of the nodes."""
    deploy.install(
        cluster,
        references,
        watch=[NAMESPACE],
        values={"queue.provider": "own", "queue.startSeconds": "60"},
        release=RELEASE,
        system=SYSTEM,
    )
    set_gpus(cluster, *NODES, count=1)
    try:
        yield
    finally:
        for kind in ("rlr", "pods", "pvc"):
            cluster.kubectl("delete", kind, "--all", "-n", NAMESPACE, timeout=120)
        cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", timeout=180)
        cluster.kubectl("delete", "namespace", NAMESPACE, SYSTEM, "--wait=false")
        set_gpus(cluster, *NODES, count=0)


def set_gpus(cluster: NativeCluster, *nodes: str, count: int) -> None:
    """Set the number of GPUs that nodes report."""
    amount = {"nvidia.com/gpu": str(count)}
    patch = json.dumps({"status": {"capacity": amount, "allocatable": amount}})
    for node in nodes:
        cluster.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)


class Story:
    """The four runs, with a check that at most one of them has pods with a GPU.

    Args:
        cluster: two nodes with the release.
        image: image of the stubs.
    """

    def __init__(self, cluster: NativeCluster, image: str) -> None:
        self.cluster = cluster
        elastic = {"trainer": {"elastic": {"min": 1, "waitSeconds": 5, "growSeconds": 600}}}
        away = {"nodeLoss": {"forceDeleteSeconds": 10}}
        # This run hangs while the node is lost, and the others last longer than the test, so that nothing depends on
        # the load of the machine.
        stands = {"faults": [{"attempt": 1, "step": 2 * INTERVAL + 2, "action": "hang"}]}
        self.first = self._run(manifest("first", image, steps=40))
        self.second = self._run(manifest("second", image, steps=2000))
        self.third = self._run(manifest("third", image, steps=2000))
        self.urgent = self._run(manifest("urgent", image, steps=30, script=stands, priority=10, **elastic, **away))

    def _run(self, document: dict[str, Any]) -> ChaosRun:
        return ChaosRun(self.cluster, document, NAMESPACE)

    def play(self) -> None:
        """Play the whole story.

        Raises:
            AssertionError: an event differs from the story; the message has the state of the run.
        """
        self.the_next_begins_when_one_has_ended()
        step = self.one_makes_room_for_a_higher_priority()
        self.a_node_is_lost()
        self.what_was_preempted_goes_on(step)

    def the_next_begins_when_one_has_ended(self) -> None:
        """Let three runs compete for the place of one."""
        self.first.apply()
        self._until(self.first, "it has room", lambda: self.first.pods("trainer"))
        self.second.apply()
        self._queued(self.second, 1, 1, f"{NEED}0 qualify (n0: 0 free; n1: 0 free)")
        since = self.second.status()["queue"]["since"]
        self._until(self.second, "who comes later has waited less, by whole seconds", lambda: _now() > since)
        self.third.apply()
        self._queued(self.third, 2, 2, f"{NEED}0 qualify (n0: 0 free; n1: 0 free)")
        self._until(self.first, "it is Complete", lambda: self.first.status()["phase"] == "Complete")
        self._until(self.second, "its turn has come", lambda: self.second.attempt() == 1)
        self._queued(self.third, 1, 1, NEED)

    def one_makes_room_for_a_higher_priority(self) -> int:
        """Let a fourth run preempt, and check the saved step of the preempted run."""
        self._until(self.second, "a checkpoint and a step more", lambda: self._step(self.second) > INTERVAL)
        self.urgent.apply()
        self._queued(self.second, 1, 2, "")
        status = self.second.status()
        saved = int(status["checkpoint"]["latestCompleteStep"])
        assert (status["restarts"], status["checkpoint"]["stepsLostTotal"]) == (0, 0), status
        assert saved >= INTERVAL, status
        assert not self.second.pods("trainer")
        self._queued(self.third, 2, 2, "")
        self._until(self.urgent, "it trains", lambda: self._step(self.urgent) > 2 * INTERVAL)
        return saved

    def a_node_is_lost(self) -> None:
        """Cut the power of one of the two nodes; the elastic run continues on the other one."""
        operator = json.loads(self.cluster.kubectl("get", "pods", "-n", SYSTEM, "-o", "json"))["items"]
        (lost,) = set(NODES) - {operator[0]["spec"]["nodeName"]}
        self.cluster.power_off(lost)
        try:
            self._until(self.urgent, "one pod is its size", lambda: self.urgent.status()["trainer"].get("size") == 1)
            status = self.urgent.status()
            assert status["restartsCountedTowardsMax"] == 0, status
            self._until(self.urgent, "it trains on", lambda: self._step(self.urgent, since=self.urgent.attempt()) > 0)
            self._queued(self.second, 1, 2, NEED)
        finally:
            self.cluster.power_on(lost)
            self.cluster.kubectl("wait", "--for=condition=Ready", f"node/{lost}", "--timeout=120s", timeout=130)
            set_gpus(self.cluster, lost, count=1)  # a restarted kubelet forgets them

    def what_was_preempted_goes_on(self, saved: int) -> None:
        """Let the queue continue with the preempted run at its saved step; a waiting run may be deleted."""
        self._until(self.urgent, "it is Complete", lambda: self.urgent.status()["phase"] == "Complete")
        self._until(self.second, "it trains on", lambda: self._step(self.second, since=2) > saved)
        status = self.second.status()
        assert status["checkpoint"]["resumedFromStep"] == saved, status
        assert (status["restarts"], status["checkpoint"]["stepsLostTotal"]) == (0, 0), status
        self._queued(self.third, 1, 1, f"{NEED}0 qualify")
        self.third.kubectl("delete", "rlr", "third", "--wait", timeout=180)
        assert not self.third.pods()

    def _queued(self, run: ChaosRun, position: int, waiting: int, words: str) -> None:
        def said() -> bool:
            status = run.status()
            place = status.get("queue") or {}
            at = (place.get("position"), place.get("waiting")) == (position, waiting)
            prefix = f"position {position} of {waiting}: {words}"
            return status.get("phase") == "Queued" and at and status["message"].startswith(prefix)

        self._until(run, f"position {position} of {waiting}: {words}", said)

    def _until(self, run: ChaosRun, what: str, holds: Callable[[], Any]) -> None:
        def alone() -> Any:
            pods = self._gpu_pods()
            assert len({pod["metadata"]["labels"]["rlrun.io/run"] for pod in pods}) < 2, (
                f"two runs have a part each: {[_shown(pod) for pod in pods]}"
            )
            return holds()

        run.wait(what, alone, steps=True)

    def _gpu_pods(self) -> list[dict[str, Any]]:
        pods = self.first.read("/api/v1|pods?labelSelector=rlrun.io/role=trainer")["items"]
        return [pod for pod in pods if pod["status"].get("phase") not in ("Succeeded", "Failed")]

    def _step(self, run: ChaosRun, since: int = 1) -> int:
        progress = run.status().get("progress") or {}
        return int(progress.get("step") or 0) if run.attempt() >= since and run.status()["phase"] == "Running" else 0


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _shown(pod: dict[str, Any]) -> str:
    ending = " ending" if "deletionTimestamp" in pod["metadata"] else ""
    return f"{pod['metadata']['name']} on {pod['spec'].get('nodeName')} {pod['status'].get('phase')}{ending}"
