"""The store: newest wins, the dead stay dead, and whose business an object is."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.api.run_status import UNSERVED
from rlrun_operator.names import SPOT_LABEL
from rlrun_operator.pods import first_asked_at
from rlrun_operator.reconcile.observe import observe_run
from rlrun_operator.runtime.cache import SPOT_KEPT, Store
from rlrun_operator.runtime.cache_fields import slim_object
from rlrun_operator.times import seconds_of


def make(kind: str, name: str, version: int, *, run: str | None = None, uid: str = "", **more: Any) -> dict[str, Any]:
    labels = {"rlrun.io/run": run} if run else {}
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": uid or f"uid-{kind}-{name}",
        "resourceVersion": str(version),
        "labels": labels,
    }
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **more}


def test_a_change_of_a_child_is_its_runs_business() -> None:
    store = Store()
    assert store.put(make("Pod", "p", 1, run="a"), 0.0) == {("ns", "a")}
    assert store.put(make("Pod", "p", 2, run="a", status={"phase": "Running"}), 0.0) == {("ns", "a")}
    assert [child["metadata"]["name"] for child in store.children(("ns", "a"))] == ["p"]
    assert store.put(make("Pod", "other", 3), 0.0) == set()


def test_old_news_do_not_undo_what_the_operator_wrote_itself() -> None:
    store = Store()
    store.put(make("RLRun", "a", 1), 0.0)
    store.put(make("RLRun", "a", 5, status={"phase": "Running"}), 0.0)  # the answer to an own write
    assert store.put(make("RLRun", "a", 3, status={"phase": "Pending"}), 0.0) == set()
    found = store.get("RLRun", "ns", "a")
    assert found is not None
    assert found["status"] == {"phase": "Running"}


def test_a_status_that_no_operator_wrote_is_none() -> None:
    store = Store()
    store.put(make("RLRun", "a", 1, status={**UNSERVED, "message": "in the words of another release"}), 0.0)
    found = store.get("RLRun", "ns", "a")
    assert found is not None
    assert "status" not in found
    store.put(make("RLRun", "a", 2, status={"phase": "Pending"}), 0.0)
    assert (store.get("RLRun", "ns", "a") or {})["status"] == {"phase": "Pending"}


def test_a_change_of_nothing_that_matters_wakes_nobody() -> None:
    store = Store()
    pod = make("Pod", "p", 1, run="a", status={"phase": "Running", "qosClass": "Burstable"})
    store.put(pod, 0.0)
    later = make("Pod", "p", 2, run="a", status={"phase": "Running", "qosClass": "BestEffort"})
    later["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    assert store.put(later, 0.0) == set()


def test_a_deleted_object_is_not_revived_by_a_late_event() -> None:
    store = Store()
    store.put(make("Pod", "p", 1, run="a"), 0.0)
    assert store.remove("Pod", "ns", "p", "uid-Pod-p") == {("ns", "a")}
    assert store.put(make("Pod", "p", 9, run="a"), 0.0) == set()
    assert store.children(("ns", "a")) == []


def owned(manifest: dict[str, Any], by: str) -> dict[str, Any]:
    manifest["metadata"]["ownerReferences"] = [{"uid": by}]
    return manifest


def pod(role: str, attempt: int, owner: str) -> dict[str, Any]:
    made = make("Pod", f"a-{role}", attempt, run="a", uid=f"{role}-{attempt}", status={"phase": "Running"})
    made["metadata"]["labels"] |= {"rlrun.io/role": role, "rlrun.io/attempt": str(attempt)}
    return owned(made, owner)


def test_deleted_pods_of_the_newest_attempt_are_remembered_until_the_run_is_gone() -> None:
    store = Store()
    store.put(make("RLRun", "a", 1), 0.0)
    store.put(owned(make("StatefulSet", "a-trainer", 1, run="a", uid="group"), "uid-RLRun-a"), 0.0)

    def vanish(role: str, attempt: int) -> list[str]:
        store.put(pod(role, attempt, "group" if role == "trainer" else "uid-RLRun-a"), 0.0)
        store.remove("Pod", "ns", f"a-{role}", f"{role}-{attempt}")
        return [found["metadata"]["uid"] for found in store.gone(("ns", "a"))]

    assert vanish("inference", 2) == [], "engines come and go"
    assert vanish("trainer", 2) == ["trainer-2"]
    assert vanish("orchestrator", 1) == ["trainer-2"]
    assert vanish("orchestrator", 2) == ["trainer-2", "orchestrator-2"]
    assert store.gone(("ns", "a"))[0]["status"] == {"phase": "Running"}
    assert vanish("trainer", 3) == ["trainer-3"]
    store.remove("RLRun", "ns", "a", "uid-RLRun-a")
    assert store.gone(("ns", "a")) == []


def test_the_last_spot_engines_are_remembered() -> None:
    """A node's loss removes a pod at once; why it went is told by its last state."""
    store = Store()
    store.put(make("RLRun", "a", 1), 0.0)
    for number in range(SPOT_KEPT + 2):
        found = make("Pod", f"a-inference-spot-{number}", number + 1, run="a")
        found["metadata"]["labels"] |= {"rlrun.io/role": "inference", SPOT_LABEL: "true"}
        found["metadata"]["annotations"] = {"rlrun.io/run-uid": "uid-RLRun-a"}
        store.put(found, 0.0)
        store.remove("Pod", "ns", f"a-inference-spot-{number}", found["metadata"]["uid"])
    names = [found["metadata"]["name"] for found in store.gone(("ns", "a"))]
    assert names == [f"a-inference-spot-{number}" for number in range(2, SPOT_KEPT + 2)]
    store.remove("RLRun", "ns", "a", "uid-RLRun-a")
    assert store.gone(("ns", "a")) == []


