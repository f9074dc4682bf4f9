"""Metrics of long runs are read line by line: constant memory, except 9 bytes for each value of a curve."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlrun.inspect.comparison import Curve, curves_table, last_step, mean_between
from rlrun.inspect.curves import MetricColumns, metric_curve, metric_names
from rlrun.inspect.gpu_cost import Account, of_folder
from rlrun.inspect.kubectl import Kubectl
from rlrun.inspect.source import FolderRun
from rlrun.protocol.files.attempts import first_attempt, write_attempt
from rlrun.protocol.files.metrics_line import FURTHEST
from rlrun.protocol.files.paths import RunPaths
from rlrun.runs import volume_reader

METRICS = 40
MIB = 1 << 20
STEPS = [5_000, pytest.param(100_000, marks=pytest.mark.full)]


def write_metrics(paths: RunPaths, steps: int) -> None:
    """Write lines of one-second steps, each with `METRICS` additional values."""
    more = {f"part/metric_{number}": number + 0.123456789 for number in range(METRICS)}
    shared = {"attempt": 1, "time/step": 1.0, "time/wait_for_batch": 0.25, "batch/tokens": 10, "batch/samples": 2}
    rest = json.dumps(shared | more)[1:]
    with paths.metrics.open("w") as file:
        for step in range(1, steps + 1):
            file.write(f'{{"step": {step}, "time": {1e9 + step}, "reward/mean": {step / steps}, {rest}\n')


def measure(act: Callable[[], object]) -> tuple[object, float]:
    """Return the result of `act` and the growth of the peak resident memory in MiB. Tracing each allocation would take minutes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current value
    before = resident("VmRSS")
    result = act()
    return result, (resident("VmHWM") - before) / 1024


def resident(name: str) -> int:
    """Return a value of `/proc/self/status` in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("steps", STEPS)
def test_account_of_long_run_uses_constant_memory(tmp_path: Path, steps: int) -> None:
    paths = RunPaths(tmp_path)
    write_attempt(paths, first_attempt(world_size=1, config_hash="h", started_at=1e9))
    write_metrics(paths, steps)
    of_folder(tmp_path, time.time())  # imports
    account, memory = measure(lambda: of_folder(tmp_path, time.time()))
    assert isinstance(account, Account)
    assert (account.tokens, account.samples) == (10 * steps, 2 * steps)
    assert account.seconds_by_use()["trained"] == steps - 1
    assert memory < 4, f"{memory:.1f} MiB for {paths.metrics.stat().st_size / MIB:.0f} MiB of metrics"


@pytest.mark.parametrize("steps", STEPS)
def test_curve_of_long_run_uses_few_bytes_per_value(tmp_path: Path, steps: int) -> None:
    paths = RunPaths(tmp_path)
    write_metrics(paths, steps)
    found, memory = measure(lambda: volume_reader.read_curve(FolderRun(tmp_path), Kubectl(), "a"))
    assert isinstance(found, Curve)
    assert last_step(found.lines) == steps
    assert mean_between(found.lines, "reward/mean", 1, steps) == pytest.approx(0.5 + 0.5 / steps)
    assert memory < 15 * (METRICS + 8) * steps / MIB + 4, f"{memory:.1f} MiB"
    rows, memory = measure(lambda: sum(1 for _ in volume_reader.metric_lines(FolderRun(tmp_path), Kubectl())))
    assert rows == steps
    assert memory < 4, f"{memory:.1f} MiB"


LINES: list[dict[str, object]] = [
    {"step": 1, "loss": 0.5, "tokens": 7},
    {"step": 2, "loss": float("inf"), "note": "text", "huge": 2**70, "flag": True, "nothing": None},
    {},
    {"step": 4, "loss": -0.0, "late": 1.0, FURTHEST: 9},
]


def test_metric_columns_return_original_lines() -> None:
    columns = MetricColumns(LINES)
    assert [dict(line) for line in columns] == LINES
    assert [dict(line) for line in columns[1:]] == LINES[1:]
    assert json.dumps(dict(columns[-1])) == json.dumps(LINES[-1])
    assert [len(line) for line in columns] == [3, 6, 0, 4]
    assert [line.get("loss", "none") for line in columns] == [0.5, float("inf"), "none", -0.0]
    assert type(columns[0]["step"]) is int
    with pytest.raises(KeyError):
        columns[0]["late"]
    with pytest.raises(IndexError):
        columns[4]


def test_plots_and_tables_of_columns_equal_lines() -> None:
    lines = [{"step": step, "loss": 1 / step, "reward/mean": step} for step in range(1, 50)]
    columns = MetricColumns(lines)
    assert metric_names(columns) == metric_names(lines)
    assert metric_curve("a", columns, "loss", 3) == metric_curve("a", lines, "loss", 3)
    fields = volume_reader.RunFields({})
    assert curves_table([Curve("a", columns, fields)]) == curves_table([Curve("a", lines, fields)])


def test_damaged_metrics_are_left_out_of_accounts_and_curves(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_metrics(paths, 3)
    whole = paths.metrics.read_bytes()
    paths.metrics.write_bytes(whole + b"[" * 100_000 + b"\n\x00\xff\n[1]\n" + whole[:100])
    assert len(volume_reader.read_curve(FolderRun(tmp_path), Kubectl(), "a").lines) == 3
    assert of_folder(tmp_path, time.time()).tokens == 30
