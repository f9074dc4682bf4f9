"""Effect of trackers on a run: `python -m benchmarks.tracking [--write] [--pairs N] [--steps N]`.

One run (supervised, of a tiny model, real torchrun ranks and orchestrator) on this machine, with a sink process. The
sink and its workers are suspended (SIGSTOP) and resumed every few steps, in turns whose order alternates, so that other
load affects both equally. The tracker works, refuses, hangs, dies or is full, one after the other. There are three
results, by their sensitivity to other load:

1. Bytes that the run's own processes write for trackers: zero, by design. Each of them records its opened files in
`tracking/` and its connections (`probe/sitecustomize.py`); the first such record fails the benchmark. Other load has no
effect on it.
2. CPU time of the roles per step, with a live sink over with a suspended one: their additional work. Other load changes
it little.
3. Time of a step, likewise, which a user notices. Medians of turns, compared in pairs of neighbors.

A ratio is shown if all of its 95 % interval is below the goal, missed if all is above, and otherwise undecided: more
pairs, or an idle machine, decide it. A live sink also sends the backlog of a suspended one, so the ratios are rather
too high. In the end the curve must be complete.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.local_command import local_command
from benchmarks.paired import (
    Estimate,
    Verdict,
    cpu_by_thread,
    cpu_seconds_with_ended,
    descendants,
    estimate,
    turns,
    used,
)
from rlrun.runtime.processes import processes_with
from tests.support.mlflow_server import Server

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "tracking.md"
STATES = ("well", "refuses", "hangs", "dies", "full")
SETTLE, WARM = 150, 20
GOAL = 1.02
_PATIENCE = "60"
_MARK = "RLRUN_BENCH_SINK"
_PROBE = ROOT / "benchmarks" / "probe"


@dataclass(frozen=True)
class Plan:
    """Extent of the measurement."""

    pairs: int = 60
    """Pairs of turns in each state of the tracker."""
    steps: int = 6
    """Steps of a turn."""
    settle: int = SETTLE
    """Uncounted steps at the start of each state, because the first attempts at a tracker follow each other closely."""

    @property
    def all_steps(self) -> int:
        """Steps of the run."""
        return WARM + len(STATES) * (self.settle + 2 * self.pairs * self.steps)


class Run:
    """The run under measurement, and its sinks.

    Args:
        folder: folder for all of its files.
        url: URL of the tracker.
        plan: extent of the measurement.
    """

    def __init__(self, folder: Path, url: str, plan: Plan) -> None:
        self.root = folder / "out"
        self.notes, self._sink_notes = folder / "notes.txt", folder / "sink-notes.txt"
        rows = [{"prompt": f"number {i}", "completion": "abc " * 12} for i in range(64)]
        (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = {
            "task": "SFT", "model": {"tiny": {}}, "maxSteps": plan.all_steps, "seqLen": 64, "checkpoint": {"interval": 100_000},
            "data": {"batchSize": 2, "sources": [{"path": str(folder / "chats.jsonl")}]},
        }  # fmt: skip
        manifest = folder / "run.json"
        head = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "bench"}}
        manifest.write_text(json.dumps({**head, "spec": spec}))
        command = local_command(manifest, self.root)
        self._url, self._config = url, folder / "tracked.json"
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, env=self._probed(self.notes))
        self._sink: subprocess.Popen[bytes] | None = None
        self._metrics: BinaryIO | None = None
        self._seen = 0

    def lines(self) -> list[dict[str, Any]]:
        """Return lines of the run's metrics so far."""
        try:
            whole = (self.root / "metrics.jsonl").read_text().rpartition("\n")[0]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in whole.splitlines()]

    @property
    def count(self) -> int:
        """Number of finished steps; a cheap call."""
        try:
            self._seen += self._open().read().count(b"\n")
        except FileNotFoundError:
            return 0
        return self._seen

    def _open(self) -> BinaryIO:
        if self._metrics is None:
            self._metrics = (self.root / "metrics.jsonl").open("rb")
        return self._metrics

    def _probed(self, notes: Path) -> dict[str, str]:
        """Return variables of a process that records its contact with trackers."""
        path = os.pathsep.join([str(_PROBE), *filter(None, [os.environ.get("PYTHONPATH")])])
        port = self._url.rpartition(":")[2].rstrip("/")
        probe = {"PROBE_NOTES": str(notes), "PROBE_FOLDER": str(self.root / "tracking"), "PROBE_PORT": port}
        return {**os.environ, **probe, "PYTHONPATH": path}

    def noted(self) -> tuple[list[str], list[str]]:
        """Return files and connections of trackers that the run's own processes have used, and those of the sink and
        its workers."""
        files = (self.notes, self._sink_notes)
        roles, sink = ([] if not file.exists() else file.read_text().splitlines() for file in files)
        return roles, sink

    def sink_cpu(self) -> float:
        """Return CPU seconds of the sink, its workers, and ended ones."""
        return cpu_seconds_with_ended(processes_with(_MARK, str(self.root)))

    def roles_cpu(self) -> dict[int, float]:
        """Return CPU seconds of each thread of the run's own processes: the launcher, the orchestrator and the
        trainer's ranks."""
        return cpu_by_thread(descendants(self.process.pid))

    def wait_for(self, step: int) -> None:
        """Wait until a step is finished."""
        while self.count < step:
            assert self.process.poll() is None, "the run has ended early"
            time.sleep(0.02)

    def start_sink(self, *options: str) -> None:
        """Start a sink."""
        document = json.loads((self.root / "run.json").read_text())
        self._config.write_text(json.dumps({**document, "tracking": {"mlflow": {"uri": self._url}}}))
        command = [sys.executable, "-m", "rlrun.tracking", "--config", str(self._config), "--patience", _PATIENCE]
        environ = {**self._probed(self._sink_notes), _MARK: str(self.root)}
        self._sink = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, env=environ)

    def signal_sink(self, number: int) -> None:
        """Signal the sink and its workers."""
        for pid in processes_with(_MARK, str(self.root)):
            os.kill(pid, number)

    def drain(self) -> None:
        """Let the sink send the rest to the tracker."""
        self.start_sink("--once")
        assert self._sink is not None
        assert self._sink.wait(timeout=120) == 0