@pytest.mark.parametrize("successor_first", [False, True])
def test_a_deleted_pod_is_remembered_whichever_is_told_first_its_end_or_its_successor(successor_first: bool) -> None:
    """The watch's events of two UIDs are handled side by side, and within a second their times are the same."""
    store = Store()
    store.put(make("RLRun", "a", 1), 0.0)
    store.put(owned(make("StatefulSet", "a-trainer", 1, run="a", uid="group"), "uid-RLRun-a"), 0.0)
    store.put(pod("trainer", 2, "group"), 0.0)
    successor = pod("trainer", 2, "group")
    successor["metadata"] |= {"uid": "another", "resourceVersion": "9"}
    news = [lambda: store.remove("Pod", "ns", "a-trainer", "trainer-2"), lambda: store.put(successor, 0.0)]
    for tell in reversed(news) if successor_first else news:
        tell()
    assert [found["metadata"]["uid"] for found in store.gone(("ns", "a"))] == ["trainer-2"]


@pytest.mark.parametrize(("uid", "known"), [("uid-RLRun-a", 1), ("of-before", 0)])
def test_a_pod_that_says_whose_it_is_needs_no_statefulset_to_be_remembered(uid: str, known: int) -> None:
    """The StatefulSet was deleted, and its pods with it: of both only the news of the end come."""
    store = Store()
    store.put(make("RLRun", "a", 1), 0.0)
    said = pod("trainer", 1, "group")
    said["metadata"]["annotations"] = {"rlrun.io/run-uid": uid}
    store.put(said, 0.0)
    store.remove("Pod", "ns", "a-trainer", "trainer-1")
    assert len(store.gone(("ns", "a"))) == known


def test_pods_of_a_run_that_was_deleted_are_not_its_successors() -> None:
    """Their names, labels and attempts are the same, and within a second their times are, too."""
    store = Store()
    store.put(make("RLRun", "a", 1, uid="first"), 0.0)
    store.put(owned(make("StatefulSet", "a-trainer", 1, run="a", uid="group"), "first"), 0.0)
    for role, owner in (("orchestrator", "first"), ("trainer", "group")):
        store.put(pod(role, 1, owner), 0.0)
    store.remove("Pod", "ns", "a-orchestrator", "orchestrator-1")
    assert len(store.gone(("ns", "a"))) == 1
    store.put(make("RLRun", "a", 9, uid="second"), 0.0)  # the watch broke between the two
    assert store.gone(("ns", "a")) == []
    store.put(pod("orchestrator", 2, "first"), 0.0)
    store.remove("Pod", "ns", "a-orchestrator", "orchestrator-2")
    store.remove("Pod", "ns", "a-trainer", "trainer-1")
    assert store.gone(("ns", "a")) == []


