"""Individual rules of admission; the simulation in `tests/sim/queue` covers their combination."""

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


def make_room(name: str, gpus: float = 8, others: float = 0, **node: Any) -> Room:
    labels = node.pop("labels", {})
    document = {"metadata": {"name": name, "labels": labels}, "spec": node}
    return Room(name, {GPU: gpus, "pods": 110}, {GPU: others}, document)


def make_pod_set(count: int, gpus: float, role: Role = "trainer", **more: Any) -> PodSet:
    return PodSet(role, count, {GPU: gpus, "pods": 1}, **more)


def make_run(name: str, *gang: PodSet, stage: Stage = "waiting", since: float = NOW, **more: Any) -> Applicant:
    return Applicant(name, more.pop("namespace", "team-a"), name, gang, stage, since, **more)


def make_holder(name: str, on: str, gpus: float, **more: Any) -> Applicant:
    return make_run(
        name, make_pod_set(1, gpus), stage="holding", pods=(HeldPod("trainer", on, {GPU: gpus, "pods": 1}),), **more
    )


def make_plan(
    *runs: Applicant, rooms: tuple[Room, ...], rules: QueueRules = RULES, state: QueueState | None = None
) -> Plan:
    return admit_runs(runs, Capacity(rooms), rules, state or QueueState(), NOW)


def plan_with_quota(*runs: Applicant, state: QueueState | None = None, **quota: float) -> Plan:
    """Plan with many nodes and a quota of team-a with one resource; `used` is the reported use."""
    used = {f"requests.{GPU}": quota.pop("used", 0.0)}
    team = Quota("team", {f"requests.{GPU}": quota.pop("hard")}, used)
    rooms = Capacity(tuple(make_room(f"node-{i}") for i in range(4)))
    return admit_runs(runs, rooms, RULES, state or QueueState(), NOW, quotas={"team-a": [team]})


def test_shared_quota_admits_the_first_run() -> None:
    verdicts = plan_with_quota(
        make_run("a", make_pod_set(1, 8)), make_run("b", make_pod_set(1, 8), since=NOW + 1), hard=12.0
    ).verdicts
    assert (verdicts["a"].admitted, verdicts["b"].reason) == (True, "WaitingForResources")
    assert verdicts["b"].message.startswith(f"quota team: requests.{GPU}: requested 8, used 8 of 12")


def test_missing_pods_of_admitted_run_count_in_quota() -> None:
    half = make_run("a", make_pod_set(2, 4), stage="holding", pods=(HeldPod("trainer", "node-0", {GPU: 4}),))
    assert not plan_with_quota(half, make_run("b", make_pod_set(1, 4)), hard=8.0, used=4.0).verdicts["b"].admitted
    assert plan_with_quota(half, make_run("b", make_pod_set(1, 4)), hard=12.0, used=4.0).verdicts["b"].admitted


def test_new_pods_count_before_the_quota_reports_them() -> None:
    """The quota's report lags; two runs would be admitted into the same room, and one would get half of its pods."""
    fresh = make_holder("a", "node-0", 8)
    assert not plan_with_quota(fresh, make_run("b", make_pod_set(1, 8)), hard=12.0, used=0.0).verdicts["b"].admitted
    assert plan_with_quota(fresh, make_run("b", make_pod_set(1, 8)), hard=16.0, used=8.0).verdicts["b"].admitted


def test_gang_larger_than_its_quota_never_fits() -> None:
    verdict = plan_with_quota(make_run("a", make_pod_set(2, 8)), hard=12.0, used=4.0).verdicts["a"]
    assert verdict.reason == "NeverFits"
    assert f"quota team: requests.{GPU}: requested 16, used 4 of 12, even if nothing else ran" in verdict.message


def test_run_over_its_quota_keeps_and_preempts_no_room() -> None:
    others = [make_holder(f"h{i}", f"node-{i}", 8, namespace="team-b") for i in range(4)]
    out = make_run("a", make_pod_set(1, 8), since=NOW - 1000, priority=10)
    assert plan_with_quota(out, *others, hard=4.0).state.reservation is None
    assert not any(v.stops for v in plan_with_quota(out, *others, hard=4.0).verdicts.values())
    kept = plan_with_quota(out, *others, hard=100.0)
    assert kept.state.reservation is not None, "it preempts where its quota lets it in"
    again = plan_with_quota(out, *others, hard=4.0, state=replace(kept.state, stopping={}))
    assert again.state.reservation is None, "what was kept for it is free again"


