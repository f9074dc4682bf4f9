"""The installed resource: output of kubectl, stored fields, and edits allowed after the start of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import Kube
from tests.controlplane.installation import fresh_namespace
from tests.controlplane.world import RUNS

SMALLEST = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: frozen}
spec:
  model: {path: /models/tiny}
  environments:
  - {id: reverse-text}
"""
STATUS = {
    "phase": "Running",
    "reason": "Stepping",
    "attempt": 2,
    "steps": "412/1000",
    "trainerReady": "2/2",
    "inferenceReady": "4/4",
    "restarts": 1,
    "progress": {"step": 412, "reward": 0.7123, "policyVersion": 411, "stalenessMean": 1.5, "tokensPerSecond": 51200},
    "checkpoint": {"latestCompleteStep": 400},
}


@pytest.fixture(scope="module")
def begun(cluster: Cluster) -> Iterator[str]:
    """Namespace of a run whose first attempt has started; tests do not change it."""
    with fresh_namespace(cluster) as namespace:
        cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=SMALLEST)
        start_attempt(cluster, namespace, "frozen")
        yield namespace


@pytest.fixture
def run(cluster: Cluster, namespace: str) -> str:
    """Name of a run without an operator in that namespace."""
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=SMALLEST)
    return "frozen"


def patch(cluster: Cluster, namespace: str, run: str, changes: dict[str, Any], subresource: str = "") -> None:
    """Merge `changes` into a run by a request, because each kubectl costs CPU time."""
    path = f"{RUNS}/namespaces/{namespace}/rlruns/{run}"
    Kube(cluster.kubeconfig)("PATCH", f"{path}/{subresource}" if subresource else path, changes)


def refusal(cluster: Cluster, namespace: str, run: str, spec: dict[str, Any]) -> str:
    with pytest.raises(AssertionError) as error:
        patch(cluster, namespace, run, {"spec": spec})
    return str(error.value)


def start_attempt(cluster: Cluster, namespace: str, run: str) -> None:
    patch(cluster, namespace, run, {"status": {"attempt": 1}}, "status")


def test_stored_spec_equals_written_spec(cluster: Cluster, namespace: str, run: str) -> None:
    spec = json.loads(cluster.kubectl("get", "rlr", run, "-n", namespace, "-o", "json"))["spec"]
    assert spec == {"model": {"path": "/models/tiny"}, "environments": [{"id": "reverse-text"}]}


def test_kubectl_get_shows_status_columns(cluster: Cluster, namespace: str, run: str) -> None:
    patch(cluster, namespace, run, {"status": STATUS}, "status")
    head, line = cluster.kubectl("get", "rlr", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "PHASE", "STEP", "REWARD", "TRAINER", "INFERENCE", "RESTARTS", "CKPT", "AGE"]
    assert line.split()[:-1] == ["frozen", "Running", "412/1000", "0.7123", "2/2", "4/4", "1", "400"]
    for phase, names in (("Running", ["rlrun.rlrun.io/frozen"]), ("Failed", [])):
        found = cluster.kubectl("get", "rlr", "-n", namespace, "-o", "name", f"--field-selector=status.phase={phase}")
        assert found.split() == names
    head, line = cluster.kubectl("get", "rl", "-n", namespace, "-o", "wide").splitlines()
    assert head.split()[9:] == ["REASON", "ATTEMPT", "VERSION", "STALENESS", "TOK/S"]
    assert line.split()[9:] == ["Stepping", "2", "411", "1.5", "51200"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("rlrun", "reinforcement-learning"),
        ("rlrun.spec.trainer", "processesPerReplica.*Ranks per replica"),
        ("rlrun.spec.algorithm.maxAsyncLevel", "Pipeline depth"),
        ("rlrun.spec.storage", "ReadWriteMany|existing PersistentVolumeClaim"),
        ("rlrun.spec.trainer.affinity.nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
        ("rlrun.status.checkpoint", "latestCompleteStep"),
    ],
)
def test_kubectl_explain_describes_field(cluster: Cluster, path: str, words: str) -> None:
    assert re.search(words, cluster.kubectl("explain", path), re.DOTALL)