def test_the_deletion_of_a_predecessor_leaves_its_successor() -> None:
    store = Store()
    store.put(make("StatefulSet", "a-trainer", 1, run="a", uid="old"), 0.0)
    store.put(make("StatefulSet", "a-trainer", 7, run="a", uid="new"), 0.0)
    assert store.remove("StatefulSet", "ns", "a-trainer", "old") == set()
    assert len(store.children(("ns", "a"))) == 1


def test_a_claim_that_a_run_brings_along_is_its_business_whichever_came_first() -> None:
    store = Store()
    store.put(make("PersistentVolumeClaim", "shared", 1), 0.0)
    store.put(make("RLRun", "a", 2, spec={"storage": {"claimName": "shared"}}), 0.0)
    store.put(make("RLRun", "b", 3, spec={"storage": {"claimName": "shared"}}), 0.0)
    bound = make("PersistentVolumeClaim", "shared", 4, status={"phase": "Bound"})
    assert store.put(bound, 0.0) == {("ns", "a"), ("ns", "b")}
    store.remove("RLRun", "ns", "b", "uid-RLRun-b")
    assert store.remove("PersistentVolumeClaim", "ns", "shared", "uid-PersistentVolumeClaim-shared") == {("ns", "a")}


def test_malformed_specs_are_stored_like_any_other() -> None:
    store = Store()
    for number, storage in enumerate(("text", ["list"], {"claimName": 7}, None)):
        assert store.put(make("RLRun", f"r{number}", number, spec={"storage": storage}), 0.0)


def test_freshness_is_judged_by_renewals_that_were_seen() -> None:
    store = Store()
    lease = {"holderIdentity": "o", "renewTime": "10:00"}
    store.put(make("Lease", "a-progress", 1, run="a", spec=lease), 100.0)
    annotated = make("Lease", "a-progress", 2, run="a", spec=lease)
    annotated["metadata"]["annotations"] = {"someone": "else"}
    store.put(annotated, 150.0)
    assert store.lease_changed_at("ns", "a-progress") == 100.0
    store.put(make("Lease", "a-progress", 3, run="a", spec=lease | {"renewTime": "10:01"}), 160.0)
    assert store.lease_changed_at("ns", "a-progress") == 160.0
    store.rebase_leases(300.0)
    assert store.lease_changed_at("ns", "a-progress") == 300.0


def test_progress_is_what_the_lease_tells_while_it_is_seen() -> None:
    store, version = Store(), 0

    def renew(at: float, **told: str) -> float | None:
        nonlocal version
        version += 1
        lease = make("Lease", "a-progress", version, run="a", spec={"holderIdentity": "o", "renewTime": str(at)})
        lease["metadata"]["annotations"] = {f"rlrun.io/{name}": value for name, value in told.items()}
        store.put(lease, at)
        return store.lease_moved_at("ns", "a-progress")

    assert renew(100.0, step="3", attempt="1") == 100.0
    assert renew(110.0, step="3", attempt="1", reward="0.5") == 100.0
    assert renew(120.0, step="4", attempt="1") == 120.0
    assert renew(130.0, step="4", attempt="1", activity="7") == 130.0
    assert renew(190.0, step="4", attempt="1", activity="7") == 130.0
    assert renew(251.0, step="4", attempt="1", activity="7") == 251.0, "nothing was seen for a while"
    assert renew(260.0, step="4", attempt="2", activity="7") == 260.0
    assert store.watching_since is None
    store.rebase_leases(300.0)
    assert (store.lease_moved_at("ns", "a-progress"), store.watching_since) == (300.0, 300.0)


def test_a_complete_list_buries_what_it_lacks_but_not_what_is_younger_than_it() -> None:
    store = Store()
    store.put(make("Pod", "gone", 1, run="a"), 0.0)
    store.put(make("Pod", "stays", 2, run="b"), 0.0)
    before = store.idents("Pod", "ns")
    store.put(make("Pod", "born-meanwhile", 9, run="c"), 0.0)
    assert store.prune("Pod", "ns", before, {("Pod", "ns", "stays")}) == {("ns", "a")}
    assert store.count() == {"Pod": 2}