def test_quota_limits_and_counts_apply_per_pod() -> None:
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


def test_missing_room_is_reported_per_node() -> None:
    taint = {"key": "gone", "effect": "NoSchedule"}
    rooms = (make_room("node-1"), make_room("node-7", others=5), make_room("node-9", taints=[taint]))
    answer = make_plan(make_run("a", make_pod_set(2, 8)), rooms=rooms).verdicts["a"]
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
def test_temporarily_unavailable_node_counts_as_future_room(why: str, node: dict[str, Any]) -> None:
    answer = make_plan(
        make_run("a", make_pod_set(2, 8)), rooms=(make_room("node-1"), make_room("node-7", **node))
    ).verdicts["a"]
    assert answer.reason == "WaitingForResources"
    assert answer.message == f"trainer needs 2 nodes with 8 free {GPU} each; 1 qualifies (node-7: {why})"
    small = make_plan(
        make_run("a", make_pod_set(2, 9)), rooms=(make_room("node-1"), make_room("node-7", **node))
    ).verdicts["a"]
    assert small.reason == "NeverFits", "not even then"


def test_unresponsive_node_counts_as_future_room() -> None:
    lost = {"metadata": {"name": "node-7"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    rooms = (make_room("node-1"), Room("node-7", {GPU: 8, "pods": 110}, {}, lost))
    answer = make_plan(make_run("a", make_pod_set(2, 8)), rooms=rooms).verdicts["a"]
    assert (answer.reason, "(node-7: not ready)" in answer.message) == ("WaitingForResources", True)


def test_roles_that_fit_only_separately_are_reported() -> None:
    answer = make_plan(
        make_run("a", make_pod_set(1, 8), make_pod_set(1, 2, "inference")), rooms=(make_room("node-1"),)
    ).verdicts["a"]
    assert answer.reason == "NeverFits"
    assert "each role fits by itself" in answer.message


def test_fragmented_free_gpus_are_not_room() -> None:
    verdicts = make_plan(
        make_run("a", make_pod_set(1, 8)), rooms=(make_room("node-1", others=4), make_room("node-2", others=4))
    ).verdicts
    assert verdicts["a"].reason == "WaitingForResources"


def test_topology_domain_needs_room_for_all_its_pods() -> None:
    rooms = tuple(make_room(f"node-{i}", others=8 * (i == 1), labels={"rack": f"r{i // 2}"}) for i in range(4))
    together = make_pod_set(2, 8, together=("rack",))
    assert make_plan(make_run("a", together), rooms=rooms).verdicts["a"].admitted
    apart = (*rooms[:2], replace(rooms[2], others={GPU: 1}), rooms[3])
    waits = make_plan(make_run("a", together), rooms=apart).verdicts["a"]
    assert "in one domain of rack" in waits.message


def test_anti_affine_engines_get_one_node_each() -> None:
    engines = make_pod_set(2, 1, "inference", apart=True)
    assert not make_plan(make_run("a", engines), rooms=(make_room("node-1"),)).verdicts["a"].admitted
    assert make_plan(make_run("a", engines), rooms=(make_room("node-1"), make_room("node-2"))).verdicts["a"].admitted


def test_preemption_selects_the_fewest_and_latest_runs() -> None:
    held = [make_holder(f"low-{i}", "node-1", 2, started=float(i)) for i in range(4)]
    outcome = make_plan(*held, make_run("high", make_pod_set(1, 4), priority=5), rooms=(make_room("node-1"),))
    assert {uid for uid, verdict in outcome.verdicts.items() if verdict.stops} == {"low-3", "low-2"}


def test_insufficient_preemption_stops_no_run() -> None:
    rooms = (make_room("node-1", others=4),)
    outcome = make_plan(make_holder("low", "node-1", 4), make_run("high", make_pod_set(1, 8), priority=5), rooms=rooms)
    assert not any(verdict.stops for verdict in outcome.verdicts.values())


def test_borrowed_share_returns_to_its_namespace() -> None:
    held = [make_holder(f"a-{i}", "node-1", 2, namespace="team-a", started=float(i)) for i in range(4)]
    outcome = make_plan(*held, make_run("b", make_pod_set(1, 4), namespace="team-b"), rooms=(make_room("node-1"),))
    assert sum(verdict.stops for verdict in outcome.verdicts.values()) == 2
    greedy = make_plan(*held, make_run("b", make_pod_set(1, 6), namespace="team-b"), rooms=(make_room("node-1"),))
    assert not any(verdict.stops for verdict in greedy.verdicts.values()), "more than its share"


@pytest.mark.parametrize(("waited", "passes"), [(100.0, True), (301.0, False)])
def test_later_runs_overtake_the_first_until_its_limit(waited: float, passes: bool) -> None:
    first = make_run("big", make_pod_set(1, 8), since=NOW - waited)
    outcome = make_plan(
        make_holder("x", "node-1", 4), first, make_run("small", make_pod_set(1, 4)), rooms=(make_room("node-1"),)
    )
    assert outcome.verdicts["small"].admitted == passes
    assert outcome.verdicts["big"].position == 1


def test_kept_room_does_not_block_other_nodes() -> None:
    first = make_run("big", make_pod_set(1, 8), since=NOW - 1000)
    small = make_run("small", make_pod_set(1, 4, spec={"nodeSelector": {"pool": "other"}}))
    rooms = (make_room("node-1"), make_room("node-2", 4, labels={"pool": "other"}))
    assert make_plan(make_holder("x", "node-1", 4), first, small, rooms=rooms).verdicts["small"].admitted


def test_run_without_nodes_releases_its_room() -> None:
    gang = make_pod_set(2, 8)
    lost = make_run("a", gang, stage="holding", pods=(HeldPod("trainer", "node-1", gang.requests),))
    state = QueueState(lacking={"a": NOW - 61})
    outcome = make_plan(lost, rooms=(make_room("node-1"),), state=state)
    assert outcome.verdicts["a"].reason == "Released"
    later = make_plan(
        replace(lost, stage="waiting", pods=()), rooms=(make_room("node-1"), make_room("node-2")), state=outcome.state
    )
    assert later.verdicts["a"].reason == "BackingOff"
    assert later.verdicts["a"].message.startswith("it had room and did not start; the queue retries at ")


def test_run_with_ending_pods_is_not_late() -> None:
    gang = make_pod_set(1, 8)
    ends = HeldPod("trainer", "node-1", gang.requests, ending=True)
    restarts = make_run("a", gang, stage="holding", pods=(ends,))
    outcome = make_plan(restarts, rooms=(make_room("node-1"),), state=QueueState(lacking={"a": NOW - 10_000}))
    assert outcome.verdicts["a"].admitted


def test_additional_engines_do_not_release_a_run() -> None:
    there = HeldPod("inference", "node-1", {GPU: 8, "pods": 1})
    grows = make_run("a", make_pod_set(2, 8, "inference", least=1), stage="holding", pods=(there,))
    outcome = make_plan(grows, rooms=(make_room("node-1"),), state=QueueState(lacking={"a": NOW - 10_000}))
    assert outcome.verdicts["a"].admitted


def test_unused_admission_goes_to_the_next_run() -> None:
    rooms, runs = (
        (make_room("node-1"),),
        (make_run("a", make_pod_set(1, 8), since=0.0), make_run("b", make_pod_set(1, 8))),
    )
    first = make_plan(*runs, rooms=rooms)
    assert first.verdicts["a"].admitted
    later = admit_runs(runs, Capacity(rooms), RULES, first.state, NOW + 121)
    assert (later.verdicts["a"].reason, later.verdicts["b"].admitted) == ("BackingOff", True)


def test_pod_requests_match_the_scheduler() -> None:
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
def test_obstacle_between_pod_and_node_is_found(
    node: dict[str, Any], spec: dict[str, Any], obstacle: str | None
) -> None:
    assert obstacle_between({"metadata": {"name": "n"}} | node, spec) == obstacle


def test_gang_is_read_from_the_workloads() -> None:
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
