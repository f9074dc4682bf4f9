"""Calculations of the many-runs benchmark without a cluster: writers, ready runs and goals."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from benchmarks.many_runs import table, usage
from benchmarks.many_runs.by_hand import ByHand, rendered, smallest
from benchmarks.many_runs.fleet import ENGINES, PODS, SPEC, Told, limit_seconds, spread, whole
from benchmarks.many_runs.usage import DAEMONS, OPERATOR, SERVER, Write


def line(at: str, user: str, verb: str = "update", agent: str = "kube/1", resource: str = "pods", sub: str = "") -> str:
    subject = {"resource": resource} | ({"subresource": sub} if sub else {})
    time = f"2026-01-01T{at}.000000Z"
    return json.dumps(
        {
            "requestReceivedTimestamp": time,
            "user": {"username": user},
            "userAgent": agent,
            "verb": verb,
            "objectRef": subject,
        }
    )


def test_writes_are_grouped_by_account_or_program() -> None:
    controller = "system:serviceaccount:kube-system:replicaset-controller"
    log = [
        line("00:00:09", controller),
        line("00:00:11", controller),
        line("00:00:12", "admin", "patch", "kwok/v0.7.0 (linux)", sub="status"),
        line("00:00:13", "admin", "patch", "rlrun-operator", "rlruns", "status"),
        line("00:00:14", "admin", "patch", "", "leases"),
        line("00:00:21", controller),
        '{"half": ',
    ]
    began = 1767225600.0  # 2026-01-01
    assert usage.counted(log, began + 10, began + 20) == {
        Write("replicaset-controller", "update", "pods"): 1,
        Write("kwok", "patch", "pods/status"): 1,
        Write("rlrun-operator", "patch", "rlruns/status"): 1,
        Write("admin", "patch", "leases"): 1,
    }


def test_cpu_time_is_parsed_for_any_process_name() -> None:
    fields = "S 1 1 1 0 -1 4194560 1 2 3 4 150 50 0 0 20 0 1 0 100"
    assert usage._cpu(f"7 (a) b) {fields}") == pytest.approx(200 / usage._TICKS)


def test_run_is_ready_when_all_pods_are_ready() -> None:
    first = [
        "run-00001-trainer-0",
        "run-00001-inference-6b5f-aaaaa",
        "run-00001-inference-6b5f-bbbbb",
        "run-00001-orchestrator-1",
    ]
    assert whole([*first, "run-00002-trainer-0"], PODS) == ["run-00001"]


def test_run_milestones_are_recorded_once() -> None:
    def state(phase: str, engines: int = 0, attempt: int = 0) -> dict[str, object]:
        status = {"phase": phase, "attempt": attempt, "trainer": {"ready": 1}, "inference": {"ready": engines}}
        return {"metadata": {"name": "a"}, "status": status}

    told = Told()
    told.take({"metadata": {"name": "a"}}, 0.0)
    told.take(state("Starting", attempt=1), 1.0)
    told.take(state("Starting", ENGINES, attempt=1), 2.0)
    told.take(state("Running", ENGINES, attempt=1), 3.0)
    told.take(state("Running", ENGINES, attempt=1), 4.0)
    assert (told.pods, told.ready, told.running) == ({"a": 1.0}, {"a": 2.0}, {"a": 3.0})


def test_manual_objects_equal_pods_of_a_run() -> None:
    kinds = Counter(child["kind"] for child in rendered("run-1", "bench"))
    for child in smallest("run-1", "bench"):
        kinds.subtract([child["kind"]])
    assert not {kind: count for kind, count in kinds.items() if count < 0}
    for children in (smallest, rendered):
        made = {child["kind"]: child for child in children("run-1", "bench")}
        engines = made["Deployment"]["spec"]["replicas"]
        assert (engines, engines + made["StatefulSet"]["spec"]["replicas"] + 1) == (ENGINES, PODS)
    assert SPEC["inference"]["replicas"] == ENGINES


def test_time_limit_grows_with_runs() -> None:
    assert limit_seconds(1000) - limit_seconds(200) == 2400


def start(server: float, operator: float, ready: float) -> table.Start:
    cpu = dict.fromkeys(DAEMONS, 1.0) | {SERVER: server, OPERATOR: operator}
    told = Told({"a": 1.0}, {"a": 2.0}, {"a": 3.0})
    return table.Start(10, 1.0, {"a": ready}, told, cpu, {OPERATOR: 100.0}, 80.0, Counter(), 5.0)


@pytest.mark.parametrize(
    ("figures", "verdicts"),
    [((16.0, 0.5, 16.0), ["met"] * 4), ((16.1, 0.9, 16.1), ["missed", "missed", "met", "missed"])],
)
def test_goal_verdict_follows_measured_figures(figures: tuple[float, float, float], verdicts: list[str]) -> None:
    bare = ByHand(10, 10.0, {SERVER: 10.0}, 34.0)
    rows = table.of_start(start(*figures), bare, bare, one_apply=1e-3, one_status=4e-3)
    goals = [goal for _, _, goal in rows if goal]
    assert [goal.rpartition(": ")[2] for goal in goals] == verdicts
    assert [goal.partition(" ")[2].partition(":")[0].partition(" (")[0] for goal in goals] == [
        "1.6",
        "1.6",
        "4 ms",
        "70",
    ]


def test_rare_writes_are_one_line() -> None:
    writes = Counter(
        {Write("kwok", "patch", "pods/status"): 400, Write("x", "create", "events"): 3, Write("y", "update", "pods"): 2}
    )
    assert table.of_writes(writes, 100) == ["| patch pods/status | kwok | 4.00 |", "| all others | | 0.05 |"]


def test_spread_reports_median_percentile_and_maximum() -> None:
    assert spread([float(n) for n in range(100, 0, -1)]) == (51.0, 96.0, 100.0)


@pytest.mark.parametrize(
    ("count", "share", "verdict"),
    [
        (200, 0.02, "≤ 2% (10% for 1,000 runs): met"),
        (200, 0.044, "≤ 2% (10% for 1,000 runs): missed"),
        (1000, 0.1, "≤ 10%: met"),
        (5000, 0.11, "≤ 10%: missed"),
    ],
)
def test_fewer_runs_have_a_smaller_share_of_a_core(count: int, share: float, verdict: str) -> None:
    steady = table.Steady(60.0, {OPERATOR: 60 * share, SERVER: 60 * share}, 0.05, 6.0, 1.0, 100.0)
    assert [goal for _, _, goal in table.of_steady(steady, count) if goal] == [verdict, verdict]
