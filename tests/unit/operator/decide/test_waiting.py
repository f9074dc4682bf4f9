"""Why a run waits, in words that name the role and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlrun_operator.names import ROLES, Ref
from rlrun_operator.times import rfc3339
from tests.unit.operator.decide.kube import Kube

GPUS = {
    "trainer": {"replicas": 2, "gpusPerReplica": 8},
    "inference": {"gpusPerReplica": 1},
    "placement": {"gpuProduct": "NVIDIA-H200"},
}
NO_FIT = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: 3 No preemption victims found."
NOT_FOUND = 'rpc error: code = NotFound desc = failed to pull and unpack image "ghcr.io/x/y:1": not found'


def node(name: str, product: str | None = "NVIDIA-H200", gpus: int = 8, taint: str | None = None) -> dict[str, Any]:
    labels = {"nvidia.com/gpu.product": product} if product else {}
    labels |= {"kubernetes.io/hostname": name, "nvidia.com/gpu.clique": "1"}
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": taints},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "512Gi"}},
    }


def event(kind: str, name: str, reason: str, message: str, at: str = "2023-11-14T22:13:25Z") -> dict[str, Any]:
    return {
        "involvedObject": {"kind": kind, "name": name},
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
        "type": "Warning",
    }


def unscheduled(kube: Kube, text: str = NO_FIT, roles: tuple[str, ...] = ("trainer",)) -> None:
    """The scheduler finds no node for the pods of some roles."""
    kube.schedule = False
    kube.settle()
    for role in ("trainer", "inference", "orchestrator"):
        for pod in kube.pods(role):
            if role in roles:
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
                pod["status"]["conditions"] = [condition]
            else:
                pod["spec"]["nodeName"] = "node-1"


def waiting(kube: Kube, role: str, reason: str, message: str) -> None:
    """A container of the role waits."""
    kube.make_ready = False
    kube.settle()
    for pod in kube.pods(role):
        image = pod["spec"]["containers"][0]["image"]
        state = {"waiting": {"reason": reason, "message": message}}
        pod["status"]["containerStatuses"] = [
            {"name": role, "image": image, "ready": False, "restartCount": 0, "state": state}
        ]


def patience_over(kube: Kube) -> None:
    kube.tick(1)
    kube.tick(3)


def check(kube: Kube, condition: str, reason: str, *words: str) -> None:
    """The condition says so, and the status' own message is the same."""
    patience_over(kube)
    found = kube.condition(condition)
    assert (found["status"], found["reason"]) == ("False", reason), kube.status
    for word in words:
        assert word in found["message"], found["message"]
    assert (kube.status["reason"], kube.status["message"]) == (reason, found["message"])
    assert kube.told.count(("Warning", reason)) == 1
    kube.tick(30)
    assert kube.told.count(("Warning", reason)) == 1, "a wait is told once"


def test_nothing_is_called_a_problem_in_the_first_two_seconds() -> None:
    kube = Kube(GPUS)
    unscheduled(kube)
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
            [node("a", "NVIDIA-A100"), node("b", None)],
            ["no node has that", "NVIDIA-A100 (1 node)", "placement.gpuProduct"],
        ),
        ([node("b", None)], ["no node has the label nvidia.com/gpu.product at all", "placement.gpuProduct"]),
        ([node("a", gpus=4)], ["none has 8 nvidia.com/gpu (most: 4)", "trainer.gpusPerReplica"]),
        ([node("a", taint="team-b")], ["1 node qualifies, except for the taint team-b", "trainer.tolerations"]),
        (
            [node("a", taint="node.kubernetes.io/not-ready")],
            ["except for the taint node.kubernetes.io/not-ready", "kubectl describe node"],
        ),
        (
            [node("a"), node("b", gpus=4)],
            ["1 node qualifies, but not enough of that is free", "3 Insufficient nvidia.com/gpu"],
        ),
        ([node("a") | {"spec": {"unschedulable": True}}], ["the cluster has no schedulable node"]),
        ([], ["the cluster has no schedulable node"]),
    ],
)
def test_a_trainer_without_nodes(nodes: list[dict[str, Any]] | None, words: list[str]) -> None:
    kube = Kube(GPUS)
    unscheduled(kube)
    kube.nodes = nodes
    check(kube, "Scheduled", "Unschedulable", *words)
    assert "preemption" not in kube.status["message"]


