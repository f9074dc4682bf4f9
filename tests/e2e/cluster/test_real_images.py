"""Real torchrun groups and a real vLLM in restricted pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.api import Cluster
from tests.cluster.demo import GAIN
from tests.cluster.follow import follow
from tests.e2e.cluster.kube_run import KubeRun, example
from tests.e2e.local.local_run import LEARNED_STEPS

NewRun = Callable[[dict[str, Any]], KubeRun]
START_AT_MOST = 0.6

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.full
def test_the_quickstart_learns_on_the_cluster(new_run: NewRun, cluster: Cluster) -> None:
    """The bars of the local run, after as many steps as it needs."""
    half = {"interval": LEARNED_STEPS // 2}
    run = new_run(example("quickstart", maxSteps=LEARNED_STEPS, evaluation=half, checkpoint=half))
    run.apply()
    outcome = follow(cluster, run.name, namespace=run.namespace, timeout=900)
    assert outcome.phase == "Complete", run.explain()
    assert len(outcome.rewards) == LEARNED_STEPS
    assert outcome.start <= START_AT_MOST
    assert outcome.end >= outcome.start + GAIN
    assert outcome.held_out[0][0] == 0
    assert outcome.held_out[-1][1] >= outcome.held_out[0][1] + GAIN


def test_a_torchrun_group_of_two_pods_resumes_after_a_killed_rank(new_run: NewRun) -> None:
    document = example(
        "quickstart",
        maxSteps=24,
        trainer={"replicas": 2, "processesPerReplica": 1},
        orchestrator={"batchSize": 64},
        checkpoint={"interval": 6},
    )
    document["metadata"]["name"] = "two-pods"
    del document["spec"]["evaluation"]
    run = new_run(document)
    run.apply()
    run.wait_checkpoint(6)
    run.kill_process("two-pods-trainer-1", "trainer", "rlrun.trainer --config")
    run.wait("attempt 2, long before a collective times out", lambda: run.attempt() == 2)
    final = run.wait_phase("Complete")
    assert final["restarts"] == 1
    assert final["checkpoint"]["resumedFromStep"] >= 6
    assert final["checkpoint"]["stepsLostTotal"] <= 6
    assert final["progress"]["step"] == 24
