"""Hostile values in statuses, labels and annotations, written by any user who may edit them."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.api.run_status import ATTEMPT_MAX, COUNT_MAX
from rlrun_operator.decide.reading import read_status
from rlrun_operator.failures.detect import next_number
from rlrun_operator.names import RUN_UID_ANNOTATION, attempt_of, is_made_for
from rlrun_operator.pods import read_pods
from tests.unit.operator.decide.kube import Kube

HUGE = 2**63 - 1
"""Largest number that the API accepts; the operator cannot write this value plus one."""


@pytest.mark.parametrize("value", [HUGE, -1, -HUGE])
def test_number_out_of_range_is_ignored(value: int) -> None:
    status = read_status(
        {
            "attempt": value,
            "restarts": value,
            "activeSeconds": value,
            "trainer": {"desired": value, "ready": 1},
            "progress": {"step": value, "totalSteps": 9},
            "checkpoint": {"stepsLostTotal": value},
        }
    )
    assert (status.attempt, status.restarts, status.active_seconds, status.trainer.desired) == (0, 0, 0, 0)
    assert (status.progress.step, status.progress.total_steps, status.checkpoint.steps_lost_total) == (0, 9, 0)


def test_largest_valid_number_is_read() -> None:
    status = read_status({"attempt": ATTEMPT_MAX, "restarts": COUNT_MAX})
    assert (status.attempt, status.restarts) == (ATTEMPT_MAX, COUNT_MAX)


@pytest.mark.parametrize("name", ["bad name!", "x" * 300, "A", ""])
def test_invalid_node_name_is_not_excluded(name: str) -> None:
    """The API server would refuse the next attempt with this name, and the run would fail."""
    other = {"name": "node-1", "until": "2999-01-01T00:00:00Z", "reason": "r"}
    status = read_status({"excludedNodes": [{**other, "name": name}, other]})
    assert [node.name for node in status.excluded_nodes or ()] == ["node-1"]


def test_run_with_huge_status_numbers_restarts_from_zero() -> None:
    kube = Kube().start()
    kube.run["status"] = {**kube.status, "restarts": HUGE, "restartsCountedTowardsMax": -HUGE, "launchedAttempt": HUGE}
    kube.exit("trainer", 1)
    for _ in range(20):
        kube.tick()
    assert (kube.status["attempt"], kube.status["restarts"]) == (2, 1)


@pytest.mark.parametrize("text", ["9" * 62, "9" * 10, "-1", "x", "", None])
def test_invalid_attempt_label_is_not_a_number(text: str | None) -> None:
    assert attempt_of({"labels": {"rlrun.io/attempt": text}}) is None
    assert attempt_of({"labels": {"rlrun.io/attempt": "999999999"}}) == ATTEMPT_MAX


def test_impossible_attempt_number_in_message_is_ignored() -> None:
    assert next_number("next free attempt: " + "9" * 900) is None
    assert next_number("next free attempt: 12") == 12


def make_labelled_pod(**metadata: Any) -> dict[str, Any]:
    labels = {"rlrun.io/run": "run", "rlrun.io/role": "trainer", "rlrun.io/attempt": "1"}
    return {"metadata": {"name": "run-trainer-3", "uid": "p", "labels": labels, **metadata}}


def test_handmade_pod_with_run_labels_is_ignored() -> None:
    """Otherwise it would count as a newer trainer pod and restart a healthy run."""
    assert read_pods([make_labelled_pod()], uid="u", born_after=0.0) == ([], [])
    owner = {"kind": "StatefulSet", "name": "run-trainer", "uid": "s"}
    own, _ = read_pods([make_labelled_pod(ownerReferences=[owner])], uid="u", born_after=0.0)
    assert len(own) == 1


def test_copied_label_does_not_make_a_child() -> None:
    owner = {"kind": "RLRun", "name": "run", "uid": "another life"}
    assert is_made_for(make_labelled_pod(ownerReferences=[owner])["metadata"], "run")
    assert is_made_for(make_labelled_pod(annotations={RUN_UID_ANNOTATION: "u"})["metadata"], "run")
    assert not is_made_for(make_labelled_pod()["metadata"], "run")
    assert not is_made_for(make_labelled_pod(ownerReferences=[owner])["metadata"], "other")


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment", "Lease"])
def test_foreign_object_with_copied_label_is_reported_as_foreign(kind: str) -> None:
    """An object of a deleted run would be waited for forever."""
    found = Kube().start()
    ref = next(ref for ref in found.objects if ref.kind == kind)
    copied = found.objects[ref]
    copied["metadata"] = {**copied["metadata"], "ownerReferences": [], "uid": "copy"}
    kube = Kube()
    kube.objects[ref] = copied
    kube.settle()
    assert kube.status["phase"] == "Pending"
    assert kube.status["message"].startswith(f"{ref.kind} {ref.name} exists and is not of this run")


@pytest.mark.parametrize("mark", ["nonsense", "uid/x", "uid/" + "9" * 5000, "/"])
def test_edited_host_annotation_does_not_stop_a_guest(mark: str) -> None:
    host = Kube({"trainer": {"lora": {"slots": 2}, "guests": ["*"]}}, name="host", uid="uid-of-host").start()
    guest = Kube({"trainer": {"sharedWith": "host", "lora": {}}})
    guest.host, guest.guests = host, host.guests
    host.guests.append(guest)
    guest.settle()
    pod = next(found for ref, found in guest.objects.items() if ref.kind == "Pod")
    pod["metadata"]["annotations"]["rlrun.io/host"] = mark
    guest.settle()
    assert guest.status["phase"] in ("Starting", "Restarting")
