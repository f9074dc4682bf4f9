"""Pending claims: ownership, messages, and the edits and commands that help."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.names import ROLES, Ref
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import EPOCH, UID, Kube
from tests.unit.operator.decide.test_waiting import make_event, mark_unscheduled, pass_patience

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


def make_pending_run(storage: dict[str, Any] | None = None, told: str = "", of_class: str | None = "standard") -> Kube:
    """Run whose claim gets no volume, so its pods get no node."""
    kube = Kube({"storage": storage} if storage else None)
    kube.bind_claims = kube.schedule = False
    kube.settle()
    if of_class is not None:  # the API server fills in the default class
        kube.objects[CLAIM]["spec"].setdefault("storageClassName", of_class)
    if told:
        kube.events = [make_event("PersistentVolumeClaim", "run-data", "ProvisioningFailed", told)]
    pass_patience(kube)
    return kube


def read_storage_condition(kube: Kube) -> tuple[str, str, str]:
    found = kube.condition("StorageReady")
    return found["status"], found["reason"], found["message"]


def list_owners(kube: Kube) -> list[str]:
    return [owner["uid"] for owner in kube.objects[CLAIM]["metadata"].get("ownerReferences", ())]


def test_run_owns_claim_until_it_is_bound() -> None:
    kube = make_pending_run()
    assert list_owners(kube) == [UID]
    kube.bind_claims = kube.schedule = True
    kube.tick()
    assert (list_owners(kube), kube.writes.count("disown run-data")) == ([], 1)
    kube.tick()
    assert kube.writes.count("disown run-data") == 1


def test_foreign_owner_of_claim_is_kept() -> None:
    kube = make_pending_run()
    kube.objects[CLAIM]["metadata"]["ownerReferences"].append({"kind": "Backup", "uid": "other"})
    kube.bind_claims = kube.schedule = True
    kube.tick()
    assert list_owners(kube) == ["other"]


def test_claim_deleted_with_its_run_keeps_its_owner() -> None:
    kube = Kube({"storage": {"claimTemplate": {}, "whenDeleted": "Delete"}}).start()
    assert list_owners(kube) == [UID]


def test_claim_has_no_gitops_tracking_label() -> None:
    assert "app.kubernetes.io/instance" not in make_pending_run().objects[CLAIM]["metadata"]["labels"]


@pytest.mark.parametrize("told", [OF_KIND, OF_EBS, OF_PD])
def test_single_node_class_is_reported_with_edit_and_command(told: str) -> None:
    status, reason, message = read_storage_condition(make_pending_run(told=told))
    assert (status, reason) == ("False", "ClaimPending")
    assert told in message
    for part in ("storage.claimTemplate.storageClassName", "accessModes to [ReadWriteOnce]", DELETE):
        assert part in message


def test_edited_claim_differs_from_existing_claim_until_recreated() -> None:
    kube = make_pending_run(told=OF_KIND)
    kube.edit(storage={"claimTemplate": {"accessModes": ["ReadWriteOnce"]}})
    kube.tick()
    kube.tick(5)
    message = read_storage_condition(kube)[2]
    assert "it was created before storage.claimTemplate was edited" in message
    assert DELETE in message
    kube.objects.pop(CLAIM)
    kube.events = []
    kube.tick()
    assert kube.objects[CLAIM]["spec"]["accessModes"] == ["ReadWriteOnce"], "made again, as it is asked for now"
    kube.bind_claims = kube.schedule = True
    kube.tick()
    kube.tick(5)
    assert (kube.status["phase"], read_storage_condition(kube)[1]) == ("Starting", "ClaimBound")


def test_unbound_claim_of_earlier_run_is_reported_with_command() -> None:
    """Earlier releases left claims without an owner, and a recreated run used them silently."""
    kube = Kube()
    kube.bind_claims = kube.schedule = False
    kube.objects[CLAIM] = make_leftover_claim(phase="Pending")
    pass_patience(kube)
    _, reason, message = read_storage_condition(kube)
    assert reason == "ClaimPending"
    assert "an earlier run of this name left this claim" in message
    assert DELETE in message


def test_bound_claim_of_earlier_run_is_used_and_reported() -> None:
    kube = Kube()
    kube.objects[CLAIM] = make_leftover_claim(phase="Bound")
    kube.start()
    status, reason, message = read_storage_condition(kube)
    assert (status, reason) == ("True", "ClaimBound")
    assert "an earlier run of this name left it with its data" in message
    assert DELETE in message
    assert "earlier" not in read_storage_condition(Kube().start())[2]


def test_volume_appears_in_status_once_it_exists() -> None:
    """The rule that freezes `storage` reads this field."""
    kube = make_pending_run()
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


def make_leftover_claim(phase: str) -> dict[str, Any]:
    return {
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": "run-data",
            "uid": "uid-of-before",
            "labels": {"rlrun.io/run": "run"},
            "creationTimestamp": format_rfc3339(EPOCH - 3600),
            "generation": 1,
        },
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}},
        "status": {"phase": phase},
    }


def test_pods_waiting_for_their_claim_are_not_unschedulable() -> None:
    """Free nodes do not help these pods."""
    kube = Kube()
    kube.bind_claims = False
    mark_unscheduled(
        kube, "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found", ROLES
    )
    pass_patience(kube)
    found = kube.condition("Scheduled")
    assert (found["reason"], kube.status["reason"]) == ("Scheduling", "ClaimPending")
    assert found["message"] == "the pods wait for the volume of claim run-data: see StorageReady"
