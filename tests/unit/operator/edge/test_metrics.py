"""Metrics of the operator: series of its runs and ages of its watches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import pytest
from prometheus_client import generate_latest

from rlrun.api.run_status import Phase
from rlrun_operator.kube.resources import WATCHED
from rlrun_operator.runtime.cache import Store
from rlrun_operator.runtime.metrics import PHASES, Metrics
from tests.unit.operator.edge.test_store import make_object


def scrape(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode()


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Running", "attempt": "x", "progress": {"step": "y", "reward": [], "lastStepTime": "soon"}},
        {"phase": ["Running"], "progress": [], "checkpoint": 3, "attempt": None},
        {
            "progress": {"step": 2**70, "lastStepTime": "0001-01-01T00:00:00+14:00"},
            "checkpoint": {"stepsLostTotal": {}},
        },
    ],
)
def test_malformed_status_hides_no_other_run(status: dict[str, Any]) -> None:
    store = Store()
    store.put(make_object("RLRun", "nonsense", 1, status=status), 0.0)
    store.put(make_object("RLRun", "well", 2, status={"phase": "Running", "attempt": 2}), 0.0)
    metrics = Metrics(store)
    metrics.status_written(("ns", "nonsense"), {"restarts": 0}, {"restarts": 1, "lastFailure": "x"}, 0.0)
    text = scrape(metrics)
    assert 'rlrun_attempt{namespace="ns",run="well"} 2.0' in text
    assert 'rlrun_info{model="",namespace="ns",run="nonsense"' in text


def test_series_of_a_run_exist_as_long_as_it() -> None:
    store = Store()
    metrics = Metrics(store)
    status = {
        "phase": "Running",
        "attempt": 2,
        "restarts": 2,
        "restartsCountedTowardsMax": 1,
        "conditions": [
            {
                "type": "Progressing",
                "status": "False",
                "reason": "NoProgress",
                "message": "",
                "lastTransitionTime": "x",
            },
            {"type": "StorageReady", "status": "False", "reason": "Mine", "message": "", "lastTransitionTime": "x"},
            {"type": "Mine", "status": "True", "reason": "Mine", "message": "", "lastTransitionTime": "x"},
        ],
        "lastFailure": {"reason": "OOMKilled"},
        "progress": {"step": 41, "totalSteps": 50, "reward": 0.71, "lastStepTime": "2026-01-01T00:00:00Z"},
        "checkpoint": {"stepsLostTotal": 3},
        "inference": {"desired": 4, "ready": 2, "spot": {"desired": 3, "ready": 1, "lost": 5}},
        "trainer": {"desired": 2, "ready": 2, "size": 2},
        "cost": {
            "countedTo": "2026-01-01T00:00:00Z",
            "attempts": [
                {"attempt": 1, "role": "trainer", "gpuSeconds": {"trained": 100, "Mine": 5}},
                {"attempt": 2, "role": "trainer", "gpuSeconds": {"trained": 50, "startup": 7}},
            ],
        },
    }
    spec = {"model": {"name": "Qwen/Qwen3-8B"}, "budget": {"gpuHours": 2}, "trainer": {"replicas": 4}}
    run = make_object("RLRun", "a", 1, spec=spec, status=status)
    run["metadata"]["creationTimestamp"] = "2026-01-01T00:01:00Z"
    gpu = {"limits": {"nvidia.com/gpu": "8"}}
    pod = make_object(
        "Pod", "p", 1, run="a", spec={"nodeName": "n", "containers": [{"name": "trainer", "resources": gpu}]}
    )
    pod["metadata"]["labels"]["rlrun.io/role"] = "trainer"
    waiting = make_object("Pod", "q", 1, run="a", spec={"containers": [{"name": "trainer", "resources": gpu}]})
    for found in (run, pod, waiting):
        store.put(found, 0.0)
    key = ("ns", "a")
    metrics.status_written(key, {}, {"phase": "Starting"}, 10.0)
    metrics.status_written(key, {"phase": "Starting"}, status, 40.0)
    text = scrape(metrics)
    labels = 'namespace="ns",run="a"'
    for line in (
        f'rlrun_info{{model="Qwen/Qwen3-8B",{labels},uid="uid-RLRun-a"}} 1.0',
        f"rlrun_created_timestamp_seconds{{{labels}}} 1.76722566e+09",
        'rlrun_phase{namespace="ns",phase="Running",run="a"} 1.0',
        'rlrun_phase{namespace="ns",phase="Failed",run="a"} 0.0',
        f"rlrun_step{{{labels}}} 41.0",
        f"rlrun_reward_mean{{{labels}}} 0.71",
        f"rlrun_max_steps{{{labels}}} 50.0",
        f"rlrun_last_step_timestamp_seconds{{{labels}}} 1.7672256e+09",
        f"rlrun_steps_lost_total{{{labels}}} 3.0",
        f"rlrun_engines_wanted{{{labels}}} 4.0",
        f"rlrun_engines_ready{{{labels}}} 2.0",
        f"rlrun_spot_engines_wanted{{{labels}}} 3.0",
        f"rlrun_spot_engines_ready{{{labels}}} 1.0",
        f"rlrun_spot_engines_lost_total{{{labels}}} 5.0",
        f"rlrun_trainer_size_wanted{{{labels}}} 4.0",
        f"rlrun_trainer_size{{{labels}}} 2.0",
        'rlrun_restarts_total{counted="true",namespace="ns",run="a"} 1.0',
        'rlrun_restarts_total{counted="false",namespace="ns",run="a"} 1.0',
        'rlrun_failures_total{namespace="ns",reason="OOMKilled",run="a"} 2.0',
        'rlrun_condition{namespace="ns",reason="NoProgress",run="a",status="False",type="Progressing"} 1.0',
        'rlrun_condition{namespace="ns",reason="Unknown",run="a",status="False",type="StorageReady"} 1.0',
        'rlrun_gpus_allocated{namespace="ns",role="trainer",run="a"} 8.0',
        'rlrun_gpu_seconds_total{namespace="ns",role="trainer",run="a",use="trained"} 150.0',
        'rlrun_gpu_seconds_total{namespace="ns",role="trainer",run="a",use="startup"} 7.0',
        f"rlrun_budget_gpu_seconds{{{labels}}} 7200.0",
        'rlrun_phase_duration_seconds_sum{phase="Starting"} 30.0',
    ):
        assert line in text, (line, text)
    assert "Mine" not in text, "anybody who may write a status could make series without end"
    store.remove("RLRun", "ns", "a", "uid-RLRun-a")
    metrics.forget_run(key)
    assert 'run="a"' not in scrape(metrics)


def test_waiting_run_has_queue_position_and_start_time() -> None:
    store = Store()
    queue = {"since": "2026-01-01T00:00:00Z", "position": 2, "waiting": 3}
    store.put(make_object("RLRun", "a", 1, status={"phase": "Queued", "queue": queue}), 0.0)
    text = scrape(Metrics(store))
    assert 'rlrun_queue_position{namespace="ns",run="a"} 2.0' in text
    assert 'rlrun_queue_since_timestamp_seconds{namespace="ns",run="a"} 1.7672256e+09' in text


def test_unknown_roles_make_no_series() -> None:
    """Any user may label a pod, and each label value would add a series."""
    store = Store()
    store.put(make_object("RLRun", "a", 1, spec={}), 0.0)
    gpu = {"limits": {"nvidia.com/gpu": "8"}}
    for role in ("mine", "x" * 63):
        pod = make_object(
            "Pod", role, 1, run="a", spec={"nodeName": "n", "containers": [{"name": "c", "resources": gpu}]}
        )
        pod["metadata"]["labels"]["rlrun.io/role"] = role
        store.put(pod, 0.0)
    assert "rlrun_gpus_allocated{" not in scrape(Metrics(store))


@pytest.mark.parametrize("phase", PHASES)
def test_run_has_one_series_for_each_phase(phase: str) -> None:
    store = Store()
    store.put(make_object("RLRun", "a", 1, spec={}, status={"phase": phase}), 0.0)
    series = [line for line in scrape(Metrics(store)).splitlines() if line.startswith("rlrun_phase{")]
    assert len(series) == len(get_args(Phase)) - 1, "Unserved is no phase of a run that an operator serves"
    assert [line for line in series if line.endswith(" 1.0")] == [
        f'rlrun_phase{{namespace="ns",phase="{phase}",run="a"}} 1.0'
    ]


def test_watched_kinds_have_a_watch_age() -> None:
    metrics = Metrics(Store())
    for resource in WATCHED:
        metrics.observe_watch(resource.plural, "team-a", lambda: 3.0)
    assert scrape(metrics).count("rlrun_operator_watch_age_seconds{") == len(WATCHED)


def test_standby_process_counts_no_run() -> None:
    store = Store()
    store.put(make_object("RLRun", "a", 1, spec={}, status={"phase": "Running"}), 0.0)
    metrics, leads = Metrics(store), [1.0]
    metrics.observe_queue(lambda: 0.0, lambda: 0.0, lambda: leads[0])
    assert 'run="a"' in scrape(metrics)
    leads[0] = 0.0
    text = scrape(metrics)
    assert 'run="a"' not in text
    assert "rlrun_operator_leader 0.0" in text


def test_run_without_status_has_a_series_for_each_phase() -> None:
    store = Store()
    store.put(make_object("RLRun", "a", 1, spec={}), 0.0)
    lines = [line for line in scrape(Metrics(store)).splitlines() if line.startswith("rlrun_phase{")]
    assert len(lines) == len(PHASES) == 10
    assert all(line.endswith(" 0.0") for line in lines)


def test_restart_phases_are_counted_after_the_restart_completes() -> None:
    metrics, key = Metrics(Store()), ("ns", "a")
    begun = {"since": "x", "attempt": 2, "seconds": {"ending": 12}}
    whole = begun | {"seconds": {"ending": 12, "containers": 40, "mine": 1, "step": "y"}, "totalSeconds": 52}
    slower = whole | {"since": "y", "totalSeconds": 60}
    states: list[dict[str, Any]] = [
        {},
        begun,
        whole,
        whole | {"slow": "z"},
        slower,
        {"since": []},
        {"totalSeconds": []},
    ]
    for old, new in pairwise(states):
        metrics.status_written(key, {"lastRestart": old}, {"lastRestart": new}, 0.0)
    text = scrape(metrics)
    assert 'rlrun_restart_seconds_count{phase="total"} 2.0' in text
    assert 'rlrun_restart_seconds_sum{phase="total"} 112.0' in text
    assert 'rlrun_restart_seconds_count{phase="containers"} 2.0' in text
    assert "mine" not in text
