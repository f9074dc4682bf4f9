"""Life of runs on a real control plane: status, conditions and events."""

from __future__ import annotations

import json
import re

import pytest

from rlrun.protocol.messages.lease_annotations import OBSERVED, OTHER
from tests.cluster import Cluster
from tests.controlplane.corpus import MALFORMED, Malformed
from tests.controlplane.harness import OperatorProcess, wait_for
from tests.controlplane.world import APPS, CORE, RUNS, World


def test_run_trains_from_creation_to_complete(world: World, cluster: Cluster) -> None:
    world.create("a")
    world.wait_phase("a", "Starting")
    world.wait_pods_ready("a", 2)
    world.renew("a", 1)
    world.wait_phase("a", "Running")
    world.renew("a", 42, total_steps=100, policy_version=41, checkpoint_step=40)
    status = wait_for(lambda: world.status("a"), lambda s: s["steps"] == "42/100", "the step is told")
    assert status["progress"]["reward"] == pytest.approx(0.542)
    assert status["checkpoint"]["latestCompleteStep"] == 40
    assert (status["trainerReady"], status["inferenceReady"]) == ("1/1", "1/1")
    line = cluster.kubectl("get", "rlr", "a", "-n", world.namespace)
    assert re.search(r"a\s+Running\s+42/100\s+0\.542\s+1/1\s+1/1\s+0\s+40", line), line
    world.renew("a", 100)
    world.end_pod("a-orchestrator-1", 0)
    status = world.wait_phase("a", "Complete")
    cluster.kubectl("wait", "rlr/a", "-n", world.namespace, "--for=condition=Complete", "--timeout=50s")
    assert status["steps"] == "100/100"
    assert status["completionTime"]
    assert world.kube.items(world.path(APPS, "statefulsets")) == [], "its GPUs are free"
    assert world.kube.items(world.path(APPS, "deployments")) == []
    assert world.kube.get(world.path(CORE, "pods", "a-orchestrator-1")), "its log stays"
    events = world.wait_event("a", "Completed")
    assert (events[0], events[-1]) == ("AttemptStarted", "Completed"), events
    assert len(events) <= 7, events


def test_deleted_trainer_pod_restarts_run_uncounted(world: World) -> None:
    world.start("a", step=7, checkpoint={"interval": 5})
    world.renew("a", 7, checkpoint_step=5)
    wait_for(lambda: world.status("a"), lambda s: s["checkpoint"].get("latestCompleteStep") == 5, "checkpoint")
    inference = {
        p["metadata"]["uid"] for p in world.pods("a") if p["metadata"]["labels"]["rlrun.io/role"] == "inference"
    }
    world.delete("pods", "a-trainer-0")
    status = world.wait_phase("a", "Starting", attempt=2)
    assert (status["restarts"], status["restartsCountedTowardsMax"]) == (1, 0)
    assert status["lastFailure"]["podName"] == "a-trainer-0"
    assert status["lastFailure"]["counted"] is False
    wait_for(
        lambda: sorted(
            p["metadata"]["name"] for p in world.pods("a") if p["metadata"]["labels"]["rlrun.io/role"] != "inference"
        ),
        lambda names: names == ["a-orchestrator-2", "a-trainer-0"],
        "the pods of attempt 2",
    )
    assert inference == {
        p["metadata"]["uid"] for p in world.pods("a") if p["metadata"]["labels"]["rlrun.io/role"] == "inference"
    }, "the engines stay warm"
    world.wait_pods_ready("a", 2)
    world.renew("a", 6, attempt=2, resumed_from_step=5, checkpoint_step=5, start_seconds='{"imports":0.1,"step":0.1}')
    status = world.wait_phase("a", "Running", attempt=2)
    assert status["checkpoint"]["resumedFromStep"] == 5
    assert status["checkpoint"]["stepsLostTotal"] == 2
    took = status["lastRestart"]
    assert sorted(took["seconds"]) == sorted((*OBSERVED, "imports", "step", OTHER))
    assert (took["attempt"], took["totalSeconds"]) == (2, sum(took["seconds"].values()))


