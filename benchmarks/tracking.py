"""Whether a run's steps notice its trackers: `python -m benchmarks.tracking [--write]`.

One run (supervised, of a tiny model, real torchrun ranks and orchestrator) on this machine, with a sink beside it. The sink and its
workers are stopped (SIGSTOP) and continued every few steps, so that steps with and without them lie side by side and what else the
machine does meets both alike. Meanwhile the tracker is well, refuses, hangs, dies or is full, one after the other. The
figure is the median step beside a live sink over the median step beside a stopped one. In the end the curve has to be whole.
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
TURNS, STEPS, SETTLE, WARM = 25, 4, 120, 20
GOAL = 1.02
_PATIENCE = "60"
_MARK = "RLRUN_BENCH_SINK"


class Run:
    """The run under measurement, and sinks beside it.

    Args:
        folder: for all of its files.
        url: of the tracker.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.root = folder / "out"
        rows = [{"prompt": f"number {i}", "completion": "abc " * 12} for i in range(64)]
        (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        steps = WARM + len(STATES) * (SETTLE + 2 * TURNS * STEPS)
        spec = {
            "task": "SFT", "model": {"tiny": {}}, "maxSteps": steps, "seqLen": 64, "checkpoint": {"interval": 100_000},
            "data": {"batchSize": 2, "sources": [{"path": str(folder / "chats.jsonl")}]},
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
            time.sleep(0.02)

    def start_sink(self, *options: str) -> None:
        """Start a sink."""
        document = json.loads((self.root / "run.json").read_text())
        self._config.write_text(json.dumps({**document, "tracking": {"mlflow": {"uri": self._url}}}))
        command = [sys.executable, "-m", "rlrun.tracking", "--config", str(self._config), "--patience", _PATIENCE]
        environ = {**os.environ, _MARK: str(self.root)}
        self._sink = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, env=environ)

    def signal_sink(self, number: int) -> None:
        """Signal the sink and its workers."""
        for pid in processes_with(_MARK, str(self.root)):
            os.kill(pid, number)

    def drain(self) -> None:
        """Have the tracker get the rest."""
        self.start_sink("--once")
        assert self._sink is not None
        assert self._sink.wait(timeout=120) == 0


Steps = dict[str, tuple[list[float], list[float]]]
"""Seconds of the steps with and without a sink, by the tracker's state."""


def measure(folder: Path) -> Steps:
    """Run it all."""
    plan: list[tuple[str, int, int, bool]] = []
    with Server() as server:
        run = Run(folder, server.url)
        try:
            run.wait_for(WARM // 2)
            run.start_sink()
            run.wait_for(WARM)
            step = WARM
            for state in STATES:
                server.mode = "" if state == "well" else state
                step += (
                    SETTLE  # a sink starts once in a run, and the first attempts at a tracker follow each other closely
                )
                run.wait_for(step)
                for alive in (True, False) * TURNS:
                    run.signal_sink(signal.SIGCONT if alive else signal.SIGSTOP)
                    first = len(run.lines()) + 1  # the step that is under way belongs to neither
                    step += STEPS
                    run.wait_for(step)
                    plan.append((state, first, len(run.lines()), alive))
            run.signal_sink(signal.SIGKILL)
            assert run.process.wait(timeout=300) == 0
            server.mode = ""
            run.drain()
        finally:
            run.signal_sink(signal.SIGKILL)
            if run.process.poll() is None:
                run.process.terminate()
                run.process.wait()
        lines = run.lines()
        assert server.points == {(line["step"], line["loss"]) for line in lines}, "the curve is not whole"
    found: Steps = {state: ([], []) for state in STATES}
    for state, first, last, alive in plan:
        found[state][not alive].extend(float(line["time/step"]) for line in lines[first:last])
    return found


def ratio(steps: tuple[list[float], list[float]]) -> float:
    """Median step with a sink over the one without."""
    return statistics.median(steps[0]) / statistics.median(steps[1])


def page(found: Steps) -> str:
    """The result's page."""
    whole = ([s for own in found.values() for s in own[0]], [s for own in found.values() for s in own[1]])
    rows = [
        f"| {state} | {len(own[0])} + {len(own[1])} | {1000 * statistics.median(own[1]):.0f} ms | {ratio(own):.3f} |"
        for state, own in (*found.items(), ("all", whole))
    ]
    return "\n".join(
        [
            "# What a step notices of trackers",
            "",
            f"`python -m benchmarks.tracking`; one supervised run of a tiny model, {os.cpu_count()} cores ({platform.machine()}),",
            f"load of the machine {os.getloadavg()[2]:.1f}. The sink was stopped and continued every {STEPS} steps. Goal: {GOAL}.",
            f"The first {SETTLE} steps of each state do not count. The curve was whole in the end.",
            "",
            "| the tracker | steps with and without | step without | with / without |",
            "|---|---:|---:|---:|",
            *rows,
            "",
        ]
    )


def main() -> int:
    """Run the benchmark; 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    text = page(found)
    print(text)
    if options.write:
        RESULT.write_text(text)
    whole = ([s for own in found.values() for s in own[0]], [s for own in found.values() for s in own[1]])
    return int(ratio(whole) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
