"""Life of a run in a Kueue queue, including operators that are killed between any two writes."""

from __future__ import annotations

import pytest

from rlrun_operator.names import Ref
from rlrun_operator.providers import kueue_workload as objects
from rlrun_operator.settings import Provider, RenderSettings
from tests.support.kueue import counts, is_true
from tests.unit.operator.providers.life import Life


def read_template(life: Life, kind: str, name: str) -> dict[str, object]:
    found = life.kube.objects[Ref(kind, name)]
    return dict(found["spec"]["template"])


def whole_life(life: Life) -> None:
    """Run that waits, is admitted, trains, is preempted, is admitted with another flavor and ends."""
    life.kueue.rooms = 0
    life.settle()
    assert life.phase == "Queued", life.said
    assert life.said == (
        "WaitingForResources: LocalQueue team-a: insufficient unused quota for nvidia.com/gpu in flavor h100, 8 more needed "
        "(WaitingForQuota)"
    )
    life.kueue.rooms = 1
    life.running(7)
    assert read_template(life, "StatefulSet", "run-trainer")["spec"]["nodeSelector"] == {"cloud/gpu": "h100"}  # type: ignore[index]
    assert life.workload_says("PodsReady") == ("True", "Started")
    life.kueue.rooms = 0
    life.kueue_does(life.kueue.preempt)
    life.kube.report(7, checkpoint_step=7)
    life.tick()
    assert life.phase == "Queued", life.said
    assert life.workload is not None
    assert not counts(life.workload)
    life.kueue.rooms, life.kueue.flavor = 1, "a100"
    life.tick()
    assert life.kube.status["attempt"] == 2, life.said
    assert read_template(life, "Deployment", "run-inference")["spec"]["nodeSelector"] == {"cloud/gpu": "a100"}  # type: ignore[index]
    life.kube.report(8, checkpoint_step=8, resumed_from_step=7)
    life.tick()
    assert life.kube.status["checkpoint"]["stepsLostTotal"] == 0
    assert life.kube.status["restartsCountedTowardsMax"] == 0
    life.kube.exit("orchestrator", 0)
    life.tick()
    assert life.phase == "Complete", life.said
    assert life.workload_says("Finished") == ("True", "Succeeded")
    assert life.made == 1, "one Workload for the whole life"


def test_preempted_run_completes_with_another_flavor() -> None:
    whole_life(Life())


