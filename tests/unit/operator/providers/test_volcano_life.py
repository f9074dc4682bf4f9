"""Life of a run in a Volcano queue, including operators that are killed between any two writes."""

from __future__ import annotations

import pytest

from rlrun_operator.names import Ref
from rlrun_operator.restrictions.run_policy import Installation, RunPolicy
from rlrun_operator.settings import RenderSettings
from tests.unit.operator.providers.volcano_life import Life

ANYTHING = RenderSettings(installation=Installation(RunPolicy(pod_template="Any", priority_classes=("*",))))


def whole_life(life: Life) -> None:
    """Run that waits, is admitted, has no nodes, trains, restarts, loses its room and ends."""
    life.volcano.rooms = life.volcano.nodes = 0
    life.settle()
    assert life.phase == "Queued", life.said
    assert life.said.startswith("WaitingForResources: Volcano Queue team-a: PodGroup rlrun-run-")
    assert life.said.endswith(
        "is Pending: queue resource quota insufficient: insufficient nvidia.com/gpu; it needs 2 trainer, 1 inference, 1 orchestrator"
    )
    assert (life.pods(), life.group_phase) == ([], "Pending")
    life.volcano.rooms = 1
    life.tick()
    assert (life.phase, life.group_phase) == ("Starting", "Inqueue")
    assert "PodGroup" in life.kube.condition("Admitted")["message"]
    assert "4/6 tasks in gang unschedulable (NotEnoughResources)" in life.kube.condition("Admitted")["message"]
    life.volcano.nodes = 5  # one engine fewer than wanted
    life.running(7)
    assert (life.group_phase, len(life.kube.pods("inference"))) == ("Running", 3)
    life.kube.exit("trainer", 1)
    for _ in range(8):
        life.tick()
    assert (life.kube.status["attempt"], life.phase) == (2, "Starting"), life.said
    assert life.made == 1, "engines outlive attempts, and so does their group"
    life.kube.report(8, checkpoint_step=8, resumed_from_step=5)
    life.tick()
    life.kube.exit("orchestrator", 0)
    life.tick()
    assert (life.phase, life.group_phase) == ("Complete", "none"), life.said


def test_run_lives_in_one_group_through_restarts() -> None:
    whole_life(Life())


@pytest.mark.parametrize(("every", "first"), [(2, 0), (2, 1), (3, 1)])
def test_killed_operator_continues_correctly_between_any_writes(every: int, first: int) -> None:
    life = Life(kills=lambda number: number % every == first)
    whole_life(life)
    assert life.killed > 5


