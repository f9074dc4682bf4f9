"""Faults that a run must survive: killed processes, deleted pods, a killed or upgraded operator, and an API server
outage."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.cluster import deploy
from tests.cluster.api import Cluster
from tests.e2e.chaos.play import PATIENCE
from tests.e2e.cluster.kube_run import KubeRun

Manifest = Callable[..., dict[str, Any]]
NewRun = Callable[[dict[str, Any]], KubeRun]
OUTAGE_SECONDS = 60.0
INTERVAL = 5

pytestmark = pytest.mark.timeout(900)


def _trained_steps(run: KubeRun) -> list[tuple[int, int]]:
    """Return step and attempt of every line of the training log."""
    claim = json.loads(run.kubectl("get", "pvc", f"{run.name}-data", "-o", "json"))
    volume = json.loads(run.cluster.kubectl("get", "pv", claim["spec"]["volumeName"], "-o", "json"))
    path = volume["spec"]["hostPath"]["path"]
    text = run.cluster.sh(run.cluster.nodes[0], "cat", f"{path}/{run.name}/metrics.jsonl")
    lines = [json.loads(line) for line in text.splitlines()]
    return [(int(line["step"]), int(line["attempt"])) for line in lines]


def test_killed_process_and_deleted_pods_lose_one_interval(new_run: NewRun, stub_manifest: Manifest) -> None:
    # Each attempt hangs two steps after a checkpoint, so that the number of lost steps does not depend on the load of
    # the machine.
    hangs = [{"attempt": attempt, "step": attempt * INTERVAL + 3, "action": "hang"} for attempt in (1, 2, 3)]
    script = {"trainer": {"stepSeconds": 0.5, "faults": hangs}}
    run = new_run(stub_manifest("survivor", script, steps=25, failurePolicy={"backoff": {"initialSeconds": 1}}))

    def trains_until_it_hangs(attempt: int) -> dict[str, Any]:
        run.wait_checkpoint(attempt * INTERVAL)
        run.wait_step(attempt * INTERVAL + 2)
        return run.wait_phase("Running")

    run.apply()
    trains_until_it_hangs(1)
    run.kill_process("survivor-trainer-0", "trainer", "tests.support.stub.trainer")
    run.wait("attempt 2", lambda: run.attempt() == 2)

    status = trains_until_it_hangs(2)
    assert (status["lastFailure"]["role"], status["lastFailure"]["exitCode"]) == ("trainer", 137)
    assert status["checkpoint"]["resumedFromStep"] == INTERVAL
    assert status["restartsCountedTowardsMax"] == 1
    run.kubectl("delete", "pod", "survivor-trainer-0", "--wait=false")
    run.wait("attempt 3", lambda: run.attempt() == 3)

    status = trains_until_it_hangs(3)
    assert status["checkpoint"]["resumedFromStep"] == 2 * INTERVAL
    (engine,) = (pod["metadata"]["name"] for pod in run.pods("inference"))
    run.kubectl("delete", "pod", engine)
    run.wait("another engine serves", lambda: run.status()["inference"]["ready"] == 1)
    assert run.attempt() == 3, "losing an engine begins no attempt"
    run.kubectl("delete", "pod", "survivor-orchestrator-3", "--wait=false")

    final = run.wait_phase("Complete")
    assert (final["attempt"], final["restarts"], final["progress"]["step"]) == (4, 3, 25)
    assert final["restartsCountedTowardsMax"] == 1, "deleted pods are disruptions"
    assert final["checkpoint"]["resumedFromStep"] == 3 * INTERVAL
    assert [(failure["attempt"], failure["step"]) for failure in final["failures"]] == [(1, 7), (2, 12), (3, 17)]
    assert final["checkpoint"]["stepsLostTotal"] == 3 * 2

    trained = _trained_steps(run)
    assert [step for step, _ in trained] == list(range(1, 26)), "each step once, in order"
    assert [attempt for _, attempt in trained] == [1] * 5 + [2] * 5 + [3] * 5 + [4] * 10, (
        "nothing lost is told as trained"
    )


@pytest.mark.full
def test_operator_kill_and_upgrade_do_not_disturb_run(
    new_run: NewRun, stub_manifest: Manifest, cluster: Cluster, references: Mapping[str, str]
) -> None:
    run = new_run(stub_manifest("unbothered", steps=1000))
    run.apply()
    run.wait_step(5)
    before = run.identities()

    cluster.kubectl("delete", "pod", "-n", deploy.SYSTEM, "--all", "--grace-period=0", "--force", "--wait=false")
    # Another cluster domain changes all rendered objects of a run. Images would not, because the manifest names its
    # own.
    changed = {"clusterDomain": "next.local", "podAnnotations.upgraded": "yes"}
    deploy.install(cluster, references, watch=["team-a"], values=changed)
    try:
        step = run.step()
        run.wait_step(step + 10)
        assert run.identities() == before
        assert run.condition("ConfigurationValid")["reason"] == "Valid", "nobody has edited it"
        status = run.status()
        assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 1, 0), status.get("lastFailure")
    finally:
        deploy.install(cluster, references, watch=["team-a"])


@pytest.mark.full
@pytest.mark.nodes_recover
def test_run_continues_during_api_server_outage(new_run: NewRun, stub_manifest: Manifest, cluster: Cluster) -> None:
    manifest = stub_manifest("offline", steps=400)
    for role in ("trainer", "inference", "orchestrator"):
        # The nodes' heartbeats are late for a while afterwards. Kubernetes keeps pods there for 5 minutes, the test
        # cluster for seconds.
        manifest["spec"][role]["podTemplate"] = {"spec": {"tolerations": PATIENCE}}
    run = new_run(manifest)
    run.apply()
    run.wait_step(5)
    before, step = run.identities(), run.step()
    cluster.api_server.stop()
    try:
        time.sleep(OUTAGE_SECONDS)  # the duration of the outage under test
    finally:
        cluster.api_server.start()
    run.wait("the run went on meanwhile", lambda: run.step() >= step + OUTAGE_SECONDS * 0.8, steps=True)
    assert run.identities() == before
    followed = step + OUTAGE_SECONDS * 0.8
    run.wait("the operator follows again", lambda: run.status()["progress"]["step"] > followed, steps=True)
    status = run.status()
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 1, 0), status.get("lastFailure")
