"""Elastic trainer: fewer pods when nodes are missing, more at a checkpoint, one size for each attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlrun.config.models.parallel import ParallelismConfig, Sizes, trainer_sizes
from rlrun_operator.decide.elastic_trainer import Choice, Look, Rules, choose_size, grow_delay
from rlrun_operator.names import ROLE_LABEL, Ref
from rlrun_operator.state import Admission
from rlrun_operator.times import rfc3339
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
    """A scheduler with room for so many trainer pods."""

    def __init__(self, kube: Kube, pods: int) -> None:
        self._kube, self.pods = kube, pods

    def __call__(self, pod: Object) -> str | None:
        if pod["metadata"]["labels"][ROLE_LABEL] != "trainer":
            return "node-0"
        taken = {p["spec"]["nodeName"] for p in self._kube.pods("trainer") if "nodeName" in p["spec"]}
        free = [f"node-{i}" for i in range(1, self.pods + 1) if f"node-{i}" not in taken]
        return free[0] if free else None


def node(name: str, gpus: int = 8, **spec: Any) -> Object:
    resources = {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "512Gi", "pods": "110"}
    return {
        "metadata": {"name": name, "labels": {}},
        "spec": spec,
        "status": {"allocatable": resources, "conditions": []},
    }


def began(pods: int = 4, spec: dict[str, Any] = SPEC) -> tuple[Kube, Room]:
    kube = Kube(spec)
    kube.place = room = Room(kube, pods)
    return kube, room


def lose(kube: Kube, room: Room, pods: int = 1) -> None:
    """Nodes go, with the newest pods on them."""
    room.pods -= pods
    for pod in [
        p
        for p in kube.pods("trainer")
        if p["spec"].get("nodeName") not in (f"node-{i}" for i in range(1, room.pods + 1))
    ]:
        kube.objects.pop(Ref("Pod", pod["metadata"]["name"]))
    kube.tick()


def size(kube: Kube) -> tuple[int, int | None, str]:
    """Pods of the StatefulSet, size on record, and ranks' nodes of the pods' environment."""
    child = kube.objects[TRAINER]
    env = {e["name"]: e.get("value") for e in child["spec"]["template"]["spec"]["containers"][0]["env"]}
    return child["spec"]["replicas"], kube.status["trainer"].get("size"), str(env["RLRUN_NNODES"])


def shrunk(pods: int = 3, spec: dict[str, Any] = SPEC) -> tuple[Kube, Room]:
    """A run that has lost nodes, and trains with fewer pods."""
    kube, room = began(spec=spec)
    kube.start(step=30)
    lose(kube, room, 4 - pods)
    kube.tick(5)
    kube.tick(101)
    kube.tick(5)
    return kube, room


def trains(kube: Kube, step: int, resumed: int, checkpoint: int) -> None:
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
def test_sizes_are_those_that_the_layout_divides(
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
def test_the_choice(look: Look, choice: Choice, words: str) -> None:
    found = choose_size(look, RULES)
    assert (found.size, bool(found.why)) == (choice.size, choice.size != look.size)
    assert words in found.why
    assert (choice.waiting_on or "") in (found.waiting_on or "")


def test_growths_in_vain_double_the_time_to_the_next() -> None:
    assert [grow_delay(RULES, tries) for tries in (0, 1, 2, 4, 9)] == [1000, 2000, 4000, 16000, 16000]


def test_a_lost_node_is_waited_for_and_then_done_without() -> None:
    kube, room = began()
    kube.start(step=30)
    assert size(kube) == (4, None, "4")
    lose(kube, room)
    kube.tick(5)
    assert (kube.status["attempt"], size(kube)) == (2, (4, None, "4")), "a node may come"
    kube.tick(90)
    assert kube.status["trainer"]["waitingOn"] == "nodes for 1 of 4 pods; it continues with 3 pods after 100 s"
    assert kube.status["attempt"] == 2
    kube.tick(10)
    kube.tick(5)
    assert size(kube) == (3, 3, "3")
    assert (kube.status["attempt"], kube.status["trainerReady"], len(kube.pods("trainer"))) == (3, "3/3", 3)
    assert kube.status["trainer"]["reason"] == "4 to 3 pods: 1 of 4 pods found no node within 100 s"
    assert kube.status["restartsCountedTowardsMax"] == 0
    assert ("Normal", "TrainerResized") in kube.told
    assert any(message.endswith("attempt 2 saves a checkpoint and ends for this") for message in kube.messages)


def test_a_node_that_comes_in_time_is_used() -> None:
    kube, room = began()
    kube.start(step=30)
    lose(kube, room)
    kube.tick(90)
    room.pods = 4
    kube.tick(5)
    kube.tick(100)
    assert (size(kube), kube.status["attempt"], kube.status["trainerReady"]) == ((4, None, "4"), 2, "4/4")


@pytest.mark.parametrize(("code", "restarts", "failed"), [(1, 1, False), (78, 0, True)])
def test_failure_comes_before_a_size_that_is_due_in_the_same_pass(code: int, restarts: int, failed: bool) -> None:
    """A resize first would restart a crashed attempt at once and uncounted, and an attempt that can never succeed for ever."""
    kube, room = began()
    kube.start(step=30)
    lose(kube, room)
    kube.tick(95)
    assert (kube.status["attempt"], size(kube)) == (2, (4, None, "4"))
    kube.exit("orchestrator", code)
    kube.tick(10)
    kube.tick(5)
    assert kube.status["restartsCountedTowardsMax"] == restarts
    assert (kube.status["phase"] == "Failed") is failed


def test_pods_that_are_made_late_are_waited_for_from_then_on() -> None:
    """An operator that died while it began an attempt comes back late: the record is older than the pods."""
    kube, room = began()
    kube.start(step=30)
    lose(kube, room)
    kube.tick(5)
    kube.tick(90)
    for pod in kube.pods("trainer"):
        if not pod["spec"].get("nodeName"):
            pod["metadata"]["creationTimestamp"] = rfc3339(kube.now)
    kube.tick(10)
    kube.tick(5)
    assert size(kube) == (4, None, "4")
    kube.tick(85)
    kube.tick(5)
    assert size(kube) == (3, 3, "3")


def test_the_time_before_a_suspension_is_no_wait_for_nodes() -> None:
    kube, room = began()
    kube.start(step=30)
    kube.edit(suspend=True)
    kube.tick(5)
    kube.tick(500)
    room.pods = 3
    kube.edit(suspend=False)
    kube.tick(5)
    kube.tick(5)
    assert (size(kube), kube.status["attempt"]) == ((4, None, "4"), 2)
    kube.tick(100)
    kube.tick(5)
    assert size(kube) == (3, 3, "3")


def test_never_fewer_than_min() -> None:
    kube, _ = shrunk(1, SPEC | {"trainer": SPEC["trainer"] | {"elastic": ELASTIC | {"min": 2}}})
    kube.tick(1000)
    assert (size(kube), kube.status["attempt"], kube.status["reason"]) == ((4, None, "4"), 2, "Unschedulable")


def test_the_size_is_on_record_before_it_is_acted_on_and_another_operator_goes_on_from_there() -> None:
    kube, room = began()
    kube.start(step=30)
    lose(kube, room, 2)
    kube.tick(5)
    kube.now += 101
    first = kube.decide()
    assert (first.scale, first.delete, first.status["trainer"]["size"]) == ((), (), 2)
    kube.do(first)
    kube.new_operator()
    kube.settle()
    kube.tick(5)
    assert (size(kube), kube.status["attempt"]) == ((2, 2, "2"), 3)


@pytest.mark.parametrize("requests", range(12))
def test_a_crash_between_any_two_requests_changes_no_size(requests: int) -> None:
    kube, room = began()
    kube.start(step=30)
    lose(kube, room, 2)
    kube.tick(5)
    kube.now += 101
    for _ in range(12):
        kube.do(kube.decide(), stop_after=requests)
        kube.controllers()
        kube.now += 1
    kube.settle()
    kube.tick(5)
    assert size(kube) == (2, 2, "2")


def test_it_grows_at_a_checkpoint_when_nodes_have_room_and_loses_no_step() -> None:
    kube, room = shrunk(2)
    trains(kube, 35, 30, 30)
    assert kube.status["trainer"]["waitingOn"].startswith("it does not grow before growTime")
    kube.nodes = [node(f"node-{i}") for i in range(1, 3)]
    kube.tick(1000)
    trains(kube, 41, 30, 40)
    assert kube.status["trainer"]["waitingOn"] == "there is room for 2 pods and not for 3"
    assert size(kube) == (2, 2, "2")
    kube.nodes += [node("node-3"), node("node-4")]
    room.pods = 4
    trains(kube, 50, 30, 40)
    assert (size(kube), kube.status["trainer"]["waitingOn"]) == ((2, 2, "2"), "the next complete checkpoint")
    trains(kube, 60, 30, 60)
    kube.tick(5)
    assert (size(kube), kube.status["trainerReady"], kube.status["attempt"]) == ((4, None, "4"), "4/4", 4)
    assert kube.status["trainer"]["reason"] == "2 to 4 pods: there is room for 4"
    trains(kube, 61, 60, 60)
    assert kube.status["checkpoint"]["stepsLostTotal"] == 0
    assert "grownFrom" not in kube.status["trainer"]


def test_it_does_not_grow_at_the_checkpoint_that_its_attempt_started_from() -> None:
    kube, room = shrunk(2)
    kube.nodes = [node(f"node-{i}") for i in range(1, 5)]
    room.pods = 4
    kube.tick(1000)
    trains(kube, 31, 30, 30)
    assert (size(kube), kube.status["trainer"]["waitingOn"]) == ((2, 2, "2"), "the next complete checkpoint")


def test_a_time_far_in_the_future_is_not_believed_as_the_clock_was_set() -> None:
    kube, room = shrunk(2)
    room.pods = 4
    trains(kube, 41, 30, 40)
    kube.run["status"]["trainer"]["growTime"] = "2099-01-01T00:00:00Z"
    kube.tick(61)
    trains(kube, 60, 30, 60)
    kube.tick(5)
    assert size(kube) == (4, None, "4")


def test_what_a_cordoned_or_full_node_has_is_no_room() -> None:
    kube, _ = shrunk(2)
    kube.nodes = [node("node-1"), node("node-2"), node("node-3", unschedulable=True), node("node-4", gpus=4)]
    kube.tick(1001)
    trains(kube, 41, 30, 40)
    trains(kube, 42, 30, 40)
    assert kube.status["trainer"]["waitingOn"] == "there is room for 2 pods and not for 3"


def test_where_nobody_knows_what_is_free_it_is_tried_less_and_less_often() -> None:
    kube, room = shrunk(2)
    waits = []
    for step in (60, 80):
        before = kube.now
        while size(kube)[0] == 2:
            trains(kube, step + 1, 30, step)
            kube.tick(60)
        waits.append(kube.now - before)
        kube.tick(5)
        assert kube.status["trainer"]["grownFrom"] == 2
        kube.tick(101)
        kube.tick(5)
        assert size(kube) == (2, 2, "2")
    assert 900 < waits[0] < 1200
    assert 1900 < waits[1] < 2300
    assert kube.status["trainer"]["growths"] == 2
    assert kube.status["restartsCountedTowardsMax"] == 0
    room.pods = 4
    while size(kube)[0] == 2:
        trains(kube, 101, 30, 100)
        kube.tick(600)
    kube.tick(5)
    trains(kube, 121, 100, 120)
    assert "growths" not in kube.status["trainer"], "a growth that found nodes starts the count again"


@pytest.mark.parametrize(
    "change", [lambda kube: kube.edit(suspend=True), lambda kube: kube.edit(trainer=SPEC["trainer"] | {"replicas": 2})]
)
def test_a_suspension_and_fewer_replicas_forget_the_size(change: Callable[[Kube], None]) -> None:
    kube, room = shrunk(2)
    trains(kube, 35, 30, 30)
    change(kube)
    kube.tick(5)
    kube.tick(5)
    room.pods = 4
    kube.edit(suspend=False)
    if kube.status["phase"] == "Running":
        kube.run["metadata"].setdefault("annotations", {})["rlrun.io/restart-requested-at"] = "2026-01-01T00:00:00Z"
    kube.tick(5)
    kube.tick(5)
    pods, on_record, _ = size(kube)
    assert (pods, on_record) == (kube.run["spec"]["trainer"]["replicas"], None)
    assert "reason" not in kube.status["trainer"]


def test_elastic_removed_from_a_smaller_run_changes_nothing_until_the_next_attempt() -> None:
    kube, room = shrunk(2)
    trains(kube, 35, 30, 30)
    kube.edit(trainer={k: v for k, v in SPEC["trainer"].items() if k != "elastic"})
    kube.tick(5)
    assert (size(kube), kube.status["phase"]) == ((2, 2, "2"), "Running")
    room.pods = 4
    kube.disrupt("trainer")
    kube.tick(5)
    kube.tick(5)
    assert size(kube) == (4, None, "4")


def test_a_queue_gives_fewer_pods_and_says_when_there_are_more() -> None:
    kube, room = began(2)
    kube.admission = Admission(True, "RoomFound", "there is room for all pods of the run", room=2)
    kube.start(step=30)
    assert (size(kube), kube.status["attempt"]) == ((2, 2, "2"), 1)
    assert kube.status["trainer"]["reason"] == "2 of 4 pods: the queue has room for these"
    kube.tick(1001)
    trains(kube, 41, 0, 40)
    assert size(kube) == (2, 2, "2")
    kube.admission = Admission(True, "RoomFound", "there is room for all pods of the run", room=4)
    room.pods = 4
    trains(kube, 60, 0, 60)
    kube.tick(5)
    assert size(kube) == (4, None, "4")


def test_more_replicas_in_an_edit_that_is_pending_are_no_growth() -> None:
    kube, _ = began(8)
    kube.start(step=30)
    kube.edit(trainer=SPEC["trainer"] | {"replicas": 8})
    kube.tick(2000)
    trains(kube, 41, 30, 40)
    assert (size(kube), kube.status["attempt"]) == ((4, None, "4"), 1)
    assert "waitingOn" not in kube.status["trainer"]
