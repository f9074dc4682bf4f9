"""Live view and summary of a local run."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path

import pytest
from rich.console import Console

from rlrun.local import view as view_module
from rlrun.local.summary import print_summary
from rlrun.local.view import MetricsTail, View, draw_sparkline, show_duration, step_line


@pytest.mark.parametrize(("seconds", "shown"), [(None, "–"), (5.9, "5s"), (187, "3m07s"), (3725, "1h02m")])
def test_durations_are_short(seconds: float | None, shown: str) -> None:
    assert show_duration(seconds) == shown


def test_sparkline_rises_with_values_and_fits() -> None:
    assert draw_sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(draw_sparkline([float(i) for i in range(1000)], width=40)) == 40
    assert draw_sparkline([]) == ""


def test_tail_reads_complete_lines_and_follows_rewrite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert list(tail.read_new_lines()) == []
    path.write_text('{"step": 1}\n{"st')
    assert [line["step"] for line in tail.read_new_lines()] == [1]
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert [line["step"] for line in tail.read_new_lines()] == [2]
    path.write_text('{"step": 1}\n')  # A resume deleted a lost step.
    assert list(tail.read_new_lines()) == []
    assert tail.history.last == {"step": 1}


def test_tail_detects_replaced_file_of_same_length(tmp_path: Path) -> None:
    """A resumed run of short steps can retrain all lost steps before the next poll; the view missed that once."""
    path, again = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.tmp"
    tail = MetricsTail(path)
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert len(list(tail.read_new_lines())) == 3
    again.write_text('{"step": 1}\n{"step": 2, "attempt": 2}\n{"step": 3, "attempt": 2}\n')
    again.replace(path)
    assert [(line["step"], line["attempt"]) for line in tail.read_new_lines()] == [(2, 2), (3, 2)]
    assert tail.history.last == {"step": 3, "attempt": 2}
    with path.open("a") as file:
        file.write('{"step": 4}\n')
    assert [line["step"] for line in tail.read_new_lines()] == [4]


def test_invalid_metrics_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('p": 1}\n7\n{"step": 2}\n')
    assert [line["step"] for line in MetricsTail(path).read_new_lines()] == [2]


def test_step_is_printed_in_one_line() -> None:
    line = {"step": 3, "reward/mean": 0.5, "off_policy/mean": 1.25, "eval/arithmetic/reward/mean": 0.25}
    assert step_line(line, 9) == "step 3/9  reward 0.500  staleness 1.25  eval/arithmetic/reward/mean 0.250"


def test_full_volume_is_printed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = {"reason": "StorageFull", "text": "the volume is full: 0 B free of 80 MiB since 03:27:39 UTC"}
    answers = iter([{"storage": trouble}, None, {"storage": trouble}, {"storage": None}])
    monkeypatch.setattr(view_module, "read_progress", lambda *_: next(answers))
    metrics = tmp_path / "metrics.jsonl"
    console = Console(file=io.StringIO(), width=40)
    view = View(console, name="a", max_steps=9, metrics=metrics, url="", api_key="k", plain=True)
    with view:
        metrics.write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n")
        for _ in range(4):
            view.update("")
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "step 1/9  loss 1.0000",
        "the volume is full: 0 B free of 80 MiB",
        "the volume can be written again",
    ]


def test_wait_is_printed_once_without_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = ["trainer: loading since 03:30:13Z", "trainer: loading since 03:30:13Z; 2 of 4 files, a long line"]
    answers = iter([None, *({"waiting_on": text} for text in waits)])
    monkeypatch.setattr(view_module, "read_progress", lambda *_: next(answers))
    console = Console(file=io.StringIO(), width=30)
    view = View(console, name="a", max_steps=9, metrics=tmp_path / "m", url="", api_key="k", plain=True)
    with view:
        for _ in range(3):
            view.update("the roles to start since 0s")
    lines = [line.partition("] ")[2] for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines == ["the roles to start", "trainer: loading"]


def test_tiny_negative_number_has_no_sign() -> None:
    assert step_line({"step": 3, "loss": -1e-9}, 9) == "step 3/9  loss 0.0000"
    assert step_line({"step": 3, "loss": -0.25}, 9) == "step 3/9  loss -0.2500"


def test_summary_shows_start_end_and_evaluation(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval/a/reward/mean": 0.5}]
    lines += [{"step": n, "reward/mean": 0.5 + n / 100, "time/step": 1.0} for n in range(1, 31)]
    lines[-1]["eval/a/reward/mean"] = 0.75
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    console = Console(file=io.StringIO(), width=110)
    print_summary(console, tmp_path, elapsed_seconds=61, command="rlrun local run.yaml")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "reward 0.520 → 0.790 (first and last tenth of 30 steps)" in text
    assert "held-out reward 0.500 (version 0) → 0.750 (version 30)" in text
    assert "Complete in 1 min 1 s" in text


def test_summary_names_partial_evaluations(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval/a/reward/mean": 0.5, "eval/a/answers": 6, "eval/a/errors": 0, "eval/a/timeouts": 0}]
    lines += [{"step": n, "reward/mean": 0.5, "time/step": 1.0} for n in range(1, 4)]
    lines[-1] |= {"eval/a/reward/mean": 0.75, "eval/a/reward/mean_all": 0.5, "eval/a/answers": 4}
    lines[-1] |= {"eval/a/errors": 1, "eval/a/timeouts": 1}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    console = Console(file=io.StringIO(), width=110)
    print_summary(console, tmp_path, elapsed_seconds=61, command="rlrun local run.yaml")
    notes = [line for line in console.file.getvalue().splitlines() if "(partial" in line]  # type: ignore[attr-defined]
    assert notes == [
        "held-out reward of a, version 3: (partial: 4 of 6 answers in time, 1 failed, 0.500 with the rest as 0)"
    ]


def test_panel_shows_step_elapsed_time_and_wait(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0, "eval/a/reward/mean": 0.5}) + "\n")
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    view = View(console, name="demo", max_steps=10, metrics=path, url="http://127.0.0.1:1", api_key="k", plain=False)
    path.write_text(path.read_text() + json.dumps({"step": 4, "reward/mean": 0.625}) + "\n")
    with view:
        view.update("roles starting since 3s")
        view._live.refresh()  # type: ignore[union-attr]
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert any("step" in line and "4/10" in line and "elapsed" in line and line.endswith("0s") for line in lines)
    assert any("0.625" in line for line in lines)
    assert any("v0 0.500" in line for line in lines)
    assert any("waiting for: roles starting since 3s" in line for line in lines)


def test_panel_shows_dash_for_unknown_version(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    view = View(
        console, name="demo", max_steps=10, metrics=tmp_path / "m", url="http://127.0.0.1:1", api_key="k", plain=True
    )
    console.print(view._draw_panel({"policy_version": None, "in_flight": None}, "the roles to start"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "None" not in text
    assert ["held-out", "–", "version", "–", "in", "flight", "–"] in [line.split() for line in text.splitlines()]


def test_tail_keeps_few_numbers_per_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {f"metric/{number}": float(number) for number in range(100)}
    with path.open("w") as file:
        for step in range(3000):
            file.write(
                json.dumps({"step": step, "reward/mean": step / 3000, "eval/a/reward/mean": 0.5} | values) + "\n"
            )
    tail = MetricsTail(path)
    tracemalloc.start()
    assert sum(1 for _ in tail.read_new_lines()) == 3000
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 3000 * 100, "whole lines are held"
    assert tail.history.held_out == ["v0 0.500", "v2999 0.500"]
    assert tail.history.curve_values("reward/mean")[-1] == 2999 / 3000
