"""The operator with Kueue's own manager: quota, flavors, priorities, evictions, timeouts and queue states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.cluster import Cluster
from tests.controllers.kueue import KUEUE, RealKueue
from tests.controlplane.harness import Json, OperatorProcess, wait_for
from tests.controlplane.installation import judged_operator
from tests.controlplane.world import CORE, World
from tests.support.kueue import is_true

QUEUE = {"provider": "kueue"}
FOUR = {"trainer": {"gpusPerReplica": 4}, "inference": {"replicas": 1, "gpusPerReplica": 4, "tensorParallel": 4}}


@pytest.fixture(scope="module")
def operator(
    cluster: Cluster, nodes: tuple[str, ...], kueue: RealKueue, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """One operator that may read ResourceFlavors."""
    with judged_operator(cluster, tmp_path_factory.mktemp("operator"), RLRUN_QUEUE=json.dumps(QUEUE)) as operator:
        yield operator


@pytest.fixture
def queues(world: World, kueue: RealKueue) -> Iterator[World]:
    """Two flavors with eight GPUs each, and a LocalQueue of this test's namespace."""
    for name in ("h100", "a100"):
        spec = {"nodeLabels": {"gpu": name}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
        world.kube("POST", f"{KUEUE}/resourceflavors", _object("ResourceFlavor", name, spec))
    flavors = [
        {
            "name": name,
            "resources": [
                {"name": "nvidia.com/gpu", "nominalQuota": 8},
                {"name": "cpu", "nominalQuota": 640},
                {"name": "memory", "nominalQuota": "5Ti"},
            ],
        }
        for name in ("h100", "a100")
    ]
    spec = {
        "namespaceSelector": {},
        "queueingStrategy": "BestEffortFIFO",
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": ["nvidia.com/gpu", "cpu", "memory"], "flavors": flavors}],
    }
    world.kube("POST", f"{KUEUE}/clusterqueues", _object("ClusterQueue", "gpus", spec))
    local = _object("LocalQueue", "team-a", {"clusterQueue": "gpus"})
    world.kube("POST", world.path(KUEUE, "localqueues"), local)
    yield world
    for one in world.kube.items(world.path("/apis/rlrun.io/v1alpha1", "rlruns")):
        world.delete("rlruns", one["metadata"]["name"], "/apis/rlrun.io/v1alpha1")
    wait_for(
        lambda: world.kube.items(world.path(KUEUE, "workloads")),
        lambda found: not found,
        "no Workload is left",
    )
    world.delete("localqueues", "team-a", KUEUE)
    for plural, names in (("clusterqueues", ("gpus",)), ("resourceflavors", ("h100", "a100"))):
        for name in names:
            world.kube("DELETE", f"{KUEUE}/{plural}/{name}")
            wait_for(
                lambda path=f"{KUEUE}/{plural}/{name}": world.kube.get(path),
                lambda found: found is None,
                f"{name} is gone",
            )


def _object(kind: str, name: str, spec: Json) -> Json:
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, "spec": spec}


def workloads(world: World, run: str) -> list[Json]:
    """Return the Workloads of a run: at most one."""
    found = world.kube.items(world.path(KUEUE, "workloads"))
    return [one for one in found if one["metadata"]["ownerReferences"][0]["name"] == run]


def wait_workload(world: World, run: str, good: Callable[[Json], bool], what: str) -> Json:
    """Wait until the Workload of a run satisfies a predicate; return it."""
    found = wait_for(
        lambda: workloads(world, run),
        lambda seen: len(seen) == 1 and good(seen[0]),
        f"the Workload of {run} {what}",
    )
    return found[0]


def counts(one: Json) -> dict[str, int]:
    return {each["name"]: each["count"] for each in one["spec"]["podSets"]}


def train(world: World, name: str, step: int, *, attempt: int = 1, pods: int = 2, **more: object) -> None:
    """Let an admitted attempt start and reach a saved step."""
    world.wait_phase(name, "Starting", attempt=attempt)
    world.wait_pods_ready(name, pods)
    world.renew(name, step, attempt=attempt, checkpoint_step=step, **more)
    world.wait_phase(name, "Running")


def nodes_of(world: World, name: str) -> set[str]:
    """Return nodes of a run's GPU pods; orchestrators request no GPU and run on any node."""
    roles = ("trainer", "inference")
    return {
        one["spec"].get("nodeName") for one in world.pods(name) if one["metadata"]["labels"]["rlrun.io/role"] in roles
    }


def test_kueue_queues_runs_and_preempts_by_priority(queues: World) -> None:
    world = queues
    world.create("a", queueName="team-a", **FOUR)
    train(world, "a", 5)
    assert nodes_of(world, "a") == {"flavor-0"}
    world.create("b", queueName="team-a", **FOUR)
    train(world, "b", 7)
    assert nodes_of(world, "b") == {"flavor-1"}, "the second flavor has room"
    wait_workload(world, "b", lambda one: is_true(one, "PodsReady"), "says PodsReady")

    world.create("c", queueName="team-a", **FOUR)
    status = world.wait_told("c", "insufficient unused quota for nvidia.com/gpu in flavor a100")
    assert (status["phase"], status["reason"], world.pods("c")) == ("Queued", "WaitingForResources", [])

    world.create("d", queueName="team-a", priority=100, **FOUR)
    (loser,) = wait_for(
        lambda: [name for name in "ab" if world.status(name)["phase"] in ("Suspending", "Queued")],
        lambda found: len(found) == 1,
        "one run gives way",
    )
    train(world, "d", 3)
    status = world.wait_told(loser, "insufficient unused quota")
    assert (status["phase"], status["restarts"], status["checkpoint"]["stepsLostTotal"]) == ("Queued", 0, 0)
    assert "Preempted" in world.events(loser)
    world.renew("d", 100, checkpoint_step=100)
    world.end_pod("d-orchestrator-1", 0)
    world.wait_phase("d", "Complete")
    wait_workload(world, "d", lambda one: is_true(one, "Finished"), "is finished")
    world.wait_phase(loser, "Starting", attempt=2)
    assert world.status("c")["phase"] == "Queued", "it came later"


