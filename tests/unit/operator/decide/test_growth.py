"""Growth of a run's own claim after an increase of `storage.claimTemplate.size`, in every state of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlrun_operator.names import RUN_LABEL, SPEC_HASH_ANNOTATION, Ref
from rlrun_operator.render import spec_hash
from rlrun_operator.validate_spec import judge_spec
from tests.unit.operator.decide.kube import Kube
from tests.unit.operator.decide.test_shared import make_guest, make_host, tick

CLAIM = Ref("PersistentVolumeClaim", "run-data")
REFUSAL = (
    'persistentvolumeclaims "run-data" is forbidden: only dynamically provisioned pvc can be resized and the storageclass that '
    "provisions the pvc must support resize"
)


def make_storage_block(size: str | None = None, **storage: Any) -> dict[str, Any]:
    return {"storage": {"claimTemplate": {"size": size} if size else {}, **storage}}


def list_growths(kube: Kube) -> list[str]:
    return [write for write in kube.writes if write.startswith("grow ")]


def restarts(kube: Kube) -> None:
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1)
    kube.tick()
    assert kube.status["phase"] == "Restarting"


def waits(kube: Kube) -> None:
    kube.edit(suspend=True)
    kube.settle()
    for role in ("trainer", "inference", "orchestrator"):
        for pod in kube.pods(role):
            del kube.objects[Ref("Pod", pod["metadata"]["name"])]
    kube.tick(5)
    assert kube.status["phase"] == "Suspended"


def ends(kube: Kube) -> None:
    kube.exit("orchestrator", 0)
    kube.tick()
    kube.tick()
    assert kube.status["phase"] == "Complete"


@pytest.mark.parametrize("state", [None, restarts, waits, ends], ids=lambda state: getattr(state, "__name__", "trains"))
def test_claim_grows_immediately_without_other_writes(state: Callable[[Kube], None] | None) -> None:
    kube = Kube(make_storage_block("100Gi") | {"failurePolicy": {"maxRestarts": 9}}).start()
    if state is not None:
        state(kube)
    before, phase = len(kube.writes), kube.status["phase"]
    kube.edit(**make_storage_block("200Gi"))
    kube.settle()
    claims = [write for write in kube.writes[before:] if "run-data" in write]
    assert claims == ["grow run-data 200Gi"]
    if state is not restarts:
        rest = {write for write in kube.writes[before:] if write not in (claims[0], "status")}
        assert {write.split(" ", 1)[1] for write in rest} <= {"PodDisruptionBudget run-inference"}, "as after any edit"
    assert kube.status["phase"] == phase
    assert (kube.status["attempt"], kube.condition("ConfigurationValid")["reason"]) == (1, "Valid")
    assert kube.condition("StorageReady")["reason"] == "ClaimResizing"
    kube.objects[CLAIM]["status"]["capacity"] = {"storage": "200Gi"}
    kube.tick()
    assert kube.condition("StorageReady")["message"] == "claim run-data is bound"


def test_growth_is_reported_until_it_completes() -> None:
    kube = Kube(make_storage_block("100Gi")).start()
    said = kube.condition("StorageReady")
    assert (said["reason"], said["message"]) == ("ClaimBound", "claim run-data is bound")
    assert kube.status["storage"]["size"] == "100Gi"
    kube.edit(**make_storage_block("1Ti"))
    kube.settle()

    def told() -> str:
        return str(kube.condition("StorageReady")["message"])

    assert told() == "claim run-data is bound; it grows from 100Gi to 1Ti: the storage driver enlarges the volume"
    assert kube.status["storage"]["size"] == "1Ti"
    for kind, words in (
        ("Resizing", "the storage driver enlarges the volume"),
        (
            "FileSystemResizePending",
            "the volume is enlarged; its file system follows on the node of a pod that mounts it",
        ),
        ("ControllerResizeError", "no space in the pool; it is tried again"),
    ):
        kube.objects[CLAIM]["status"]["conditions"] = [
            {"type": kind, "status": "True", "message": "no space in the pool"}
        ]
        kube.tick()
        assert told() == f"claim run-data is bound; it grows from 100Gi to 1Ti: {words}"
        found = kube.condition("StorageReady")
        assert (found["status"], found["reason"]) == ("True", "ClaimResizing")
    kube.objects[CLAIM]["status"] |= {"conditions": [], "capacity": {"storage": "1Ti"}}
    kube.tick()
    assert (kube.condition("StorageReady")["reason"], told()) == ("ClaimBound", "claim run-data is bound")
    assert list_growths(kube) == ["grow run-data 1Ti"]
    assert [reason for kind, reason in kube.told if kind == "Warning"] == []


def test_refused_growth_is_reported_without_other_effects() -> None:
    kube = Kube(make_storage_block("100Gi")).start()
    kube.objects[CLAIM]["spec"]["storageClassName"] = "local-path"
    kube.refuses_growth = REFUSAL
    kube.edit(**make_storage_block("200Gi"))
    kube.settle()
    kube.tick(30)
    found = kube.condition("StorageReady")
    assert (found["status"], found["reason"]) == ("True", "ClaimResizeRefused")
    assert "claim run-data is bound; it stays at 100Gi, and the run continues" in found["message"]
    assert "storage.claimTemplate.size requests 200Gi, which is refused" in found["message"]
    assert "have allowVolumeExpansion set in StorageClass local-path" in found["message"]
    assert (kube.status["phase"], kube.status["storage"]["size"]) == ("Running", "100Gi")
    assert kube.told.count(("Warning", "ClaimResizeRefused")) == 1
    assert kube.decide().grow is None, "it is not asked for in every pass"
    kube.edit(**make_storage_block("300Gi"))
    asked = kube.decide().grow
    assert asked is not None, "another size is asked for at once"
    assert asked.size == "300Gi"
    kube.refuses_growth = ""
    kube.settle()
    assert kube.condition("StorageReady")["reason"] == "ClaimResizing"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("exceeded quota: disk, requested: requests.storage=100Gi", "free some of the namespace's quota"),
        ('admission webhook "x" denied the request: no', "change the policy or webhook that refuses it"),
        ('User "sa" cannot patch resource "persistentvolumeclaims"', "a helm upgrade of its chart grants it"),
        (
            "maximum storage usage per PersistentVolumeClaim is 150Gi, but request is 200Gi",
            "change storage.claimTemplate.size, or have the namespace's LimitRange changed",
        ),
    ],
)
def test_refused_growth_is_reported_with_a_fix(text: str, fix: str) -> None:
    kube = Kube(make_storage_block("100Gi")).start()
    kube.refuses_growth = text
    kube.edit(**make_storage_block("200Gi"))
    kube.settle()
    assert text in kube.condition("StorageReady")["message"]
    assert fix in kube.condition("StorageReady")["message"]


def test_full_volume_reports_its_pending_growth() -> None:
    kube = Kube(make_storage_block("100Gi")).start()
    kube.edit(**make_storage_block("200Gi"))
    kube.settle()
    kube.report(3, storage="StorageFull: the volume is full: 12 MiB free of 100 GiB")
    kube.tick()
    found = kube.condition("StorageReady")
    assert (found["status"], found["reason"]) == ("False", "StorageFull"), found
    assert "it grows from 100Gi to 200Gi" in found["message"]


def another_makes_it(kube: Kube) -> None:
    kube.objects[CLAIM]["metadata"]["labels"] = {RUN_LABEL: "other"}


def it_is_deleted(kube: Kube) -> None:
    kube.objects[CLAIM]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"


def it_is_unbound(kube: Kube) -> None:
    kube.bind_claims = False
    kube.objects[CLAIM]["status"] = {"phase": "Pending"}


def it_asks_for_more(kube: Kube) -> None:
    kube.objects[CLAIM]["spec"]["resources"]["requests"]["storage"] = "0.5Ti"


def it_asks_for_the_same(kube: Kube) -> None:
    kube.objects[CLAIM]["spec"]["resources"]["requests"]["storage"] = str(200 * 2**30)


def it_cannot_be_read(kube: Kube) -> None:
    kube.objects[CLAIM]["spec"]["resources"]["requests"]["storage"] = "much"


def the_spec_is_refused(kube: Kube) -> None:
    kube.rejection = "no"


@pytest.mark.parametrize(
    "case",
    [
        another_makes_it,
        it_is_deleted,
        it_is_unbound,
        it_asks_for_more,
        it_asks_for_the_same,
        it_cannot_be_read,
        the_spec_is_refused,
    ],
    ids=lambda case: case.__name__,
)
def test_claim_is_not_grown_if_changed_or_unreadable(case: Callable[[Kube], None]) -> None:
    kube = Kube(make_storage_block("100Gi")).start()
    kube.edit(**make_storage_block("200Gi"))
    asked = kube.decide().grow
    assert asked is not None
    case(kube)
    assert kube.decide().grow is None


def test_existing_claim_is_not_grown() -> None:
    kube = Kube({"storage": {"claimName": "mine"}})
    mine = Ref("PersistentVolumeClaim", "mine")
    kube.objects[mine] = {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "mine", "uid": "u", "generation": 1},
        "spec": {"resources": {"requests": {"storage": "1Gi"}}},
        "status": {"phase": "Bound"},
    }
    kube.start()
    assert kube.decide().grow is None
    assert kube.status["storage"]["size"] == "1Gi"


def test_guest_never_grows_the_claim_of_its_host() -> None:
    host = make_host({"storage": {"claimName": "guest-data"}})
    host.objects[Ref("PersistentVolumeClaim", "guest-data")] = {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "guest-data", "uid": "u", "labels": {RUN_LABEL: "guest"}},
        "spec": {"resources": {"requests": {"storage": "50Gi"}}},
        "status": {"phase": "Bound"},
    }
    host.start()
    guest = make_guest(host)
    tick(host, guest)
    guest.start()
    assert guest.status["storage"]["size"] == "50Gi"
    assert (guest.decide().grow, host.decide().grow) == (None, None)


def test_unbound_claim_grows_once_it_is_bound() -> None:
    kube = Kube(make_storage_block("100Gi"))
    kube.bind_claims = False
    kube.settle()
    kube.edit(**make_storage_block("200Gi"))
    kube.tick()
    assert list_growths(kube) == []
    kube.bind_claims = True
    kube.settle()
    assert list_growths(kube) == ["grow run-data 200Gi"]


@pytest.mark.parametrize("storage", [None, {"claimTemplate": {}}, {"claimTemplate": {}, "mountPath": "/mnt"}])
def test_spec_hash_ignores_claim_size(storage: dict[str, Any] | None) -> None:
    def hashed(storage: dict[str, Any] | None) -> str:
        kube = Kube({"storage": storage} if storage is not None else None)
        spec = judge_spec(kube.run).spec
        assert spec is not None
        return spec_hash(spec)

    grown = {**(storage or {}), "claimTemplate": {"size": "9Ti"}}
    assert hashed(storage) == hashed(grown)
    assert hashed(storage) != hashed({**grown, "mountPath": "/elsewhere"})
    assert hashed(storage) != hashed({**grown, "claimTemplate": {"storageClassName": "fast"}})


MARK_OF_BEFORE = "d65f6dbd991911b6"
"""`spec_hash` of `SMALLEST` with a size of 200Gi, from the last release whose hash included the size."""


def write_previous_hashes(kube: Kube) -> None:
    """Write the hashes of the previous release, which included the size."""
    present = kube.status["specHash"]
    kube.run["status"] = {**kube.status, "specHash": MARK_OF_BEFORE}
    for ref, child in kube.objects.items():
        annotations = child["metadata"].get("annotations") or {}
        if annotations.get(SPEC_HASH_ANNOTATION) == present:
            marked = {**annotations, SPEC_HASH_ANNOTATION: MARK_OF_BEFORE}
            kube.objects[ref] = {**child, "metadata": {**child["metadata"], "annotations": marked}}


def test_upgrade_does_not_mark_a_run_as_edited() -> None:
    kube = Kube(make_storage_block("200Gi")).start()
    engines = kube.objects[Ref("Deployment", "run-inference")]["metadata"]["uid"]
    write_previous_hashes(kube)
    before = len(kube.writes)
    kube.tick()
    assert kube.condition("ConfigurationValid")["reason"] == "Valid"
    assert kube.status["specHash"] != MARK_OF_BEFORE
    assert [write for write in kube.writes[before:] if "status" not in write] == []
    restarts(kube)
    kube.lingering = set()
    kube.settle()
    assert kube.status["attempt"] == 2
    assert kube.objects[Ref("Deployment", "run-inference")]["metadata"]["uid"] == engines
    assert "apply Deployment run-inference" not in kube.writes[before:]


def test_edit_during_an_upgrade_is_detected() -> None:
    kube = Kube(make_storage_block("200Gi")).start()
    write_previous_hashes(kube)
    kube.edit(**make_storage_block("200Gi", mountPath="/elsewhere"))
    kube.tick()
    assert kube.condition("ConfigurationValid")["reason"] == "ChangePending"
