"""Reasons why a run waits, with role and fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlrun_operator.names import ROLES, Ref
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import Kube

GPUS = {
    "trainer": {"replicas": 2, "gpusPerReplica": 8},
    "inference": {"gpusPerReplica": 1},
    "placement": {"gpuProduct": "NVIDIA-H200"},
}
NO_FIT = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: 3 No preemption victims found."
NOT_FOUND = 'rpc error: code = NotFound desc = failed to pull and unpack image "ghcr.io/x/y:1": not found'


def make_node(
    name: str, product: str | None = "NVIDIA-H200", gpus: int = 8, taint: str | None = None
) -> dict[str, Any]:
    labels = {"nvidia.com/gpu.product": product} if product else {}
    labels |= {"kubernetes.io/hostname": name, "nvidia.com/gpu.clique": "1"}
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": taints},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "512Gi"}},
    }


def make_event(kind: str, name: str, reason: str, message: str, at: str = "2023-11-14T22:13:25Z") -> dict[str, Any]:
    return {
        "involvedObject": {"kind": kind, "name": name},
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
        "type": "Warning",
    }


def mark_unscheduled(kube: Kube, text: str = NO_FIT, roles: tuple[str, ...] = ("trainer",)) -> None:
    """Report that the scheduler finds no node for pods of these roles."""
    kube.schedule = False
    kube.settle()
    for role in ("trainer", "inference", "orchestrator"):
        for pod in kube.pods(role):
            if role in roles:
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
                pod["status"]["conditions"] = [condition]
            else:
                pod["spec"]["nodeName"] = "node-1"


def set_waiting(kube: Kube, role: str, reason: str, message: str) -> None:
    """Put a container of the role into a waiting state."""
    kube.make_ready = False
    kube.settle()
    for pod in kube.pods(role):
        image = pod["spec"]["containers"][0]["image"]
        state = {"waiting": {"reason": reason, "message": message}}
        pod["status"]["containerStatuses"] = [
            {"name": role, "image": image, "ready": False, "restartCount": 0, "state": state}
        ]


def pass_patience(kube: Kube) -> None:
    kube.tick(1)
    kube.tick(3)


def check_condition(kube: Kube, condition: str, reason: str, *words: str) -> None:
    """Check reason and words of the condition, and that the status has the same message."""
    pass_patience(kube)
    found = kube.condition(condition)
    assert (found["status"], found["reason"]) == ("False", reason), kube.status
    for word in words:
        assert word in found["message"], found["message"]
    assert (kube.status["reason"], kube.status["message"]) == (reason, found["message"])
    assert kube.told.count(("Warning", reason)) == 1
    kube.tick(30)
    assert kube.told.count(("Warning", reason)) == 1, "a wait is told once"


def test_first_two_seconds_report_no_problem() -> None:
    kube = Kube(GPUS)
    mark_unscheduled(kube)
    decision = kube.decide()
    assert (decision.look_up, [e.type for e in decision.events if e.type == "Warning"]) == (frozenset(), [])
    kube.tick(1)
    assert kube.condition("Scheduled")["reason"] == "Scheduling"
    kube.now += 2
    assert kube.decide().look_up == {"events", "nodes"}


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (
            None,
            [
                "trainer needs 2 pods with 8 nvidia.com/gpu each",
                "label nvidia.com/gpu.product=NVIDIA-H200",
                "3 Insufficient nvidia.com/gpu",
            ],
        ),
        (
            [make_node("a", "NVIDIA-A100"), make_node("b", None)],
            ["no node has that", "NVIDIA-A100 (1 node)", "placement.gpuProduct"],
        ),
        ([make_node("b", None)], ["no node has the label nvidia.com/gpu.product at all", "placement.gpuProduct"]),
        ([make_node("a", gpus=4)], ["none has 8 nvidia.com/gpu (most: 4)", "trainer.gpusPerReplica"]),
        (
            [make_node("a", taint="team-b")],
            [
                "1 node qualifies, except for the taint team-b",
                "write trainer.tolerations: [{key: team-b, operator: Exists}]",
            ],
        ),
        (
            [make_node("a", taint="node.kubernetes.io/not-ready")],
            ["except for the taint node.kubernetes.io/not-ready", "kubectl describe node"],
        ),
        (
            [make_node("a"), make_node("b", gpus=4)],
            ["1 node qualifies, but not enough of that is free", "3 Insufficient nvidia.com/gpu"],
        ),
        ([make_node("a") | {"spec": {"unschedulable": True}}], ["the cluster has no schedulable node"]),
        ([], ["the cluster has no schedulable node"]),
    ],
)
def test_unschedulable_trainer_is_reported_with_its_cause(nodes: list[dict[str, Any]] | None, words: list[str]) -> None:
    kube = Kube(GPUS)
    mark_unscheduled(kube)
    kube.nodes = nodes
    check_condition(kube, "Scheduled", "Unschedulable", *words)
    assert "preemption" not in kube.status["message"]


def test_unmatched_pool_or_selector_is_reported_with_its_field() -> None:
    kube = Kube({"placement": {"pool": "gold"}})
    mark_unscheduled(kube)
    kube.nodes = [make_node("a")]
    check_condition(kube, "Scheduled", "Unschedulable", "no node has the label rlrun.io/pool at all", "placement.pool")
    kube = Kube({"inference": {"nodeSelector": {"disk": "fast"}}})
    mark_unscheduled(kube, roles=("inference",))
    kube.nodes = [make_node("a")]
    check_condition(kube, "Scheduled", "Unschedulable", "inference needs 1 pod on nodes", "inference.nodeSelector")


SPREAD = {"inference": {"replicas": 2}, "placement": {"spreadInference": "Required"}}
NEAR = {"trainer": {"replicas": 2}, "placement": {"topology": {"required": "nvidia.com/gpu.clique"}}}
ONE_NODE = {"storage": {"claimTemplate": {"accessModes": ["ReadWriteOnce"]}}}
HEAD = "0/2 nodes are available: "


@pytest.mark.parametrize(
    ("spec", "role", "text", "words"),
    [
        (
            {"storage": {"claimName": "single"}},
            "trainer",
            "node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode.",
            ["claim single has access mode ReadWriteOncePod", "storage.claimName"],
        ),
        ({}, "trainer", "2 node(s) had volume node affinity conflict.", ["claim run-data can be used on other nodes"]),
        (
            {},
            "trainer",
            "2 node(s) unavailable due to one or more pvc(s) bound to non-existent pv.",
            ["the volume of claim run-data does not exist"],
        ),
        (
            {},
            "inference",
            "2 node(s) didn't match pod topology spread constraints.",
            ["topologySpreadConstraints of inference.podTemplate", "ScheduleAnyway"],
        ),
        (
            SPREAD,
            "inference",
            "2 node(s) didn't match pod anti-affinity rules.",
            ["each engine needs its own node", "placement.spreadInference", "inference.replicas"],
        ),
        (
            {},
            "trainer",
            "2 node(s) didn't satisfy existing pods anti-affinity rules.",
            ["these nodes run pods that its anti-affinity excludes", "trainer.affinity"],
        ),
        (
            NEAR,
            "trainer",
            "1 Insufficient nvidia.com/gpu, 1 node(s) didn't match pod affinity rules.",
            ["by the label nvidia.com/gpu.clique", "placement.topology.preferred"],
        ),
        (
            ONE_NODE,
            "orchestrator",
            "2 node(s) didn't match pod affinity rules.",
            ["claim run-data puts all pods on one node", "ReadWriteMany"],
        ),
        ({}, "trainer", "2 Too many pods.", ["2 nodes qualify, but none accepts it now"]),
    ],
)
@pytest.mark.parametrize("reads_nodes", [True, False])
def test_scheduling_obstacle_is_reported_with_its_fix(
    spec: dict[str, Any], role: str, text: str, words: list[str], reads_nodes: bool
) -> None:
    kube = Kube(spec)
    kube.bind_claims = True
    if "claimName" in spec.get("storage", {}):
        claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "single", "uid": "c"}, "spec": {}}
        kube.objects[Ref("PersistentVolumeClaim", "single")] = claim
    mark_unscheduled(kube, HEAD + text, (role,))
    kube.nodes = [make_node("a"), make_node("b")] if reads_nodes else None
    seen = [word for word in words if reads_nodes or "qualify" not in word]
    check_condition(
        kube, "Scheduled", "Unschedulable", f"{role} needs", *seen, f"the scheduler reports: {HEAD}{text.rstrip('.')}"
    )


def test_missing_topology_label_is_reported() -> None:
    kube = Kube({"placement": {"topology": {"required": "rack"}}})
    mark_unscheduled(kube, HEAD + "2 node(s) didn't match pod affinity rules.")
    kube.nodes = [make_node("a"), make_node("b")]
    check_condition(kube, "Scheduled", "Unschedulable", "no such node has the label rack", "placement.topology")


def test_permanent_obstacle_is_reported_before_temporary_ones() -> None:
    kube = Kube({"inference": {"nodeSelector": {"disk": "fast"}}, "orchestrator": {"nodeSelector": {"disk": "new"}}})
    mark_unscheduled(kube, HEAD + "2 Too many pods.", ROLES)
    kube.nodes = [make_node("a")]
    pass_patience(kube)
    message = kube.condition("Scheduled")["message"]
    assert "trainer needs" not in message
    assert message.startswith("inference needs 1 pod on nodes with label disk=fast; no node has the label disk at all")
    assert ". Also: orchestrator needs 1 pod" in message


def test_unknown_storage_class_is_reported() -> None:
    kube = Kube({"storage": {"claimTemplate": {"storageClassName": "broken"}}})
    kube.bind_claims = False
    mark_unscheduled(
        kube, "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.", ("trainer", "orchestrator")
    )
    told = 'storageclass.storage.k8s.io "broken" not found'
    kube.events = [make_event("PersistentVolumeClaim", "run-data", "ProvisioningFailed", told)]
    check_condition(
        kube,
        "StorageReady",
        "ClaimPending",
        "claim run-data",
        "StorageClass broken",
        told,
        "storage.claimTemplate.storageClassName",
    )


def test_missing_default_storage_class_is_reported() -> None:
    kube = Kube()
    kube.bind_claims = False
    mark_unscheduled(kube, "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
    check_condition(kube, "StorageReady", "ClaimPending", "names no StorageClass", "default StorageClass")


def test_pod_obstacle_is_reported_before_its_waiting_claim() -> None:
    kube = Kube(GPUS | {"storage": {"claimTemplate": {"storageClassName": "local"}}})
    kube.bind_claims = False
    mark_unscheduled(kube)
    pass_patience(kube)
    assert (kube.condition("StorageReady")["reason"], kube.status["reason"]) == ("ClaimWaiting", "Unschedulable")


def test_missing_or_lost_claim_is_reported() -> None:
    kube = Kube({"storage": {"claimName": "shared"}})
    check_condition(
        kube, "StorageReady", "ClaimNotFound", "storage.claimName", "PersistentVolumeClaim shared does not exist"
    )
    shared = {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "shared", "uid": "p"},
        "spec": {},
        "status": {"phase": "Lost"},
    }
    kube.bind_claims = False
    kube.objects[Ref("PersistentVolumeClaim", "shared")] = shared
    kube.tick()
    assert kube.condition("StorageReady")["reason"] == "ClaimLost"


@pytest.mark.parametrize(
    ("role", "condition", "reason", "message", "expected", "words"),
    [
        (
            "trainer",
            "PodsReady",
            "ErrImagePull",
            NOT_FOUND,
            "ImagePullFailed",
            ["trainer: image ghcr.io/", "not found", "trainer.image"],
        ),
        (
            "orchestrator",
            "PodsReady",
            "ImagePullBackOff",
            f'Back-off pulling image "ghcr.io/x/y:1": ErrImagePull: {NOT_FOUND}',
            "ImagePullFailed",
            ["orchestrator: image", "rpc error: code = NotFound", "orchestrator.imagePullSecrets"],
        ),
        (
            "inference",
            "InferenceAvailable",
            "ErrImagePull",
            NOT_FOUND,
            "ImagePullFailed",
            ["inference: image", "inference.image"],
        ),
        (
            "trainer",
            "PodsReady",
            "CreateContainerConfigError",
            'secret "hub-token" not found',
            "ContainerConfigInvalid",
            ["create secret hub-token", "trainer.envFrom"],
        ),
        (
            "trainer",
            "PodsReady",
            "CreateContainerConfigError",
            "couldn't find key HF_TOKEN in Secret team-a/hub-token",
            "ContainerConfigInvalid",
            ["add the key HF_TOKEN to secret hub-token, or correct trainer.env"],
        ),
        (
            "trainer",
            "PodsReady",
            "CreateContainerError",
            "exec: sh: not found",
            "ContainerFailing",
            ["cannot be started", "trainer.image"],
        ),
    ],
)
def test_failed_container_start_is_reported(
    role: str, condition: str, reason: str, message: str, expected: str, words: list[str]
) -> None:
    kube = Kube()
    set_waiting(kube, role, reason, message)
    check_condition(kube, condition, expected, *words)


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ('secret "for-rlrun-wandb" not found', "create secret for-rlrun-wandb in the run's namespace"),
        (
            "couldn't find key WANDB_API_KEY in Secret team-a/for-rlrun-wandb",
            "add the key WANDB_API_KEY to secret for-rlrun-wandb",
        ),
    ],
)
def test_missing_tracker_key_is_reported_with_its_field(message: str, fix: str) -> None:
    kube = Kube({"tracking": {"wandb": {"secretRef": {"name": "for-rlrun-wandb"}}}})
    set_waiting(kube, "orchestrator", "CreateContainerConfigError", message)
    said = f"{message}; {fix}, or correct tracking.wandb.secretRef"
    check_condition(kube, "PodsReady", "ContainerConfigInvalid", f"orchestrator: {said}")


def test_alternating_image_pull_reasons_keep_the_status_stable() -> None:
    kube = Kube()
    set_waiting(kube, "trainer", "ErrImagePull", NOT_FOUND)
    pass_patience(kube)
    before = kube.status["message"]
    set_waiting(
        kube, "trainer", "ImagePullBackOff", f'Back-off pulling image "ghcr.io/x/y:1": ErrImagePull: {NOT_FOUND}'
    )
    kube.tick(10)
    assert kube.status["message"] == before


def set_replica_failure(kube: Kube, *, now: bool = True) -> None:
    """Set or clear the ReplicaFailure condition, as the Deployment controller does for refused pods."""
    deployment = kube.objects[Ref("Deployment", "run-inference")]
    deployment["status"]["conditions"] = [{"type": "ReplicaFailure", "status": str(now)}]


def test_resolved_refusal_of_engines_is_not_reported() -> None:
    """The event outlives the refusal, and the engine created since then may be gone again."""
    kube = Kube()
    kube.settle()
    for pod in kube.pods("inference"):
        del kube.objects[Ref("Pod", pod["metadata"]["name"])]
    kube.controllers = lambda: False  # type: ignore[method-assign]
    kube.events = [make_event("ReplicaSet", "run-inference-5d8f", "FailedCreate", "exceeded quota: gpus")]
    set_replica_failure(kube, now=False)
    kube.tick(60)
    assert "gpus" not in kube.condition("Scheduled")["message"]
    set_replica_failure(kube)
    kube.tick(60)
    assert "gpus" in kube.condition("Scheduled")["message"]


@pytest.mark.parametrize(
    ("kind", "name", "role", "text", "reason", "words"),
    [
        (
            "StatefulSet",
            "run-trainer",
            "trainer",
            "create Pod run-trainer-0 in StatefulSet run-trainer failed error: "
            'pods "run-trainer-0" is forbidden: exceeded quota: gpus, limited: 4',
            "QuotaExceeded",
            ["trainer: the quota", "exceeded quota: gpus"],
        ),
        (
            "ReplicaSet",
            "run-inference-5d8f",
            "inference",
            'Error creating: pods "run-inference-5d8f-x" is forbidden: violates PodSecurity "restricted:latest": hostPath',
            "PodsRefused",
            ["inference: its pods are refused", "violates PodSecurity", "inference.podTemplate"],
        ),
        (
            "StatefulSet",
            "run-trainer",
            "trainer",
            'create Pod run-trainer-0 in StatefulSet run-trainer failed error: pods "run-trainer-0" already exists',
            "PodsRefused",
            ['"run-trainer-0" already exists', "that pod belongs to something else; delete it"],
        ),
    ],
)
def test_refused_pods_are_reported_with_their_cause(
    kind: str, name: str, role: str, text: str, reason: str, words: list[str]
) -> None:
    kube = Kube()
    kube.schedule = False
    kube.settle()
    kube.schedule = True
    for ref in [Ref("Pod", pod["metadata"]["name"]) for pod in kube.pods(role)]:
        del kube.objects[ref]
    kube.controllers = lambda: False  # type: ignore[method-assign]
    kube.events = [make_event(kind, name, "FailedCreate", text)]
    set_replica_failure(kube)
    for pod in (pod for role in ROLES for pod in kube.pods(role)):
        pod["spec"]["nodeName"] = "node-1"
    check_condition(kube, "Scheduled", reason, *words)


def test_ended_run_does_not_report_its_last_wait() -> None:
    kube = Kube()
    kube.schedule = False
    kube.settle()
    del kube.objects[Ref("Pod", "run-trainer-0")]
    kube.controllers = lambda: False  # type: ignore[method-assign]
    kube.events = [
        make_event("StatefulSet", "run-trainer", "FailedCreate", "exceeded quota: gpus", at=format_rfc3339(kube.now))
    ]
    kube.tick(60)
    assert "gpus" in kube.condition("Scheduled")["message"]
    kube.exit("orchestrator", 65)
    kube.tick(1)
    assert kube.status["phase"] == "Failed"
    assert (kube.condition("Scheduled")["status"], kube.condition("Scheduled")["reason"]) == ("False", "RunOver")
    assert "gpus" not in str(kube.status["conditions"])


def test_previous_wait_is_cleared_while_a_name_is_taken() -> None:
    kube = Kube()
    kube.schedule = False
    kube.settle()
    del kube.objects[Ref("Pod", "run-trainer-0")]
    kube.controllers = lambda: False  # type: ignore[method-assign]
    kube.events = [
        make_event("StatefulSet", "run-trainer", "FailedCreate", "exceeded quota: gpus", at=format_rfc3339(kube.now))
    ]
    kube.tick(60)
    assert "gpus" in kube.condition("Scheduled")["message"]
    del kube.controllers  # type: ignore[method-assign]  # the quota allows them
    kube.exit("orchestrator", 1)
    kube.taken = "Service run-trainer"
    kube.tick(1)
    kube.settle()
    assert (kube.status["phase"], kube.status["reason"]) == ("Restarting", "NameTaken")
    assert (kube.condition("Scheduled")["status"], kube.condition("Scheduled")["reason"]) == ("False", "Restarting")
    assert "gpus" not in str(kube.status["conditions"])


@pytest.mark.parametrize(("kind", "name"), [("StatefulSet", "run-trainer"), ("ReplicaSet", "run-inference-5d8f")])
@pytest.mark.parametrize("text", ["exceeded quota: of-before", 'admission webhook "of-before" denied the request'])
def test_refusal_before_the_attempt_is_not_reported(kind: str, name: str, text: str) -> None:
    kube = Kube()
    kube.schedule = False
    kube.settle()
    for pod in [*kube.pods("trainer"), *kube.pods("inference")]:
        del kube.objects[Ref("Pod", pod["metadata"]["name"])]
    kube.controllers = lambda: False  # type: ignore[method-assign]
    kube.events = [make_event(kind, name, "FailedCreate", text, at=format_rfc3339(kube.now - 600))]
    set_replica_failure(kube)
    kube.tick(10)
    assert "of-before" not in kube.condition("Scheduled")["message"]
    kube.events = [make_event(kind, name, "FailedCreate", text, at=format_rfc3339(kube.now))]
    kube.tick(10)
    assert "of-before" in kube.condition("Scheduled")["message"]


def test_event_of_a_replaced_claim_is_not_reported() -> None:
    kube = Kube()
    kube.bind_claims = False
    kube.settle()
    kube.events = [make_event("PersistentVolumeClaim", "run-data", "ProvisioningFailed", "pool of-before is full")]
    kube.events[0]["involvedObject"]["uid"] = "another"
    kube.tick(10)
    assert "of-before" not in kube.condition("StorageReady")["message"]
    kube.events[0]["involvedObject"]["uid"] = kube.objects[Ref("PersistentVolumeClaim", "run-data")]["metadata"]["uid"]
    kube.tick(10)
    assert "of-before" in kube.condition("StorageReady")["message"]


def test_clock_set_back_does_not_hide_a_reason() -> None:
    kube = Kube()
    kube.bind_claims = False
    kube.settle()
    kube.events = [make_event("PersistentVolumeClaim", "run-data", "ProvisioningFailed", "the pool is full")]
    kube.tick(-3600)
    assert "the pool is full" in kube.condition("StorageReady")["message"]


def test_refusal_of_the_next_attempt_is_reported() -> None:
    kube = Kube().start()
    kube.run["status"]["conditions"] = [
        *[c for c in kube.status["conditions"] if c["type"] not in ("Restarting", "Scheduled")],
        *[
            {
                "type": kind,
                "status": said,
                "reason": "R",
                "message": "m",
                "lastTransitionTime": format_rfc3339(kube.now),
            }
            for kind, said in (("Restarting", "True"), ("Scheduled", "False"))
        ],
    ]
    for ref in [ref for ref in kube.objects if ref.kind in ("Pod", "StatefulSet") and "inference" not in ref.name]:
        del kube.objects[ref]
    kube.now += 60
    refused = make_event("Service", "run-trainer", "FailedCreate", 'failed calling webhook "guard": no route')
    del refused["lastTimestamp"]
    kube.events = [refused]
    told = {c["type"]: c for c in kube.decide().status["conditions"]}["Scheduled"]
    assert told["reason"] == "AdmissionRefused"
    assert "failed calling webhook" in told["message"]


@pytest.mark.parametrize(
    ("kind", "name", "condition", "words"),
    [
        ("Pod", "run-orchestrator-1", "Scheduled", "orchestrator: the quota does not allow its pods"),
        ("PersistentVolumeClaim", "run-data", "StorageReady", "claim run-data cannot be created"),
        ("Service", "run-trainer", "Scheduled", "Service run-trainer cannot be created"),
    ],
)
def test_quota_refusal_of_operator_write_is_reported(kind: str, name: str, condition: str, words: str) -> None:
    kube = Kube()
    kube.bind_claims = kind != "PersistentVolumeClaim"
    decision = kube.decide()
    conditions = list(decision.status["conditions"])
    kube.run["status"] = {
        "phase": "Starting",
        "conditions": conditions,
    }  # status of a pass that could not create all objects
    kube.now += 10
    kube.events = [make_event(kind, name, "FailedCreate", f"{name} is forbidden: exceeded quota: team-a")]
    told = {c["type"]: c for c in kube.decide().status["conditions"]}[condition]
    assert (told["status"], told["reason"]) == ("False", "QuotaExceeded")
    assert words in told["message"]
    assert "exceeded quota: team-a" in told["message"]


@pytest.mark.parametrize(
    ("kind", "name", "condition", "words"),
    [
        ("PersistentVolumeClaim", "run-data", "StorageReady", "claim run-data cannot be created"),
        ("Service", "run-trainer", "Scheduled", "Service run-trainer cannot be created"),
    ],
)
def test_policy_refusal_of_operator_write_is_reported(kind: str, name: str, condition: str, words: str) -> None:
    kube = Kube()
    kube.bind_claims = kind != "PersistentVolumeClaim"
    kube.run["status"] = {"phase": "Starting", "conditions": list(kube.decide().status["conditions"])}
    kube.now += 10
    kube.events = [make_event(kind, name, "FailedCreate", 'admission webhook "guard" denied the request: no owner')]
    told = {c["type"]: c for c in kube.decide().status["conditions"]}[condition]
    assert (told["status"], told["reason"]) == ("False", "AdmissionRefused")
    assert words in told["message"]
    assert 'admission webhook "guard" denied the request: no owner' in told["message"]
    assert "the operator retries" in told["message"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('admission webhook "guard" denied the request: no owner', "AdmissionRefused"),
        ("forbidden: exceeded quota: team-a", "QuotaExceeded"),
    ],
)
@pytest.mark.parametrize("step", [None, 3])
def test_refused_lease_recreation_is_reported(step: int | None, text: str, reason: str) -> None:
    kube = Kube()
    kube.settle()
    if step is not None:
        kube.report(step)
        kube.settle()
    del kube.objects[Ref("Lease", "run-progress")]
    kube.events = [make_event("Lease", "run-progress", "FailedCreate", text)]
    decision = kube.decide()
    assert [apply.manifest["kind"] for apply in decision.repair] == ["Lease"], "all else goes on where it is refused"
    told = {c["type"]: c for c in decision.status["conditions"]}["Progressing"]
    assert (told["status"], told["reason"]) == ("Unknown", reason)
    assert "Lease run-progress was deleted and cannot be created again" in told["message"]
    assert text in told["message"]
    assert decision.status["message"] == told["message"]
    kube.events = []
    kube.tick()
    assert kube.condition("Progressing")["reason"] != reason


def test_lost_lease_of_invalid_run_is_reported() -> None:
    kube = Kube()
    kube.start()
    kube.edit(trainer={"replicas": 0})
    del kube.objects[Ref("Lease", "run-progress")]
    kube.settle()
    told = kube.condition("Progressing")
    assert told["reason"] == "InvalidConfiguration"
    assert "Lease run-progress was deleted, and is created again when the specification is valid" in told["message"]


def test_failed_mount_is_reported_until_it_succeeds() -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    kube.events = [
        make_event("Pod", "run-trainer-0", "FailedMount", "MountVolume.SetUp failed: mount.nfs: Connection refused")
    ]
    check_condition(
        kube,
        "PodsReady",
        "MountFailed",
        "trainer pod run-trainer-0: cannot mount on node node-1",
        "Connection refused",
        "run-data",
    )
    kube.pod("trainer")["status"]["conditions"] = [{"type": "PodReadyToStartContainers", "status": "True"}]
    kube.tick(1)
    assert kube.condition("PodsReady")["reason"] == "PodsStarting", (
        "the mount went well after all; now the image is pulled"
    )


@pytest.mark.parametrize("kind", ["configmap", "secret"])
def test_kubelet_cache_delay_is_not_a_problem(kind: str) -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    text = f'MountVolume.SetUp failed for volume "config" : failed to sync {kind} cache: timed out waiting for the condition'
    kube.events = [make_event("Pod", "run-trainer-0", "FailedMount", text)]
    pass_patience(kube)
    kube.tick(1)
    assert kube.condition("PodsReady")["reason"] == "PodsStarting"
    assert "MountFailed" not in [reason for _, reason in kube.told]


def test_missing_mounted_secret_is_reported() -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    text = 'MountVolume.SetUp failed for volume "token" : secret "hub-token" not found'
    kube.events = [make_event("Pod", "run-trainer-0", "FailedMount", text)]
    check_condition(
        kube, "PodsReady", "MountFailed", "create secret hub-token in the run's namespace", "trainer.podTemplate"
    )


def test_unresponsive_node_is_reported() -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    pass_patience(kube)
    assert kube.decide().look_up == {"events", "nodes"}, (
        "whether the node answers is what explains a pod that does not begin"
    )
    silent = make_node("node-1")
    silent["status"]["conditions"] = [
        {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting."}
    ]
    kube.nodes = [silent]
    words = "trainer pod run-trainer-0: node node-1 is not ready (NodeStatusUnknown: Kubelet stopped posting.)"
    kube.tick(1)
    assert kube.condition("PodsReady")["reason"] == "NodeNotReady"
    assert words in kube.condition("PodsReady")["message"]
    assert kube.condition("InferenceAvailable")["reason"] == "NodeNotReady"
    silent["status"]["conditions"][0]["status"] = "True"
    kube.tick(1)
    assert kube.condition("PodsReady")["reason"] == "PodsStarting"


def test_event_of_an_earlier_pod_is_ignored() -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    before = make_event(
        "Pod", "run-trainer-0", "FailedMount", "MountVolume.SetUp failed: mount.nfs: Connection refused"
    )
    before["involvedObject"]["uid"] = "another"
    kube.events = [before]
    pass_patience(kube)
    assert kube.condition("PodsReady")["reason"] == "PodsStarting"
    before["involvedObject"]["uid"] = kube.pod("trainer")["metadata"]["uid"]
    kube.tick(1)
    assert kube.condition("PodsReady")["reason"] == "MountFailed"


def making_the_model(kube: Kube) -> None:
    kube.pod("trainer")["status"]["initContainerStatuses"] = [{"name": "model", "state": {"running": {}}}]


def loading_the_engine(kube: Kube) -> None:
    for role in ("trainer", "orchestrator", "inference"):
        ready = "False" if role == "inference" else "True"
        for pod in kube.pods(role):
            pod["status"] |= {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}
            pod["status"]["containerStatuses"] = [{"name": role, "state": {"running": {}}}]


@pytest.mark.parametrize(
    ("happens", "reason", "words"),
    [
        (making_the_model, "ModelPreparing", "tiny model"),
        (loading_the_engine, "EngineLoading", "loading the model"),
    ],
)
def test_slow_start_is_reported_without_a_warning(happens: Callable[[Kube], None], reason: str, words: str) -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    happens(kube)
    pass_patience(kube)
    assert (kube.status["reason"], [t for t, _ in kube.told if t == "Warning"]) == (reason, [])
    assert words in kube.status["message"]


def test_waiting_reason_of_orchestrator_is_reported() -> None:
    kube = Kube()
    kube.settle()
    kube.report(None, waiting_on="the first rollouts (3 of 8 groups)")
    kube.tick()
    assert kube.status["reason"] == "WaitingForFirstStep"
    assert "the first rollouts" in kube.status["message"]


def test_explanations_are_requested_with_growing_delays() -> None:
    kube = Kube(GPUS)
    mark_unscheduled(kube)
    pass_patience(kube)
    assert kube.decide().wake_in == pytest.approx(5.0)
    kube.tick(300)
    assert kube.decide().wake_in == pytest.approx(30, abs=2)
    kube.tick(100_000)
    assert kube.decide().wake_in == pytest.approx(60)
