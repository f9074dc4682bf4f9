"""Real torchrun groups and a real vLLM in restricted pods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.api import Cluster
from tests.cluster.demo import GAIN
from tests.cluster.follow import follow
from tests.e2e.cluster.attempts import check_outcomes, find_places, make_attempts
from tests.e2e.cluster.kube_run import ROOT, KubeRun, example
from tests.e2e.cluster.model_stories import SHAPES, Shape, manifest_of, put_repository, run_to_end
from tests.e2e.local.local_run import LEARNED_STEPS

NewRun = Callable[[dict[str, Any]], KubeRun]
START_AT_MOST = 0.6
SHAPE_GAIN = 0.1
"""Measured: 0.29 to 0.34 (benchmarks/results/models_on_a_cluster.md). Without learning, the standard deviation of the gain is 0.023."""

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.full
def test_quickstart_learns_on_cluster(new_run: NewRun, cluster: Cluster) -> None:
    """The reward limits are those of the local run, after the required number of steps."""
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


@pytest.mark.full
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))
def test_repository_of_published_shape_learns_on_cluster(
    shape: Shape, new_run: NewRun, references: Mapping[str, str], tmp_path: Path
) -> None:
    learning, flipped = new_run(manifest_of(shape)), new_run(manifest_of(shape, flipped=True))
    try:
        put_repository(learning, shape, tmp_path, references["trainer"])
        learned, unlearned = run_to_end(learning), run_to_end(flipped)
    finally:
        learning.kubectl("delete", f"pvc/{shape.name}", "--ignore-not-found", "--wait=false")
    print(f"{shape.name}: {learned.before} to {learned.after}; flipped: {unlearned.before} to {unlearned.after}")
    assert learned.gain >= SHAPE_GAIN
    assert unlearned.gain < 0
    for result in (learned, unlearned):
        assert abs(result.mismatch) < shape.largest_mismatch
        assert (result.status["attempt"], result.status.get("restarts", 0)) == (1, 0)


def test_torchrun_group_resumes_after_killed_rank(new_run: NewRun) -> None:
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
def test_untrusted_code_cannot_leave_sandbox_in_real_images(
    new_run: NewRun, cluster: Cluster, references: Mapping[str, str]
) -> None:
    """The attempts of tests/e2e/cluster/test_attempts.py next to a real trainer and a real engine, in the image of
    users."""
    aimed_at = example("quickstart", maxSteps=1000)
    aimed_at["metadata"]["name"] = "aimed-at"
    file = Path(__file__).with_name("attempts_in_real_images.yaml")
    attempted = example("quickstart", **yaml.safe_load(file.read_text()))
    attempted["metadata"]["name"] = "attempted"
    del attempted["spec"]["evaluation"]
    other, run = new_run(aimed_at), new_run(attempted)
    modules = (ROOT / "tests/support/faults" / f"{name}.py" for name in ("attempts_in_a_pod", "intruder_in_a_pod"))
    run.kubectl("create", "configmap", "faults", *(f"--from-file={module}" for module in modules))
    try:
        other.apply()
        other.wait_step(1)
        check_outcomes(make_attempts(run, find_places(run, other, cluster), references["trainer"]))
    finally:
        run.kubectl("delete", "configmap", "faults", "--wait=false")