def test_group_counts_only_required_pods() -> None:
    life = Life(
        trainer={"replicas": 2, "gpusPerReplica": 8, "priorityClassName": "high"},
        orchestrator={"batchSize": 8, "resources": {"requests": {"cpu": "1500m", "memory": "1Gi"}}},
    )
    life.kube.settings = ANYTHING
    life.settle()
    assert life.group is not None
    spec = life.group["spec"]
    assert (spec["minMember"], spec["queue"], spec["priorityClassName"]) == (4, "team-a", "high")
    assert spec["minTaskMember"] == {"trainer": 2, "inference": 1, "orchestrator": 1}
    assert spec["minResources"] == {"cpu": "1500m", "memory": str(2**30), "nvidia.com/gpu": "17"}
    (owner,) = life.group["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["controller"]) == ("RLRun", True)
    template = life.kube.objects[Ref("Deployment", "run-inference")]["spec"]["template"]
    assert template["metadata"]["annotations"]["volcano.sh/task-spec"] == "inference"


@pytest.mark.parametrize(
    ("blocks", "counts"),
    [
        ({"trainer": {"replicas": 4, "elastic": {"min": 2}}}, {"trainer": 2, "inference": 1, "orchestrator": 1}),
        ({"inference": {"autoscale": {"min": 2, "max": 6}, "minAvailable": 2}}, {"trainer": 2, "inference": 2, "orchestrator": 1}),
        ({"task": "SFT", "inference": {}}, {"trainer": 2, "orchestrator": 1}),
    ],
    ids=["elastic trainer", "autoscaled engines", "no engines"],
)  # fmt: skip
def test_optional_pods_are_not_counted(blocks: dict[str, object], counts: dict[str, int]) -> None:
    if blocks.get("task") == "SFT":
        life = Life(**blocks, environments=[], data={"sources": [{"path": "/data/chats.jsonl"}], "epochs": 1})
    else:
        life = Life(**blocks)
    life.settle()
    assert life.group is not None, life.said
    assert life.group["spec"]["minTaskMember"] == counts


def test_suspended_run_has_no_group_and_queues_again() -> None:
    life = Life().running()
    life.kube.edit(suspend=True)
    life.kube.report(7, checkpoint_step=7)
    life.tick()
    assert (life.phase, life.group_phase) == ("Suspended", "none"), life.said
    life.volcano.rooms = 0
    life.kube.edit(suspend=False)
    life.tick()
    assert (life.phase, life.group_phase, life.pods()) == ("Queued", "Pending", []), life.said
    life.volcano.rooms = 1
    life.tick()
    assert (life.kube.status["attempt"], life.kube.status["restarts"]) == (2, 0), life.said


def test_run_without_pods_between_attempts_queues_again() -> None:
    life = Life(
        task="SFT", inference={}, environments=[], data={"sources": [{"path": "/data/chats.jsonl"}], "epochs": 1}
    )
    life.running()
    life.volcano.rooms = 0
    life.kube.exit("trainer", 1)
    for _ in range(8):
        life.tick()
    assert (life.phase, life.group_phase, life.pods()) == ("Queued", "Pending", []), life.said
    life.volcano.rooms = 1
    life.tick()
    assert (life.phase, life.kube.status["attempt"]) == ("Starting", 2), life.said


def test_edit_changes_waiting_group_or_next_attempt() -> None:
    life = Life()
    life.kube.settings = ANYTHING
    life.volcano.rooms = 0
    life.settle()
    life.kube.edit(trainer={"replicas": 1, "gpusPerReplica": 8, "priorityClassName": "low"}, queueName="team-a")
    life.settle()
    assert life.group is not None
    assert (life.group["spec"]["minMember"], life.group["spec"]["priorityClassName"]) == (3, "low")
    life.volcano.rooms = 1
    life.running()
    life.kube.edit(trainer={"replicas": 2, "gpusPerReplica": 8}, inference={"replicas": 1})
    life.tick()
    assert life.group["spec"]["minMember"] == 3, "its attempt has the pods that it began with"
    life.kube.exit("trainer", 1)
    for _ in range(8):
        life.tick()
    assert life.group["spec"]["minMember"] == 4, life.said
    assert "priorityClassName" not in life.group["spec"]
    assert life.kube.status["attempt"] == 2, life.said


def test_missing_or_closed_queue_is_reported_by_name() -> None:
    life = Life(queue="nobody")
    life.settle()
    assert life.phase == "Queued"
    assert life.said.startswith(
        "QueueMisconfigured: Volcano Queue nobody: Volcano has no such Queue; name another one in"
    )
    life = Life()
    life.volcano.queues["team-a"] = "Closed"
    life.settle()
    assert "Volcano Queue team-a: the Queue is Closed, and accepts nothing until it is Open" in life.said
    life.volcano.queues["team-a"] = ""
    life.settle()
    assert "the Queue has no state yet (is Volcano's controller running?), and accepts nothing" in life.said


def test_manually_deleted_group_is_recreated_without_a_restart() -> None:
    life = Life().running()
    life.group = None
    life.tick()
    assert (life.phase, life.group_phase, life.made) == ("Running", "Running", 2), life.said


def test_other_scheduler_in_pod_template_is_refused() -> None:
    life = Life(trainer={"replicas": 2, "podTemplate": {"spec": {"schedulerName": "mine"}}})
    life.kube.settings = ANYTHING
    life.settle()
    assert life.said == (
        "FailedToStart: trainer: schedulerName is mine, and the queue's is volcano; remove it from the run"
    )
    assert life.pods() == []


def test_numeric_priority_is_reported_as_ignored() -> None:
    life = Life(priority=5)
    life.kube.settings = RenderSettings(provider="volcano")
    life.settle()
    said = life.kube.condition("ConfigurationValid")
    assert said["message"] == "ignored: priority 5, because Volcano ranks runs only by trainer.priorityClassName"