@dataclass(frozen=True)
class Turn:
    """Some steps with a live or a suspended sink."""

    alive: bool
    first: int
    """First step that counts; a step in progress at the start belongs to no turn."""
    last: int
    cpu: float
    """CPU seconds of the run's own processes, per step."""


@dataclass
class State:
    """Measures of the run in one state of the tracker."""

    turns: list[Turn] = field(default_factory=list)
    """Turns, two for each pair."""
    sink_cpu: float = 0.0
    """CPU seconds of the sink and its workers."""
    alive: float = 0.0
    """Seconds in which the sink was not suspended."""

    def pairs(self, of: Callable[[Turn], float]) -> list[tuple[float, float]]:
        """Return a measure of each pair: with a live sink, and with a suspended one."""
        found = zip(self.turns[::2], self.turns[1::2], strict=False)
        return [(of(own), of(other)) if own.alive else (of(other), of(own)) for own, other in found]


@dataclass
class Result:
    """Measurements of one run."""

    states: dict[str, State]
    seconds: list[float]
    """Time of each step."""
    sink_notes: int
    """Files and connections of the sink in the probe's records, which prove that the probe works."""

    def step_time(self, turn: Turn) -> float:
        """Return the median step of a turn, in seconds."""
        return statistics.median(self.seconds[turn.first - 1 : turn.last])

    def ratio(self, of: Callable[[Turn], float], states: Sequence[State] | None = None) -> Estimate:
        """Return the ratio of a measure over the pairs of some states. Default: all."""
        return estimate([pair for state in states or self.states.values() for pair in state.pairs(of)])


