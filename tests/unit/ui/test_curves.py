"""Curves of the page: units, scales with outliers, means, and the small curve of the list."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from rlrun.ui.page_curves import Scale, scale_of, unit_of, window_of
from rlrun.ui.static_files import StaticFiles
from tests.support.made_runs import Client, Folder, client, made, metrics_line

CONCEPTS = Path(__file__).parents[3] / "docs/concepts.md"
EXAMPLES = {"environment": "math", "reason": "age", "k": "4", "name": "loss", "pool": "easy"}


def documented() -> list[str]:
    """Return the metric names of the documented table, with an example for each placeholder."""
    table = CONCEPTS.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    found: list[str] = []
    for row in table.splitlines():
        if not row.startswith("| `"):
            continue
        first = ""
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
            whole = name
            if name.startswith("…"):
                whole = first.rsplit(name[1], 1)[0] + name[1:]
            elif first.startswith("eval/") and "/" not in name:
                whole = f"{first.rsplit('/', 1)[0]}/{name}"
            first = first or name
            whole = re.sub("<([a-z]+)>", lambda placeholder: EXAMPLES[placeholder[1]], whole)
            found.append(re.sub(r"pass@k$", "pass@4", whole))
    return found


def test_documented_metrics_have_units() -> None:
    names = documented()
    assert len(names) > 60
    assert {"eval/math/timeouts", "time/start_publish", "removed/age/completion_length/mean"} <= set(names)
    assert [name for name in names if unit_of(name).unit == "value"] == []
    assert (unit_of("env/math/exact").title, unit_of("env/math/exact").unit) == ("exact, math", "mean of the rollouts")
    assert (unit_of("my/own").title, unit_of("my/own").unit) == ("my/own", "value")


@pytest.mark.parametrize(
    ("metric", "title", "value", "unit", "shown"),
    [
        ("perf/peak_memory", "Peak memory of a trainer GPU", 3 * 2**30, "GiB", 3.0),
        ("perf/mfu", "Peak FLOP/s of the GPUs that the trainer uses", 0.41, "%", 41.0),
        ("eval/gsm8k/pass@4", "Held-out pass@4, gsm8k", 0.5, "% of tasks", 50.0),
        ("eval/gsm8k/reward/mean", "Held-out reward, gsm8k", 0.5, "reward", 0.5),
        ("reward/math/mean", "Reward, math", 0.5, "reward", 0.5),
        ("objective/math/loss", "Loss, math", 0.5, "loss", 0.5),
        ("time/step", "Duration of a step", 2.0, "s", 2.0),
    ],
)
def test_values_are_in_the_unit_of_their_metric(
    tmp_path: Path, static: StaticFiles, metric: str, title: str, value: float, unit: str, shown: float
) -> None:
    run = made(tmp_path / "runs" / "demo")
    run.lines("metrics.jsonl", [{"step": 1, metric: value}])
    asked = client(run.root.parent, static=static)[0]
    (found,) = asked.json(f"/api/runs/{run.id}/curves", metric=metric)["curves"]
    assert (found["title"], found["unit"], found["values"]) == (title, unit, [shown])


def test_few_values_far_away_are_outside_of_the_scale() -> None:
    usual = [10 + step % 7 for step in range(100)]
    assert scale_of([300, *usual]) == Scale(10, 16)
    assert scale_of([300, *usual[:50], 200, *usual[50:]]) == Scale(10, 16)
    assert scale_of([-300, *usual]) == Scale(10, 16)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([*range(100)], "a curve that rises has no outlier"),
        ([10 + step % 7 for step in range(100)] + [20], "a value near the others is none"),
        ([300.0, 1, 2, 3, 4, 5], "too few values"),
        ([1.0] * 50 + [9.0] + [1.0] * 50, "a constant has no spread"),
        ([10 + step % 7 for step in range(100)] + [300, 400, 500], "the newest values show a run that diverges"),
        ([300.0] * 20 + [10 + step % 7 for step in range(100)], "too many values"),
        ([0.5], "one value"),
    ],
)
def test_other_values_are_on_the_scale(values: list[float], why: str) -> None:
    assert scale_of(values) == Scale(min(values), max(values)), why


def test_smoothing_window_follows_number_of_steps() -> None:
    assert [window_of(count, 0) for count in (1, 10, 100, 320, 100_000)] == [1, 1, 5, 16, 25]
    assert window_of(320, 7) == 7


def long_run(folder: Path) -> Folder:
    """Write a run of 200 steps whose first step takes 300 s and has a huge loss."""
    run = made(folder)
    lines = [
        metrics_line(step) | {"time/step": 2.0 + step % 3, "loss": 1.0 + step % 2, "eval/math/reward/mean": step % 4}
        for step in range(1, 201)
    ]
    lines[0] |= {"time/step": 300.0, "loss": 1e30}
    run.lines("metrics.jsonl", lines)
    return run


@pytest.fixture
def long(tmp_path: Path) -> Folder:
    return long_run(tmp_path / "runs" / "long")


@pytest.fixture
def asked(long: Folder, static: StaticFiles) -> Client:
    return client(long.root.parent, static=static)[0]


def test_outlier_is_marked_and_excluded_from_mean(long: Folder, asked: Client) -> None:
    path, names = f"/api/runs/{long.id}/curves", ["time/step", "eval/math/reward/mean"]
    step, held_out = asked.json(path, metric=names, smooth=0)["curves"]
    assert step["values"][:3] == [300.0, 4.0, 2.0]
    assert (step["low"], step["high"], step["outliers"]) == (2.0, 4.0, 1)
    assert step["marks"] == [{"step": 1, "value": 300.0}]
    assert (step["window"], step["meanSteps"][0], max(step["means"])) == (10, 2, 4.0)
    assert (held_out["window"], held_out["means"]) == (1, []), "held-out values are not smoothed"
    plain = asked.json(path, metric="time/step", smooth=1)["curves"][0]
    assert (plain["window"], plain["means"]) == (1, [])


def test_timeline_scale_excludes_outliers(long: Folder, asked: Client) -> None:
    found = asked.json(f"/api/runs/{long.id}/timeline", spans=40)
    sums = [sum(part["seconds"][at] for part in found["parts"]) for at in range(40)]
    assert max(sums) > 60
    assert found["high"] < 4


def test_run_list_has_small_curve_per_run(long: Folder, asked: Client) -> None:
    found = asked.json(f"/api/runs/{long.id}/sparkline")
    assert (found["title"], found["steps"][0], found["steps"][-1]) == ("Reward", 1, 200)
    assert len(found["values"]) <= 60
    assert all(a < b for a, b in itertools.pairwise(found["values"]))
    sft = made(long.root.parent / "sft")
    sft.lines(
        "metrics.jsonl", [{"step": step, "loss": 1e30 if step == 1 else 2.0 + step % 2} for step in range(1, 101)]
    )
    found = asked.json(f"/api/runs/{sft.id}/sparkline")
    assert (found["title"], max(found["values"]) <= 3) == ("Loss", True)
    empty = Folder(long.root.parent / "empty")
    empty.config()
    assert asked.json(f"/api/runs/{empty.id}/sparkline") == {"title": "", "steps": [], "values": [], "last": None}