def test_a_wrong_pool_and_an_own_selector_name_their_fields() -> None:
    kube = Kube({"placement": {"pool": "gold"}})
    unscheduled(kube)
    kube.nodes = [node("a")]
    check(kube, "Scheduled", "Unschedulable", "no node has the label rlrun.io/pool at all", "placement.pool")
    kube = Kube({"inference": {"nodeSelector": {"disk": "fast"}}})
    unscheduled(kube, roles=("inference",))
    kube.nodes = [node("a")]
    check(kube, "Scheduled", "Unschedulable", "inference needs 1 pod on nodes", "inference.nodeSelector")


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
def test_what_else_keeps_a_pod_from_nodes_is_told_with_its_fix(
    spec: dict[str, Any], role: str, text: str, words: list[str], reads_nodes: bool
) -> None:
    kube = Kube(spec)
    kube.bind_claims = True
    if "claimName" in spec.get("storage", {}):
        claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "single", "uid": "c"}, "spec": {}}
        kube.objects[Ref("PersistentVolumeClaim", "single")] = claim
    unscheduled(kube, HEAD + text, (role,))
    kube.nodes = [node("a"), node("b")] if reads_nodes else None
    seen = [word for word in words if reads_nodes or "qualify" not in word]
    check(
        kube, "Scheduled", "Unschedulable", f"{role} needs", *seen, f"the scheduler reports: {HEAD}{text.rstrip('.')}"
    )


def test_a_topology_label_that_no_node_has() -> None:
    kube = Kube({"placement": {"topology": {"required": "rack"}}})
    unscheduled(kube, HEAD + "2 node(s) didn't match pod affinity rules.")
    kube.nodes = [node("a"), node("b")]
    check(kube, "Scheduled", "Unschedulable", "no such node has the label rack", "placement.topology")


def test_what_can_never_be_scheduled_is_told_before_what_only_waits() -> None:
    kube = Kube({"inference": {"nodeSelector": {"disk": "fast"}}, "orchestrator": {"nodeSelector": {"disk": "new"}}})
    unscheduled(kube, HEAD + "2 Too many pods.", ROLES)
    kube.nodes = [node("a")]
    patience_over(kube)
    message = kube.condition("Scheduled")["message"]
    assert "trainer needs" not in message
    assert message.startswith("inference needs 1 pod on nodes with label disk=fast; no node has the label disk at all")
    assert ". Also: orchestrator needs 1 pod" in message


def test_a_claim_of_an_unknown_class() -> None:
    kube = Kube({"storage": {"claimTemplate": {"storageClassName": "broken"}}})
    kube.bind_claims = False
    unscheduled(
        kube, "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.", ("trainer", "orchestrator")
    )
    told = 'storageclass.storage.k8s.io "broken" not found'
    kube.events = [event("PersistentVolumeClaim", "run-data", "ProvisioningFailed", told)]
    check(
        kube,
        "StorageReady",
        "ClaimPending",
        "claim run-data",
        "StorageClass broken",
        told,
        "storage.claimTemplate.storageClassName",
    )


