"""API key of a run: lost Secrets and requested rotations."""

from __future__ import annotations

import pytest

from rlrun_operator.names import ROLE_LABEL, ROTATE_ANNOTATION, Ref
from rlrun_operator.state import Decision
from rlrun_operator.status import reasons
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import NAME, UID, Kube
from tests.unit.operator.decide.test_shared import both, tick

FIRST = f"{NAME}-key-{UID[:8]}"
SECOND = f"{FIRST}-2"


def lose(kube: Kube, name: str = FIRST) -> None:
    del kube.objects[Ref("Secret", name)]


def rotate(kube: Kube, value: str | None = None) -> None:
    kube.run["metadata"]["annotations"] = {ROTATE_ANNOTATION: value or format_rfc3339(kube.now)}


def keys_of(kube: Kube) -> dict[str, set[str]]:
    """Return the Secrets in each role's pods."""
    found: dict[str, set[str]] = {}
    for ref, pod in kube.objects.items():
        if ref.kind == "Pod":
            env = {e["name"]: e for e in pod["spec"]["containers"][0]["env"]}
            name = env["RLRUN_API_KEY"]["valueFrom"]["secretKeyRef"]["name"]
            found.setdefault(pod["metadata"]["labels"][ROLE_LABEL], set()).add(name)
    return found


def all_roles(name: str) -> dict[str, set[str]]:
    return {role: {name} for role in ("trainer", "inference", "orchestrator")}


def ticks(kube: Kube, count: int = 8) -> None:
    for _ in range(count):
        kube.tick()


# ---- lost between attempts


def test_later_attempt_reads_its_secret_once() -> None:
    kube = Kube().start()
    assert kube.asked == []
    engine = kube.pod("inference")["metadata"]["uid"]
    kube.exit("trainer", 1)
    ticks(kube)
    assert (kube.status["attempt"], kube.asked) == (2, [FIRST])
    assert keys_of(kube) == all_roles(FIRST)
    assert "keyAttempt" not in kube.status
    assert kube.pod("inference")["metadata"]["uid"] == engine, "engines outlive attempts"


def test_attempt_after_lost_secret_uses_a_new_key() -> None:
    kube = Kube().start()
    lose(kube)
    kube.tick()
    assert kube.status["phase"] == "Running", "what has read it works on"
    kube.exit("trainer", 1)
    ticks(kube)
    assert (kube.status["attempt"], kube.status["keyAttempt"]) == (2, 2)
    assert keys_of(kube) == all_roles(SECOND)
    assert Ref("Secret", SECOND) in kube.objects
    assert Ref("Secret", FIRST) not in kube.objects
    assert ("Warning", reasons.KEY_LOST) in kube.told
    assert any(FIRST in message for message in kube.messages)
    kube.delete(kube.ref("orchestrator"))
    ticks(kube)
    assert (kube.status["attempt"], kube.asked[-1], keys_of(kube)) == (3, SECOND, all_roles(SECOND))


@pytest.mark.parametrize("requests", range(25))
def test_crash_during_attempt_start_leaves_one_key(requests: int) -> None:
    kube = Kube().start()
    lose(kube)
    kube.exit("trainer", 1)
    while kube.condition("Restarting").get("reason") != reasons.KEY_LOST:
        kube.do(kube.decide())
        kube.controllers()
        kube.now += 1
    kube.do(kube.decide(), stop_after=requests)
    kube.lost_key = None
    kube.new_operator()
    ticks(kube)
    assert kube.status["attempt"] == 2
    assert keys_of(kube) == all_roles(SECOND)


def test_deleted_secret_is_not_recreated_under_its_name() -> None:
    """The operator dies before it records the attempt, and the Secret is deleted: the pods have already read its key."""
    kube = Kube()
    kube.do(kube.decide(), stop_after=len(kube.decide().create) + len(kube.decide().apply))
    assert kube.status == {}
    for _ in range(3):
        kube.controllers()
    lose(kube)
    kube.new_operator()
    ticks(kube, 3)
    assert (kube.status["attempt"], Ref("Secret", FIRST) in kube.objects) == (1, False)


