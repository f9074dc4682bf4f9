"""Elastic trainer: fewer pods without nodes, more at a checkpoint, one size per attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlrun.config.models.parallel import ParallelismConfig, Sizes, trainer_sizes
from rlrun_operator.decide.elastic_trainer import Choice, Look, Rules, choose_size, grow_delay
from rlrun_operator.names import ROLE_LABEL, Ref
from rlrun_operator.state import Admission
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import Kube, Object

TRAINER = Ref("StatefulSet", "run-trainer")
ELASTIC = {"min": 1, "waitSeconds": 100, "growSeconds": 1000}
SPEC: dict[str, Any] = {
    "maxSteps": 1000,
    "trainer": {"replicas": 4, "gpusPerReplica": 8, "elastic": ELASTIC},
    "checkpoint": {"interval": 20},
    "storage": {"claimTemplate": {"size": "10Gi", "accessModes": ["ReadWriteMany"]}},
}
RULES = Rules(Sizes((1, 2, 4), {3: "3 is odd"}), 100.0, 1000.0)


class Room:
    """Scheduler with room for a limited number of trainer pods."""

    def __init__(self, kube: Kube, pods: int) -> None:
        self._kube, self.pods = kube, pods

    def __call__(self, pod: Object) -> str | None:
        if pod["metadata"]["labels"][ROLE_LABEL] != "trainer":
            return "node-0"
        taken = {p["spec"]["nodeName"] for p in self._kube.pods("trainer") if "nodeName" in p["spec"]}
        free = [f"node-{i}" for i in range(1, self.pods + 1) if f"node-{i}" not in taken]
        return free[0] if free else None


def make_node(name: str, gpus: int = 8, **spec: Any) -> Object:
    resources = {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "512Gi", "pods": "110"}
    return {
        "metadata": {"name": name, "labels": {}},
        "spec": spec,
        "status": {"allocatable": resources, "conditions": []},
    }


def start_elastic_run(pods: int = 4, spec: dict[str, Any] = SPEC) -> tuple[Kube, Room]:
    kube = Kube(spec)
    kube.place = room = Room(kube, pods)
    return kube, room


def lose_nodes(kube: Kube, room: Room, pods: int = 1) -> None:
    """Remove nodes together with the newest pods."""
    room.pods -= pods
    for pod in [
        p
        for p in kube.pods("trainer")
        if p["spec"].get("nodeName") not in (f"node-{i}" for i in range(1, room.pods + 1))
    ]:
        kube.objects.pop(Ref("Pod", pod["metadata"]["name"]))
    kube.tick()


def read_size(kube: Kube) -> tuple[int, int | None, str]:
    """Replicas of the StatefulSet, recorded size, and node count in the pods' environment."""
    child = kube.objects[TRAINER]
    env = {e["name"]: e.get("value") for e in child["spec"]["template"]["spec"]["containers"][0]["env"]}
    return child["spec"]["replicas"], kube.status["trainer"].get("size"), str(env["RLRUN_NNODES"])


def start_shrunk_run(pods: int = 3, spec: dict[str, Any] = SPEC) -> tuple[Kube, Room]:
    """Run that has lost nodes and trains with fewer pods."""
    kube, room = start_elastic_run(spec=spec)
    kube.start(step=30)
    lose_nodes(kube, room, 4 - pods)
    kube.tick(5)
    kube.tick(101)
    kube.tick(5)
    return kube, room


def report_step(kube: Kube, step: int, resumed: int, checkpoint: int) -> None:
    kube.report(step, resumed=resumed, checkpoint_step=checkpoint)
    kube.tick()


@pytest.mark.parametrize(
    ("layout", "ranks", "least", "allowed", "left_out"),
    [
        ({}, 1, 1, (1, 2, 3, 4), ()),
        ({"tp": 2}, 1, 1, (2, 4), (1, 3)),
        ({"tp": 2}, 2, 1, (1, 2, 3, 4), ()),
        ({"ep": 4, "cp": 2}, 1, 2, (4,), (2, 3)),
        ({"pp": 2, "dpReplicate": 2}, 4, 1, (1, 2, 3, 4), ()),
        ({"dpShard": 4}, 1, 1, (4,), (1, 2, 3)),
    ],
)
def test_trainer_sizes_divide_the_layout(
    layout: dict[str, int], ranks: int, least: int, allowed: tuple[int, ...], left_out: tuple[int, ...]
) -> None:
    found = trainer_sizes(ParallelismConfig.model_validate(layout), ranks, least, 4)
    assert (found.allowed, tuple(found.left_out)) == (allowed, left_out)
    assert all("number of ranks" in why or "dpShard" in why for why in found.left_out.values())