def test_a_claim_without_a_default_class() -> None:
    kube = Kube()
    kube.bind_claims = False
    unscheduled(kube, "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
    check(kube, "StorageReady", "ClaimPending", "names no StorageClass", "default StorageClass")


def test_a_claim_that_waits_for_its_first_pod_gives_way_to_what_the_pod_waits_for() -> None:
    kube = Kube(GPUS | {"storage": {"claimTemplate": {"storageClassName": "local"}}})
    kube.bind_claims = False
    unscheduled(kube)
    patience_over(kube)
    assert (kube.condition("StorageReady")["reason"], kube.status["reason"]) == ("ClaimWaiting", "Unschedulable")


def test_a_claim_that_does_not_exist_or_has_lost_its_volume() -> None:
    kube = Kube({"storage": {"claimName": "shared"}})
    check(kube, "StorageReady", "ClaimNotFound", "storage.claimName", "PersistentVolumeClaim shared does not exist")
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
def test_a_container_that_cannot_start(
    role: str, condition: str, reason: str, message: str, expected: str, words: list[str]
) -> None:
    kube = Kube()
    waiting(kube, role, reason, message)
    check(kube, condition, expected, *words)


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
def test_a_trackers_key_that_is_missing_names_its_field(message: str, fix: str) -> None:
    kube = Kube({"tracking": {"wandb": {"secretRef": {"name": "for-rlrun-wandb"}}}})
    waiting(kube, "orchestrator", "CreateContainerConfigError", message)
    said = f"{message}; {fix}, or correct tracking.wandb.secretRef"
    check(kube, "PodsReady", "ContainerConfigInvalid", f"orchestrator: {said}")


def test_the_kubelet_alternates_between_two_words_for_one_trouble_and_the_status_does_not() -> None:
    kube = Kube()
    waiting(kube, "trainer", "ErrImagePull", NOT_FOUND)
    patience_over(kube)
    before = kube.status["message"]
    waiting(kube, "trainer", "ImagePullBackOff", f'Back-off pulling image "ghcr.io/x/y:1": ErrImagePull: {NOT_FOUND}')
    kube.tick(10)
    assert kube.status["message"] == before


def fails(kube: Kube, *, now: bool = True) -> None:
    """The Deployment's controller says whether it is refused a pod."""
    deployment = kube.objects[Ref("Deployment", "run-inference")]
    deployment["status"]["conditions"] = [{"type": "ReplicaFailure", "status": str(now)}]


def test_a_refusal_of_engines_that_is_over_is_not_told() -> None:
    """Its event outlives it, and the engine that was made since may be gone again."""
    kube = Kube()
    kube.settle()
    for pod in kube.pods("inference"):
        del kube.objects[Ref("Pod", pod["metadata"]["name"])]
    kube.controllers = lambda: False  # type: ignore[method-assign]
    kube.events = [event("ReplicaSet", "run-inference-5d8f", "FailedCreate", "exceeded quota: gpus")]
    fails(kube, now=False)
    kube.tick(60)
    assert "gpus" not in kube.condition("Scheduled")["message"]
    fails(kube)
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
def test_pods_that_nobody_may_create(kind: str, name: str, role: str, text: str, reason: str, words: list[str]) -> None:
    kube = Kube()
    kube.schedule = False
    kube.settle()
    kube.schedule = True
    for ref in [Ref("Pod", pod["metadata"]["name"]) for pod in kube.pods(role)]:
        del kube.objects[ref]
    kube.controllers = lambda: False  # type: ignore[method-assign]
    kube.events = [event(kind, name, "FailedCreate", text)]
    fails(kube)
    for pod in (pod for role in ROLES for pod in kube.pods(role)):
        pod["spec"]["nodeName"] = "node-1"
    check(kube, "Scheduled", reason, *words)


def test_what_a_run_that_has_ended_waited_for_is_told_no_more() -> None:
    kube = Kube()
    kube.schedule = False
    kube.settle()
    del kube.objects[Ref("Pod", "run-trainer-0")]
    kube.controllers = lambda: False  # type: ignore[method-assign]
    kube.events = [event("StatefulSet", "run-trainer", "FailedCreate", "exceeded quota: gpus", at=rfc3339(kube.now))]
    kube.tick(60)
    assert "gpus" in kube.condition("Scheduled")["message"]
    kube.exit("orchestrator", 65)
    kube.tick(1)
    assert kube.status["phase"] == "Failed"
    assert (kube.condition("Scheduled")["status"], kube.condition("Scheduled")["reason"]) == ("False", "RunOver")
    assert "gpus" not in str(kube.status["conditions"])


def test_what_an_attempt_waited_for_is_not_told_while_the_next_one_waits_for_a_name() -> None:
    kube = Kube()
    kube.schedule = False
    kube.settle()
    del kube.objects[Ref("Pod", "run-trainer-0")]
    kube.controllers = lambda: False  # type: ignore[method-assign]
    kube.events = [event("StatefulSet", "run-trainer", "FailedCreate", "exceeded quota: gpus", at=rfc3339(kube.now))]
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
def test_a_refusal_of_before_the_attempt_is_not_told(kind: str, name: str, text: str) -> None:
    kube = Kube()
    kube.schedule = False
    kube.settle()
    for pod in [*kube.pods("trainer"), *kube.pods("inference")]:
        del kube.objects[Ref("Pod", pod["metadata"]["name"])]
    kube.controllers = lambda: False  # type: ignore[method-assign]
    kube.events = [event(kind, name, "FailedCreate", text, at=rfc3339(kube.now - 600))]
    fails(kube)
    kube.tick(10)
    assert "of-before" not in kube.condition("Scheduled")["message"]
    kube.events = [event(kind, name, "FailedCreate", text, at=rfc3339(kube.now))]
    kube.tick(10)
    assert "of-before" in kube.condition("Scheduled")["message"]


def test_what_another_claim_of_the_name_waited_for_is_not_told() -> None:
    kube = Kube()
    kube.bind_claims = False
    kube.settle()
    kube.events = [event("PersistentVolumeClaim", "run-data", "ProvisioningFailed", "pool of-before is full")]
    kube.events[0]["involvedObject"]["uid"] = "another"
    kube.tick(10)
    assert "of-before" not in kube.condition("StorageReady")["message"]
    kube.events[0]["involvedObject"]["uid"] = kube.objects[Ref("PersistentVolumeClaim", "run-data")]["metadata"]["uid"]
    kube.tick(10)
    assert "of-before" in kube.condition("StorageReady")["message"]


def test_a_clock_that_was_set_back_keeps_no_reason_secret() -> None:
    kube = Kube()
    kube.bind_claims = False
    kube.settle()
    kube.events = [event("PersistentVolumeClaim", "run-data", "ProvisioningFailed", "the pool is full")]
    kube.tick(-3600)
    assert "the pool is full" in kube.condition("StorageReady")["message"]


def test_what_keeps_the_next_attempt_out_is_told() -> None:
    kube = Kube().start()
    kube.run["status"]["conditions"] = [
        *[c for c in kube.status["conditions"] if c["type"] not in ("Restarting", "Scheduled")],
        *[
            {"type": kind, "status": said, "reason": "R", "message": "m", "lastTransitionTime": rfc3339(kube.now)}
            for kind, said in (("Restarting", "True"), ("Scheduled", "False"))
        ],
    ]
    for ref in [ref for ref in kube.objects if ref.kind in ("Pod", "StatefulSet") and "inference" not in ref.name]:
        del kube.objects[ref]
    kube.now += 60
    refused = event("Service", "run-trainer", "FailedCreate", 'failed calling webhook "guard": no route')
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
def test_what_a_quota_keeps_the_operator_itself_from_making(kind: str, name: str, condition: str, words: str) -> None:
    kube = Kube()
    kube.bind_claims = kind != "PersistentVolumeClaim"
    decision = kube.decide()
    conditions = list(decision.status["conditions"])
    kube.run["status"] = {"phase": "Starting", "conditions": conditions}  # of a pass that could not make everything
    kube.now += 10
    kube.events = [event(kind, name, "FailedCreate", f"{name} is forbidden: exceeded quota: team-a")]
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
def test_what_a_policy_keeps_the_operator_from_making(kind: str, name: str, condition: str, words: str) -> None:
    kube = Kube()
    kube.bind_claims = kind != "PersistentVolumeClaim"
    kube.run["status"] = {"phase": "Starting", "conditions": list(kube.decide().status["conditions"])}
    kube.now += 10
    kube.events = [event(kind, name, "FailedCreate", 'admission webhook "guard" denied the request: no owner')]
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
def test_a_lease_that_may_not_be_made_again_is_told(step: int | None, text: str, reason: str) -> None:
    kube = Kube()
    kube.settle()
    if step is not None:
        kube.report(step)
        kube.settle()
    del kube.objects[Ref("Lease", "run-progress")]
    kube.events = [event("Lease", "run-progress", "FailedCreate", text)]
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


def test_a_lost_lease_of_a_specification_that_was_made_wrong_says_what_it_waits_for() -> None:
    kube = Kube()
    kube.start()
    kube.edit(trainer={"replicas": 0})
    del kube.objects[Ref("Lease", "run-progress")]
    kube.settle()
    told = kube.condition("Progressing")
    assert told["reason"] == "InvalidConfiguration"
    assert "Lease run-progress was deleted, and is created again when the specification is valid" in told["message"]


def test_a_volume_that_cannot_be_mounted() -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    kube.events = [
        event("Pod", "run-trainer-0", "FailedMount", "MountVolume.SetUp failed: mount.nfs: Connection refused")
    ]
    check(
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
def test_a_kubelet_that_has_not_read_an_object_yet_is_no_problem(kind: str) -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    text = f'MountVolume.SetUp failed for volume "config" : failed to sync {kind} cache: timed out waiting for the condition'
    kube.events = [event("Pod", "run-trainer-0", "FailedMount", text)]
    patience_over(kube)
    kube.tick(1)
    assert kube.condition("PodsReady")["reason"] == "PodsStarting"
    assert "MountFailed" not in [reason for _, reason in kube.told]


def test_a_missing_secret_that_a_pod_mounts() -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    text = 'MountVolume.SetUp failed for volume "token" : secret "hub-token" not found'
    kube.events = [event("Pod", "run-trainer-0", "FailedMount", text)]
    check(kube, "PodsReady", "MountFailed", "create secret hub-token in the run's namespace", "trainer.podTemplate")


def test_a_node_that_does_not_answer_is_named() -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    patience_over(kube)
    assert kube.decide().look_up == {"events", "nodes"}, (
        "whether the node answers is what explains a pod that does not begin"
    )
    silent = node("node-1")
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


def test_events_about_a_pod_of_the_same_name_before_it_are_past() -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    before = event("Pod", "run-trainer-0", "FailedMount", "MountVolume.SetUp failed: mount.nfs: Connection refused")
    before["involvedObject"]["uid"] = "another"
    kube.events = [before]
    patience_over(kube)
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
def test_a_start_that_only_takes_its_time_says_so_without_a_warning(
    happens: Callable[[Kube], None], reason: str, words: str
) -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    happens(kube)
    patience_over(kube)
    assert (kube.status["reason"], [t for t, _ in kube.told if t == "Warning"]) == (reason, [])
    assert words in kube.status["message"]


def test_in_the_end_the_orchestrator_says_what_it_waits_for() -> None:
    kube = Kube()
    kube.settle()
    kube.report(None, waiting_on="the first rollouts (3 of 8 groups)")
    kube.tick()
    assert kube.status["reason"] == "WaitingForFirstStep"
    assert "the first rollouts" in kube.status["message"]


def test_explanations_are_asked_for_ever_less_often() -> None:
    kube = Kube(GPUS)
    unscheduled(kube)
    patience_over(kube)
    assert kube.decide().wake_in == pytest.approx(5.0)
    kube.tick(300)
    assert kube.decide().wake_in == pytest.approx(30, abs=2)
    kube.tick(100_000)
    assert kube.decide().wake_in == pytest.approx(60)
