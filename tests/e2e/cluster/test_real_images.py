"""Real torchrun groups and a real vLLM in restricted pods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.cluster.api import Cluster
from tests.cluster.demo import GAIN
from tests.cluster.follow import follow
from tests.e2e.cluster.attempts import check_outcomes, find_places, make_attempts
from tests.e2e.cluster.kube_run import ROOT, KubeRun, example
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


@pytest.mark.full
def test_untrusted_code_in_the_real_images(new_run: NewRun, cluster: Cluster, references: Mapping[str, str]) -> None:
    """As tests/e2e/cluster/test_attempts.py, next to a real trainer and a real engine, in the image that users have."""
    files = [
        f"--from-file={ROOT / 'tests/support/faults' / name}.py" for name in ("attempts_in_a_pod", "intruder_in_a_pod")
    ]
    code = {"name": "faults", "mountPath": "/opt/faults", "readOnly": True}
    other = new_run(example("quickstart"))
    other.document["metadata"]["name"] = "aimed-at"
    document = example("quickstart", maxSteps=1000)
    document["metadata"]["name"] = "attempted"
    del document["spec"]["evaluation"]
    document["spec"]["orchestrator"] |= {
        "batchSize": 24,
        "env": [{"name": "PYTHONPATH", "value": "/opt/faults"}],
        "podTemplate": {
            "spec": {
                "volumes": [{"name": "faults", "configMap": {"name": "faults"}}],
                "containers": [{"name": "orchestrator", "volumeMounts": [code]}],
                "initContainers": [
                    {
                        "name": "environment-2",
                        "env": [{"name": "PYTHONPATH", "value": "/opt/faults"}],
                        "volumeMounts": [code],
                    }
                ],
            }
        },
    }
    run = new_run(document)
    run.kubectl("create", "configmap", "faults", *files)
    other.apply()
    other.wait_step(1)
    check_outcomes(make_attempts(run, find_places(run, other, cluster), references["trainer"]))