@pytest.mark.parametrize(
    ("look", "choice", "words"),
    [
        (Look(4, 4), Choice(4), ""),
        (Look(4, 3, waited=99.0), Choice(4), ""),
        (
            Look(4, 3, waited=100.0),
            Choice(2),
            "4 to 2 pods: 1 of 4 pods found no node within 100 s, and 3 pods do not divide: 3 is odd",
        ),
        (Look(4, 2, waited=100.0), Choice(2), "4 to 2 pods: 2 of 4 pods"),
        (Look(4, 0, waited=900.0), Choice(4), ""),
        (Look(2, 2, grows_in=1.0, room=4, at_checkpoint=True), Choice(2, waiting_on="growTime"), ""),
        (Look(2, 2, room=3, at_checkpoint=True), Choice(2, waiting_on="there is room for 3 pods and not for 4"), ""),
        (Look(2, 2, room=4), Choice(2, waiting_on="the next complete checkpoint"), ""),
        (Look(1, 1, room=3, at_checkpoint=True), Choice(2), "1 to 2 pods: there is room for 3"),
        (Look(1, 1, at_checkpoint=True), Choice(4), "the free capacity is unknown"),
    ],
)
def test_choose_size_follows_pods_nodes_and_wait(look: Look, choice: Choice, words: str) -> None:
    found = choose_size(look, RULES)
    assert (found.size, bool(found.why)) == (choice.size, choice.size != look.size)
    assert words in found.why
    assert (choice.waiting_on or "") in (found.waiting_on or "")


def test_failed_growths_double_the_delay() -> None:
    assert [grow_delay(RULES, tries) for tries in (0, 1, 2, 4, 9)] == [1000, 2000, 4000, 16000, 16000]


def test_lost_node_is_awaited_before_the_run_shrinks() -> None:
    kube, room = start_elastic_run()
    kube.start(step=30)
    assert read_size(kube) == (4, None, "4")
    lose_nodes(kube, room)
    kube.tick(5)
    assert (kube.status["attempt"], read_size(kube)) == (2, (4, None, "4")), "a node may come"
    kube.tick(90)
    assert kube.status["trainer"]["waitingOn"] == "nodes for 1 of 4 pods; it continues with 3 pods after 100 s"
    assert kube.status["attempt"] == 2
    kube.tick(10)
    kube.tick(5)
    assert read_size(kube) == (3, 3, "3")
    assert (kube.status["attempt"], kube.status["trainerReady"], len(kube.pods("trainer"))) == (3, "3/3", 3)
    assert kube.status["trainer"]["reason"] == "4 to 3 pods: 1 of 4 pods found no node within 100 s"
    assert kube.status["restartsCountedTowardsMax"] == 0
    assert ("Normal", "TrainerResized") in kube.told
    assert any(message.endswith("attempt 2 saves a checkpoint and ends for this") for message in kube.messages)


def test_node_that_returns_in_time_keeps_the_size() -> None:
    kube, room = start_elastic_run()
    kube.start(step=30)
    lose_nodes(kube, room)
    kube.tick(90)
    room.pods = 4
    kube.tick(5)
    kube.tick(100)
    assert (read_size(kube), kube.status["attempt"], kube.status["trainerReady"]) == ((4, None, "4"), 2, "4/4")


@pytest.mark.parametrize(("code", "restarts", "failed"), [(1, 1, False), (78, 0, True)])
def test_failure_takes_precedence_over_a_due_resize(code: int, restarts: int, failed: bool) -> None:
    """Otherwise a resize would restart a crashed attempt immediately and uncounted, and a permanent failure forever."""
    kube, room = start_elastic_run()
    kube.start(step=30)
    lose_nodes(kube, room)
    kube.tick(95)
    assert (kube.status["attempt"], read_size(kube)) == (2, (4, None, "4"))
    kube.exit("orchestrator", code)
    kube.tick(10)
    kube.tick(5)
    assert kube.status["restartsCountedTowardsMax"] == restarts
    assert (kube.status["phase"] == "Failed") is failed


