"""Data that trackers read from a run folder: each line once, and the lines of a later attempt again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlrun.tracking.record_source import SYSTEM_FILE, Source, gpu_measures
from rlrun.tracking.tracker_records import DERIVED, NAMES, PATTERNS, Mark, Translator, tracked_name
from rlrun.tracking.worker import Sent, read_sent
from tests.support.tracked_run import TrackedFolder, loss


def folder(tmp_path: Path) -> TrackedFolder:
    return TrackedFolder(tmp_path / "run", {"tensorboard": {}, "samples": {"interval": 2, "count": 2}})


def marks(source: Source) -> list[tuple[int, int]]:
    return [(record.mark.step, record.mark.attempt) for record in source.read_records()]


def test_each_metrics_line_is_read_once(tmp_path: Path) -> None:
    run = folder(tmp_path)
    source = Source(run.config, [])
    assert marks(source) == []
    run.step(1)
    run.step(2)
    assert marks(source) == [(1, 1), (2, 1)]
    with run.paths.metrics.open("a") as file:
        file.write('{"step": 3, "att')
    assert marks(source) == []  # a line that is being written
    with run.paths.metrics.open("a") as file:
        file.write('empt": 1}\n')
    assert marks(source) == [(3, 1)]
    assert marks(Source(run.config, [Mark(1, 1), Mark(2, 1)])) == [(3, 1)]


@pytest.mark.parametrize("fresh", [True, False])
def test_retrained_steps_are_read_again(tmp_path: Path, fresh: bool) -> None:
    """The second case: the new file has the length of the old one at the next read."""
    run = folder(tmp_path)
    source = Source(run.config, [])
    for step in range(1, 7):
        run.step(step)
    assert marks(source)[-1] == (6, 1)
    run.begin(2, base_step=4)
    if fresh:
        source = Source(run.config, [Mark(step, 1) for step in range(1, 7)])
    assert marks(source) == []
    run.step(5)
    run.step(6)
    records = list(source.read_records())
    assert [(r.mark.step, r.mark.attempt, r.scalars["loss/mean"]) for r in records] == [
        (5, 2, loss(5, 2)),
        (6, 2, loss(6, 2)),
    ]
    assert records[-1].scalars["progress/total_tokens"] == 60  # of the steps that count
    run.begin(3, base_step=6)
    assert marks(source) == []
    run.step(7)
    assert marks(source) == [(7, 3)]


def test_samples_and_histograms_follow_their_interval(tmp_path: Path) -> None:
    run = folder(tmp_path)
    for step in (1, 2):
        run.step(step)
    run.paths.trace(1).unlink()  # the volume refused it
    first, second = Source(run.config, []).read_records()
    assert not first.histograms
    assert not first.samples
    assert second.histograms["distributions/rewards"] == [0.0, 0.25, 0.5, 0.75]
    assert second.histograms["distributions/completion_len"] == [3.0] * 4
    (rows,) = second.samples.values()
    assert [row.row_values() for row in rows] == [
        ["reverse-text", "7", "user: abc", "cba", reward, reward - 0.375, "1"] for reward in (0.0, 0.5)
    ]


def test_evaluations_have_samples_of_their_own(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.step(1, **{"eval/reverse-text/reward/mean": 0.5})
    rows = [{"policy_version": 1, "environment": "reverse-text", "task_id": "1", "reward": 1.0, "completion": "x"}]
    run.paths.evaluation_trace(1).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (record,) = Source(run.config, []).read_records()
    assert record.scalars["eval/reverse-text/avg@1"] == 0.5
    assert [row.reward for row in record.samples["eval_samples"]] == [1.0]


def test_measures_of_the_machine_join_the_step_after_them(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.step(1)
    run.step(2)
    system = run.paths.root / "tracking" / SYSTEM_FILE
    system.parent.mkdir()
    first = 1.7e9 + 1e6 + 1
    lines = [{"time": first + offset, "system/load": value} for offset, value in ((0.2, 1.0), (0.8, 3.0), (5.0, 9.0))]
    system.write_text("".join(json.dumps(line) + "\n" for line in lines))
    one, two = Source(run.config, []).read_records()
    assert "system/load" not in one.scalars
    assert two.scalars["system/load"] == 2.0
    assert gpu_measures("97, 2048, [N/A], 60\n") == {
        "system/gpu.0.utilization_percent": 97.0,
        "system/gpu.0.memory_used_gib": 2.0,
        "system/gpu.0.temperature_celsius": 60.0,
    }


def test_tracked_names_equal_prime_rl_names() -> None:
    assert tracked_name("loss") == ("loss/mean", 1.0)
    assert tracked_name("reward/a/b/mean") == ("reward/a/b", 1.0)
    assert tracked_name("eval/math/reward/mean", samples_per_task=8) == ("eval/math/avg@8", 1.0)
    assert tracked_name("eval/math/pass@4") == ("eval/math/pass@4", 1.0)
    assert tracked_name("ratio_max") == ("ratio_max", 1.0)
    targets = [name for name, _ in NAMES.values()]
    assert len(set(targets) | set(DERIVED)) == len(targets) + len(DERIVED)
    assert len({layout for _, layout in PATTERNS}) == len(PATTERNS)


def test_tracked_values_are_converted_to_tracker_units() -> None:
    translator = Translator(world_size=4, samples_per_task=1)
    line = {
        "perf/mfu": 0.5, "perf/peak_memory": 2.0**31, "perf/throughput": 100.0, "entropy": 0.5, "mismatch_kl": 0.25,
        "batch/tokens": 7.0, "batch/solve_all": 0.25, "batch/solve_none": 0.5,
    }  # fmt: skip
    translator.translate_metrics(1, line)
    scalars = translator.translate_metrics(2, line)
    assert {name: scalars[name] for name in ("perf/mfu", "perf/peak_memory", *DERIVED) if name in scalars} == {
        "perf/mfu": 50.0,
        "perf/peak_memory": 2.0,
        "batch/effective_batch_size": 0.25,
        "kl_ent_ratio/mean": 0.5,
        "perf/throughput_per_gpu": 25.0,
        "progress/total_tokens": 14.0,
        "progress/ckpt_step": 2.0,
    }


def test_journal_marks_unconfirmed_lines(tmp_path: Path) -> None:
    path = tmp_path / "tracking" / "wandb.sent"
    sent = Sent(path)
    sent.add([Mark(1, 1), Mark(2, 1)])
    sent.confirm_all()
    sent.add([Mark(3, 1)])
    assert read_sent(path) == ([Mark(1, 1), Mark(2, 1), Mark(3, 1)], 2)
    with path.open("a") as file:
        file.write("4 1")  # torn
    again = Sent(path)
    assert (again.marks[-1], again.confirmed) == (Mark(3, 1), 2)
    again.keep_first(2)
    again.add([Mark(3, 2)])
    assert read_sent(path) == ([Mark(1, 1), Mark(2, 1), Mark(3, 2)], 2)
