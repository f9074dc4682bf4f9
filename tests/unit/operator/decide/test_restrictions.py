"""Runs that exceed the restrictions of the installation: refused with a message, and started after either side is corrected."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.names import ROLES, Ref
from rlrun_operator.restrictions import Installation, RunPolicy
from rlrun_operator.settings import RenderSettings
from rlrun_operator.status import reasons
from tests.unit.operator.decide.kube import Kube

PRIVILEGED: dict[str, Any] = {"trainer": {"podTemplate": {"spec": {"hostNetwork": True, "hostPID": True}}}}
POLICIES = {"Restricted": RunPolicy(), "Any": RunPolicy(pod_template="Any")}
MODES = {mode: RenderSettings(installation=Installation(policy)) for mode, policy in POLICIES.items()}


def set_policy(kube: Kube, mode: str) -> Kube:
    """Restart the operator with another policy."""
    kube.settings = MODES[mode]
    return kube


def check_refused(kube: Kube) -> None:
    valid, failed = kube.condition("ConfigurationValid"), kube.condition("Failed")
    assert (kube.status["phase"], failed["reason"]) == ("Failed", "ForbiddenByPolicy")
    assert (valid["status"], valid["reason"]) == ("False", "ForbiddenByPolicy")
    for field in ("trainer.podTemplate.spec.hostNetwork (true)", "trainer.podTemplate.spec.hostPID (true)"):
        assert field in valid["message"]
        assert field in kube.status["message"]


def test_forbidden_run_creates_nothing_and_reports_every_field() -> None:
    kube = Kube(PRIVILEGED)
    kube.settle()
    check_refused(kube)
    assert (list(kube.objects), kube.applied) == ([], [])
    assert kube.told == [("Warning", "ForbiddenByPolicy")]
    writes = list(kube.writes)
    kube.settle()
    assert kube.writes == writes, "a refused run costs nothing"


def test_corrected_run_starts() -> None:
    kube = Kube(PRIVILEGED)
    kube.settle()
    kube.edit(trainer={})
    kube.settle()
    assert (kube.status["attempt"], kube.condition("ConfigurationValid")["status"]) == (1, "True")
    assert kube.condition("Failed").get("status") != "True"


def test_run_starts_when_the_policy_allows_it() -> None:
    kube = Kube(PRIVILEGED)
    kube.settle()
    set_policy(kube, "Any").settle()
    assert (kube.status["attempt"], kube.condition("Failed").get("status")) == (1, "False")
    assert kube.condition("ConfigurationValid")["status"] == "True"


def start_restricted_run() -> Kube:
    """Running run whose policy became stricter after its start."""
    kube = set_policy(Kube(PRIVILEGED), "Any")
    kube.settle()
    assert kube.status["attempt"] == 1
    set_policy(kube, "Restricted").settle()
    return kube


def test_stricter_policy_is_reported_and_the_attempt_continues() -> None:
    kube = start_restricted_run()
    valid = kube.condition("ConfigurationValid")
    assert (valid["status"], valid["reason"]) == ("False", "ForbiddenByPolicy")
    assert "attempt 1 continues, and no other attempt starts" in valid["message"]
    assert kube.told[-1] == ("Warning", "ForbiddenByPolicy")
    assert kube.condition("Failed").get("status") != "True"
    assert all(kube.pods(role) for role in ROLES)


def test_new_attempt_is_refused_by_a_stricter_policy() -> None:
    kube = start_restricted_run()
    rendered = list(kube.applied)
    kube.exit("trainer", 1)
    for _ in range(20):
        kube.tick(10)
    check_refused(kube)
    assert kube.applied == rendered
    assert [kube.pods(role) for role in ("trainer", "inference")] == [[], []], "nothing holds GPUs"


@pytest.mark.parametrize("corrects", ["specification", "policy"])
def test_suspended_run_resumes_after_correction_of_spec_or_policy(corrects: str) -> None:
    kube = start_restricted_run()
    kube.edit(suspend=True)
    kube.tick(60)
    assert kube.status["phase"] == "Suspended"
    kube.edit(suspend=False)
    kube.tick(10)
    assert kube.status["phase"] == "Suspended"
    assert "hostNetwork (true)" in kube.status["message"]
    if corrects == "policy":
        set_policy(kube, "Any")
    else:
        kube.edit(trainer={})
    kube.tick(60)
    assert kube.status["attempt"] == 2


def test_engines_are_not_recreated_under_a_stricter_policy() -> None:
    kube = start_restricted_run()
    engines = Ref("Deployment", "run-inference")
    kube.delete(engines)
    kube.tick(30)
    assert engines not in kube.objects


CLAIMS = RenderSettings(installation=Installation(RunPolicy(claims=("mine",))))


def test_guest_with_forbidden_host_claim_is_refused() -> None:
    host = Kube({"trainer": {"lora": {"slots": 2}, "guests": ["*"]}}, name="host", uid="uid-of-host").start()
    guest = Kube({"trainer": {"sharedWith": "host", "lora": {}}})
    guest.host, guest.guests = host, host.guests
    host.guests.append(guest)
    guest.settings = CLAIMS
    guest.settle()
    assert (guest.status["phase"], list(guest.objects)) == ("Failed", [])
    assert "trainer.sharedWith: its claim (host-data)" in guest.status["message"]
    guest.settings = RenderSettings()
    guest.settle()
    assert guest.status["attempt"] == 1


def make_claim(run: str | None) -> dict[str, Any]:
    labels = {} if run is None else {"rlrun.io/run": run}
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": "run-data", "labels": labels, "uid": "u"}, "spec": {}}


@pytest.mark.parametrize(("made_by", "begins"), [("run", True), ("other", False), (None, False)])
def test_existing_claim_is_used_only_if_made_by_run(made_by: str | None, begins: bool) -> None:
    kube = Kube()
    kube.objects[Ref("PersistentVolumeClaim", "run-data")] = make_claim(made_by)
    kube.settle()
    assert (kube.status["attempt"] == 1) is begins
    if begins:
        return
    assert (kube.status["phase"], kube.condition("Scheduled")["reason"]) == ("Pending", reasons.NAME_TAKEN)
    assert kube.status["message"].startswith("PersistentVolumeClaim run-data exists and is not of this run")
    assert ("Warning", reasons.NAME_TAKEN) in kube.told
    del kube.objects[Ref("PersistentVolumeClaim", "run-data")]
    kube.settle()
    assert kube.status["attempt"] == 1


def test_taken_name_delays_every_attempt() -> None:
    kube = Kube()
    kube.taken = "Service run-trainer"
    kube.settle()
    assert (kube.status["phase"], kube.condition("Scheduled")["reason"]) == ("Pending", reasons.NAME_TAKEN)
    assert list(kube.objects) == []
    kube.taken = None
    kube.start()
    kube.taken = "ConfigMap run-config"
    kube.exit("trainer", 1)
    kube.settle()
    assert (kube.status["phase"], kube.condition("Restarting")["reason"]) == ("Restarting", reasons.NAME_TAKEN)
    assert "ConfigMap run-config exists and is not of this run" in kube.status["message"]
    kube.taken = None
    kube.settle()
    assert kube.status["attempt"] == 2


@pytest.mark.parametrize("lost", [Ref("Lease", "run-progress"), Ref("Deployment", "run-inference")], ids=str)
def test_running_attempt_continues_while_a_name_is_taken(lost: Ref) -> None:
    kube = Kube().start()
    del kube.objects[lost]
    kube.taken = f"{lost.kind} {lost.name}"
    decision = kube.decide()
    assert not [apply for apply in decision.apply if apply.manifest["kind"] == lost.kind]
    assert not decision.create
    assert decision.wake_in is not None
    assert decision.wake_in <= 10
    kube.do(decision)
    assert f"{lost.kind} {lost.name} exists and is not of this run" in kube.condition("Progressing")["message"]
    kube.taken = None
    kube.tick()
    assert lost in kube.objects


def test_foreign_lease_is_reported_as_taken_name() -> None:
    kube = Kube()
    kube.objects[Ref("Lease", "run-progress")] = make_claim(None) | {"kind": "Lease"}
    kube.objects[Ref("Lease", "run-progress")]["metadata"] |= {"name": "run-progress"}
    kube.settle()
    assert kube.status["message"].startswith("Lease run-progress exists and is not of this run")