def test_of_a_pod_only_what_decisions_read_is_kept() -> None:
    pod = make("Pod", "p", 1, run="a")
    pod["metadata"]["managedFields"] = [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]
    pod["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "rlrun.io/x": "1"}
    pod["spec"] = {
        "nodeName": "n",
        "volumes": [{"name": "v"}],
        "containers": [
            {"name": "trainer", "image": "i", "env": [{"name": "E"}], "resources": {"limits": {"cpu": "1"}}}
        ],
    }
    state = {"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull"}}, "containerID": "c", "restartCount": 0}
    pod["status"] = {"phase": "Pending", "podIPs": [{"ip": "1"}], "containerStatuses": [state]}
    slim = slim_object(pod)
    assert slim["metadata"]["annotations"] == {"rlrun.io/x": "1"}
    assert "managedFields" not in slim["metadata"]
    assert slim["spec"] == {
        "nodeName": "n",
        "containers": [{"name": "trainer", "image": "i", "resources": {"limits": {"cpu": "1"}}}],
    }
    assert slim["status"] == {
        "phase": "Pending",
        "containerStatuses": [{"name": "trainer", "restartCount": 0, "state": {"waiting": {"reason": "ErrImagePull"}}}],
    }


def a_run(name: str, version: int, host: str | None = None, **status: Any) -> dict[str, Any]:
    spec = {"trainer": {"sharedWith": host}} if host else {}
    return make("RLRun", name, version, spec=spec, status=status)


def names(store: Store, host: str) -> list[str]:
    return [guest["metadata"]["name"] for guest in store.guests(("ns", host))]


def test_runs_that_share_a_trainer_hear_of_each_other() -> None:
    store = Store()
    host, one, two = (("ns", name) for name in ("host", "one", "two"))
    assert store.put(a_run("one", 1, "host"), 0.0) == {one, host}
    assert store.put(a_run("two", 2, "host"), 0.0) == {one, two, host}
    assert store.put(a_run("host", 3), 0.0) == {host, one, two}
    assert names(store, "host") == ["one", "two"]
    assert store.put(a_run("host", 4, phase="Running", attempt=1), 0.0) == {host, one, two}
    assert store.put(a_run("one", 5, "host", phase="Complete"), 0.0) == {host, one, two}
    assert store.remove("RLRun", "ns", "one") == {host, one, two}
    assert names(store, "host") == ["two"]
    assert store.remove("RLRun", "ns", "host") == {host, two}


def test_mere_progress_of_one_run_does_not_wake_the_others() -> None:
    store = Store()
    store.put(a_run("host", 1, attempt=1), 0.0)
    store.put(a_run("one", 2, "host", attempt=1), 0.0)
    assert store.put(a_run("host", 3, attempt=1, progress={"step": 4}), 0.0) == {("ns", "host")}
    weights = {"desired": 1, "ready": 1, "weightVersion": 9}
    store.put(a_run("host", 4, attempt=1, inference=weights), 0.0)
    assert store.put(a_run("host", 5, attempt=1, inference=weights | {"weightVersion": 10}), 0.0) == {("ns", "host")}


def test_a_run_that_becomes_the_guest_of_another_host_is_forgotten_by_the_first() -> None:
    store = Store()
    store.put(a_run("one", 1, "host"), 0.0)
    keys = store.put(a_run("one", 2, "other"), 0.0)
    assert {("ns", "host"), ("ns", "other")} <= keys
    assert (names(store, "host"), names(store, "other")) == ([], ["one"])


def test_a_guest_is_observed_with_its_host_the_hosts_claim_and_all_guests() -> None:
    store = Store()
    store.put(a_run("host", 1), 0.0)
    store.put(a_run("one", 2, "host"), 0.0)
    store.put(a_run("two", 3, "host"), 0.0)
    store.put(make("PersistentVolumeClaim", "host-data", 4, run="host"), 0.0)
    guest, host = observe_run(store, ("ns", "one")), observe_run(store, ("ns", "host"))
    assert guest is not None
    assert host is not None
    assert guest.host is not None
    assert guest.host["metadata"]["name"] == "host"
    assert [ref.name for ref in guest.children] == ["host-data"]
    assert host.host is None
    for seen in (guest, host):
        assert [run["metadata"]["name"] for run in seen.guests] == ["one", "two"]


