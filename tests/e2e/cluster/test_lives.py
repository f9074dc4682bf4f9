"""A run from `kubectl apply` to Complete, as its user experiences it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api import Cluster
from tests.cluster.deploy import RELEASE, SYSTEM
from tests.cluster.images import BuiltImage
from tests.e2e.cluster.kube_run import KubeRun, example

Manifest = Callable[..., dict[str, Any]]
NewRun = Callable[[dict[str, Any]], KubeRun]

pytestmark = pytest.mark.timeout(1200)  # the first test starts the cluster, and unpacks new images


def test_run_reports_progress_by_get_wait_and_events(
    new_run: NewRun, stub_manifest: Manifest, cluster: Cluster, tmp_path: Path
) -> None:
    run = new_run(stub_manifest("plain", steps=30))
    run.apply()
    told = tmp_path / "watch"
    with told.open("w") as output:
        watch = subprocess.Popen(
            [str(cluster.bin / "kubectl"), "get", "rlr", "plain", "-n", run.namespace, "-w", "--no-headers"],
            env=cluster.environment,
            stdout=output,
        )
    try:
        run.kubectl("wait", "--for=condition=Complete", "rlr/plain", "--timeout=180s", timeout=200)
        run.wait("the watch tells of the end too", lambda: re.search(r"\bComplete\b", told.read_text()))
    finally:
        watch.terminate()
        watch.wait(10)
    seen = told.read_text()
    phases = list(dict.fromkeys(re.findall(r"\b(Starting|Running|Completing|Complete|Restarting|Failed)\b", seen)))
    assert phases == ["Starting", "Running", "Completing", "Complete"], seen
    assert len(set(re.findall(r"\b\d+/30\b", seen))) >= 3, f"the step moves\n{seen}"
    assert seen.splitlines()[-1].split()[2] == "30/30", seen
    assert {"0/1", "1/1"} <= set(seen.split()), "ready counts move"
    rewards = [float(reward) for reward in re.findall(r"\b0\.\d+\b", seen)]
    assert len(set(rewards)) >= 2, f"the reward moves\n{seen}"
    assert rewards[-1] > rewards[0], seen

    def posted() -> set[str]:
        events = json.loads(run.kubectl("get", "events", "-o", "json"))["items"]
        return {event["reason"] for event in events if event["involvedObject"]["name"] == "plain"}

    run.wait("events, which follow the status", lambda: {"AttemptStarted", "Completed"} <= posted())
    assert not run.pods("trainer"), "a complete run holds no GPU"
    assert not run.pods("inference")
    assert "step 30: reward" in run.kubectl("logs", "plain-orchestrator-1")


@pytest.mark.full
def test_helm_test_passes(cluster: Cluster) -> None:
    told = cluster.helm("test", RELEASE, "--namespace", SYSTEM, "--logs", timeout=150)
    assert "RLRun is installed, the rights are complete, and an operator serves" in told


@pytest.mark.full
def test_sft_run_ends_with_data_without_engines(new_run: NewRun, images: Mapping[str, BuiltImage]) -> None:
    chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}]
    rows = f"{json.dumps({'messages': chat})}\n" * 24
    chats = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "chats"}, "data": {"rows.jsonl": rows}}
    mounted = {
        "volumes": [{"name": "chats", "configMap": {"name": "chats"}}],
        "containers": [{"name": "orchestrator", "volumeMounts": [{"name": "chats", "mountPath": "/chats"}]}],
    }
    stub = {"image": images["stub"].reference}
    data = {"sources": [{"path": "/chats/rows.jsonl"}], "batchSize": 4, "epochs": 1}
    document = example("sft", data=data, trainer=stub, orchestrator={**stub, "podTemplate": {"spec": mounted}})
    document["metadata"]["name"] = "taught"
    document["spec"]["data"]["validation"] = {"path": "/chats/rows.jsonl", "interval": 3}
    run = new_run(document)
    run.kubectl("apply", "-f", "-", stdin=json.dumps(chats))
    run.apply()
    run.wait("a trainer pod", lambda: run.pods("trainer"))
    assert not run.kubectl("get", "deploy", "-l", "rlrun.io/run=taught", "-o", "name")
    final = run.wait_phase("Complete")
    assert (final["steps"], final["attempt"], final["checkpoint"]["latestCompleteStep"]) == ("6/6", 1, 6)
    assert final["inference"]["desired"] == 0
    assert not run.condition("InferenceAvailable"), "a run without engines says nothing of them"
    assert "step 6" in run.kubectl("logs", "taught-orchestrator-1")


@pytest.mark.full
def test_evaluation_run_measures_checkpoint_without_trainer(
    new_run: NewRun, stub_manifest: Manifest, images: Mapping[str, BuiltImage]
) -> None:
    trained = new_run(stub_manifest("trained", steps=10))
    trained.apply()
    trained.wait_phase("Complete")
    stub = {"image": images["stub"].reference}
    document = example(
        "eval",
        policies={"fromRun": "trained", "steps": [10], "base": True},
        evaluation={"numTasks": 8, "samplesPerTask": 2},
        storage={"claimName": "trained-data"},
        inference=stub,
        orchestrator=stub,
    )
    document["metadata"]["name"] = "measured"
    run = new_run(document)
    run.apply()
    final = run.wait_phase("Complete")
    assert (final["steps"], final["attempt"], final["trainerReady"]) == ("32/32", 1, "0/0")
    assert [line.partition(":")[0] for line in final["results"]] == ["reverse-text, base", "reverse-text, step 10"]
    assert all("avg@2 0." in line or "avg@2 1." in line for line in final["results"]), final["results"]
    assert not run.condition("CheckpointHealthy"), "a run that trains nothing says nothing of checkpoints"
    assert not run.kubectl("get", "sts", "-l", "rlrun.io/run=measured", "-o", "name")
    assert not run.pods("inference"), "a complete run holds no GPU"
    assert "reverse-text, step 10: avg@2" in run.kubectl("logs", "measured-orchestrator-1")


@pytest.mark.full
def test_run_continues_after_environment_container_restart(
    new_run: NewRun, stub_manifest: Manifest, images: Mapping[str, BuiltImage]
) -> None:
    # Only the Python with pydantic of this image is used: the code comes from the orchestrator's container.
    apart = {"id": "reverse-text", "groupSize": 8, "image": images["stub"].reference, "python": "/opt/rlrun/bin/python"}
    run = new_run(stub_manifest("apart", steps=25, environments=[apart]))
    run.apply()
    run.wait_step(3)
    (pod,) = run.pods("orchestrator")
    name = pod["metadata"]["name"]
    (sidecar,) = (c for c in pod["status"]["initContainerStatuses"] if c["name"] == "environment-0")
    assert sidecar["ready"]
    run.kubectl("exec", name, "-c", "environment-0", "--", "/opt/rlrun/bin/python", "-c", "import os; os.kill(1, 15)")
    final = run.wait_phase("Complete")
    assert (final["attempt"], final["progress"]["step"]) == (1, 25)
    (pod,) = run.pods("orchestrator")
    (sidecar,) = (c for c in pod["status"]["initContainerStatuses"] if c["name"] == "environment-0")
    assert sidecar["restartCount"] >= 1
    assert "was in a container that ended" in run.kubectl("logs", name, "-c", "orchestrator")


@pytest.mark.full
def test_deleted_run_loses_children_and_keeps_volume(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("short-lived"))
    run.apply()
    run.wait_step(1)
    run.delete()
    kinds = "sts,deploy,pods,services,configmaps,secrets,serviceaccounts,roles,rolebindings,leases,networkpolicies,pdb"
    label = "rlrun.io/run=short-lived"
    run.wait("children gone", lambda: not run.kubectl("get", kinds, "-l", label, "-o", "name").split())
    assert "short-lived-data" in run.kubectl("get", "pvc")


@pytest.mark.full
def test_network_policy_isolates_engines_of_runs(new_run: NewRun, stub_manifest: Manifest) -> None:
    """The neighbor has no policy, so only the policy of the guarded run can block the connections."""
    run = new_run(stub_manifest("guarded", steps=1000))
    other = new_run(stub_manifest("neighbour", steps=1000, networkPolicy={"mode": "None"}))
    run.apply()
    other.apply()
    run.wait_step(1)
    other.wait_step(1)
    script = (
        "import sys, urllib.request\n"
        "try: print(urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).status)\n"
        "except Exception as error: print(type(error).__name__, getattr(error, 'code', ''), error)\n"
    )

    def ask(asking: KubeRun, asked: KubeRun, seconds: int) -> str:
        url = f"http://{asked.pods('inference')[0]['status']['podIP']}:8000/health"
        return run.kubectl("exec", f"{asking.name}-orchestrator-1", "--", "python3", "-c", script, url, str(seconds))

    assert ask(run, run, 60).startswith("200")
    assert ask(other, other, 60).startswith("200")
    assert "timed out" in ask(other, run, 5), "what comes in"
    assert "timed out" in ask(run, other, 5), "what goes out"


@pytest.mark.full
def test_restarted_operator_leaves_finished_run_unchanged(
    new_run: NewRun, stub_manifest: Manifest, cluster: Cluster
) -> None:
    run = new_run(stub_manifest("done", steps=10))
    run.apply()
    run.wait_phase("Complete")
    before = run.wait_resource_version()
    cluster.kubectl("rollout", "restart", "-n", "rlrun-system", "deploy/rlrun-operator")
    cluster.kubectl("rollout", "status", "-n", "rlrun-system", "deploy/rlrun-operator", "--timeout=180s", timeout=190)
    second = new_run(stub_manifest("after", steps=5))
    second.apply()
    second.wait_phase("Complete")
    assert run.get()["metadata"]["resourceVersion"] == before
    assert not run.pods("trainer")


@pytest.mark.full
def test_recreated_run_resumes_from_its_volume(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("phoenix", steps=30))
    run.apply()
    run.wait_checkpoint(10)
    first = run.get()["metadata"]["uid"]
    run.kubectl("delete", "rlr", "phoenix", "--wait")  # its children are still terminating
    run.apply()
    final = run.wait_phase("Complete")
    assert run.get()["metadata"]["uid"] != first
    assert final["checkpoint"]["resumedFromStep"] >= 10
    assert final["attempt"] > 1, "the volume knows of attempt 1"
    assert final["restartsCountedTowardsMax"] == 0
