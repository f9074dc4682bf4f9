"""Guest and host (`trainer.sharedWith`): start conditions, children, and effects of one on the other."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.names import HOST_ANNOTATION, Ref
from tests.unit.operator.decide.kube import SMALLEST, Kube

HOST: dict[str, Any] = {"trainer": {"lora": {"slots": 2}, "guests": ["*"]}}
GUEST: dict[str, Any] = {"trainer": {"sharedWith": "host", "lora": {}}}


def make_host(spec: dict[str, Any] | None = None) -> Kube:
    return Kube(HOST | (spec or {}), name="host", uid="uid-of-host")


def make_guest(host: Kube | None, spec: dict[str, Any] | None = None, name: str = "guest") -> Kube:
    """Guest of `host`, visible to the host and to its other guests."""
    guest = Kube(GUEST | (spec or {}), name=name, uid=f"uid-of-{name}")
    guest.host = host
    guest.guests = [guest] if host is None else host.guests
    if host is not None:
        host.guests.append(guest)
    return guest


def tick(*runs: Kube, seconds: float = 1.0) -> None:
    """Pass time for all runs, and settle until no run reacts to another."""
    for run in runs:
        run.now += seconds
    for _ in range(20):
        before = [len(run.writes) for run in runs]
        for run in runs:
            run.settle()
        if before == [len(run.writes) for run in runs]:
            return
    raise AssertionError("no rest")


def both() -> tuple[Kube, Kube]:
    """Host and guest that both train."""
    host = make_host().start()
    guest = make_guest(host)
    tick(host, guest)
    guest.start()
    tick(host, guest)
    return host, guest


def list_children(kube: Kube) -> list[tuple[str, str]]:
    return sorted((ref.kind, ref.name) for ref in kube.objects)


def mark_deleted(kube: Kube) -> None:
    kube.run["metadata"]["deletionTimestamp"] = "2023-11-14T22:20:00Z"


def test_guest_has_only_an_orchestrator_and_key() -> None:
    host, guest = both()
    assert [name for kind, name in list_children(guest) if kind in ("StatefulSet", "Deployment", "Service")] == []
    assert [name for kind, name in list_children(guest) if kind == "Secret"] == ["guest-key-uid-of-g"]
    assert ("PersistentVolumeClaim", "guest-data") not in list_children(guest)
    assert [name for kind, name in list_children(guest) if kind == "Pod"] == ["guest-orchestrator-1"]
    for ref, found in guest.objects.items():
        assert [owner["uid"] for owner in found["metadata"]["ownerReferences"]] == ["uid-of-guest"], ref
    status = guest.status
    assert (status["phase"], status["sharedWith"]) == ("Running", {"run": "host", "attempt": 1})
    assert (status["trainerReady"], status["inferenceReady"]) == ("1/1", "1/1")
    assert status["storage"] == {"claimName": "host-data", "path": "/data/guest", "volumeName": "pv-1", "size": "100Gi"}
    assert guest.condition("HostAvailable")["status"] == "True"
    assert guest.condition("InferenceAvailable") == {}
    assert any("with trainer and engines of run host" in message for message in guest.messages)
    assert host.status["guests"] == ["guest"]
    assert "sharedWith" not in host.status


WAITS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None, str, list[str]]] = [
    # reason, blocks of the host, blocks of the guest, status of the host (None: unchanged after its start), expected
    # text
    ("HostNotShared", {"trainer": {"lora": {}}}, {}, None, ["trainer.lora.slots 1", "slots of 2 or more"]),
    ("HostNotShared", {"trainer": {}}, {}, None, ["has no trainer.lora"]),
    (
        "HostIsGuest",
        {"trainer": {"sharedWith": "third", "lora": {}}},
        {},
        {},
        ["itself a guest, of third", "name third"],
    ),
    ("HostIsGuest", {"trainer": {"sharedWith": "guest", "lora": {}}}, {}, {}, ["of guest", "a trainer of its own"]),
    (
        "HostNamesOthers",
        {"trainer": {"lora": {"slots": 2}}},
        {},
        None,
        ["takes no guest of this name (trainer.guests: none)", "add guest to trainer.guests of host"],
    ),
    (
        "HostNamesOthers",
        {"trainer": {"lora": {"slots": 2}, "guests": ["gues", "guest-*", "other"]}},
        {},
        None,
        ["trainer.guests: gues, guest-*, other"],
    ),
    ("HostIncompatible", {}, {"model": {"path": "/models/b"}}, None, ["model differs from the model of host"]),
    (
        "HostIncompatible",
        {},
        {"trainer": {"sharedWith": "host", "lora": {"rank": 32}}},
        None,
        ["trainer.lora.rank (32)", "(16)", "lower it"],
    ),
    (
        "HostIncompatible",
        {},
        {"trainer": {"sharedWith": "host", "lora": {"targets": ["q_proj"]}}},
        None,
        ["trainer.lora.targets (['q_proj'])", "(all)"],
    ),
    ("HostIncompatible", {}, {"seqLen": 4096}, None, ["seqLen (4096)", "(2048)", "raise the host's"]),
    (
        "HostNotReady",
        {},
        {},
        {"phase": "Starting", "attempt": 1, "message": "no node", "trainer": {"desired": 1, "ready": 0}},
        ["0 of 1 pods", "Starting: no node"],
    ),
    ("HostNotReady", {"trainer": {"replicas": 0}}, {}, {}, ["specification is invalid", "spec.trainer.replicas"]),
    ("HostRestarting", {}, {}, {"phase": "Restarting", "attempt": 1}, ["restarts"]),
    (
        "HostFailed",
        {},
        {},
        {"phase": "Failed", "attempt": 1, "message": "a bad reward"},
        ["a bad reward", "correct host"],
    ),
    ("HostComplete", {}, {}, {"phase": "Complete", "attempt": 1}, ["is Complete", "raise its maxSteps"]),
    ("HostComplete", {}, {}, {"phase": "Completing", "attempt": 1}, ["takes no more runs"]),
]


@pytest.mark.parametrize(("reason", "hosts", "guests", "status", "words"), WAITS)
def test_waiting_guest_reports_reason_and_fix(
    reason: str, hosts: dict[str, Any], guests: dict[str, Any], status: dict[str, Any] | None, words: list[str]
) -> None:
    host = make_host(hosts)
    if status is None:
        host.start()
    else:
        host.run["status"] = status
    guest = make_guest(host, guests)
    guest.settle()
    found = guest.condition("HostAvailable")
    assert (found["status"], found["reason"]) == ("False", reason)
    for word in ["trainer.sharedWith (host)" if reason != "HostIncompatible" else "host", *words]:
        assert word in found["message"], found["message"]
    told = guest.status
    assert (told["phase"], told["reason"], told["attempt"]) == ("Pending", reason, 0)
    assert list(guest.objects) == []
    passes_by_itself = reason in ("HostNotReady", "HostRestarting")
    assert guest.condition("Stalled")["status"] == ("False" if passes_by_itself else "True")
    assert guest.told == ([] if passes_by_itself else [("Warning", reason)])


def test_guest_without_host_waits_until_the_host_exists() -> None:
    guest = make_guest(None)
    guest.settle()
    assert (guest.status["phase"], guest.status["reason"]) == ("Pending", "HostNotFound")
    assert "there is no RLRun of this name" in guest.status["message"]
    host = make_host()
    guest.host, host.guests, guest.guests = host, [guest], [guest]
    host.start()
    tick(host, guest)
    assert guest.status["phase"] == "Starting"
    assert guest.condition("Stalled")["status"] == "False"


CLAIMS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"claimName": "other"}, "storage.claimName (other) is not the claim of run host"),
    ({}, {"claimTemplate": {"size": "1Gi"}}, "storage.claimTemplate is not the claim of run host"),
    ({}, {"claimName": "host-data", "mountPath": "/mnt"}, "storage.mountPath (/mnt)"),
    ({}, {"claimName": "host-data", "subPath": "team"}, "storage.subPath (team)"),
    ({}, {"claimName": "host-data", "hubCache": "Volume"}, "storage.hubCache (Volume)"),
    ({"storage": {"claimName": "ours", "subPath": "a"}}, {"claimName": "ours", "subPath": "b"}, "set it to a"),
]


@pytest.mark.parametrize(("hosts", "storage", "words"), CLAIMS)
def test_guest_with_its_own_volume_is_refused(hosts: dict[str, Any], storage: dict[str, Any], words: str) -> None:
    host = make_host(hosts).start()
    guest = make_guest(host, {"storage": storage})
    guest.settle()
    valid = guest.condition("ConfigurationValid")
    assert (valid["status"], valid["reason"], guest.status["phase"]) == ("False", "InvalidConfiguration", "Pending")
    assert words in valid["message"]
    assert "remove storage" in valid["message"]
    assert list(guest.objects) == []
    guest.edit(storage={"claimName": "ours" if hosts else "host-data"})
    tick(host, guest)
    assert guest.status["phase"] == "Starting"
    assert guest.condition("ConfigurationValid")["status"] == "True"


def test_guest_waits_for_the_first_free_slot() -> None:
    host, guest = both()
    second = make_guest(host, name="second")
    tick(host, guest, second)
    assert (second.status["phase"], second.status["reason"]) == ("Pending", "HostSlotsTaken")
    assert "by itself and by guest" in second.status["message"]
    guest.exit("orchestrator", 0)
    tick(host, guest, second)
    assert (guest.status["phase"], second.status["phase"]) == ("Complete", "Starting")
    assert host.status["guests"] == ["second"]


def test_host_restart_does_not_count_as_guest_failure() -> None:
    host, guest = both()
    host.lingering = {"trainer"}
    host.exit("trainer", 137)
    tick(host, guest)
    assert host.status["phase"] == "Restarting"
    assert guest.status["phase"] == "Restarting"
    assert guest.condition("HostAvailable")["reason"] == "HostRestarting"
    assert guest.status["lastFailure"]["reason"] == "HostRestarted"
    host.lingering = set()
    for _ in range(5):
        tick(host, guest, seconds=10)
    assert (host.status["attempt"], guest.status["attempt"]) == (2, 2)
    assert guest.status["sharedWith"] == {"run": "host", "attempt": 2}
    pod = guest.pod("orchestrator")
    assert pod["metadata"]["annotations"][HOST_ANNOTATION] == "uid-of-host/2"
    assert (guest.status["restarts"], guest.status["restartsCountedTowardsMax"]) == (1, 0)
    assert host.status["restartsCountedTowardsMax"] == 1


@pytest.mark.parametrize("ready", [True, False])
def test_orchestrator_failure_without_trainer_is_uncounted(ready: bool) -> None:
    host, guest = both()
    if not ready:  # the operator has not seen the host's change yet
        host.run["status"]["trainer"]["ready"] = 0
    guest.exit("orchestrator", 1, message="the trainer has been silent for 120 s")
    guest.settle()
    assert guest.status["restartsCountedTowardsMax"] == (1 if ready else 0)


def test_attempt_number_used_in_guest_folder_is_skipped() -> None:
    _, guest = both()
    guest.exit("orchestrator", 11, message="RLRUN_ATTEMPT is 1, but it already contains attempt 4; the next is 5")
    guest.tick()
    for _ in range(5):
        guest.tick(10)
    assert (guest.status["attempt"], guest.status["restartsCountedTowardsMax"]) == (5, 0)


@pytest.mark.parametrize("gone", [False, True])
def test_guest_continues_with_the_successor_of_its_host(gone: bool) -> None:
    host, guest = both()
    mark_deleted(host)
    guest.host = None if gone else host
    for _ in range(5):
        guest.tick(10)
    assert (guest.status["phase"], guest.status["reason"]) == ("Restarting", "HostNotFound")
    assert guest.status["lastFailure"]["reason"] == "HostGone"
    assert guest.pods("orchestrator") == []
    assert (guest.status["trainerReady"], guest.condition("Stalled")["status"]) == ("0/0" if gone else "1/1", "True")
    successor = make_host()
    successor.run["metadata"]["uid"] = "uid-of-successor"
    successor.guests, guest.host = [guest], successor
    successor.start()
    for _ in range(5):
        tick(successor, guest)
    assert (guest.status["phase"], guest.status["attempt"]) == ("Starting", 2)
    assert guest.status["restartsCountedTowardsMax"] == 0


def test_guest_of_a_failed_host_waits_and_reports_it() -> None:
    host, guest = both()
    host.exit("trainer", 78, message="the configuration is wrong")
    for _ in range(5):
        tick(host, guest, seconds=10)
    assert (host.status["phase"], guest.status["phase"], guest.status["reason"]) == (
        "Failed",
        "Restarting",
        "HostFailed",
    )
    assert "the configuration is wrong" in guest.status["message"]


def test_complete_host_keeps_trainer_until_guests_end() -> None:
    host, guest = both()
    host.exit("orchestrator", 0)
    tick(host, guest)
    complete = host.condition("Complete")
    assert (complete["status"], complete["reason"], host.status["phase"]) == ("False", "GuestsJoined", "Completing")
    assert "guest" in complete["message"]
    assert {Ref("StatefulSet", "host-trainer"), Ref("Deployment", "host-inference")} <= set(host.objects)
    assert (host.status["trainerReady"], host.condition("InferenceAvailable")["status"]) == ("1/1", "True")
    assert guest.status["phase"] == "Running"
    host.delete(Ref("Deployment", "host-inference"))
    tick(host, guest)
    assert Ref("Deployment", "host-inference") in host.objects, "guests need the engines"
    guest.exit("orchestrator", 0)
    tick(host, guest)
    for _ in range(5):
        tick(host, guest, seconds=10)
    assert (guest.status["phase"], host.status["phase"]) == ("Complete", "Complete")
    assert not {Ref("StatefulSet", "host-trainer"), Ref("Deployment", "host-inference")} & set(host.objects)
    assert "guests" not in host.status


def test_trainer_used_only_by_guests_is_restarted() -> None:
    host, guest = both()
    host.exit("orchestrator", 0)
    tick(host, guest)
    host.exit("trainer", 137)
    for _ in range(5):
        tick(host, guest, seconds=10)
    assert (host.status["attempt"], host.status["phase"]) == (2, "Starting")
    assert (guest.status["attempt"], guest.status["phase"]) == (2, "Starting")
    host.exit("orchestrator", 0)  # no step is left
    tick(host, guest)
    assert (host.status["phase"], host.condition("Complete")["reason"]) == ("Completing", "GuestsJoined")
    assert guest.status["attempt"] == 2


def test_finished_host_does_not_fail_for_its_guests() -> None:
    host = make_host({"failurePolicy": {"maxRestarts": 0}}).start()
    guest = make_guest(host)
    tick(host, guest)
    guest.start()
    host.exit("orchestrator", 0)
    tick(host, guest)
    host.exit("trainer", 1)
    for _ in range(5):
        tick(host, guest, seconds=10)
    assert (host.status["phase"], guest.status["phase"], guest.status["reason"]) == (
        "Complete",
        "Restarting",
        "HostComplete",
    )


def test_deleted_guest_lets_the_host_complete() -> None:
    host, guest = both()
    host.exit("orchestrator", 0)
    tick(host, guest)
    mark_deleted(guest)
    for _ in range(5):
        tick(host, seconds=10)
    assert host.status["phase"] == "Complete"


def test_guest_with_inference_settings_is_refused() -> None:
    guest = Kube(GUEST | {"inference": {"replicas": 2}}, name="guest", uid="uid-of-guest")
    guest.settle()
    assert guest.status["phase"] == "Failed"
    assert "inference.replicas (2) is set by the host of trainer.sharedWith; remove it" in guest.status["message"]
    assert SMALLEST["model"]


def test_guest_removed_from_allowed_list_starts_no_new_attempt() -> None:
    host, guest = both()
    host.edit(trainer={"lora": {"slots": 2}, "guests": ["other"]})
    tick(host, guest)
    assert (guest.status["phase"], guest.status["attempt"], host.status["attempt"]) == ("Running", 1, 1)
    assert guest.condition("HostAvailable")["reason"] == "HostNamesOthers"
    guest.exit("orchestrator", 1)
    for _ in range(60):
        tick(host, guest)
    assert (guest.status["phase"], guest.status["attempt"], guest.pods("orchestrator")) == ("Restarting", 1, [])
    host.edit(trainer={"lora": {"slots": 2}, "guests": ["gu*"]})
    for _ in range(60):
        tick(host, guest)
    assert (guest.status["attempt"], host.status["attempt"]) == (2, 1), "the host is not restarted for it"