def test_wait_for_nodes_starts_when_late_pods_are_created() -> None:
    """An operator that dies at the start of an attempt may return late, so the record is older than the pods."""
    kube, room = start_elastic_run()
    kube.start(step=30)
    lose_nodes(kube, room)
    kube.tick(5)
    kube.tick(90)
    for pod in kube.pods("trainer"):
        if not pod["spec"].get("nodeName"):
            pod["metadata"]["creationTimestamp"] = format_rfc3339(kube.now)
    kube.tick(10)
    kube.tick(5)
    assert read_size(kube) == (4, None, "4")
    kube.tick(85)
    kube.tick(5)
    assert read_size(kube) == (3, 3, "3")


def test_time_before_suspension_is_not_a_wait_for_nodes() -> None:
    kube, room = start_elastic_run()
    kube.start(step=30)
    kube.edit(suspend=True)
    kube.tick(5)
    kube.tick(500)
    room.pods = 3
    kube.edit(suspend=False)
    kube.tick(5)
    kube.tick(5)
    assert (read_size(kube), kube.status["attempt"]) == ((4, None, "4"), 2)
    kube.tick(100)
    kube.tick(5)
    assert read_size(kube) == (3, 3, "3")


def test_trainer_never_has_fewer_pods_than_min() -> None:
    kube, _ = start_shrunk_run(1, SPEC | {"trainer": SPEC["trainer"] | {"elastic": ELASTIC | {"min": 2}}})
    kube.tick(1000)
    assert (read_size(kube), kube.status["attempt"], kube.status["reason"]) == ((4, None, "4"), 2, "Unschedulable")


def test_recorded_size_is_applied_by_the_next_operator() -> None:
    kube, room = start_elastic_run()
    kube.start(step=30)
    lose_nodes(kube, room, 2)
    kube.tick(5)
    kube.now += 101
    first = kube.decide()
    assert (first.scale, first.delete, first.status["trainer"]["size"]) == ((), (), 2)
    kube.do(first)
    kube.new_operator()
    kube.settle()
    kube.tick(5)
    assert (read_size(kube), kube.status["attempt"]) == ((2, 2, "2"), 3)


@pytest.mark.parametrize("requests", range(12))
def test_operator_crash_does_not_change_the_recorded_size(requests: int) -> None:
    kube, room = start_elastic_run()
    kube.start(step=30)
    lose_nodes(kube, room, 2)
    kube.tick(5)
    kube.now += 101
    for _ in range(12):
        kube.do(kube.decide(), stop_after=requests)
        kube.controllers()
        kube.now += 1
    kube.settle()
    kube.tick(5)
    assert read_size(kube) == (2, 2, "2")


def test_trainer_grows_at_checkpoint_without_lost_steps() -> None:
    kube, room = start_shrunk_run(2)
    report_step(kube, 35, 30, 30)
    assert kube.status["trainer"]["waitingOn"].startswith("it does not grow before growTime")
    kube.nodes = [make_node(f"node-{i}") for i in range(1, 3)]
    kube.tick(1000)
    report_step(kube, 41, 30, 40)
    assert kube.status["trainer"]["waitingOn"] == "there is room for 2 pods and not for 3"
    assert read_size(kube) == (2, 2, "2")
    kube.nodes += [make_node("node-3"), make_node("node-4")]
    room.pods = 4
    report_step(kube, 50, 30, 40)
    assert (read_size(kube), kube.status["trainer"]["waitingOn"]) == ((2, 2, "2"), "the next complete checkpoint")
    report_step(kube, 60, 30, 60)
    kube.tick(5)
    assert (read_size(kube), kube.status["trainerReady"], kube.status["attempt"]) == ((4, None, "4"), "4/4", 4)
    assert kube.status["trainer"]["reason"] == "2 to 4 pods: there is room for 4"
    report_step(kube, 61, 60, 60)
    assert kube.status["checkpoint"]["stepsLostTotal"] == 0
    assert "grownFrom" not in kube.status["trainer"]


def test_trainer_does_not_grow_at_its_starting_checkpoint() -> None:
    kube, room = start_shrunk_run(2)
    kube.nodes = [make_node(f"node-{i}") for i in range(1, 5)]
    room.pods = 4
    kube.tick(1000)
    report_step(kube, 31, 30, 30)
    assert (read_size(kube), kube.status["trainer"]["waitingOn"]) == ((2, 2, "2"), "the next complete checkpoint")


def test_growth_time_far_in_the_future_is_ignored() -> None:
    kube, room = start_shrunk_run(2)
    room.pods = 4
    report_step(kube, 41, 30, 40)
    kube.run["status"]["trainer"]["growTime"] = "2099-01-01T00:00:00Z"
    kube.tick(61)
    report_step(kube, 60, 30, 60)
    kube.tick(5)
    assert read_size(kube) == (4, None, "4")


