"""A claim that gets no volume: whose it is, what is said, and which edit and command help."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.names import ROLES, Ref
from rlrun_operator.times import rfc3339
from tests.unit.operator.decide.kube import EPOCH, UID, Kube
from tests.unit.operator.decide.test_waiting import event, patience_over, unscheduled

CLAIM = Ref("PersistentVolumeClaim", "run-data")
DELETE = "kubectl -n team-a delete pvc run-data"
OF_KIND = (
    'failed to provision volume with StorageClass "standard": NodePath only supports ReadWriteOnce and ReadWriteOncePod '
    "(1.22+) access modes"
)
OF_EBS = (
    "rpc error: Volume capabilities MULTI_NODE_MULTI_WRITER not supported. Only AccessModes[ReadWriteOnce] supported."
)
OF_PD = "rpc error: VolumeCapabilities is invalid: specified multi writer with mount access type"


def pending(storage: dict[str, Any] | None = None, told: str = "", of_class: str | None = "standard") -> Kube:
    """A run whose claim gets no volume, so that no pod gets a node."""
    kube = Kube({"storage": storage} if storage else None)
    kube.bind_claims = kube.schedule = False
    kube.settle()
    if of_class is not None:  # as the default class is filled in
        kube.objects[CLAIM]["spec"].setdefault("storageClassName", of_class)
    if told:
        kube.events = [event("PersistentVolumeClaim", "run-data", "ProvisioningFailed", told)]
    patience_over(kube)
    return kube


def ready(kube: Kube) -> tuple[str, str, str]:
    found = kube.condition("StorageReady")
    return found["status"], found["reason"], found["message"]


def owners(kube: Kube) -> list[str]:
    return [owner["uid"] for owner in kube.objects[CLAIM]["metadata"].get("ownerReferences", ())]


def test_claim_goes_with_its_run_until_it_has_a_volume() -> None:
    kube = pending()
    assert owners(kube) == [UID]
    kube.bind_claims = kube.schedule = True
    kube.tick()
    assert (owners(kube), kube.writes.count("disown run-data")) == ([], 1)
    kube.tick()
    assert kube.writes.count("disown run-data") == 1


def test_owner_of_somebody_else_stays() -> None:
    kube = pending()
    kube.objects[CLAIM]["metadata"]["ownerReferences"].append({"kind": "Backup", "uid": "other"})
    kube.bind_claims = kube.schedule = True
    kube.tick()
    assert owners(kube) == ["other"]


def test_claim_that_goes_with_its_run_keeps_its_owner() -> None:
    kube = Kube({"storage": {"claimTemplate": {}, "whenDeleted": "Delete"}}).start()
    assert owners(kube) == [UID]


def test_claim_carries_no_tracking_label_of_gitops_tools() -> None:
    assert "app.kubernetes.io/instance" not in pending().objects[CLAIM]["metadata"]["labels"]


@pytest.mark.parametrize("told", [OF_KIND, OF_EBS, OF_PD])
def test_class_without_many_nodes_is_named_with_an_edit_and_a_command(told: str) -> None:
    status, reason, message = ready(pending(told=told))
    assert (status, reason) == ("False", "ClaimPending")
    assert told in message
    for part in ("storage.claimTemplate.storageClassName", "accessModes to [ReadWriteOnce]", DELETE):
        assert part in message


def test_edited_claim_is_told_apart_from_the_one_that_is_there() -> None:
    kube = pending(told=OF_KIND)
    kube.edit(storage={"claimTemplate": {"accessModes": ["ReadWriteOnce"]}})
    kube.tick()
    kube.tick(5)
    message = ready(kube)[2]
    assert "it was created before storage.claimTemplate was edited" in message
    assert DELETE in message
    kube.objects.pop(CLAIM)
    kube.events = []
    kube.tick()
    assert kube.objects[CLAIM]["spec"]["accessModes"] == ["ReadWriteOnce"], "made again, as it is asked for now"
    kube.bind_claims = kube.schedule = True
    kube.tick()
    kube.tick(5)
    assert (kube.status["phase"], ready(kube)[1]) == ("Starting", "ClaimBound")


def test_unbound_claim_of_an_earlier_run_is_named_with_the_command() -> None:
    """Those of earlier releases had no owner, and a run made again took them over without a word."""
    kube = Kube()
    kube.bind_claims = kube.schedule = False
    kube.objects[CLAIM] = left(phase="Pending")
    patience_over(kube)
    _, reason, message = ready(kube)
    assert reason == "ClaimPending"
    assert "an earlier run of this name left this claim" in message
    assert DELETE in message


def test_bound_claim_of_an_earlier_run_is_used_and_named() -> None:
    kube = Kube()
    kube.objects[CLAIM] = left(phase="Bound")
    kube.start()
    status, reason, message = ready(kube)
    assert (status, reason) == ("True", "ClaimBound")
    assert "an earlier run of this name left it with its data" in message
    assert DELETE in message
    assert "earlier" not in ready(Kube().start())[2]


def test_volume_is_in_the_status_when_there_is_one() -> None:
    """The rule that freezes `storage` reads it."""
    kube = pending()
    kube.objects[CLAIM]["spec"]["volumeName"] = "pv-that-is-not-there"
    kube.tick()
    assert "volumeName" not in kube.status["storage"]
    kube.bind_claims = kube.schedule = True
    kube.tick()
    assert kube.status["storage"]["volumeName"] == "pv-1"


def test_storage_without_a_source_has_the_default_claim() -> None:
    kube = Kube({"storage": {"mirror": {"url": "s3://bucket/runs"}}}).start()
    spec = kube.objects[CLAIM]["spec"]
    assert (spec["accessModes"], spec["resources"]) == (["ReadWriteMany"], {"requests": {"storage": "100Gi"}})


def left(phase: str) -> dict[str, Any]:
    return {
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": "run-data",
            "uid": "uid-of-before",
            "labels": {"rlrun.io/run": "run"},
            "creationTimestamp": rfc3339(EPOCH - 3600),
            "generation": 1,
        },
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}},
        "status": {"phase": phase},
    }


def test_pods_that_wait_for_the_claim_alone_are_not_called_unschedulable() -> None:
    """Free nodes do not help them."""
    kube = Kube()
    kube.bind_claims = False
    unscheduled(kube, "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found", ROLES)
    patience_over(kube)
    found = kube.condition("Scheduled")
    assert (found["reason"], kube.status["reason"]) == ("Scheduling", "ClaimPending")
    assert found["message"] == "the pods wait for the volume of claim run-data: see StorageReady"
