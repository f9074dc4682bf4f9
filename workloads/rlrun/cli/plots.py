"""`rlrun compare`, `plot` and `cost`: numbers of several runs.

- `compare` shows the curves and configurations of runs side by side.
- `plot` draws curves of runs on the terminal, or into an SVG or PNG file.
- `cost` shows the GPU-hours of runs by purpose.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlrun.cli.run_options import (
    RUN_HELP,
    cluster_client,
    is_plugin,
    one_line_errors,
    print_document,
    runs_parser,
    say_no_runs,
)
from rlrun.cli.show_runs import read_snapshots
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect import gpu_cost
from rlrun.inspect.comparison import (
    Curve,
    common_metrics,
    curves_table,
    differences_table,
    last_step,
    manifest_differences,
    mean_between,
)
from rlrun.inspect.curves import Line, draw_png, draw_svg
from rlrun.inspect.gpu_cost import of_folder, of_snapshot
from rlrun.inspect.kubectl import Api
from rlrun.inspect.source import NotFoundError, find_run
from rlrun.runs import volume_reader
from rlrun.runs.run_views import select_curves
from rlrun.runtime import exit_codes


def compare_parser() -> Parser:
    """Return the parser of `rlrun compare`."""
    text = "Show runs side by side: their curves at common steps, and the differences of their configurations."
    p = runs_parser("compare", text, output="json yaml")
    p.add_argument("runs", nargs="+", metavar="RUN", help=f"at least two runs; {RUN_HELP}")
    return p


@one_line_errors("compare")
def run_compare(argv: Sequence[str]) -> int:
    """Run `rlrun compare` and return the exit code."""
    options = compare_parser().parse_args(list(argv))
    if len(options.runs) < 2:
        raise NotFoundError(f"got only {options.runs[0]}, expected at least two runs")
    curves = [read_curve(word, cluster_client(options)) for word in options.runs]
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
    print_document(found, options.output)
    return exit_codes.OK


def read_curve(word: str, cluster: Api) -> Curve:
    """Read the metrics and the configuration of the run that an argument names."""
    return volume_reader.read_curve(find_run(word, cluster_only=is_plugin()), cluster, word)


_ROWS = 18
_COLUMNS = 100


def plot_parser() -> Parser:
    """Return the parser of `rlrun plot`."""
    p = runs_parser("plot", "Draw a metric of runs over their steps, on the terminal or as an image.")
    p.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    p.add_argument(
        "--metric", metavar="NAME", help="name of the metric (default: reward/mean, or loss for runs without rewards)"
    )
    p.add_argument("--smooth", type=whole_number(1, 100_000), default=1, metavar="N", help="mean of the last N steps")
    picture = p.add_mutually_exclusive_group()
    picture.add_argument(
        "--svg", type=_image_path_type(".svg"), metavar="FILE", help="write an SVG image; an existing file is replaced"
    )
    picture.add_argument(
        "--png", type=_image_path_type(".png"), metavar="FILE", help="write a PNG image; needs the package pillow"
    )
    return p


def _image_path_type(suffix: str) -> Callable[[str], Path]:
    """Return the argparse type of an image file with a required suffix."""

    def parse_path(text: str) -> Path:
        path, option = Path(text), f"--{suffix[1:]}"
        found = path.suffix.lower()
        if found in (".svg", ".png") and found != suffix:
            raise argparse.ArgumentTypeError(
                f"got {text}, expected a file that ends with {suffix}; write --{found[1:]} {text}"
            )
        if found != suffix:
            raise argparse.ArgumentTypeError(
                f"got {text}, expected a file that ends with {suffix}; write {option} {path.with_suffix(suffix)}"
            )
        return path

    return parse_path


@one_line_errors("plot")
def run_plot(argv: Sequence[str]) -> int:
    """Run `rlrun plot` and return the exit code."""
    options = plot_parser().parse_args(list(argv))
    runs = [read_curve(word, cluster_client(options)) for word in options.runs]
    metric, found = select_curves(runs, options.metric, options.smooth, "--metric")
    if options.svg is not None:
        options.svg.write_text(draw_svg(metric, found))
        print(options.svg)
    elif options.png is not None:
        options.png.write_bytes(_draw_image(metric, found))
        print(options.png)
    else:
        print(_draw_terminal_plot(metric, found))
    return exit_codes.OK


def _draw_image(metric: str, found: Sequence[Line]) -> bytes:
    try:
        return draw_png(metric, found)
    except ModuleNotFoundError:
        raise NotFoundError("--png: the package pillow is missing; run pip install pillow, or use --svg") from None


def _draw_terminal_plot(metric: str, found: Sequence[Line]) -> str:
    import plotext

    plotext.clear_figure()
    for line in found:
        plotext.plot(list(line.steps), list(line.values), label=line.label, marker="braille")
    plotext.plot_size(min(_COLUMNS, shutil.get_terminal_size().columns), _ROWS)
    plotext.theme("clear")
    plotext.title(metric)
    plotext.xlabel("step")
    return str(plotext.uncolorize(plotext.build()))


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


@one_line_errors("cost")
def run_cost(argv: Sequence[str]) -> int:
    """Run `rlrun cost` and return the exit code."""
    options, now = cost_parser().parse_args(list(argv)), time.time()
    seen = read_snapshots(options, now)
    found = [of_folder(Path(one.where), now) if one.place == "folder" else of_snapshot(one) for one in seen]
    if options.output in ("json", "yaml"):
        print_document([gpu_cost.cost_document(one) for one in found], options.output)
    elif not found:
        say_no_runs()
    else:
        print(gpu_cost.cost_table(found, wide=options.output == "wide"))
    return exit_codes.OK