def test_cordoned_and_full_nodes_are_not_room() -> None:
    kube, _ = start_shrunk_run(2)
    kube.nodes = [
        make_node("node-1"),
        make_node("node-2"),
        make_node("node-3", unschedulable=True),
        make_node("node-4", gpus=4),
    ]
    kube.tick(1001)
    report_step(kube, 41, 30, 40)
    report_step(kube, 42, 30, 40)
    assert kube.status["trainer"]["waitingOn"] == "there is room for 2 pods and not for 3"


def test_growth_without_node_information_is_retried_less_often() -> None:
    kube, room = start_shrunk_run(2)
    waits = []
    for step in (60, 80):
        before = kube.now
        while read_size(kube)[0] == 2:
            report_step(kube, step + 1, 30, step)
            kube.tick(60)
        waits.append(kube.now - before)
        kube.tick(5)
        assert kube.status["trainer"]["grownFrom"] == 2
        kube.tick(101)
        kube.tick(5)
        assert read_size(kube) == (2, 2, "2")
    assert 900 < waits[0] < 1200
    assert 1900 < waits[1] < 2300
    assert kube.status["trainer"]["growths"] == 2
    assert kube.status["restartsCountedTowardsMax"] == 0
    room.pods = 4
    while read_size(kube)[0] == 2:
        report_step(kube, 101, 30, 100)
        kube.tick(600)
    kube.tick(5)
    report_step(kube, 121, 100, 120)
    assert "growths" not in kube.status["trainer"], "a growth that found nodes starts the count again"


@pytest.mark.parametrize(
    "change", [lambda kube: kube.edit(suspend=True), lambda kube: kube.edit(trainer=SPEC["trainer"] | {"replicas": 2})]
)
def test_suspension_and_fewer_replicas_reset_the_size(change: Callable[[Kube], None]) -> None:
    kube, room = start_shrunk_run(2)
    report_step(kube, 35, 30, 30)
    change(kube)
    kube.tick(5)
    kube.tick(5)
    room.pods = 4
    kube.edit(suspend=False)
    if kube.status["phase"] == "Running":
        kube.run["metadata"].setdefault("annotations", {})["rlrun.io/restart-requested-at"] = "2026-01-01T00:00:00Z"
    kube.tick(5)
    kube.tick(5)
    pods, on_record, _ = read_size(kube)
    assert (pods, on_record) == (kube.run["spec"]["trainer"]["replicas"], None)
    assert "reason" not in kube.status["trainer"]


def test_removed_elastic_block_applies_from_next_attempt() -> None:
    kube, room = start_shrunk_run(2)
    report_step(kube, 35, 30, 30)
    kube.edit(trainer={k: v for k, v in SPEC["trainer"].items() if k != "elastic"})
    kube.tick(5)
    assert (read_size(kube), kube.status["phase"]) == ((2, 2, "2"), "Running")
    room.pods = 4
    kube.disrupt("trainer")
    kube.tick(5)
    kube.tick(5)
    assert read_size(kube) == (4, None, "4")


def test_queue_room_limits_the_trainer_size() -> None:
    kube, room = start_elastic_run(2)
    kube.admission = Admission(True, "RoomFound", "there is room for all pods of the run", room=2)
    kube.start(step=30)
    assert (read_size(kube), kube.status["attempt"]) == ((2, 2, "2"), 1)
    assert kube.status["trainer"]["reason"] == "2 of 4 pods: the queue has room for these"
    kube.tick(1001)
    report_step(kube, 41, 0, 40)
    assert read_size(kube) == (2, 2, "2")
    kube.admission = Admission(True, "RoomFound", "there is room for all pods of the run", room=4)
    room.pods = 4
    report_step(kube, 60, 0, 60)
    kube.tick(5)
    assert read_size(kube) == (4, None, "4")


def test_pending_edit_of_replicas_is_not_a_growth() -> None:
    kube, _ = start_elastic_run(8)
    kube.start(step=30)
    kube.edit(trainer=SPEC["trainer"] | {"replicas": 8})
    kube.tick(2000)
    report_step(kube, 41, 30, 40)
    assert (read_size(kube), kube.status["attempt"]) == ((4, None, "4"), 1)
    assert "waitingOn" not in kube.status["trainer"]
