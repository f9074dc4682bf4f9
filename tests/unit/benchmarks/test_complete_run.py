"""Goals, events and GPU samples of the complete run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.engine_choice import RELEASED, SAFE, TRITON, EngineChoice, choose_engine, read_choice, write_choice
from benchmarks.gpu.run_events import (
    Events,
    GpuSample,
    idle_seconds,
    judge_value,
    memory_row,
    sleeping_engine_bytes,
)
from benchmarks.gpu.run_local import DRY, FULL, Sizes, specification
from benchmarks.gpu.run_phases import phase_rows, sampled_versions, worst_of_steps
from rlrun.config.models.engine_arguments import problem_of_arguments

GIB = 2**30


def sample(time: float, utilization: float | None = 1.0, used: int = 0, **processes: int) -> GpuSample:
    return GpuSample(time, utilization, used, {int(pid[1:]): value for pid, value in processes.items()})


@pytest.mark.parametrize(
    ("value", "at_most", "at_least", "result"),
    [
        (1.0, 3.0, None, "met"),
        (3.5, 3.0, None, "missed"),
        (0.2, None, 0.1, "met"),
        (0.0, None, 0.1, "missed"),
        (float("nan"), 3.0, None, "missed"),
        (float("nan"), None, 0.1, "missed"),
        (7.0, None, None, "stated"),
        (None, 3.0, None, "not run"),
    ],
)
def test_goal_results(value: float | None, at_most: float | None, at_least: float | None, result: str) -> None:
    assert judge_value(value, at_most, at_least) == result


def test_events_are_lines_and_the_table_is_complete_after_each(tmp_path: Path) -> None:
    events = Events(tmp_path / "out")
    events.put_goal("hand-over", 4.0, at_most=3.0, unit="s")
    events.put_goal("curve", None, at_least=0.3, note="run A failed")
    lines = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [line["result"] for line in lines] == ["missed", "not run"]
    table = (tmp_path / "out" / "run.md").read_text()
    assert "| hand-over | 4 | s | <= 3 | missed | - |" in table
    assert "| curve | - |  | >= 0.3 | not run | run A failed |" in table


def test_unmeasured_goal_needs_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass a note"):
        Events(tmp_path).put_goal("curve", None, at_least=0.3)


def test_idle_seconds_count_samples_below_the_bound() -> None:
    samples = [sample(index / 10, 0.0 if index % 4 == 0 else 0.9) for index in range(41)]
    assert idle_seconds(samples) == pytest.approx(4.0 * 11 / 41)
    assert idle_seconds([sample(0.0, None), sample(1.0, None)]) is None


def test_sleeping_engine_has_its_least_memory_after_it_was_awake() -> None:
    samples = [
        sample(0, p1=1 * GIB, p2=9 * GIB),
        sample(1, p1=69 * GIB, p2=9 * GIB),
        sample(2, p1=3 * GIB, p2=30 * GIB),
        sample(3, p1=70 * GIB, p2=9 * GIB),
        sample(4, p1=0, p2=0),
    ]
    left, how = sleeping_engine_bytes(samples, end=3.5)
    assert left == 3 * GIB
    assert how.startswith("least memory of the process")
    assert sleeping_engine_bytes(samples[:1], end=-1.0) == (None, "no samples of a GPU")
    assert memory_row([sample(0, used=2 * GIB), sample(1, used=4 * GIB)])["most MiB"] == 4096


def test_hidden_processes_leave_an_upper_bound_of_the_engines_memory() -> None:
    used = (1, 60, 75, 5, 20, 74, 6)
    samples = [sample(time, used=gib * GIB) for time, gib in enumerate(used)]
    left, how = sleeping_engine_bytes(samples, end=10.0)
    assert left == 4 * GIB
    assert how.startswith("upper bound, because NVML shows no processes")


def step(number: int, end: float, **times: float) -> dict[str, float]:
    return {"step": number, "time": end, **{f"time/{name}": value for name, value in times.items()}}


def test_phases_have_the_samples_of_their_time() -> None:
    times = {"step": 10.0, "wait_for_batch": 4.0, "wait_for_turn": 1.0, "forward_backward": 2.5, "optimizer": 0.5}
    lines = [step(0, 90.0), step(1, 100.0, **times), step(2, 110.0, **times, broadcast_weights=1.0)]
    # The clock of the samples is 1,000 s ahead, and the GPU is idle in the turn and in the first half of the hand-over.
    samples = [
        sample(
            1090.0 + tenth / 10,
            0.0 if 40 <= tenth % 100 < 50 or 80 <= tenth % 100 < 85 else 0.9,
            used=(tenth % 100) * GIB,
        )
        for tenth in range(200)
    ]
    rows = phase_rows(lines, samples, 1000.0)
    assert {name: row["s per step"] for name, row in rows.items()} == pytest.approx(
        {"rollouts": 4.0, "turn": 1.0, "training": 3.0, "hand-over": 1.0, "rest": 1.0}
    )
    assert {name: row["samples"] for name, row in rows.items()} == {
        "rollouts": 40, "turn": 10, "training": 30, "hand-over": 10, "rest": 10,
    }  # fmt: skip
    assert {name: row["idle share"] for name, row in rows.items()} == {
        "rollouts": 0.0, "turn": 1.0, "training": 0.0, "hand-over": 0.5, "rest": 0.0,
    }  # fmt: skip
    assert (rows["turn"]["least MiB"], rows["turn"]["most MiB"]) == (40 * 1024, 49 * 1024)
    assert "idle share" not in phase_rows(lines, [], 0.0)["turn"]


def test_sampled_versions_and_tokens_without_one(tmp_path: Path) -> None:
    rows = [
        {"completion_tokens": 32, "versions": [[{"version": 3, "start": 10, "end": 42}]]},
        {
            "completion_tokens": 32,
            "versions": [[{"version": 4, "start": 10, "end": 30}, {"version": None, "start": 30, "end": 42}]],
        },
    ]
    (tmp_path / "step_00000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sampled_versions(tmp_path) == ({3, 4}, 12)
    assert sampled_versions(tmp_path / "missing") == (set(), 0)


@pytest.mark.parametrize(
    ("wrong", "arguments"),
    [
        ((), RELEASED),
        (("FA3 17 x 16/8",), TRITON),
        (("RoPE 1 x 8",), SAFE.arguments),
        (("FA3 17 x 16/8", "RMSNorm 7 x 128"), SAFE.arguments),
    ],
)
def test_engine_replaces_refused_kernels(wrong: tuple[str, ...], arguments: tuple[str, ...], tmp_path: Path) -> None:
    names = ("RMSNorm 7 x 128", "RoPE 1 x 8", "FA3 17 x 16/8")
    rows = {name: {"note": "did not come back"} if name in wrong else {"right": True} for name in names}
    assert read_choice(tmp_path) == read_choice(None) == EngineChoice()
    write_choice(tmp_path, choose_engine(rows))
    choice = read_choice(tmp_path)
    assert choice.arguments == arguments
    assert all(name in choice.reason for name in wrong)
    assert problem_of_arguments(choice.arguments) is None


@pytest.mark.parametrize("sizes", [DRY, replace(FULL, engine=SAFE)])
def test_both_runs_use_the_chosen_kernels(sizes: Sizes, tmp_path: Path) -> None:
    for run in (0, 1):
        assert specification(sizes, tmp_path, run=run)["inference"]["extraArgs"] == list(sizes.engine.arguments)


@pytest.mark.parametrize(
    ("values", "steps", "result"),
    [([0.0, 1e-4], 2, "met"), ([0.0], 2, "missed"), ([], 2, "not run"), ([0.0, 0.2], 2, "missed")],
)
def test_step_without_the_metric_misses_the_goal(values: list[float], steps: int, result: str) -> None:
    assert judge_value(worst_of_steps(values, steps), 1e-3, None) == result