def test_kueue_reasons_for_waiting_are_reported(queues: World) -> None:
    world = queues
    big = {"trainer": {"gpusPerReplica": 8}, "inference": {"replicas": 2, "gpusPerReplica": 8, "tensorParallel": 8}}
    world.create("big", queueName="team-a", **big)
    status = world.wait_told("big", r"> maximum capacity \(8\)")
    assert (status["phase"], status["reason"]) == ("Queued", "NeverFits")
    world.create("lost", queueName="nowhere", **FOUR)
    status = world.wait_told("lost", "^LocalQueue nowhere doesn't exist")
    assert (status["phase"], status["reason"]) == ("Queued", "QueueMisconfigured")

    world.create("a", queueName="team-a", **FOUR)
    train(world, "a", 5)
    world.kube("PATCH", f"{KUEUE}/clusterqueues/gpus", {"spec": {"stopPolicy": "HoldAndDrain"}})
    status = world.wait_told("a", "The ClusterQueue is stopped")
    status = world.wait_phase("a", "Queued")
    assert status["reason"] == "WaitingForTurn"
    assert world.kube.items(world.path(CORE, "pods")) == []
    world.kube("PATCH", f"{KUEUE}/clusterqueues/gpus", {"spec": {"stopPolicy": "None"}})
    train(world, "a", 9, attempt=2, resumed_from_step=5)
    assert world.status("a")["checkpoint"]["stepsLostTotal"] == 0


def test_workload_follows_suspension_scaling_and_deletion(queues: World) -> None:
    world = queues
    world.create("a", queueName="team-a", trainer={"gpusPerReplica": 2}, inference={"replicas": 1, "gpusPerReplica": 1})
    train(world, "a", 5)
    world.edit("a", {"suspend": True})
    world.wait_phase("a", "Suspended")
    wait_workload(world, "a", lambda one: not one["status"].get("admission"), "has no quota")
    world.edit("a", {"suspend": False})
    train(world, "a", 8, attempt=2, resumed_from_step=5)

    world.edit("a", {"inference": {"replicas": 3}})
    wait_workload(world, "a", lambda one: counts(one).get("inference") == 3, "has three engines")
    train(world, "a", 9, attempt=3, pods=4, resumed_from_step=8)
    name = workloads(world, "a")[0]["metadata"]["name"]
    world.kube("DELETE", world.path(KUEUE, "workloads", name))
    train(world, "a", 11, attempt=4, pods=4, resumed_from_step=9)
    assert world.status("a")["restarts"] == 0


def test_kueue_timeout_and_deactivation_are_reported(queues: World, kueue: RealKueue) -> None:
    world = queues
    retry = {"backoffBaseSeconds": 3, "backoffLimitCount": 1}
    kueue.stop()
    kueue.start(waitForPodsReady={"timeout": "5s", "recoveryTimeout": "5s", "requeuingStrategy": retry})
    world.kube("PATCH", "/api/v1/nodes/flavor-0", {"spec": {"unschedulable": True}})
    world.create("a", queueName="team-a", **FOUR)
    status = world.wait_told("a", "retries at")
    assert (status["phase"], status["reason"]) == ("Queued", "BackingOff")
    status = world.wait_told("a", "set spec.active of Workload .* to true, or suspend the run and resume it")
    assert (status["phase"], status["reason"]) == ("Queued", "WorkloadDeactivated")

    world.kube("PATCH", "/api/v1/nodes/flavor-0", {"spec": {"unschedulable": None}})
    kueue.stop()
    kueue.start()
    world.edit("a", {"suspend": True})
    world.wait_phase("a", "Suspended")
    world.edit("a", {"suspend": False})
    attempt = world.status("a")["attempt"]
    wait_for(lambda: world.status("a"), lambda s: s["attempt"] > attempt, "the next attempt")
    train(world, "a", 2, attempt=attempt + 1)


def test_run_continues_after_kueue_manager_is_killed(queues: World, kueue: RealKueue) -> None:
    world = queues
    kueue.stop()
    kueue.start(manageJobsWithoutQueueName=True)
    world.create("a", queueName="team-a", **FOUR)
    train(world, "a", 5)
    assert len(world.kube.items(world.path(KUEUE, "workloads"))) == 1, "none for its StatefulSet, Deployment or pods"
    kueue.kill()
    for step in range(6, 9):
        world.renew("a", step, checkpoint_step=step)
        wait_for(
            lambda: world.status("a")["progress"]["step"],
            lambda seen, step=step: seen == step,
            f"step {step}",
        )
    kueue.start()
    world.create("b", queueName="team-a", **FOUR)
    train(world, "b", 2)
    status = world.status("a")
    assert (status["phase"], status["attempt"]) == ("Running", 1)
