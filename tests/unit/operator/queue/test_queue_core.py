"""Rules of admission, one by one; the simulation (`tests/sim/queue`) holds them together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlrun_operator.names import Role
from rlrun_operator.node_fit import obstacle_between, requests_of
from rlrun_operator.queue.admit import admit_runs
from rlrun_operator.queue.packing import gang_of
from rlrun_operator.queue.queue_model import (
    Applicant,
    Capacity,
    HeldPod,
    Plan,
    PodSet,
    QueueRules,
    QueueState,
    Room,
    Stage,
)
from rlrun_operator.queue.quota import Quota, asked_of

GPU = "nvidia.com/gpu"
NOW = 10_000.0
RULES = QueueRules(pass_seconds=300.0)


def room(name: str, gpus: float = 8, others: float = 0, **node: Any) -> Room:
    labels = node.pop("labels", {})
    document = {"metadata": {"name": name, "labels": labels}, "spec": node}
    return Room(name, {GPU: gpus, "pods": 110}, {GPU: others}, document)


def pods(count: int, gpus: float, role: Role = "trainer", **more: Any) -> PodSet:
    return PodSet(role, count, {GPU: gpus, "pods": 1}, **more)


def run(name: str, *gang: PodSet, stage: Stage = "waiting", since: float = NOW, **more: Any) -> Applicant:
    return Applicant(name, more.pop("namespace", "team-a"), name, gang, stage, since, **more)


def holds(name: str, on: str, gpus: float, **more: Any) -> Applicant:
    return run(name, pods(1, gpus), stage="holding", pods=(HeldPod("trainer", on, {GPU: gpus, "pods": 1}),), **more)


def plan(*runs: Applicant, rooms: tuple[Room, ...], rules: QueueRules = RULES, state: QueueState | None = None) -> Plan:
    return admit_runs(runs, Capacity(rooms), rules, state or QueueState(), NOW)


def limited(*runs: Applicant, state: QueueState | None = None, **quota: float) -> Plan:
    """A plan on many nodes, with a quota of team-a; `used` is what it has of its only resource."""
    used = {f"requests.{GPU}": quota.pop("used", 0.0)}
    team = Quota("team", {f"requests.{GPU}": quota.pop("hard")}, used)
    rooms = Capacity(tuple(room(f"node-{i}") for i in range(4)))
    return admit_runs(runs, rooms, RULES, state or QueueState(), NOW, quotas={"team-a": [team]})


def test_a_quota_that_two_runs_share_admits_the_first_and_tells_the_second() -> None:
    verdicts = limited(run("a", pods(1, 8)), run("b", pods(1, 8), since=NOW + 1), hard=12.0).verdicts
    assert (verdicts["a"].admitted, verdicts["b"].reason) == (True, "WaitingForResources")
    assert verdicts["b"].message.startswith(f"quota team: requests.{GPU}: requested 8, used 8 of 12")


def test_pods_of_an_admitted_run_that_do_not_exist_yet_count_in_its_quota() -> None:
    half = run("a", pods(2, 4), stage="holding", pods=(HeldPod("trainer", "node-0", {GPU: 4}),))
    assert not limited(half, run("b", pods(1, 4)), hard=8.0, used=4.0).verdicts["b"].admitted
    assert limited(half, run("b", pods(1, 4)), hard=12.0, used=4.0).verdicts["b"].admitted


def test_pods_that_exist_count_before_the_quota_reports_them() -> None:
    """Its report is of a moment ago: two runs would else be admitted into the same room, and one would get half of its pods."""
    fresh = holds("a", "node-0", 8)
    assert not limited(fresh, run("b", pods(1, 8)), hard=12.0, used=0.0).verdicts["b"].admitted
    assert limited(fresh, run("b", pods(1, 8)), hard=16.0, used=8.0).verdicts["b"].admitted


def test_a_gang_larger_than_its_quota_never_fits() -> None:
    verdict = limited(run("a", pods(2, 8)), hard=12.0, used=4.0).verdicts["a"]
    assert verdict.reason == "NeverFits"
    assert f"quota team: requests.{GPU}: requested 16, used 4 of 12, even if nothing else ran" in verdict.message


def test_no_room_is_kept_or_made_for_a_run_that_its_quota_keeps_out() -> None:
    others = [holds(f"h{i}", f"node-{i}", 8, namespace="team-b") for i in range(4)]
    out = run("a", pods(1, 8), since=NOW - 1000, priority=10)
    assert limited(out, *others, hard=4.0).state.reservation is None
    assert not any(v.stops for v in limited(out, *others, hard=4.0).verdicts.values())
    kept = limited(out, *others, hard=100.0)
    assert kept.state.reservation is not None, "it preempts where its quota lets it in"
    again = limited(out, *others, hard=4.0, state=replace(kept.state, stopping={}))
    assert again.state.reservation is None, "what was kept for it is free again"


def test_limits_and_counts_of_a_quota_are_the_pods_own() -> None:
    container = {"resources": {"limits": {"memory": "2Gi"}}}
    gang = (PodSet("trainer", 3, {"memory": 2.0**31, "pods": 1}, {"containers": [container]}),)
    asked = asked_of(gang)
    assert {name: asked[name] for name in ("pods", "count/pods", "memory", "requests.memory", "limits.memory")} == {
        "pods": 3,
        "count/pods": 3,
        "memory": 3 * 2.0**31,
        "requests.memory": 3 * 2.0**31,
        "limits.memory": 3 * 2.0**31,
    }


def test_what_is_missing_is_told_by_node() -> None:
    taint = {"key": "gone", "effect": "NoSchedule"}
    rooms = (room("node-1"), room("node-7", others=5), room("node-9", taints=[taint]))
    answer = plan(run("a", pods(2, 8)), rooms=rooms).verdicts["a"]
    assert (
        answer.message
        == f"trainer needs 2 nodes with 8 free {GPU} each; 1 qualifies (node-7: 3 free; node-9: taint gone)"
    )


@pytest.mark.parametrize(
    ("why", "node"),
    [
        (
            "cordoned",
            {"unschedulable": True, "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]},
        ),
        (
            "taint node.kubernetes.io/unreachable",
            {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]},
        ),
    ],
)
def test_a_node_that_is_away_for_a_while_is_not_never(why: str, node: dict[str, Any]) -> None:
    answer = plan(run("a", pods(2, 8)), rooms=(room("node-1"), room("node-7", **node))).verdicts["a"]
    assert answer.reason == "WaitingForResources"
    assert answer.message == f"trainer needs 2 nodes with 8 free {GPU} each; 1 qualifies (node-7: {why})"
    small = plan(run("a", pods(2, 9)), rooms=(room("node-1"), room("node-7", **node))).verdicts["a"]
    assert small.reason == "NeverFits", "not even then"


def test_a_node_that_does_not_answer_is_not_never() -> None:
    lost = {"metadata": {"name": "node-7"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    rooms = (room("node-1"), Room("node-7", {GPU: 8, "pods": 110}, {}, lost))
    answer = plan(run("a", pods(2, 8)), rooms=rooms).verdicts["a"]
    assert (answer.reason, "(node-7: not ready)" in answer.message) == ("WaitingForResources", True)


def test_roles_that_fit_alone_and_not_together_are_told_so() -> None:
    answer = plan(run("a", pods(1, 8), pods(1, 2, "inference")), rooms=(room("node-1"),)).verdicts["a"]
    assert answer.reason == "NeverFits"
    assert "each role fits by itself" in answer.message


def test_free_gpus_in_pieces_are_no_room() -> None:
    verdicts = plan(run("a", pods(1, 8)), rooms=(room("node-1", others=4), room("node-2", others=4))).verdicts
    assert verdicts["a"].reason == "WaitingForResources"


def test_pods_of_a_topology_domain_find_room_in_one_or_wait() -> None:
    rooms = tuple(room(f"node-{i}", others=8 * (i == 1), labels={"rack": f"r{i // 2}"}) for i in range(4))
    together = pods(2, 8, together=("rack",))
    assert plan(run("a", together), rooms=rooms).verdicts["a"].admitted
    apart = (*rooms[:2], replace(rooms[2], others={GPU: 1}), rooms[3])
    waits = plan(run("a", together), rooms=apart).verdicts["a"]
    assert "in one domain of rack" in waits.message


def test_engines_that_must_be_apart_get_a_node_each() -> None:
    engines = pods(2, 1, "inference", apart=True)
    assert not plan(run("a", engines), rooms=(room("node-1"),)).verdicts["a"].admitted
    assert plan(run("a", engines), rooms=(room("node-1"), room("node-2"))).verdicts["a"].admitted


def test_the_fewest_runs_that_are_enough_are_preempted_the_latest_first() -> None:
    held = [holds(f"low-{i}", "node-1", 2, started=float(i)) for i in range(4)]
    outcome = plan(*held, run("high", pods(1, 4), priority=5), rooms=(room("node-1"),))
    assert {uid for uid, verdict in outcome.verdicts.items() if verdict.stops} == {"low-3", "low-2"}


def test_nobody_is_preempted_where_it_would_not_be_enough() -> None:
    rooms = (room("node-1", others=4),)
    outcome = plan(holds("low", "node-1", 4), run("high", pods(1, 8), priority=5), rooms=rooms)
    assert not any(verdict.stops for verdict in outcome.verdicts.values())


def test_borrowed_share_goes_back_to_whom_it_belongs() -> None:
    held = [holds(f"a-{i}", "node-1", 2, namespace="team-a", started=float(i)) for i in range(4)]
    outcome = plan(*held, run("b", pods(1, 4), namespace="team-b"), rooms=(room("node-1"),))
    assert sum(verdict.stops for verdict in outcome.verdicts.values()) == 2
    greedy = plan(*held, run("b", pods(1, 6), namespace="team-b"), rooms=(room("node-1"),))
    assert not any(verdict.stops for verdict in greedy.verdicts.values()), "more than its share"


@pytest.mark.parametrize(("waited", "passes"), [(100.0, True), (301.0, False)])
def test_others_pass_the_first_run_until_it_has_waited_long_enough(waited: float, passes: bool) -> None:
    first = run("big", pods(1, 8), since=NOW - waited)
    outcome = plan(holds("x", "node-1", 4), first, run("small", pods(1, 4)), rooms=(room("node-1"),))
    assert outcome.verdicts["small"].admitted == passes
    assert outcome.verdicts["big"].position == 1


def test_room_is_kept_where_it_is_and_others_begin_elsewhere() -> None:
    first = run("big", pods(1, 8), since=NOW - 1000)
    small = run("small", pods(1, 4, spec={"nodeSelector": {"pool": "other"}}))
    rooms = (room("node-1"), room("node-2", 4, labels={"pool": "other"}))
    assert plan(holds("x", "node-1", 4), first, small, rooms=rooms).verdicts["small"].admitted


def test_a_run_whose_pods_find_no_room_gives_its_own_back() -> None:
    gang = pods(2, 8)
    lost = run("a", gang, stage="holding", pods=(HeldPod("trainer", "node-1", gang.requests),))
    state = QueueState(lacking={"a": NOW - 61})
    outcome = plan(lost, rooms=(room("node-1"),), state=state)
    assert outcome.verdicts["a"].reason == "Released"
    later = plan(replace(lost, stage="waiting", pods=()), rooms=(room("node-1"), room("node-2")), state=outcome.state)
    assert later.verdicts["a"].reason == "BackingOff"
    assert later.verdicts["a"].message.startswith("it had room and did not start; the queue retries at ")


def test_a_run_whose_own_pods_still_end_is_not_late() -> None:
    gang = pods(1, 8)
    ends = HeldPod("trainer", "node-1", gang.requests, ending=True)
    restarts = run("a", gang, stage="holding", pods=(ends,))
    outcome = plan(restarts, rooms=(room("node-1"),), state=QueueState(lacking={"a": NOW - 10_000}))
    assert outcome.verdicts["a"].admitted


def test_engines_that_are_added_later_cost_a_run_nothing() -> None:
    there = HeldPod("inference", "node-1", {GPU: 8, "pods": 1})
    grows = run("a", pods(2, 8, "inference", least=1), stage="holding", pods=(there,))
    outcome = plan(grows, rooms=(room("node-1"),), state=QueueState(lacking={"a": NOW - 10_000}))
    assert outcome.verdicts["a"].admitted


def test_an_admission_that_nobody_takes_goes_to_the_next() -> None:
    rooms, runs = (room("node-1"),), (run("a", pods(1, 8), since=0.0), run("b", pods(1, 8)))
    first = plan(*runs, rooms=rooms)
    assert first.verdicts["a"].admitted
    later = admit_runs(runs, Capacity(rooms), RULES, first.state, NOW + 121)
    assert (later.verdicts["a"].reason, later.verdicts["b"].admitted) == ("BackingOff", True)


def test_a_pod_asks_for_what_the_scheduler_counts() -> None:
    spec = {
        "initContainers": [
            {"resources": {"requests": {"cpu": "8"}}},
            {"restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
        ],
        "containers": [{"resources": {"limits": {GPU: "4"}, "requests": {"cpu": "500m", "memory": "1Gi"}}}],
        "overhead": {"cpu": "250m"},
    }
    assert requests_of(spec) == {"cpu": 8.25, "memory": 2.0**30, GPU: 4.0, "pods": 1.0}


@pytest.mark.parametrize(
    ("node", "spec", "obstacle"),
    [
        ({"spec": {"unschedulable": True}}, {}, "cordoned"),
        ({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}, {}, "not ready"),
        ({}, {"nodeSelector": {"a": "b"}}, "no label a=b"),
        (
            {},
            {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n"]}]}
                            ]
                        }
                    }
                }
            },
            "the pod's node affinity",
        ),
        ({}, {}, None),
    ],
    ids=["cordoned", "not ready", "label", "excluded", "none"],
)
def test_what_stands_between_a_pod_and_a_node(node: dict[str, Any], spec: dict[str, Any], obstacle: str | None) -> None:
    assert obstacle_between({"metadata": {"name": "n"}} | node, spec) == obstacle


def test_a_gang_is_read_from_the_workloads() -> None:
    container = {"resources": {"limits": {GPU: "2"}}}
    rule = {"topologyKey": "kubernetes.io/hostname"}
    away = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [rule]}}
    template = {"spec": {"containers": [container], "affinity": away}}
    made = [
        {"kind": "StatefulSet", "spec": {"replicas": 2, "template": {"spec": {"containers": [container]}}}},
        {"kind": "Deployment", "spec": {"replicas": 3, "template": template}},
        {"kind": "Pod", "spec": {"containers": [{}]}},
    ]
    found = [(s.role, s.count, s.requests.get(GPU), s.apart) for s in gang_of(made)]
    assert found == [("trainer", 2, 2.0, False), ("inference", 3, 2.0, True), ("orchestrator", 1, None, False)]
