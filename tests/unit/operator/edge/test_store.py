"""Store of observed objects: versions, deletions and the runs that an object concerns."""

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


def make_object(
    kind: str, name: str, version: int, *, run: str | None = None, uid: str = "", **more: Any
) -> dict[str, Any]:
    labels = {"rlrun.io/run": run} if run else {}
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": uid or f"uid-{kind}-{name}",
        "resourceVersion": str(version),
        "labels": labels,
    }
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **more}


def test_child_change_wakes_its_run() -> None:
    store = Store()
    assert store.put(make_object("Pod", "p", 1, run="a"), 0.0) == {("ns", "a")}
    assert store.put(make_object("Pod", "p", 2, run="a", status={"phase": "Running"}), 0.0) == {("ns", "a")}
    assert [child["metadata"]["name"] for child in store.children(("ns", "a"))] == ["p"]
    assert store.put(make_object("Pod", "other", 3), 0.0) == set()


def test_stale_event_does_not_overwrite_own_write() -> None:
    store = Store()
    store.put(make_object("RLRun", "a", 1), 0.0)
    store.put(make_object("RLRun", "a", 5, status={"phase": "Running"}), 0.0)  # response to the operator's own write
    assert store.put(make_object("RLRun", "a", 3, status={"phase": "Pending"}), 0.0) == set()
    found = store.get("RLRun", "ns", "a")
    assert found is not None
    assert found["status"] == {"phase": "Running"}


def test_unserved_status_is_dropped() -> None:
    store = Store()
    store.put(make_object("RLRun", "a", 1, status={**UNSERVED, "message": "in the words of another release"}), 0.0)
    found = store.get("RLRun", "ns", "a")
    assert found is not None
    assert "status" not in found
    store.put(make_object("RLRun", "a", 2, status={"phase": "Pending"}), 0.0)
    assert (store.get("RLRun", "ns", "a") or {})["status"] == {"phase": "Pending"}


