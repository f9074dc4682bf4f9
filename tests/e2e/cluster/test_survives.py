"""What must not stop a run: dead processes, deleted pods, a killed or upgraded operator, an API server that is away."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.cluster import deploy
from tests.cluster.api import Cluster
from tests.e2e.cluster.kube_run import KubeRun

Manifest = Callable[..., dict[str, Any]]
NewRun = Callable[[dict[str, Any]], KubeRun]
OUTAGE_SECONDS = 60.0
INTERVAL = 5

pytestmark = pytest.mark.timeout(900)


def _trained_steps(run: KubeRun) -> list[tuple[int, int]]:
    """Step and attempt of every line of the training log."""
    claim = json.loads(run.kubectl("get", "pvc", f"{run.name}-data", "-o", "json"))
    volume = json.loads(run.cluster.kubectl("get", "pv", claim["spec"]["volumeName"], "-o", "json"))
    path = volume["spec"]["hostPath"]["path"]
    text = run.cluster.sh(run.cluster.nodes[0], "cat", f"{path}/{run.name}/metrics.jsonl")
    lines = [json.loads(line) for line in text.splitlines()]
    return [(int(line["step"]), int(line["attempt"])) for line in lines]


def test_a_killed_process_and_each_deleted_pod_cost_at_most_a_checkpoint_interval(
    new_run: NewRun, stub_manifest: Manifest
) -> None:
    run = new_run(stub_manifest("survivor", steps=45, failurePolicy={"backoff": {"initialSeconds": 1}}))
    run.apply()

    run.wait_checkpoint(INTERVAL)
    run.wait_step(INTERVAL + 2)
    run.kill_process("survivor-trainer-0", "trainer", "rlrun.stub.trainer")
    run.wait("attempt 2 trains", lambda: run.attempt() == 2 and run.status()["phase"] == "Running")
    status = run.status()
    resumed = [status["checkpoint"]["resumedFromStep"]]
    assert resumed[0] >= INTERVAL
    assert status["lastFailure"]["role"] == "trainer"
    assert status["lastFailure"]["exitCode"] == 137
    assert status["restartsCountedTowardsMax"] == 1

    run.wait_checkpoint(2 * INTERVAL)
    run.kubectl("delete", "pod", f"{run.name}-trainer-0", "--wait=false")
    run.wait("attempt 3 trains", lambda: run.attempt() == 3 and run.status()["phase"] == "Running")
    resumed.append(run.status()["checkpoint"]["resumedFromStep"])

    run.wait_checkpoint(3 * INTERVAL)
    run.kubectl("delete", "pod", f"{run.name}-orchestrator-3", "--wait=false")
    run.wait("attempt 4 trains", lambda: run.attempt() == 4 and run.status()["phase"] == "Running")
    resumed.append(run.status()["checkpoint"]["resumedFromStep"])

    run.wait_checkpoint(4 * INTERVAL)
    engine = run.pods("inference")[0]["metadata"]["name"]
    run.kubectl("delete", "pod", engine, "--wait=false")

    final = run.wait_phase("Complete", 300)
    assert final["attempt"] == 4, "losing an engine begins no attempt"
    assert final["restarts"] == 3
    assert final["restartsCountedTowardsMax"] == 1, "deleted pods are disruptions"
    assert final["progress"]["step"] == 45
    assert final["checkpoint"]["resumedFromStep"] == resumed[-1] >= 3 * INTERVAL
    assert [failure["attempt"] for failure in final["failures"]] == [1, 2, 3]
    # A step may be told after the failure was put on record, never before.
    lost = sum(failure["step"] - step for failure, step in zip(final["failures"], resumed, strict=True))
    assert lost <= final["checkpoint"]["stepsLostTotal"] <= 3 * INTERVAL, final

    trained = _trained_steps(run)
    assert [step for step, _ in trained] == list(range(1, 46)), "each step once, in order"
    attempts = [attempt for _, attempt in trained]
    assert attempts == sorted(attempts), "no step of an old attempt after a newer one began"


def test_operator_killed_and_upgraded_during_a_run(
    new_run: NewRun, stub_manifest: Manifest, cluster: Cluster, references: Mapping[str, str]
) -> None:
    run = new_run(stub_manifest("unbothered", steps=1000))
    run.apply()
    run.wait_step(5)
    before = run.identities()

    cluster.kubectl("delete", "pod", "-n", deploy.SYSTEM, "--all", "--grace-period=0", "--force", "--wait=false")
    # The addresses of a run's pods are in all that is rendered; images would not do: the manifest names its own.
    changed = {"clusterDomain": "next.local", "podAnnotations.upgraded": "yes"}
    deploy.install(cluster, references, watch=["team-a"], values=changed)
    try:
        step = run.step()
        run.wait_step(step + 10)
        assert run.identities() == before
        assert run.condition("ConfigurationValid")["reason"] == "Valid", "nobody has edited it"
        status = run.status()
        assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 1, 0)
    finally:
        deploy.install(cluster, references, watch=["team-a"])


def test_api_server_away_for_a_minute(new_run: NewRun, stub_manifest: Manifest, cluster: Cluster) -> None:
    run = new_run(stub_manifest("offline", steps=400))
    run.apply()
    run.wait_step(5)
    before, step = run.identities(), run.step()
    cluster.api_server.stop()
    try:
        time.sleep(OUTAGE_SECONDS)  # the outage itself is what is tested
    finally:
        cluster.api_server.start()
    run.wait("the run went on meanwhile", lambda: run.step() >= step + OUTAGE_SECONDS * 0.8, 60)
    assert run.identities() == before
    run.wait("the operator follows again", lambda: run.status()["progress"]["step"] > step + OUTAGE_SECONDS * 0.8, 60)
    status = run.status()
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 1, 0)