@pytest.mark.parametrize(("every", "first"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_killed_operator_continues_correctly_between_any_writes(every: int, first: int) -> None:
    """Each write is tried twice; the operator is killed at the first try."""
    life = Life(kills=lambda number: number % every == first)
    whole_life(life)
    assert life.killed > 20, life.killed


def suspend_run(life: Life) -> Life:
    life.running(7)
    life.kube.edit(suspend=True)
    life.kube.report(7, checkpoint_step=7)
    life.tick()
    assert life.phase == "Suspended", life.said
    return life


@pytest.mark.parametrize("every", [0, 2, 3])
def test_suspended_run_releases_quota_and_waits_again_on_resume(every: int) -> None:
    life = suspend_run(Life(kills=lambda number: every > 0 and number % every == 1))
    assert life.workload is not None
    assert life.workload["spec"]["active"] is False
    assert "admission" not in life.workload["status"]
    life.kube.edit(suspend=False)
    life.kueue.rooms = 0
    life.tick()
    assert life.phase == "Queued", life.said
    life.kueue.rooms = 1
    life.tick()
    assert (life.phase, life.kube.status["attempt"]) == ("Starting", 2)
    assert life.workload["spec"]["active"] is True


@pytest.mark.parametrize("role", ["trainer", "orchestrator", "inference"])
def test_quota_is_held_while_a_pod_is_ending(role: str) -> None:
    life = Life().running(7)
    life.kube.lingering = {role}
    life.kueue.rooms = 0
    life.kueue_does(life.kueue.preempt)
    life.tick()
    assert life.workload is not None
    assert (life.phase, "admission" in life.workload["status"]) == ("Suspending", True)
    life.kube.lingering = set()
    life.tick()
    assert (life.phase, "admission" in life.workload["status"]) == ("Queued", False)


def test_missing_queue_is_reported() -> None:
    life = Life(queue="team-x")
    life.settle()
    assert (life.phase, life.said) == (
        "Queued",
        "QueueMisconfigured: LocalQueue team-x doesn't exist (Misconfigured)",
    )
    assert {"QueueMisconfigured", "Queued"} <= {reason for _, reason in life.kube.told}


def test_manually_deleted_workload_suspends_run_and_is_recreated() -> None:
    life = Life().running(7)
    life.workload = None
    life.check = lambda: None  # type: ignore[method-assign]  # what was deleted under the run's pods counts no quota
    life.kube.report(7, checkpoint_step=7)
    life.tick()
    assert (life.made, life.kube.status["attempt"], life.phase) == (2, 2, "Starting")
    assert life.kube.status["restartsCountedTowardsMax"] == 0


def test_additional_engines_are_created_after_their_admission() -> None:
    life = Life().running(7)
    life.kueue.rooms = 0
    life.kube.edit(inference={"replicas": 4, "gpusPerReplica": 1})
    life.kube.report(7, checkpoint_step=7)
    life.tick()
    assert life.phase == "Queued", life.said
    life.kueue.rooms = 1
    life.tick()
    assert life.workload is not None
    assert life.workload["status"]["admission"]["podSetAssignments"][1]["count"] == 4
    assert len(life.kube.pods("inference")) == 4


def test_autoscaled_engines_stay_within_the_admission() -> None:
    life = Life(inference={"autoscale": {"min": 1, "max": 4}, "gpusPerReplica": 1}).running(7)
    assert life.workload is not None
    assert life.workload["status"]["admission"]["podSetAssignments"][1]["count"] == 4, "quota for all that there may be"
    assert len(life.kube.pods("inference")) == 1
    life.kube.status["inference"]["desired"] = 3
    life.settle()
    assert (life.phase, len(life.kube.pods("inference"))) == ("Running", 3), life.said


def test_deactivated_run_returns_after_suspend_and_resume() -> None:
    life = Life().running(7)
    life.kueue_does(life.kueue.deactivate)
    life.kube.report(7, checkpoint_step=7)
    life.tick()
    assert life.said.startswith("WorkloadDeactivated: "), life.said
    life.kube.edit(suspend=True)
    life.tick()
    life.kube.edit(suspend=False)
    life.tick()
    assert life.phase == "Starting", life.said


def test_failed_run_finishes_its_workload() -> None:
    life = Life().running(7)
    life.kube.exit("orchestrator", 65)
    life.tick()
    assert (life.phase, life.workload_says("Finished")) == ("Failed", ("True", "Failed"))


def test_conflicting_admission_fails_the_run_before_its_pods() -> None:
    life = Life(trainer={"replicas": 2, "nodeSelector": {"cloud/gpu": "b200"}})
    life.settle()
    assert (life.phase, life.said) == (
        "Failed",
        "FailedToStart: trainer: nodeSelector cloud/gpu is b200, and the admission has h100; remove it from the run",
    )
    life.tick()
    assert life.kube.pods("trainer") == []
    assert life.workload_says("Finished") == ("True", "Failed")
    assert ("Warning", "FailedToStart") in life.kube.told
    life.kube.edit(trainer={"replicas": 2})
    life.tick()
    assert (life.phase, life.made) == ("Starting", 2), life.said


@pytest.mark.parametrize(("provider", "reason"), [("own", "FieldsIgnored"), ("kueue", "Valid"), ("volcano", "Valid")])
def test_unused_queue_name_is_reported(provider: Provider, reason: str) -> None:
    life = Life(queueName="team-a")
    life.kube.settings = RenderSettings(provider=provider)
    life.settle()
    assert life.kube.condition("ConfigurationValid")["reason"] == reason


def test_queue_label_in_pod_template_is_refused() -> None:
    labels = {"kueue.x-k8s.io/queue-name": "team-a"}
    life = Life(inference={"replicas": 1, "podTemplate": {"metadata": {"labels": labels}}})
    life.settle()
    assert "inference.podTemplate.metadata.labels: remove kueue.x-k8s.io/queue-name" in life.said


def test_values_added_by_admission_are_not_requested_again() -> None:
    life = Life().running(7)
    before = life.subject().pod_sets
    life.kube.admission = life.step().answer
    assert life.kube.admission.placed
    assert life.subject().pod_sets == before, "mistake 6: it would be pinned to the nodes of its first admission"
    assert "nodeSelector" not in before[0]["template"]["spec"]


def test_excluded_node_does_not_change_the_shape() -> None:
    pod = {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]}
    ]}}}}  # fmt: skip
    child = {"kind": "Pod", "spec": {**pod, "containers": [{"name": "a", "image": "x", "env": []}]}}
    assert objects.pod_sets([child])[0]["template"] == {"spec": {"containers": [{"name": "a"}]}}


def test_restart_keeps_its_admission() -> None:
    life = Life().running(7)
    life.kube.exit("trainer", 1)
    life.tick(60.0)
    assert life.kube.status["attempt"] == 2
    assert life.workload is not None
    assert is_true(life.workload, "Admitted")
    assert life.workload_says("PodsReady")[1] in ("Recovered", "WaitForRecovery")


def test_spot_engines_are_a_separate_pod_set() -> None:
    spot = {"share": 0.5, "nodeSelector": {"capacity": "spot"}}
    engines = {"replicas": 4, "gpusPerReplica": 1}
    life = Life(inference={**engines, "spot": spot})
    life.running(7)
    assert life.workload is not None
    sets = {one["name"]: (one["count"], one["template"]["spec"]) for one in life.workload["spec"]["podSets"]}
    assert {name: count for name, (count, _) in sets.items()} == {
        "trainer": 2,
        "inference": 2,
        "orchestrator": 1,
        "inference-spot": 2,
    }
    assert sets["inference-spot"][1]["nodeSelector"] == {"capacity": "spot"}
    pods = read_template(life, "Deployment", "run-inference-spot")
    assert pods["spec"]["nodeSelector"] == {"cloud/gpu": "h100", "capacity": "spot"}  # type: ignore[index]
    assert pods["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "inference-spot"  # type: ignore[index]
    for share in (0.25, 0.75):
        life.kube.edit(inference={**engines, "spot": {**spot, "share": share}})
        assert life.step().answer.stops, "three engines of a kind are more than were admitted"
