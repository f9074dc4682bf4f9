"""Series of broken runs, one for each alert, and of a healthy run: input of `promtool test rules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INTERVAL, EVALUATION = "1m", "2m"
_END = 480
"""Minutes of each series. `a+bxN` is N+1 samples, one per minute."""
_RUN = 'namespace="team-a",run="a"'
_ROLE = f'{_RUN},role="trainer"'


def _steady(value: float) -> str:
    return f"{value}x{_END}"


def _growing(per_minute: float) -> str:
    return f"0+{per_minute}x{_END}"


LEADER = 'rlrun_operator_leader{job="rlrun-operator",namespace="rlrun-system",pod="one"}'
PHASE = f'rlrun_phase{{{_RUN},phase="Running"}}'
PROGRESSING = f'rlrun_condition{{{_RUN},type="Progressing",status="True",reason="Training"}}'
NO_PROGRESS = f'rlrun_condition{{{_RUN},type="Progressing",status="False",reason="NoProgress"}}'
STORAGE_FULL = f'rlrun_condition{{{_RUN},type="StorageReady",status="False",reason="StorageFull"}}'
LAST_STEP = f"rlrun_last_step_timestamp_seconds{{{_RUN}}}"
RESTARTS = f'rlrun_restarts_total{{{_RUN},counted="true"}}'
STEP = f"rlrun_step{{{_RUN}}}"
REWARD = f"rlrun_reward_mean{{{_RUN}}}"
FREE = f'rlrun_volume_free_bytes{{{_RUN},role="orchestrator"}}'
SIZE = f'rlrun_volume_size_bytes{{{_RUN},role="orchestrator"}}'
WAIT_SECONDS = f'rlrun_trainer_wait_seconds_total{{{_RUN},role="orchestrator"}}'
STEP_SECONDS = f'rlrun_trainer_step_seconds_total{{{_RUN},role="orchestrator"}}'
REQUESTS = f'rlrun_engine_requests{{{_RUN},role="orchestrator",state="running"}}'
WAITING = f'rlrun_engine_requests{{{_RUN},role="orchestrator",state="waiting"}}'
MISMATCH = f'rlrun_mismatch_kl{{{_RUN},role="orchestrator"}}'
IDLE_0 = f'rlrun_gpu_idle_seconds_total{{{_ROLE},gpu="0"}}'
NEARLY_SPENT = f'rlrun_condition{{{_RUN},type="WithinBudget",status="True",reason="BudgetNearlySpent"}}'
BUDGET_LEFT = f'rlrun_condition{{{_RUN},type="WithinBudget",status="True",reason="BudgetLeft"}}'
TRAINED = f'rlrun_gpu_seconds_total{{{_ROLE},use="trained"}}'
WAITED = f'rlrun_gpu_seconds_total{{{_ROLE},use="waitedForRollouts"}}'
IDLE_1 = f'rlrun_gpu_idle_seconds_total{{{_ROLE},gpu="1"}}'

HEALTHY: Mapping[str, str] = {
    LEADER: _steady(1),
    PHASE: _steady(1),
    PROGRESSING: _steady(1),
    LAST_STEP: _growing(60),
    RESTARTS: f"0x100 1x{_END}",
    STEP: _growing(1),
    REWARD: _growing(0.001),
    FREE: _steady(50e9),
    SIZE: _steady(100e9),
    WAIT_SECONDS: _growing(15),
    STEP_SECONDS: _growing(60),
    REQUESTS: f"4x30 0x5 4x{_END}",
    WAITING: _steady(0),
    MISMATCH: f"0.0005x200 0.2 0.0005x{_END}",
    BUDGET_LEFT: _steady(1),
    TRAINED: _growing(400),
    WAITED: _growing(80),
    IDLE_0: _growing(20),
    IDLE_1: _growing(3),
}


@dataclass(frozen=True)
class Case:
    """One broken run.

    Attributes:
        alert: firing alert; "" if none fires.
        series: series that differ from the healthy run; a series without values is deleted.
        fires_at: time at which the alert fires.
        silent_at: earlier time at which it does not fire.
        role: value of the alert's role label, or "" without the label.
    """

    alert: str
    series: Mapping[str, str]
    fires_at: str
    silent_at: str = "1h"
    role: str = ""


CASES: Sequence[Case] = (
    Case("RLRunOperatorDown", {LEADER: f"1x120 0x{_END}"}, "130m", "122m"),
    Case("RLRunOperatorDown", {LEADER: ""}, "10m", "2m"),
    Case("RLRunStalled", {LAST_STEP: f"0+60x120 7200x{_END}"}, "195m", "181m"),
    Case("RLRunStalled", {PROGRESSING: "1x120", NO_PROGRESS: f"_x120 1x{_END}"}, "130m", "122m"),
    Case("RLRunRestarting", {RESTARTS: f"0x120 1x5 2x5 3x5 4x{_END}"}, "150m", "121m"),
    Case("RLRunStorageFull", {STORAGE_FULL: f"_x120 1x{_END}"}, "125m", "121m"),
    Case("RLRunStorageFull", {FREE: f"50000000000x120 4000000000x{_END}"}, "125m", "121m"),
    Case("RLRunRewardFlat", {REWARD: _steady(0)}, "2h", "10m"),
    Case("RLRunRewardFlat", {REWARD: f"0+0.001x120 0.12x{_END}"}, "280m", "3h"),
    Case("RLRunTrainerStarved", {WAIT_SECONDS: f"0+6x120 720+48x{_END}"}, "3h", "121m"),
    Case("RLRunEnginesStarved", {REQUESTS: f"4x120 0x{_END}"}, "3h", "130m"),
    Case("RLRunMismatchKLHigh", {MISMATCH: f"0.0005x120 0.3x{_END}"}, "150m", "121m"),
    Case("RLRunBudgetNearlySpent", {BUDGET_LEFT: "1x120", NEARLY_SPENT: f"_x120 1x{_END}"}, "125m", "121m"),
    Case("RLRunGPUTimeLost", {TRAINED: _growing(80), WAITED: _growing(400)}, "2h", "20m"),
    Case("RLRunGPUTimeLost", {TRAINED: ""}, "2h", "20m"),
    Case("RLRunGPUsIdle", {IDLE_0: _growing(59), IDLE_1: _growing(58)}, "2h", "20m", role="trainer"),
)
SILENT: Sequence[Mapping[str, str]] = (
    {PHASE: _steady(0), LAST_STEP: _steady(0), REQUESTS: _steady(0), IDLE_0: _growing(60), IDLE_1: _growing(60)},
    {REWARD: _steady(1), STEP: _steady(3)},
)
"""Series that do not fire: a completed run, and a constant reward without a trained step."""
SEVERITY: Mapping[str, str] = {
    "RLRunOperatorDown": "critical",
    "RLRunStalled": "critical",
    "RLRunRestarting": "warning",
    "RLRunStorageFull": "critical",
    "RLRunRewardFlat": "info",
    "RLRunTrainerStarved": "warning",
    "RLRunEnginesStarved": "info",
    "RLRunMismatchKLHigh": "warning",
    "RLRunGPUsIdle": "warning",
    "RLRunBudgetNearlySpent": "warning",
    "RLRunGPUTimeLost": "warning",
}


def rule_tests(rules: str, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the test file for promtool.

    Args:
        rules: path of the file of rules.
        cases: runs; each becomes a separate test.
    """
    quiet = [Case("", HEALTHY | dict(series), "4h") for series in SILENT]
    return {
        "rule_files": [rules],
        "evaluation_interval": EVALUATION,
        "tests": [_make_test(case) for case in (*cases, *quiet)],
    }


def _make_test(case: Case) -> dict[str, Any]:
    series = {name: values for name, values in (HEALTHY | dict(case.series)).items() if values}
    firing = 'ALERTS{alertstate="firing"}'
    return {
        "interval": INTERVAL,
        "name": case.alert or "healthy",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": case.silent_at, "exp_samples": []},
            {"expr": firing, "eval_time": case.fires_at, "exp_samples": _make_samples(case)},
        ],
    }


def _make_samples(case: Case) -> list[dict[str, Any]]:
    if not case.alert:
        return []
    labels = {"alertname": case.alert, "alertstate": "firing", "severity": SEVERITY[case.alert]}
    if case.alert != "RLRunOperatorDown":
        labels |= {"namespace": "team-a", "run": "a"}
    else:
        labels |= {"namespace": "rlrun-system"}
    if case.role:
        labels["role"] = case.role
    text = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return [{"labels": f"ALERTS{{{text}}}", "value": 1}]