def test_attempt_with_two_keys_restarts() -> None:
    """A second operator has read the Secret before its loss and creates the StatefulSet after the loss is recorded."""
    kube = Kube().start()
    kube.exit("trainer", 1)
    while not (decision := kube.decide()).apply:
        kube.do(decision)
        kube.controllers()
        kube.now += 1
    late = next(item.manifest for item in decision.apply if item.manifest["kind"] == "StatefulSet")
    lose(kube)
    kube.do(decision)
    kube.do(kube.decide())
    assert kube.status["keyAttempt"] == 2
    begins = kube.decide()
    kube.do(begins, stop_after=len(begins.create))
    assert Ref("Secret", SECOND) in kube.objects
    kube._apply(late, False)
    ticks(kube, 12)
    assert kube.status["attempt"] == 3
    assert len(set.union(*keys_of(kube).values())) == 1
    assert {o["status"]["phase"] for r, o in kube.objects.items() if r.kind == "Pod"} == {"Running"}


# ---- lost during an attempt


@pytest.mark.parametrize("role", ["trainer", "orchestrator", "inference"])
def test_pod_waiting_for_lost_secret_ends_attempt_uncounted(role: str) -> None:
    kube = Kube()
    kube.make_ready = False
    ticks(kube, 2)
    for other in {"trainer", "orchestrator", "inference"} - {role}:
        kube.pod(other)["status"] = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": other, "ready": True, "restartCount": 0, "state": {"running": {}}}],
        }
    lose(kube)
    kube.make_ready = True
    ticks(kube)
    failure = kube.status["lastFailure"]
    assert (failure["reason"], failure["role"], failure["counted"]) == (reasons.KEY_LOST, role, False)
    assert FIRST in failure["message"]
    assert (kube.status["attempt"], keys_of(kube)) == (2, all_roles(SECOND))
    assert ("Warning", reasons.DISRUPTED) in kube.told


def test_added_engine_without_secret_ends_the_attempt() -> None:
    kube = Kube().start()
    lose(kube)
    kube.edit(inference={"replicas": 2})
    ticks(kube)
    assert kube.status["lastFailure"]["reason"] == reasons.KEY_LOST
    assert (kube.status["attempt"], keys_of(kube)) == (2, all_roles(SECOND))


def test_kubelet_with_stale_secret_cache_ends_nothing() -> None:
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    secret = kube.objects.pop(Ref("Secret", FIRST))
    kube.make_ready = True
    kube.controllers()
    kube.objects[Ref("Secret", FIRST)] = secret
    kube.do(kube.decide())
    assert kube.asked == [FIRST]
    ticks(kube, 3)
    assert (kube.status["attempt"], kube.status.get("lastFailure")) == (1, None)
    assert {o["status"]["phase"] for r, o in kube.objects.items() if r.kind == "Pod"} == {"Running"}


def test_missing_user_secret_is_waited_for() -> None:
    source = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "for-rlrun-hub", "key": "token"}}}
    kube = Kube({"trainer": {"env": [source]}})
    kube.tick()
    ticks(kube)
    assert (kube.status["attempt"], kube.asked) == (1, [])
    ready = kube.condition("PodsReady")
    assert ready["reason"] == reasons.CONTAINER_CONFIG_INVALID
    assert "create secret for-rlrun-hub" in ready["message"]


def test_attempt_without_possible_successor_is_not_ended() -> None:
    kube = Kube({"inference": {"replicas": 2}}).start()
    lose(kube)
    kube.lost_key = FIRST
    kube.edit(trainer={"replicas": 0}, inference={"replicas": 2})
    kube.delete(kube.ref("inference"))
    ticks(kube, 3)
    assert (kube.status["phase"], kube.status["attempt"]) == ("Running", 1)
    assert kube.condition("ConfigurationValid")["status"] == "False"
    kube.edit(trainer={"replicas": 1}, inference={"replicas": 2})
    ticks(kube)
    assert (kube.status["attempt"], keys_of(kube)) == (2, all_roles(SECOND))


# ---- requested rotation