def test_irrelevant_change_wakes_no_run() -> None:
    store = Store()
    pod = make_object("Pod", "p", 1, run="a", status={"phase": "Running", "qosClass": "Burstable"})
    store.put(pod, 0.0)
    later = make_object("Pod", "p", 2, run="a", status={"phase": "Running", "qosClass": "BestEffort"})
    later["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    assert store.put(later, 0.0) == set()


def test_late_event_does_not_restore_a_deleted_object() -> None:
    store = Store()
    store.put(make_object("Pod", "p", 1, run="a"), 0.0)
    assert store.remove("Pod", "ns", "p", "uid-Pod-p") == {("ns", "a")}
    assert store.put(make_object("Pod", "p", 9, run="a"), 0.0) == set()
    assert store.children(("ns", "a")) == []


def set_owner(manifest: dict[str, Any], by: str) -> dict[str, Any]:
    manifest["metadata"]["ownerReferences"] = [{"uid": by}]
    return manifest


def make_pod(role: str, attempt: int, owner: str) -> dict[str, Any]:
    made = make_object("Pod", f"a-{role}", attempt, run="a", uid=f"{role}-{attempt}", status={"phase": "Running"})
    made["metadata"]["labels"] |= {"rlrun.io/role": role, "rlrun.io/attempt": str(attempt)}
    return set_owner(made, owner)


def test_deleted_pods_of_newest_attempt_are_kept() -> None:
    store = Store()
    store.put(make_object("RLRun", "a", 1), 0.0)
    store.put(set_owner(make_object("StatefulSet", "a-trainer", 1, run="a", uid="group"), "uid-RLRun-a"), 0.0)

    def vanish(role: str, attempt: int) -> list[str]:
        store.put(make_pod(role, attempt, "group" if role == "trainer" else "uid-RLRun-a"), 0.0)
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


def test_newest_deleted_spot_engines_are_kept() -> None:
    """The loss of a node removes a pod immediately, and only its last state contains the reason."""
    store = Store()
    store.put(make_object("RLRun", "a", 1), 0.0)
    for number in range(SPOT_KEPT + 2):
        found = make_object("Pod", f"a-inference-spot-{number}", number + 1, run="a")
        found["metadata"]["labels"] |= {"rlrun.io/role": "inference", SPOT_LABEL: "true"}
        found["metadata"]["annotations"] = {"rlrun.io/run-uid": "uid-RLRun-a"}
        store.put(found, 0.0)
        store.remove("Pod", "ns", f"a-inference-spot-{number}", found["metadata"]["uid"])
    names = [found["metadata"]["name"] for found in store.gone(("ns", "a"))]
    assert names == [f"a-inference-spot-{number}" for number in range(2, SPOT_KEPT + 2)]
    store.remove("RLRun", "ns", "a", "uid-RLRun-a")
    assert store.gone(("ns", "a")) == []


@pytest.mark.parametrize("successor_first", [False, True])
def test_deleted_pod_is_kept_in_either_event_order(successor_first: bool) -> None:
    """The watch handles events of two UIDs concurrently, and times within one second are equal."""
    store = Store()
    store.put(make_object("RLRun", "a", 1), 0.0)
    store.put(set_owner(make_object("StatefulSet", "a-trainer", 1, run="a", uid="group"), "uid-RLRun-a"), 0.0)
    store.put(make_pod("trainer", 2, "group"), 0.0)
    successor = make_pod("trainer", 2, "group")
    successor["metadata"] |= {"uid": "another", "resourceVersion": "9"}
    news = [lambda: store.remove("Pod", "ns", "a-trainer", "trainer-2"), lambda: store.put(successor, 0.0)]
    for tell in reversed(news) if successor_first else news:
        tell()
    assert [found["metadata"]["uid"] for found in store.gone(("ns", "a"))] == ["trainer-2"]


@pytest.mark.parametrize(("uid", "known"), [("uid-RLRun-a", 1), ("of-before", 0)])
def test_pod_with_run_uid_is_kept_without_its_statefulset(uid: str, known: int) -> None:
    """After the StatefulSet and its pods are deleted, only deletion events arrive."""
    store = Store()
    store.put(make_object("RLRun", "a", 1), 0.0)
    said = make_pod("trainer", 1, "group")
    said["metadata"]["annotations"] = {"rlrun.io/run-uid": uid}
    store.put(said, 0.0)
    store.remove("Pod", "ns", "a-trainer", "trainer-1")
    assert len(store.gone(("ns", "a"))) == known


def test_pods_of_deleted_run_are_not_kept_for_successor() -> None:
    """Names, labels and attempts are equal, and within one second the times are as well."""
    store = Store()
    store.put(make_object("RLRun", "a", 1, uid="first"), 0.0)
    store.put(set_owner(make_object("StatefulSet", "a-trainer", 1, run="a", uid="group"), "first"), 0.0)
    for role, owner in (("orchestrator", "first"), ("trainer", "group")):
        store.put(make_pod(role, 1, owner), 0.0)
    store.remove("Pod", "ns", "a-orchestrator", "orchestrator-1")
    assert len(store.gone(("ns", "a"))) == 1
    store.put(make_object("RLRun", "a", 9, uid="second"), 0.0)  # the watch broke before this event
    assert store.gone(("ns", "a")) == []
    store.put(make_pod("orchestrator", 2, "first"), 0.0)
    store.remove("Pod", "ns", "a-orchestrator", "orchestrator-2")
    store.remove("Pod", "ns", "a-trainer", "trainer-1")
    assert store.gone(("ns", "a")) == []


def test_deletion_of_predecessor_keeps_its_successor() -> None:
    store = Store()
    store.put(make_object("StatefulSet", "a-trainer", 1, run="a", uid="old"), 0.0)
    store.put(make_object("StatefulSet", "a-trainer", 7, run="a", uid="new"), 0.0)
    assert store.remove("StatefulSet", "ns", "a-trainer", "old") == set()
    assert len(store.children(("ns", "a"))) == 1


def test_existing_claim_wakes_its_runs_in_either_order() -> None:
    store = Store()
    store.put(make_object("PersistentVolumeClaim", "shared", 1), 0.0)
    store.put(make_object("RLRun", "a", 2, spec={"storage": {"claimName": "shared"}}), 0.0)
    store.put(make_object("RLRun", "b", 3, spec={"storage": {"claimName": "shared"}}), 0.0)
    bound = make_object("PersistentVolumeClaim", "shared", 4, status={"phase": "Bound"})
    assert store.put(bound, 0.0) == {("ns", "a"), ("ns", "b")}
    store.remove("RLRun", "ns", "b", "uid-RLRun-b")
    assert store.remove("PersistentVolumeClaim", "ns", "shared", "uid-PersistentVolumeClaim-shared") == {("ns", "a")}


def test_malformed_specs_are_stored_like_any_other() -> None:
    store = Store()
    for number, storage in enumerate(("text", ["list"], {"claimName": 7}, None)):
        assert store.put(make_object("RLRun", f"r{number}", number, spec={"storage": storage}), 0.0)


def test_lease_age_counts_observed_renewals() -> None:
    store = Store()
    lease = {"holderIdentity": "o", "renewTime": "10:00"}
    store.put(make_object("Lease", "a-progress", 1, run="a", spec=lease), 100.0)
    annotated = make_object("Lease", "a-progress", 2, run="a", spec=lease)
    annotated["metadata"]["annotations"] = {"someone": "else"}
    store.put(annotated, 150.0)
    assert store.lease_changed_at("ns", "a-progress") == 100.0
    store.put(make_object("Lease", "a-progress", 3, run="a", spec=lease | {"renewTime": "10:01"}), 160.0)
    assert store.lease_changed_at("ns", "a-progress") == 160.0
    store.rebase_leases(300.0)
    assert store.lease_changed_at("ns", "a-progress") == 300.0


def test_progress_time_follows_lease_annotations() -> None:
    store, version = Store(), 0

    def renew(at: float, **told: str) -> float | None:
        nonlocal version
        version += 1
        lease = make_object("Lease", "a-progress", version, run="a", spec={"holderIdentity": "o", "renewTime": str(at)})
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


def test_prune_removes_missing_objects_and_keeps_newer_ones() -> None:
    store = Store()
    store.put(make_object("Pod", "gone", 1, run="a"), 0.0)
    store.put(make_object("Pod", "stays", 2, run="b"), 0.0)
    before = store.idents_of("Pod", "ns")
    store.put(make_object("Pod", "born-meanwhile", 9, run="c"), 0.0)
    assert store.remove_unlisted("Pod", "ns", before, {("Pod", "ns", "stays")}) == {("ns", "a")}
    assert store.count() == {"Pod": 2}


def test_stored_pod_contains_only_fields_that_decisions_read() -> None:
    pod = make_object("Pod", "p", 1, run="a")
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
    return make_object("RLRun", name, version, spec=spec, status=status)


def list_guests(store: Store, host: str) -> list[str]:
    return [guest["metadata"]["name"] for guest in store.guests(("ns", host))]


def test_host_and_guest_changes_wake_each_other() -> None:
    store = Store()
    host, one, two = (("ns", name) for name in ("host", "one", "two"))
    assert store.put(a_run("one", 1, "host"), 0.0) == {one, host}
    assert store.put(a_run("two", 2, "host"), 0.0) == {one, two, host}
    assert store.put(a_run("host", 3), 0.0) == {host, one, two}
    assert list_guests(store, "host") == ["one", "two"]
    assert store.put(a_run("host", 4, phase="Running", attempt=1), 0.0) == {host, one, two}
    assert store.put(a_run("one", 5, "host", phase="Complete"), 0.0) == {host, one, two}
    assert store.remove("RLRun", "ns", "one") == {host, one, two}
    assert list_guests(store, "host") == ["two"]
    assert store.remove("RLRun", "ns", "host") == {host, two}


def test_progress_of_one_run_does_not_wake_others() -> None:
    store = Store()
    store.put(a_run("host", 1, attempt=1), 0.0)
    store.put(a_run("one", 2, "host", attempt=1), 0.0)
    assert store.put(a_run("host", 3, attempt=1, progress={"step": 4}), 0.0) == {("ns", "host")}
    weights = {"desired": 1, "ready": 1, "weightVersion": 9}
    store.put(a_run("host", 4, attempt=1, inference=weights), 0.0)
    assert store.put(a_run("host", 5, attempt=1, inference=weights | {"weightVersion": 10}), 0.0) == {("ns", "host")}


def test_guest_with_new_host_leaves_old_host() -> None:
    store = Store()
    store.put(a_run("one", 1, "host"), 0.0)
    keys = store.put(a_run("one", 2, "other"), 0.0)
    assert {("ns", "host"), ("ns", "other")} <= keys
    assert (list_guests(store, "host"), list_guests(store, "other")) == ([], ["one"])


def test_guest_is_observed_with_host_claim_and_guests() -> None:
    store = Store()
    store.put(a_run("host", 1), 0.0)
    store.put(a_run("one", 2, "host"), 0.0)
    store.put(a_run("two", 3, "host"), 0.0)
    store.put(make_object("PersistentVolumeClaim", "host-data", 4, run="host"), 0.0)
    guest, host = observe_run(store, ("ns", "one")), observe_run(store, ("ns", "host"))
    assert guest is not None
    assert host is not None
    assert guest.host is not None
    assert guest.host["metadata"]["name"] == "host"
    assert [ref.name for ref in guest.children] == ["host-data"]
    assert host.host is None
    for seen in (guest, host):
        assert [run["metadata"]["name"] for run in seen.guests] == ["one", "two"]


def test_pod_keeps_time_of_first_deletion_request() -> None:
    store = Store()
    asked = [(40, "2026-11-22T06:40:06Z"), (1, "2026-11-22T06:39:28Z"), (0, "2026-11-22T06:39:28Z")]
    for version, (grace, ends) in enumerate(asked, start=1):
        pod = make_object("Pod", "p", version, run="a", status={"phase": "Running"})
        pod["metadata"] |= {"deletionTimestamp": ends, "deletionGracePeriodSeconds": grace}
        store.put(pod, 0.0)
        found = store.get("Pod", "ns", "p")
        assert found is not None
        assert first_asked_at(found["metadata"]) == seconds_of("2026-11-22T06:39:26Z")
    successor = make_object("Pod", "p", 9, run="a", uid="another")
    store.put(successor, 0.0)
    found = store.get("Pod", "ns", "p")
    assert found is not None
    assert first_asked_at(found["metadata"]) is None


def test_part_is_compared_with_fields_of_last_apply() -> None:
    def part(version: int, field: str, uid: str = "u") -> dict[str, Any]:
        found = make_object("Service", "t", version, run="a", uid=uid)
        entry = {"manager": "rlrun-operator", "operation": "Apply", "fieldsV1": {"f:spec": {f"f:{field}": {}}}}
        found["metadata"]["managedFields"] = [entry]
        return found

    def accepted() -> Any:
        return store.get("Service", "ns", "t")["accepted"]  # type: ignore[index]

    store = Store()
    store.put(part(1, "ports"), 0.0)
    assert accepted() is None, "this process has applied nothing"
    store.put(part(1, "ports"), 0.0, applied=True)  # the watch event arrived before the response
    left = accepted()
    assert left is not None
    store.put(part(2, "selector"), 0.0)
    assert accepted() == left != store.get("Service", "ns", "t")["held"]  # type: ignore[index]
    store.put(part(3, "selector"), 0.0, applied=True)
    assert accepted() == store.get("Service", "ns", "t")["held"]  # type: ignore[index]
    store.put(part(4, "selector", uid="another"), 0.0)
    assert accepted() is None


def put_listed_object(store: Store, found: dict[str, Any], memory: Any) -> bool:
    """Put one object of a list, like `Feed.compare`."""
    older = store.forget_rewound(found, memory)
    store.put(found, 0.0)
    return older


def test_restored_etcd_list_replaces_later_states() -> None:
    store = Store()
    store.put(make_object("RLRun", "a", 90, spec={"maxSteps": 9}), 0.0)
    memory = store.memory("RLRun", None)
    assert put_listed_object(store, make_object("RLRun", "a", 40, spec={"maxSteps": 4}), memory)
    assert store.runs()[0]["spec"] == {"maxSteps": 4}
    assert store.put(make_object("RLRun", "a", 41, spec={"maxSteps": 5}), 0.0) == {("ns", "a")}, "it follows from there"
    assert store.runs()[0]["spec"] == {"maxSteps": 5}


def test_own_write_newer_than_the_list_is_kept() -> None:
    """The list is older than the write but arrives after it."""
    store = Store()
    store.put(make_object("RLRun", "a", 40, spec={"maxSteps": 4}), 0.0)
    memory = store.memory("RLRun", None)
    store.put(make_object("RLRun", "a", 41, spec={"maxSteps": 5}), 0.0)
    assert not put_listed_object(store, make_object("RLRun", "a", 40, spec={"maxSteps": 4}), memory)
    assert store.runs()[0]["spec"] == {"maxSteps": 5}


def test_object_deleted_after_the_backup_returns() -> None:
    store = Store()
    store.put(make_object("RLRun", "a", 1), 0.0)
    store.put(set_owner(make_object("StatefulSet", "a-trainer", 1, run="a", uid="group"), "uid-RLRun-a"), 0.0)
    lost = make_pod("trainer", 1, "group")
    store.put(lost, 0.0)
    store.remove("Pod", "ns", "a-trainer", "trainer-1")
    assert store.gone(("ns", "a")) != []
    assert not store.forget_rewound(lost, ({}, set())), "deleted while the list was on its way"
    assert put_listed_object(store, lost, store.memory("Pod", None))
    assert store.get("Pod", "ns", "a-trainer") is not None
    assert store.gone(("ns", "a")) == []