def measure(folder: Path, plan: Plan) -> Result:
    """Run everything.

    Raises:
        AssertionError: one of the run's own processes had contact with a tracker, or the curve is incomplete in the
            end.
    """
    states = {name: State() for name in STATES}
    with Server() as server:
        run = Run(folder, server.url, plan)
        try:
            run.wait_for(WARM // 2)
            run.start_sink()
            run.wait_for(WARM)
            step = WARM
            for name, state in states.items():
                server.mode = "" if name == "well" else name
                step += plan.settle
                run.wait_for(step)
                step = _take_turns(run, state, plan, step)
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
    roles, sink = run.noted()
    assert not roles, f"the run's own processes have to do with trackers: {roles[:3]}"
    assert sink, "the probe has seen nothing of the sink, so it would see nothing of the run either"
    return Result(states, [float(line["time/step"]) for line in lines], len(sink))


def _take_turns(run: Run, state: State, plan: Plan, step: int) -> int:
    """Measure one state of the tracker from a step on; return the step at its end."""
    sink = run.sink_cpu()
    for alive in turns(plan.pairs):
        run.signal_sink(signal.SIGCONT if alive else signal.SIGSTOP)
        began, first, before = time.monotonic(), run.count, run.roles_cpu()
        step = max(step, first) + plan.steps
        run.wait_for(step)
        last = run.count
        state.alive += (time.monotonic() - began) * alive
        state.turns.append(Turn(alive, first + 2, last, used(before, run.roles_cpu()) / (last - first)))
    state.sink_cpu = run.sink_cpu() - sink
    run.signal_sink(signal.SIGCONT)
    return step


def verdicts(result: Result) -> dict[str, Verdict]:
    """Compare each ratio over all states with the goal."""
    return {"step": result.ratio(result.step_time).verdict(GOAL), "CPU": result.ratio(_cpu).verdict(GOAL)}


def _cpu(turn: Turn) -> float:
    return turn.cpu


def page(result: Result, plan: Plan) -> str:
    """Return the result's page."""

    def row(name: str, states: list[State], without: str) -> str:
        cores = sum(state.sink_cpu for state in states) / sum(state.alive for state in states)
        step, cpu = result.ratio(result.step_time, states), result.ratio(_cpu, states)
        return f"| {name} | {step.pairs} | {without} | {step} | {cpu} | {cores:.3f} |"

    rows = [
        row(name, [state], f"{1000 * statistics.median(own for _, own in state.pairs(result.step_time)):.0f} ms")
        for name, state in result.states.items()
    ]
    said = "; ".join(f"{name}: {verdict}" for name, verdict in verdicts(result).items())
    text = f"""# What a step notices of trackers

`python -m benchmarks.tracking --pairs {plan.pairs} --steps {plan.steps}`; one supervised run of a tiny model, {os.cpu_count()} cores
({platform.machine()}), load of the machine {os.getloadavg()[2]:.1f}. The sink was stopped and continued every {plan.steps} steps; the
first {plan.settle} steps of each state do not count. Ratios are medians over pairs of turns, with the 95 % interval of a bootstrap
over pairs.

**Goal {GOAL} over all states: {said}.** Undecided is an interval that holds the goal: more pairs, or a quieter machine, decide it.

Bytes that the run's own processes wrote for trackers: **0**. None of them opened a file in `tracking/` or connected to the tracker;
the same probe saw {result.sink_notes} such acts of the sink and its workers. The curve was whole in the end.
"""
    head = "the tracker|pairs|step without|step, with / without|CPU of the roles, with / without|CPU of sink and workers, cores"
    table = ["| " + " | ".join(head.split("|")) + " |", "|---|---:|---:|---:|---:|---:|", *rows]
    return "\n".join([text, *table, row("all", list(result.states.values()), ""), ""])


def main() -> int:
    """Run the benchmark; return 1 if a goal is missed, 2 if one is undecided."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument(
        "--pairs", type=int, default=Plan.pairs, help=f"pairs of turns per state of the tracker (default: {Plan.pairs})"
    )
    parser.add_argument("--steps", type=int, default=Plan.steps, help=f"steps of a turn (default: {Plan.steps})")
    parser.add_argument(
        "--settle", type=int, default=Plan.settle, help=f"steps per state that do not count (default: {Plan.settle})"
    )
    options = parser.parse_args()
    if min(options.pairs, options.steps, options.settle) < 1 or options.steps < 2:
        parser.error("--pairs and --settle are at least 1, --steps at least 2")
    plan = Plan(options.pairs, options.steps, options.settle)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), plan)
    text = page(result, plan)
    print(text)
    if options.write:
        RESULT.write_text(text)
    found = verdicts(result).values()
    return 1 if "missed" in found else 2 * ("undecided" in found)


if __name__ == "__main__":
    sys.exit(main())
