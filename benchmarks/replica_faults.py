"""Cost of a bad engine among two in a run: `python -m benchmarks.replica_faults [--write]`.

Whole runs of processes: trainer, orchestrator and two engines without a model, which sample a token in 20 ms and have
room for all requests. After ten steps the second engine is disturbed. Lost: the seconds from step 10 to the last step
in excess of those of the undisturbed run. Wrong tokens: their log-prob is not that of their labelled version, or they
were too old or too new to be trained on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.local.two_engines import TwoEngines, two_engines

RESULTS = Path(__file__).parent / "results" / "replica_faults.md"
STEPS = 150
FROM = 10
OUTAGE_SECONDS = 10.0


def nothing(run: TwoEngines) -> None:
    """Do not disturb."""


def killed(run: TwoEngines) -> None:
    """Kill it; another process replaces it after a while."""
    run.second.kill()
    run.second.wait()
    time.sleep(OUTAGE_SECONDS)
    run.start_second()


def old_weights(run: TwoEngines) -> None:
    """Restart it at once with its first weights, without notice to the orchestrator."""
    run.second.kill()
    run.second.wait()
    run.start_second()


def stopped(run: TwoEngines) -> None:
    """Suspend it, and resume it after a while."""
    run.second.send_signal(signal.SIGSTOP)
    time.sleep(3 * OUTAGE_SECONDS)
    run.second.send_signal(signal.SIGCONT)


def scripted(action: str) -> list[dict[str, Any]]:
    """Return a fault of the engine's own, from the tenth version on."""
    return [{"version": FROM, "action": action, "seconds": OUTAGE_SECONDS}]


@dataclass(frozen=True)
class Fault:
    """One line of the table."""

    what: str
    disturb: Callable[[TwoEngines], None] = nothing
    faults: Sequence[dict[str, Any]] = ()


FAULTS = [
    Fault("none"),
    Fault(f"ten times slower for {OUTAGE_SECONDS:.0f} s", faults=scripted("slow")),
    Fault(f"answers 500 for {OUTAGE_SECONDS:.0f} s", faults=scripted("answer_500")),
    Fault(f"killed, another one after {OUTAGE_SECONDS:.0f} s", killed),
    Fault("killed, another one with old weights at once", old_weights),
    Fault(f"SIGSTOP for {3 * OUTAGE_SECONDS:.0f} s", stopped),
]


@dataclass(frozen=True)
class Cost:
    """Measures of a run."""

    seconds: float
    longest_step: float
    moved: int
    """Number of requests that moved to the other engine."""
    longest_moved: float
    """Longest time until a request moved, in seconds."""
    wrong: int


def measure(fault: Fault, steps: int) -> Cost:
    """Measure one run."""
    with tempfile.TemporaryDirectory() as folder, two_engines(Path(folder), steps) as run:
        run.begin(*fault.faults)
        run.until(FROM)
        fault.disturb(run)
        run.finish()
        lines = run.run.metrics()
        times = [line["time"] for line in lines[FROM - 1 :]]
        return Cost(
            times[-1] - times[0],
            max(after - before for before, after in itertools.pairwise(times)),
            int(lines[-1]["engines/moved_requests"]),
            lines[-1]["engines/lost_seconds_longest"],
            run.wrong_tokens(),
        )


def table(costs: Sequence[Cost], steps: int) -> str:
    """Return the table as Markdown; the first row is the undisturbed run."""
    lines = [
        "# One of two engines is bad",
        "",
        f"`python -m benchmarks.replica_faults --write`; {os.cpu_count()} cores ({platform.machine()}), {steps} steps of 32 rollouts",
        "of 17 tokens, `maxAsyncLevel` 2. Engines without a model, each with room for everything, 20 ms per token: what is lost is the",
        "time until the fault is noticed, and what was generated in vain.",
        "",
        "| second engine | seconds | lost | longest step | requests moved | longest of them | wrong tokens |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for fault, cost in zip(FAULTS, costs, strict=True):
        lost = cost.seconds - costs[0].seconds
        lines.append(
            f"| {fault.what} | {cost.seconds:.1f} | {lost:.1f} | {cost.longest_step:.2f} | {cost.moved} | {cost.longest_moved:.1f} "
            f"| {cost.wrong} |"
        )
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    options = parser.parse_args(argv)
    costs = [measure(fault, options.steps) for fault in FAULTS]
    text = table(costs, options.steps)
    print(text)
    if options.write:
        RESULTS.write_text(text)
    return 1 if any(cost.wrong for cost in costs) else 0


if __name__ == "__main__":
    sys.exit(main())
