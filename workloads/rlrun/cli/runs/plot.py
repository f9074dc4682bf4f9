"""`rlrun plot`: curves of runs on the terminal, or as an SVG file."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.runs.common import RUN_HELP, answered, api, runs_parser
from rlrun.cli.runs.compare import read_curve
from rlrun.config.loading.parser import Parser, whole
from rlrun.config.suggest import unknown_name
from rlrun.inspect.compare import Curve
from rlrun.inspect.curves import DEFAULTS, Line, curve, names, svg
from rlrun.inspect.source import NotFoundError
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import printable

_ROWS = 18
_COLUMNS = 100


def plot_parser() -> Parser:
    """The command line of `rlrun plot`."""
    p = runs_parser("plot", "Draw a metric of runs over their steps, on this terminal or as an SVG file.")
    p.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    p.add_argument("--metric", metavar="NAME", help="which metric (default: reward/mean; loss where there is none)")
    p.add_argument("--smooth", type=whole(1, 100_000), default=1, metavar="N", help="mean of the last N steps")
    p.add_argument("--svg", type=Path, metavar="FILE", help="a picture instead; a file that is there is replaced")
    return p


@answered("plot")
def run_plot(argv: Sequence[str]) -> int:
    """Run `rlrun plot`; returns the exit code."""
    options = plot_parser().parse_args(list(argv))
    runs = [read_curve(word, api(options)) for word in options.runs]
    metric = options.metric or _default(runs)
    found = [curve(run.label, run.lines, metric, options.smooth) for run in runs]
    if not all(line.steps for line in found):
        known = sorted({printable(name) for run in runs for name in names(run.lines)})
        without = next(line.label for line in found if not line.steps)
        raise NotFoundError(f"--metric: {without}: {unknown_name('metric', metric, known)}")
    if options.svg is not None:
        options.svg.write_text(svg(metric, found))
        print(options.svg)
    else:
        print(_text(metric, found))
    return exit_codes.OK


def _default(runs: Sequence[Curve]) -> str:
    """The first usual metric that all runs have."""
    return next((name for name in DEFAULTS if all(name in names(run.lines) for run in runs)), DEFAULTS[0])


def _text(metric: str, found: Sequence[Line]) -> str:
    import plotext

    plotext.clear_figure()
    for line in found:
        plotext.plot(list(line.steps), list(line.values), label=line.label, marker="braille")
    plotext.plot_size(min(_COLUMNS, shutil.get_terminal_size().columns), _ROWS)
    plotext.theme("clear")
    plotext.title(metric)
    plotext.xlabel("step")
    return str(plotext.uncolorize(plotext.build()))