def test_spec_is_editable_before_first_attempt(cluster: Cluster, namespace: str, run: str) -> None:
    patch(cluster, namespace, run, {"spec": {"maxSteps": 7, "trainer": {"replicas": 2}, "storage": {"claimName": "a"}}})
    start_attempt(cluster, namespace, run)
    assert "seqLen (16, was 2048)" in refusal(cluster, namespace, run, {"seqLen": 16})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"maxSteps": 99}, r"maxSteps \(99\) may only grow since attempt 1 started; it is 100"),
        (
            {"seqLen": 4096, "seed": 3},
            r'frozen .*: \["seqLen \(4096, was 2048\)", "seed \(3, was 0\)"\]; set spec.suspend to true',
        ),
        ({"model": {"path": "/other"}}, r'fixed .*: \["model.path"\]; changing it needs a new run'),
        ({"storage": {"claimName": "other"}, "managedBy": "b"}, r'fixed .*: \["storage", "managedBy"\]'),
        ({"storage": {"mountPath": "/mnt"}}, r'fixed .*: \["storage"\]'),
        ({"storage": {"claimTemplate": {"size": "1Ti", "storageClassName": "b"}}}, r'fixed .*: \["storage"\]'),
        (
            {"storage": {"claimTemplate": {"size": "99Gi"}}},
            r"size: size \(99Gi\) must be at least 100Gi since attempt 1 started: a claim cannot shrink; write 100Gi or more",
        ),
        ({"trainer": {"sharedWith": "other"}}, r'fixed .*: \["trainer.sharedWith"\]'),
        ({"environments": [{"id": "arithmetic"}]}, r'frozen .*: \["environments"\]'),
        ({"evaluation": {"interval": 5}}, r'\["evaluation"\]'),
        (
            {
                "trainer": {"image": "x", "optimizer": {"lr": 0.1}},
                "orchestrator": {"podTemplate": {"spec": {"hostNetwork": True}}},
            },
            r'\["trainer.image", "trainer.optimizer", "orchestrator.podTemplate"\]',
        ),
        ({"inference": {"replicas": 2, "extraArgs": ["--x"]}}, r': \["inference.extraArgs"\]'),
        ({"placement": {"pool": "b"}}, r'\["placement.pool"\]'),
        ({"networkPolicy": {"mode": "None"}}, r'\["networkPolicy.mode"\]'),
        (
            {"checkpoint": {"interval": 5}, "weightSync": {"timeoutSeconds": 9}},
            r'\["checkpoint.interval", "weightSync.timeoutSeconds"\]',
        ),
        (
            {"algorithm": {"maxAsyncLevel": 1}, "sampling": {"temperature": 0.5}},
            r'\["algorithm.maxAsyncLevel", "sampling.temperature"\]',
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_running_run_refuses_edit(cluster: Cluster, begun: str, spec: dict[str, Any], words: str) -> None:
    message = refusal(cluster, begun, "frozen", spec)
    assert re.search(words, message), message
    assert "since attempt 1 started" in message


def test_run_with_unstarted_role_is_editable(cluster: Cluster, namespace: str, run: str) -> None:
    """The fix for a wrong image, a missing Secret or a wrong label is an edit of the specification."""
    start_attempt(cluster, namespace, run)
    patch(cluster, namespace, run, {"status": {"unstarted": ["inference"]}}, "status")
    patch(cluster, namespace, run, {"spec": {"inference": {"image": "registry/inference:1"}, "seqLen": 4096}})
    assert 'fixed since attempt 1 started: ["model.path"]' in refusal(
        cluster, namespace, run, {"model": {"path": "/other"}}
    )
    patch(cluster, namespace, run, {"status": {"unstarted": None}}, "status")
    assert 'frozen since attempt 1 started: ["inference.image"]' in refusal(
        cluster, namespace, run, {"inference": {"image": "registry/inference:2"}}
    )


def test_storage_is_editable_until_volume_exists(cluster: Cluster, namespace: str, run: str) -> None:
    start_attempt(cluster, namespace, run)
    told = {"unstarted": ["trainer"], "storage": {"claimName": "a", "path": "/a", "size": "100Gi"}}
    patch(cluster, namespace, run, {"status": told}, "status")
    of_one_node = {"claimTemplate": {"storageClassName": "b", "accessModes": ["ReadWriteOnce"], "size": "10Gi"}}
    patch(cluster, namespace, run, {"spec": {"storage": of_one_node}})
    patch(cluster, namespace, run, {"spec": {"storage": {"claimTemplate": None, "claimName": "other"}}})
    both = {"storage": {"claimName": "third"}, "model": {"path": "/other"}}
    assert 'fixed since attempt 1 started: ["model.path"];' in refusal(cluster, namespace, run, both), "storage is not"
    patch(cluster, namespace, run, {"status": {"storage": {"volumeName": "pv-1"}}}, "status")
    assert 'fixed since attempt 1 started: ["storage"];' in refusal(
        cluster, namespace, run, {"storage": {"claimName": "a"}}
    )
    patch(cluster, namespace, run, {"status": {"unstarted": None, "storage": {"volumeName": None}}}, "status")
    assert 'fixed since attempt 1 started: ["storage"];' in refusal(
        cluster, namespace, run, {"storage": {"claimName": "a"}}
    )


def test_claim_size_may_only_grow(cluster: Cluster, namespace: str, run: str) -> None:
    start_attempt(cluster, namespace, run)

    def sized(size: str | None) -> dict[str, Any]:
        return {"storage": {"claimTemplate": {"size": size} if size else {}}}

    for size in (None, "100Gi", "200Gi", "0.2Ti", "2e12", "2T", "10Ti"):
        patch(cluster, namespace, run, {"spec": sized(size)})
    assert "size (9.9Ti) must be at least 10Ti" in refusal(cluster, namespace, run, sized("9.9Ti"))
    told = refusal(cluster, namespace, run, sized("much"))
    assert 'spec.storage.claimTemplate.size: got "much", expected a Kubernetes quantity above 0' in told
    patch(
        cluster,
        namespace,
        run,
        {"status": {"storage": {"claimName": "a", "path": "/a", "size": "2T"}}},
        "status",
    )
    assert "size (1T) must be at least 2T" in refusal(cluster, namespace, run, sized("1T"))
    patch(cluster, namespace, run, {"spec": sized("2T")})


def test_live_fields_stay_editable(cluster: Cluster, namespace: str, run: str) -> None:
    start_attempt(cluster, namespace, run)
    patch(cluster, namespace, run, {"spec": {"inference": {"replicas": 4, "minAvailable": 2}}})
    patch(cluster, namespace, run, {"spec": {"failurePolicy": {"maxRestarts": 9}, "maxSteps": 200, "suspend": True}})
    ends = {"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 0, "cleanupPolicy": {"onFailure": "None"}}
    patch(cluster, namespace, run, {"spec": ends})
    patch(cluster, namespace, run, {"metadata": {"labels": {"team": "a"}}})
    patch(cluster, namespace, run, {"status": {"attempt": 2}}, "status")
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=SMALLEST)
    message = refusal(cluster, namespace, run, {"inference": {"minAvailable": 5}})
    assert "minAvailable (5) must be at most replicas (4)" in message


def test_suspended_run_is_editable_except_fixed_fields(cluster: Cluster, namespace: str, run: str) -> None:
    start_attempt(cluster, namespace, run)
    patch(cluster, namespace, run, {"spec": {"suspend": True}})
    edit = {"trainer": {"replicas": 2, "optimizer": {"lr": 0.1}}, "seqLen": 4096}
    assert "trainer.optimizer" in refusal(cluster, namespace, run, edit), "its pods are not gone yet"
    patch(cluster, namespace, run, {"status": {"phase": "Suspended"}}, "status")
    assert "fixed since attempt 1 started" in refusal(cluster, namespace, run, {"model": {"path": "/other"}})
    patch(cluster, namespace, run, {"spec": {**edit, "suspend": False}})
    assert "frozen since attempt 1 started" in refusal(cluster, namespace, run, {"seqLen": 2048}), "it goes on"
