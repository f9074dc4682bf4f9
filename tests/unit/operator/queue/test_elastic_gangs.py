"""Elastic trainers in the operator's queue: admission with fewer pods, no release, and growth while no run waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlrun_operator.names import Role
from rlrun_operator.queue.admit import admit_runs
from rlrun_operator.queue.packing import gang_of, held_pods
from rlrun_operator.queue.preemption import pods_without_node
from rlrun_operator.queue.queue_model import (
    Applicant,
    Capacity,
    HeldPod,
    PodSet,
    QueueRules,
    QueueState,
    Room,
    Stage,
    Verdict,
)
from rlrun_operator.queue.quota import Quota
from rlrun_operator.render import render_workloads, spot_deployment
from tests.unit.operator.build.examples import context

GPU = "nvidia.com/gpu"
RULES = QueueRules(displaced_seconds=60.0, start_seconds=600.0)


def make_nodes(count: int, gpus: float = 8.0) -> Capacity:
    return Capacity(
        tuple(Room(f"node-{i}", {GPU: gpus}, node={"metadata": {"name": f"node-{i}"}}) for i in range(count))
    )


def make_run(uid: str = "a", stage: Stage = "waiting", trainers: int = 4, placed: int = 0, **fields: Any) -> Applicant:
    role: Role = "trainer"
    gang = (PodSet(role, trainers, {GPU: 8.0}, least=2),)
    pods = tuple(HeldPod(role, f"node-{i}" if i < placed else None, {GPU: 8.0}) for i in range(trainers))
    since = fields.pop("since", 0.0)
    return Applicant(
        uid, "team", uid, gang, stage, since, pods=pods if stage == "holding" else (), sizes=(2, 3, 4), **fields
    )


def plan_verdicts(*runs: Applicant, on: int, state: QueueState | None = None, now: float = 0.0) -> dict[str, Verdict]:
    return dict(admit_runs(runs, make_nodes(on), RULES, state or QueueState(), now).verdicts)


def test_elastic_run_is_admitted_with_pods_that_fit() -> None:
    assert [plan_verdicts(make_run(), on=count)["a"].room for count in (4, 3, 2)] == [None, 3, 2]
    assert all(plan_verdicts(make_run(), on=count)["a"].admitted for count in (4, 3, 2))
    none = plan_verdicts(make_run(), on=1)["a"]
    assert (none.admitted, none.reason) == (False, "NeverFits")
    assert "trainer needs 2 nodes" in none.message


def test_admitted_size_is_remembered_until_it_is_recorded() -> None:
    first = admit_runs([make_run()], make_nodes(3), RULES, QueueState(), 0.0)
    again = admit_runs([make_run(), make_run("b")], make_nodes(5), RULES, first.state, 1.0)
    assert (again.verdicts["a"].room, again.verdicts["b"].room) == (3, 2)
    recorded = admit_runs([make_run(stage="holding", trainers=3, placed=3)], make_nodes(5), RULES, again.state, 2.0)
    assert recorded.state.sized == {}


def test_elastic_run_with_enough_pods_is_not_released() -> None:
    state, holds = QueueState(), make_run(stage="holding", placed=3)
    for now in (0.0, 100.0, 1000.0):
        plan = admit_runs([holds], make_nodes(3), RULES, state, now)
        state = plan.state
        assert plan.verdicts["a"].admitted
    fixed = replace(holds, gang=(PodSet("trainer", 4, {GPU: 8.0}),), sizes=())
    state = admit_runs([fixed], make_nodes(3), RULES, QueueState(), 0.0).state
    assert admit_runs([fixed], make_nodes(3), RULES, state, 100.0).verdicts["a"].reason == "Released"


def test_additional_room_goes_to_one_run_without_waiting_runs() -> None:
    small = make_run(stage="holding", trainers=2, placed=2)
    assert plan_verdicts(small, on=3)["a"].room == 3
    assert plan_verdicts(small, on=9)["a"].room == 4
    assert plan_verdicts(small, on=2)["a"].room == 2
    larger = replace(make_run("b"), gang=(PodSet("trainer", 8, {GPU: 8.0}),), sizes=())
    assert plan_verdicts(small, larger, on=9)["a"].room == 2
    leaves = replace(make_run("b", stage="leaving"), gang=(), sizes=())
    assert plan_verdicts(small, leaves, on=9)["a"].room == 2, "a run that was preempted waits again once it has left"
    other = replace(
        make_run("b", stage="holding", trainers=2),
        pods=tuple(HeldPod("trainer", f"node-{i}", {GPU: 8.0}) for i in (2, 3)),
    )
    told = plan_verdicts(small, other, on=6)
    assert sorted((told["a"].room, told["b"].room)) == [2, 4]


def test_unknown_capacity_gives_no_additional_room() -> None:
    small = make_run(stage="holding", trainers=2, placed=2)
    alone = admit_runs([small], None, RULES, QueueState(), 0.0).verdicts["a"]
    beside = admit_runs([small, make_run("b", placed=0), make_run("c")], None, RULES, QueueState(), 0.0).verdicts["a"]
    assert (alone.room, beside.room) == (None, 2)


def test_waiting_run_preempts_only_for_its_minimum() -> None:
    low = [
        replace(
            make_run(f"low-{i}", stage="holding", trainers=1),
            gang=(PodSet("trainer", 1, {GPU: 8.0}),),
            sizes=(),
            pods=(HeldPod("trainer", f"node-{i}", {GPU: 8.0}),),
        )
        for i in range(4)
    ]
    told = plan_verdicts(*low, make_run("high", priority=10), on=4)
    assert sorted(told[one.uid].reason for one in low) == ["Preempted", "Preempted", "RoomFound", "RoomFound"]


def make_leaving_run(uid: str, *on: int) -> Applicant:
    """Run that is leaving these nodes."""
    pods = tuple(HeldPod("trainer", f"node-{i}", {GPU: 8.0}, ending=True) for i in on)
    return replace(make_run(uid, stage="leaving", trainers=2), pods=pods, sizes=())


def test_elastic_run_waits_for_leaving_runs_to_fit_more() -> None:
    first = admit_runs([make_leaving_run("b", 2, 3), make_run()], make_nodes(4), RULES, QueueState(), 0.0)
    told = first.verdicts["a"]
    assert (told.admitted, told.reason) == (False, "WaitingForTurn")
    assert "4 fit when the leaving runs have ended" in told.message
    half = admit_runs(
        [make_leaving_run("b", 3), make_run(), make_run("c", since=5.0)], make_nodes(4), RULES, first.state, 1.0
    )
    assert not half.verdicts["a"].admitted, "its pods do not go at the same moment"
    assert not half.verdicts["c"].admitted, "the room is kept for the run that waits for it"
    gone = admit_runs([make_run(), make_run("c", since=5.0)], make_nodes(4), RULES, half.state, 2.0)
    assert (gone.verdicts["a"].admitted, gone.verdicts["a"].room) == (True, None)
    assert gone.state.patient == {}


def test_wait_for_leaving_runs_has_a_limit() -> None:
    state = QueueState()
    for now in (0.0, RULES.leave_seconds - 1.0):
        plan = admit_runs([make_leaving_run("b", 2, 3), make_run()], make_nodes(4), RULES, state, now)
        state = plan.state
        assert not plan.verdicts["a"].admitted
    late = admit_runs(
        [make_leaving_run("b", 2, 3), make_run()], make_nodes(4), RULES, state, RULES.leave_seconds
    ).verdicts["a"]
    assert (late.admitted, late.room) == (True, 2)
    elsewhere = admit_runs([make_leaving_run("b", 7), make_run()], make_nodes(3), RULES, QueueState(), 0.0).verdicts[
        "a"
    ]
    assert (elsewhere.admitted, elsewhere.room) == (True, 3), "on a node that is gone"


def test_elastic_run_does_not_grow_beyond_its_quota() -> None:
    small = make_run(stage="holding", trainers=2, placed=2)
    for hard, room in ((32.0, 4), (31.0, 3), (23.0, 2)):
        quota = Quota("team", {f"requests.{GPU}": hard}, {f"requests.{GPU}": 16.0})
        plan = admit_runs([small], make_nodes(4), RULES, QueueState(), 0.0, quotas={"team": [quota]})
        assert plan.verdicts["a"].room == room, hard


def test_spot_engines_are_charged_but_not_waited_for() -> None:
    ctx = context({"inference": {"replicas": 4, "spot": {"share": 0.5, "nodeSelector": {"capacity": "spot"}}}})
    gang = gang_of(render_workloads(ctx).existing, engines_needed=1)
    assert {pods.role: (pods.count, pods.least) for pods in gang}["inference"] == (2, 1)
    template = spot_deployment(ctx)
    assert template is not None
    pod = template["spec"]["template"]
    waits = {**pod, "metadata": {**pod["metadata"], "name": "a"}}
    there = {**waits, "spec": {**pod["spec"], "nodeName": "spot-1"}}
    held = held_pods([waits, there])
    assert [(pod.node, pod.spot) for pod in held] == [(None, True), ("spot-1", True)]
    engine = HeldPod("inference", "node-1", {GPU: 1.0})
    gang = (PodSet("inference", 2, {GPU: 1.0}, least=2),)
    missing = pods_without_node(Applicant("a", "team", "a", gang, "holding", 0.0, pods=(*held, engine)))
    assert [pods.count for pods in missing] == [1], "a spot engine stands for none of the gang"
