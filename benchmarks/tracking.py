"""Whether a run's steps notice its trackers: `python -m benchmarks.tracking [--write]`.

One run (supervised, of a tiny model, real torchrun ranks and orchestrator) on this machine. While it trains, a sink is beside it for a
stretch of steps and not for the next, in turn; the tracker is well, refuses, hangs, dies or is full, one after the other and again. The
figure is the median step with a sink in this state over the median step of the stretches without one right before and after it: what
else the machine does meets both alike. In the end the curve has to be whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlrun.runtime.processes import processes_with
from tests.support.mlflow_server import Server

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "tracking.md"
STATES = ("well", "refuses", "hangs", "dies", "full")
ROUNDS, STEPS, SETTLE, WARM = 4, 16, 2, 10
GOAL = 1.02
_PATIENCE = "5"
_MARK = "RLRUN_BENCH_SINK"


class Run:
    """The run under measurement, and sinks beside it.

    Args:
        folder: for all of its files.
        url: of the tracker.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.root = folder / "out"
        rows = [{"prompt": f"number {i}", "completion": "abc " * 60} for i in range(64)]
        (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        steps = WARM + (2 * len(STATES) * ROUNDS + 1) * STEPS + 1
        spec = {
            "task": "SFT", "model": {"tiny": {}}, "maxSteps": steps, "seqLen": 256, "checkpoint": {"interval": 100_000},
            "data": {"batchSize": 8, "sources": [{"path": str(folder / "chats.jsonl")}]},
        }  # fmt: skip
        manifest = folder / "run.json"
        head = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "bench"}}
        manifest.write_text(json.dumps({**head, "spec": spec}))
        command = [
            sys.executable,
            "-m",
            "rlrun.cli.main",
            "local",
            str(manifest),
            "--plain",
            "--output-dir",
            str(self.root),
        ]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        self._url, self._config = url, folder / "tracked.json"
        self._sink: subprocess.Popen[bytes] | None = None

    def lines(self) -> list[dict[str, Any]]:
        """Lines of the run's metrics so far."""
        try:
            whole = (self.root / "metrics.jsonl").read_text().rpartition("\n")[0]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for(self, step: int) -> None:
        """Wait until a step is done."""
        while len(self.lines()) < step:
            assert self.process.poll() is None, "the run has ended early"
            time.sleep(0.1)

    def start_sink(self, *options: str) -> None:
        """Start a sink."""
        document = json.loads((self.root / "run.json").read_text())
        self._config.write_text(json.dumps({**document, "tracking": {"mlflow": {"uri": self._url}}}))
        command = [sys.executable, "-m", "rlrun.tracking", "--config", str(self._config), "--patience", _PATIENCE]
        environ = {**os.environ, _MARK: str(self.root)}
        self._sink = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, env=environ)

    def kill_sink(self) -> None:
        """Kill the sink and its workers."""
        assert self._sink is not None
        for pid in processes_with(_MARK, str(self.root)):
            os.kill(pid, signal.SIGKILL)
        self._sink.wait()

    def drain(self) -> None:
        """Have the tracker get the rest."""
        self.start_sink("--once")
        assert self._sink is not None
        assert self._sink.wait(timeout=120) == 0


def measure(folder: Path) -> dict[str, list[float]]:
    """Ratios by state, one per stretch."""
    plan: list[tuple[str, int]] = []
    with Server() as server:
        run = Run(folder, server.url)
        try:
            step = WARM
            run.wait_for(step)
            for _ in range(ROUNDS):
                for state in STATES:
                    step += STEPS
                    run.wait_for(step)  # without a sink
                    server.mode = "" if state == "well" else state
                    plan.append((state, step))
                    run.start_sink()
                    step += STEPS
                    run.wait_for(step)
                    run.kill_sink()
            assert run.process.wait(timeout=300) == 0
            server.mode = ""
            run.drain()
        finally:
            if run.process.poll() is None:
                run.process.terminate()
                run.process.wait()
        lines = run.lines()
        assert server.points == {(line["step"], line["loss"]) for line in lines}, "the curve is not whole"
    seconds = [float(line["time/step"]) for line in lines]
    ratios: dict[str, list[float]] = {state: [] for state in STATES}
    for state, first in plan:
        own = seconds[first + SETTLE : first + STEPS]
        beside = seconds[first - STEPS + SETTLE : first] + seconds[first + STEPS + SETTLE : first + 2 * STEPS]
        ratios[state].append(statistics.median(own) / statistics.median(beside))
    ratios["seconds"] = seconds[WARM:]
    return ratios


def page(ratios: dict[str, list[float]]) -> str:
    """The result's page."""
    seconds = ratios["seconds"]
    every = [ratio for state in STATES for ratio in ratios[state]]
    rows = [
        f"| {state} | {statistics.median(ratios[state]):.3f} | {min(ratios[state]):.3f} to {max(ratios[state]):.3f} |"
        for state in STATES
    ]
    return "\n".join(
        [
            "# What a step notices of trackers",
            "",
            f"`python -m benchmarks.tracking`; one supervised run of {len(seconds) + WARM} steps, "
            f"{1000 * statistics.median(seconds):.0f} ms each (median), {os.cpu_count()} cores ({platform.machine()}),",
            f"load of the machine {os.getloadavg()[2]:.1f}. A stretch of {STEPS} steps with a sink, over those without one beside it; "
            f"{ROUNDS} stretches per state. Goal: {GOAL}.",
            "The curve was whole in the end.",
            "",
            "| the tracker | step with a sink / without (median) | from to |",
            "|---|---:|---:|",
            *rows,
            f"| all | {statistics.median(every):.3f} | {min(every):.3f} to {max(every):.3f} |",
            "",
        ]
    )


def main() -> int:
    """Run the benchmark; 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ratios = measure(Path(folder))
    text = page(ratios)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return int(statistics.median([ratio for state in STATES for ratio in ratios[state]]) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
