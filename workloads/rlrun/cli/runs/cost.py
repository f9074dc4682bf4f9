"""`rlrun cost`: GPU-hours of runs by purpose."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.runs.common import answered, runs_parser, say_no_runs, write
from rlrun.cli.runs.look import snapshots
from rlrun.config.loading.parser import Parser
from rlrun.inspect.cost import text
from rlrun.inspect.cost.account import of_folder, of_snapshot
from rlrun.runtime import exit_codes


def cost_parser() -> Parser:
    """Return the parser of `rlrun cost`."""
    told = (
        "Show the GPU-hours of runs by purpose: training, waiting for rollouts or for the trainer, startup, steps that were trained "
        "again, stopping. Default: all runs in the cluster's namespace and in ./runs. -o wide adds attempts and roles."
    )
    p = runs_parser("cost", told, output="wide json yaml")
    p.add_argument("runs", nargs="*", metavar="RUN", help="runs, or folders with runs (default: all)")
    p.add_argument("-A", "--all-namespaces", action="store_true", help="runs of all namespaces of the cluster")
    return p


@answered("cost")
def run_cost(argv: Sequence[str]) -> int:
    """Run `rlrun cost` and return the exit code."""
    options, now = cost_parser().parse_args(list(argv)), time.time()
    seen = snapshots(options, now)
    found = [of_folder(Path(one.where), now) if one.place == "folder" else of_snapshot(one) for one in seen]
    if options.output in ("json", "yaml"):
        write([text.cost_document(one) for one in found], options.output)
    elif not found:
        say_no_runs()
    else:
        print(text.cost_table(found, wide=options.output == "wide"))
    return exit_codes.OK