@pytest.mark.full
def test_run_fails_after_maximum_restarts(world: World, cluster: Cluster) -> None:
    backoff = {"initialSeconds": 0.1, "maxSeconds": 0.2}
    world.start("a", failurePolicy={"maxRestarts": 3, "backoff": backoff})
    for attempt in (1, 2, 3, 4):
        world.wait_pods_ready("a", 2)
        pod = world.kube("GET", world.path(CORE, "pods", "a-trainer-0"))
        assert pod["metadata"]["labels"]["rlrun.io/attempt"] == str(attempt)
        world.end_container("a-trainer-0", 1, "CUDA error: device-side assert")
        if attempt < 4:
            world.wait_phase("a", "Starting", attempt=attempt + 1)
    status = world.wait_phase("a", "Failed")
    assert (status["restarts"], status["restartsCountedTowardsMax"]) == (3, 3)
    assert status["lastFailure"]["exitCode"] == 1
    failed = world.condition("a", "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "MaxRestartsExceeded")
    assert "device-side assert" in failed["message"]
    cluster.kubectl("wait", "rlr/a", "-n", world.namespace, "--for=condition=Failed", "--timeout=50s")
    wait_for(lambda: world.kube.items(world.path(APPS, "statefulsets")), lambda found: not found, "no trainer is left")


@pytest.mark.full
def test_wrong_configuration_fails_run_without_restart(world: World) -> None:
    world.start("a")
    world.end_pod("a-orchestrator-1", 78, "environments[0].id 'reverse-text' has no task for letters=0")
    status = world.wait_phase("a", "Failed")
    assert status["restarts"] == 0
    assert "letters=0" in status["message"]
    assert status["lastFailure"]["exitCode"] == 78
    assert world.condition("a", "Stalled")["status"] == "True"


@pytest.mark.full
def test_label_without_nodes_is_reported_with_role(world: World) -> None:
    world.create("a", trainer={"gpusPerReplica": 8}, placement={"gpuProduct": "NVIDIA-B300"})
    status = world.wait_told("a", "NVIDIA-B300")
    assert status["phase"] == "Starting"
    assert re.search(r"trainer needs 1 pod .*8 nvidia.com/gpu", status["message"]), status["message"]
    assert world.condition("a", "Scheduled")["reason"] == "Unschedulable"
    world.wait_event("a", "Unschedulable")


@pytest.mark.full
def test_unavailable_gpus_are_reported(world: World) -> None:
    world.create("a", trainer={"replicas": 40, "gpusPerReplica": 8})
    status = world.wait_told("a", "trainer needs")
    assert "8 nvidia.com/gpu" in status["message"]


@pytest.mark.full
def test_unbound_claim_is_reported(world: World) -> None:
    world.create("a", storage={"claimTemplate": {"storageClassName": "broken", "size": "1Gi"}})
    status = world.wait_told("a", "broken")
    assert "a-data" in status["message"]
    assert world.condition("a", "StorageReady")["status"] == "False"


@pytest.mark.full
def test_missing_claim_is_reported_and_used_once_created(world: World) -> None:
    world.create("a", storage={"claimName": "mine"})
    world.wait_told("a", "mine")
    claim = {
        "metadata": {"name": "mine"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "shared",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    world.kube("POST", world.path(CORE, "persistentvolumeclaims"), claim)
    wait_for(lambda: world.condition("a", "StorageReady"), lambda c: c.get("status") == "True", "the claim is seen")
    world.wait_pods_ready("a", 2)


@pytest.mark.full
def test_full_quota_is_reported_and_run_starts_after_raise(world: World) -> None:
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"count/pods": "0"}}}
    world.kube("POST", world.path(CORE, "resourcequotas"), quota)
    wait_for(
        lambda: world.kube("GET", world.path(CORE, "resourcequotas", "small")),
        lambda found: bool(found["status"].get("hard")),
        "the quota counts",
    )
    world.create("a")
    world.wait_told("a", "quota")
    world.kube("PATCH", world.path(CORE, "resourcequotas", "small"), {"spec": {"hard": {"count/pods": "10"}}})
    world.wait_pods_ready("a", 2)


