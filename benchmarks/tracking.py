"""Time of a run's steps with and without its trackers: `python -m benchmarks.tracking [--write]`.

One run (supervised, of a tiny model, real torchrun ranks and orchestrator) on this machine, with a sink beside it. The sink and its
workers are stopped (SIGSTOP) and continued every few steps, so that steps with and without them lie side by side and what else the
machine does meets both alike. Meanwhile the tracker is well, refuses, hangs, dies or is full, one after the other. The figure is the
median, over pairs of such neighbours, of the mean step beside a live sink over the mean step beside a stopped one; the sink's and
its workers' CPU stands beside it, which no other load of the machine disturbs. In the end the curve has to be whole.
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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rlrun.runtime.processes import processes_with
from tests.support.mlflow_server import Server

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "tracking.md"
STATES = ("well", "refuses", "hangs", "dies", "full")
TURNS, STEPS, SETTLE, WARM = 30, 5, 150, 20
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
        self._metrics: BinaryIO | None = None
        self._seen = 0

    def lines(self) -> list[dict[str, Any]]:
        """Lines of the run's metrics so far."""
        try:
            whole = (self.root / "metrics.jsonl").read_text().rpartition("\n")[0]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in whole.splitlines()]

    @property
    def count(self) -> int:
        """Steps that are done; cheap to ask."""
        try:
            self._seen += self._open().read().count(b"\n")
        except FileNotFoundError:
            return 0
        return self._seen

    def _open(self) -> BinaryIO:
        if self._metrics is None:
            self._metrics = (self.root / "metrics.jsonl").open("rb")
        return self._metrics

    def sink_cpu(self) -> float:
        """CPU seconds of the sink, its workers, and those that have ended."""
        total = 0
        for pid in processes_with(_MARK, str(self.root)):
            with suppress(OSError):
                total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        return total / os.sysconf("SC_CLK_TCK")

    def wait_for(self, step: int) -> None:
        """Wait until a step is done."""
        while self.count < step:
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


@dataclass
class State:
    """Measures of the run in one state of the tracker."""

    pairs: list[tuple[float, float]] = field(default_factory=list)
    """Mean step beside a live sink, and beside a stopped one right after it, in seconds."""
    cpu: float = 0.0
    """CPU seconds of the sink and its workers."""
    alive: float = 0.0
    """Seconds for which they were not stopped."""


def ratio(states: Iterable[State]) -> float:
    """Median over pairs of neighbours of a step with a sink over one without."""
    return statistics.median(own / without for state in states for own, without in state.pairs)


def measure(folder: Path) -> dict[str, State]:
    """Run it all."""
    plan: list[tuple[str, int, int]] = []
    found = {state: State() for state in STATES}
    with Server() as server:
        run = Run(folder, server.url)
        try:
            run.wait_for(WARM // 2)
            run.start_sink()
            run.wait_for(WARM)
            step = WARM
            for name in STATES:
                server.mode = "" if name == "well" else name
                step += (
                    SETTLE  # a sink starts once in a run, and the first attempts at a tracker follow each other closely
                )
                run.wait_for(step)
                before = run.sink_cpu()
                for alive in (True, False) * TURNS:
                    run.signal_sink(signal.SIGCONT if alive else signal.SIGSTOP)
                    began, first = time.monotonic(), run.count + 1  # the step that is under way belongs to neither
                    step += STEPS
                    run.wait_for(step)
                    found[name].alive += (time.monotonic() - began) * alive
                    plan.append((name, first, run.count))
                found[name].cpu = run.sink_cpu() - before
                run.signal_sink(signal.SIGCONT)
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
    seconds = [float(line["time/step"]) for line in lines]
    means = [(name, statistics.fmean(seconds[first:last])) for name, first, last in plan if last > first]
    for (name, own), (other, without) in zip(means[::2], means[1::2], strict=False):
        if name == other:
            found[name].pairs.append((own, without))
    return found


def page(found: dict[str, State]) -> str:
    """The result's page."""
    rows = [
        f"| {name} | {len(state.pairs)} | {1000 * statistics.median(without for _, without in state.pairs):.0f} ms | "
        f"{ratio([state]):.3f} | {state.cpu / state.alive:.3f} |"
        for name, state in found.items()
    ]
    cpu = sum(state.cpu for state in found.values()) / sum(state.alive for state in found.values())
    pairs = sum(len(state.pairs) for state in found.values())
    return "\n".join(
        [
            "# What a step notices of trackers",
            "",
            f"`python -m benchmarks.tracking`; one supervised run of a tiny model, {os.cpu_count()} cores ({platform.machine()}),",
            f"load of the machine {os.getloadavg()[2]:.1f}. The sink was stopped and continued every {STEPS} steps. Goal: {GOAL}.",
            f"The first {SETTLE} steps of each state do not count. The curve was whole in the end.",
            "",
            "The machine had other work: a single state's ratio differs by several percent from run to run. The CPU does not; of a tracker",
            "that is down it is that of new attempts, which become rarer (at least one a minute).",
            "",
            "| the tracker | pairs | step without | with / without | CPU of sink and workers, cores |",
            "|---|---:|---:|---:|---:|",
            *rows,
            f"| all | {pairs} | | {ratio(found.values()):.3f} | {cpu:.3f} |",
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
    return int(ratio(found.values()) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