def test_key_rotation_is_an_uncounted_restart() -> None:
    kube = Kube().start()
    rotate(kube)
    ticks(kube)
    status = kube.status
    assert (status["attempt"], status["keyAttempt"], status["restarts"]) == (2, 2, 1)
    assert status["restartsCountedTowardsMax"] == 0
    assert status["keyRotationRequestedAt"] == kube.run["metadata"]["annotations"][ROTATE_ANNOTATION]
    assert keys_of(kube) == all_roles(SECOND)
    assert ("Normal", reasons.KEY_ROTATION_REQUESTED) in kube.told
    assert kube.asked == [], "it is made whether the first one is there or not"
    ticks(kube)
    assert kube.status["attempt"] == 2, "once for each value"


def test_key_rotation_waits_for_the_backoff() -> None:
    kube = Kube({"failurePolicy": {"backoff": {"initialSeconds": 60}}}).start()
    for _ in range(2):
        kube.exit("trainer", 1)
        ticks(kube)
    rotate(kube)
    ticks(kube)
    assert (kube.status["phase"], kube.status["attempt"]) == ("Restarting", 2)
    kube.tick(100)
    ticks(kube)
    assert (kube.status["attempt"], kube.status["restarts"]) == (3, 2)
    assert keys_of(kube) == all_roles(f"{FIRST}-3")


def test_new_key_of_pending_restart_is_recorded_immediately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next pass uses the key; an unrecorded key made the operator repeat the same decision without a pause."""
    kube = Kube().start()
    kube.lingering = {"orchestrator"}
    kube.exit("trainer", 1)
    ticks(kube)
    assert (kube.status["phase"], kube.condition("Restarting")["reason"]) == ("Restarting", reasons.PODS_ENDING)
    rotate(kube)
    kube.lingering = set()
    seen, decide = [], kube.decide

    def watched() -> Decision:
        seen.append((kube.status, decide()))
        return seen[-1][1]

    monkeypatch.setattr(kube, "decide", watched)
    ticks(kube)
    assert kube.status["keyAttempt"] == 2
    assert [d.urgency for before, d in seen if d.status.get("keyAttempt") and "keyAttempt" not in before] == ["now"]


def test_rotation_of_suspended_run_applies_at_resumption() -> None:
    kube = Kube().start()
    kube.edit(suspend=True)
    ticks(kube)
    rotate(kube)
    ticks(kube)
    assert (kube.status["phase"], kube.pods("inference")) == ("Suspended", [])
    kube.edit(suspend=False)
    ticks(kube)
    assert (kube.status["attempt"], keys_of(kube)) == (2, all_roles(SECOND))


def test_rotation_before_the_first_attempt_uses_first_key() -> None:
    kube = Kube()
    rotate(kube)
    kube.start()
    ticks(kube)
    assert (kube.status["attempt"], keys_of(kube)) == (1, all_roles(FIRST))


def test_invalid_rotation_time_is_reported_once() -> None:
    kube = Kube().start()
    rotate(kube, "soon")
    ticks(kube)
    assert kube.status["attempt"] == 1
    assert kube.told.count(("Warning", reasons.KEY_ROTATION_REQUEST_INVALID)) == 1


def test_rotated_key_does_not_return_after_lost_status() -> None:
    kube = Kube().start()
    rotate(kube)
    ticks(kube)
    kube.run["metadata"]["annotations"] = {}
    del kube.run["status"]
    ticks(kube)
    kube.exit("trainer", 1)
    ticks(kube)
    assert Ref("Secret", FIRST) in kube.objects
    assert keys_of(kube) == all_roles(SECOND)


# ---- guests


def test_guest_with_lost_secret_gets_a_new_key() -> None:
    host, guest = both()
    own = "guest-key-uid-of-g"
    assert keys_of(guest) == {"orchestrator": {own}}
    lose(guest, own)
    guest.exit("orchestrator", 1)
    for _ in range(8):
        tick(host, guest)
    assert keys_of(guest) == {"orchestrator": {f"{own}-2"}}
    assert (guest.status["attempt"], host.status["attempt"]) == (2, 1)


def test_guests_restart_with_their_keys_after_host_rotation() -> None:
    host, guest = both()
    before = keys_of(guest)
    rotate(host)
    for _ in range(12):
        tick(host, guest)
    assert (host.status["attempt"], keys_of(host)) == (2, all_roles("host-key-uid-of-h-2"))
    assert (guest.status["attempt"], guest.status["lastFailure"]["counted"]) == (2, False)
    assert keys_of(guest) == before