@pytest.mark.full
def test_engine_scaling_changes_nothing_else(world: World) -> None:
    world.start("a")
    followers = ("pods", "deployments", "leases", "poddisruptionbudgets")
    before = world.versions("a", leave_out=followers)
    world.edit("a", {"inference": {"replicas": 3}})
    wait_for(lambda: world.status("a"), lambda s: s["inferenceReady"] == "3/3", "three engines")
    assert world.versions("a", leave_out=followers) == before
    assert world.status("a")["attempt"] == 1


def test_deleted_run_keeps_only_its_claim(world: World) -> None:
    world.start("keeps")
    world.start("drops", storage={"claimTemplate": {"size": "1Gi"}, "whenDeleted": "Delete"})
    for name in ("keeps", "drops"):
        world.delete("rlruns", name, api="/apis/rlrun.io/v1alpha1")
    wait_for(lambda: world.versions("drops"), lambda left: not left, "everything of `drops` is gone")
    left = wait_for(lambda: world.versions("keeps"), lambda left: len(left) <= 1, "everything of `keeps` but the claim")
    assert list(left) == ["persistentvolumeclaims/keeps-data"]


@pytest.mark.full
def test_recreated_run_waits_for_old_children(world: World) -> None:
    world.start("a")
    uid = world.run("a")["metadata"]["uid"]
    world.delete("rlruns", "a", api="/apis/rlrun.io/v1alpha1")
    world.create("a")
    assert world.run("a")["metadata"]["uid"] != uid
    world.wait_pods_ready("a", 2)
    status = world.status("a")
    assert (status["attempt"], status["restarts"]) == (1, 0), "the old run's ending pods are no failure of the new one"
    owners = {s["metadata"]["ownerReferences"][0]["uid"] for s in world.kube.items(world.path(APPS, "statefulsets"))}
    assert owners == {world.run("a")["metadata"]["uid"]}


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in MALFORMED if c.stage == "operator"], ids=lambda case: case.name)
def test_operator_reports_defect_and_creates_no_children(world: World, cluster: Cluster, case: Malformed) -> None:
    cluster.kubectl("apply", "-n", world.namespace, "-f", str(case.path))
    (item,) = world.kube.items(world.path("/apis/rlrun.io/v1alpha1", "rlruns"))
    name = item["metadata"]["name"]
    status = world.wait_phase(name, "Failed")
    valid = world.condition(name, "ConfigurationValid")
    assert (valid["status"], status["observedGeneration"]) == ("False", 1)
    assert re.search(case.expect, valid["message"]), valid["message"]
    assert world.kube.items(world.path(APPS, "statefulsets")) == []
    assert world.pods(name) == []


@pytest.mark.full
def test_corrected_run_starts(world: World) -> None:
    world.create("a", trainer={"podTemplate": {"spec": {"terminationGracePeriodSeconds": "soon"}}})
    assert "terminationGracePeriodSeconds" in world.wait_phase("a", "Failed")["message"]
    world.edit("a", {"trainer": {"podTemplate": None}})
    world.wait_pods_ready("a", 2)


@pytest.mark.full
def test_metrics_appear_and_vanish_with_run(world: World, operator: OperatorProcess) -> None:
    world.start("seen", step=3)
    mine = f'namespace="{world.namespace}"'

    def series() -> dict[str, float]:
        return {k: v for k, v in operator.metrics().items() if mine in k}

    wait_for(
        series,
        lambda found: (
            found.get(f'rlrun_phase{{{mine},phase="Running",run="seen"}}') == 1.0
            and found.get(f'rlrun_step{{{mine},run="seen"}}') == 3.0
        ),
        "the run is measured",
    )
    world.delete("rlruns", "seen", api="/apis/rlrun.io/v1alpha1")
    wait_for(series, lambda found: not found, "its series are gone")