def test_when_a_pod_was_asked_to_end_first_is_kept_though_kubernetes_writes_over_it() -> None:
    store = Store()
    asked = [(40, "2026-11-22T06:40:06Z"), (1, "2026-11-22T06:39:28Z"), (0, "2026-11-22T06:39:28Z")]
    for version, (grace, ends) in enumerate(asked, start=1):
        pod = make("Pod", "p", version, run="a", status={"phase": "Running"})
        pod["metadata"] |= {"deletionTimestamp": ends, "deletionGracePeriodSeconds": grace}
        store.put(pod, 0.0)
        found = store.get("Pod", "ns", "p")
        assert found is not None
        assert first_asked_at(found["metadata"]) == seconds_of("2026-11-22T06:39:26Z")
    successor = make("Pod", "p", 9, run="a", uid="another")
    store.put(successor, 0.0)
    found = store.get("Pod", "ns", "p")
    assert found is not None
    assert first_asked_at(found["metadata"]) is None


def test_what_an_own_apply_left_is_what_a_part_is_compared_with() -> None:
    def part(version: int, field: str, uid: str = "u") -> dict[str, Any]:
        found = make("Service", "t", version, run="a", uid=uid)
        entry = {"manager": "rlrun-operator", "operation": "Apply", "fieldsV1": {"f:spec": {f"f:{field}": {}}}}
        found["metadata"]["managedFields"] = [entry]
        return found

    def accepted() -> Any:
        return store.get("Service", "ns", "t")["accepted"]  # type: ignore[index]

    store = Store()
    store.put(part(1, "ports"), 0.0)
    assert accepted() is None, "this process has applied nothing"
    store.put(part(1, "ports"), 0.0, applied=True)  # the watch was faster than the answer
    left = accepted()
    assert left is not None
    store.put(part(2, "selector"), 0.0)
    assert accepted() == left != store.get("Service", "ns", "t")["held"]  # type: ignore[index]
    store.put(part(3, "selector"), 0.0, applied=True)
    assert accepted() == store.get("Service", "ns", "t")["held"]  # type: ignore[index]
    store.put(part(4, "selector", uid="another"), 0.0)
    assert accepted() is None


def rewound(store: Store, found: dict[str, Any], memory: Any) -> bool:
    """What `Feed.compare` does with one object of a list."""
    older = store.forget_rewound(found, memory)
    store.put(found, 0.0)
    return older


def test_a_list_of_a_restored_etcd_replaces_later_states() -> None:
    store = Store()
    store.put(make("RLRun", "a", 90, spec={"maxSteps": 9}), 0.0)
    memory = store.memory("RLRun", None)
    assert rewound(store, make("RLRun", "a", 40, spec={"maxSteps": 4}), memory)
    assert store.runs()[0]["spec"] == {"maxSteps": 4}
    assert store.put(make("RLRun", "a", 41, spec={"maxSteps": 5}), 0.0) == {("ns", "a")}, "it follows from there"
    assert store.runs()[0]["spec"] == {"maxSteps": 5}


def test_an_own_write_that_is_newer_than_the_list_stays() -> None:
    """The list was made before the write, and is read after it."""
    store = Store()
    store.put(make("RLRun", "a", 40, spec={"maxSteps": 4}), 0.0)
    memory = store.memory("RLRun", None)
    store.put(make("RLRun", "a", 41, spec={"maxSteps": 5}), 0.0)
    assert not rewound(store, make("RLRun", "a", 40, spec={"maxSteps": 4}), memory)
    assert store.runs()[0]["spec"] == {"maxSteps": 5}


def test_what_was_deleted_after_the_backup_is_there_again() -> None:
    store = Store()
    store.put(make("RLRun", "a", 1), 0.0)
    store.put(owned(make("StatefulSet", "a-trainer", 1, run="a", uid="group"), "uid-RLRun-a"), 0.0)
    lost = pod("trainer", 1, "group")
    store.put(lost, 0.0)
    store.remove("Pod", "ns", "a-trainer", "trainer-1")
    assert store.gone(("ns", "a")) != []
    assert not store.forget_rewound(lost, ({}, set())), "deleted while the list was on its way"
    assert rewound(store, lost, store.memory("Pod", None))
    assert store.get("Pod", "ns", "a-trainer") is not None
    assert store.gone(("ns", "a")) == []
