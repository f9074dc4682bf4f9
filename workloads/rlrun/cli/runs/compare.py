"""`rlrun compare`: show the curves and configurations of runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.cli.runs.common import RUN_HELP, answered, api, is_plugin, runs_parser, write
from rlrun.config.loading.parser import Parser
from rlrun.inspect.compare import (
    Curve,
    common_metrics,
    curves_table,
    differences_table,
    last_step,
    manifest_differences,
    mean_between,
)
from rlrun.inspect.kubectl import Api
from rlrun.inspect.source import NotFoundError, find_run
from rlrun.runs import reading
from rlrun.runtime import exit_codes


def compare_parser() -> Parser:
    """Return the parser of `rlrun compare`."""
    text = "Show runs side by side: their curves at common steps, and the differences of their configurations."
    p = runs_parser("compare", text, output="json yaml")
    p.add_argument("runs", nargs="+", metavar="RUN", help=f"at least two runs; {RUN_HELP}")
    return p


@answered("compare")
def run_compare(argv: Sequence[str]) -> int:
    """Run `rlrun compare` and return the exit code."""
    options = compare_parser().parse_args(list(argv))
    if len(options.runs) < 2:
        raise NotFoundError(f"got only {options.runs[0]}, expected at least two runs")
    curves = [read_curve(word, api(options)) for word in options.runs]
    if not options.output:
        print(curves_table(curves))
        print("\n" + differences_table(curves))
        return exit_codes.OK
    common = min(last_step(curve.lines) for curve in curves)
    tail = max(1, common - common // 10)
    found = {
        "steps": common,
        "runs": [curve.label for curve in curves],
        "lastTenth": {
            name: [mean_between(curve.lines, name, tail, common) for curve in curves] for name in common_metrics(curves)
        },
        "differences": dict(manifest_differences(curves)),
    }
    write(found, options.output)
    return exit_codes.OK


def read_curve(word: str, cluster: Api) -> Curve:
    """Read the metrics and the configuration of the run that an argument names."""
    return reading.read_curve(find_run(word, cluster_only=is_plugin()), cluster, word)