@pytest.mark.full
def test_describe_shows_reason_for_unscheduled_run(world: World, cluster: Cluster) -> None:
    world.create("a", trainer={"nodeSelector": {"disk": "ssd"}})
    world.wait_told("a", "disk")
    world.wait_event("a", "Unschedulable")
    text = cluster.kubectl("describe", "rlr", "a", "-n", world.namespace)
    assert "trainer" in text
    assert "disk=ssd" in text
    assert re.search(r"Warning\s+Unschedulable", text)
    assert json.loads(cluster.kubectl("get", "rlr", "a", "-n", world.namespace, "-o", "json"))["status"]["message"]


HOST = {
    "trainer": {"lora": {"slots": 2}, "guests": ["*"]},
    "failurePolicy": {"backoff": {"initialSeconds": 0.1, "maxSeconds": 0.2}},
}
GUEST = {"trainer": {"sharedWith": "host", "lora": {"rank": 8}}}


def start_guest(world: World) -> None:
    """Create a guest of the running host, and let it train."""
    world.create("guest", **GUEST)
    world.wait_phase("guest", "Starting")
    wait_for(lambda: world.pods("guest"), lambda pods: len(pods) == 1, "the guest's orchestrator exists")
    world.renew("guest", 1)
    world.wait_phase("guest", "Running")


def test_guest_follows_host_until_both_complete(world: World, cluster: Cluster) -> None:
    world.create("guest", **GUEST)
    status = world.wait_told("guest", "there is no RLRun of this name")
    assert (status["phase"], status["reason"]) == ("Pending", "HostNotFound")
    world.start("host", **HOST)
    status = world.wait_phase("guest", "Starting")
    assert status["sharedWith"] == {"run": "host", "attempt": 1}
    assert status["storage"]["claimName"] == "host-data"
    made = {kind.partition("/")[0] for kind in world.versions("guest")}
    assert not made & {"statefulsets", "deployments", "services", "persistentvolumeclaims"}
    world.renew("guest", 3)
    world.wait_phase("guest", "Running")
    line = cluster.kubectl("get", "rlr", "guest", "-n", world.namespace)
    assert re.search(r"guest\s+Running\s+3/100\s+\S+\s+1/1\s+1/1", line), line

    world.end_container("host-trainer-0", 137)
    world.wait_phase("host", "Starting", attempt=2)
    status = world.wait_phase("guest", "Starting", attempt=2)
    assert (status["restarts"], status["restartsCountedTowardsMax"]) == (1, 0)
    assert (status["lastFailure"]["reason"], status["sharedWith"]["attempt"]) == ("HostRestarted", 2)
    world.renew("host", 100, attempt=2)
    world.wait_phase("host", "Running")

    world.end_pod("host-orchestrator-2", 0)
    status = world.wait_phase("host", "Completing")
    assert (status["reason"], status["guests"]) == ("GuestsJoined", ["guest"])
    assert "that share them: guest" in status["message"]
    assert world.kube.get(world.path(APPS, "statefulsets", "host-trainer"))
    world.renew("guest", 100, attempt=2)
    world.end_pod("guest-orchestrator-2", 0)
    world.wait_phase("guest", "Complete")
    world.wait_phase("host", "Complete")
    assert world.kube.items(world.path(APPS, "statefulsets")) == []


@pytest.mark.full
def test_guest_deletion_keeps_host_and_host_deletion_is_reported(world: World) -> None:
    world.start("host", **HOST)
    start_guest(world)
    before = world.settled("host")
    world.delete("rlruns", "guest", RUNS)
    wait_for(lambda: world.versions("guest"), lambda left: not left, "nothing of the guest is left")
    wait_for(lambda: world.status("host"), lambda status: "guests" not in status, "the host has forgotten it")
    assert world.versions("host", leave_out=("leases",)) == before
    start_guest(world)
    world.delete("rlruns", "host", RUNS)
    status = world.wait_phase("guest", "Restarting")
    assert "trainer.sharedWith (host)" in status["message"]
    wait_for(lambda: world.pods("guest"), lambda pods: not pods, "the guest's orchestrator is gone")
    assert world.condition("guest", "HostAvailable")["reason"] == "HostNotFound"
    assert world.status("guest")["restartsCountedTowardsMax"] == 0
