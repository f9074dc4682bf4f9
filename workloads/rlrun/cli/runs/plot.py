"""`rlrun plot`: draw curves of runs on the terminal, or into an SVG or PNG file."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rlrun.cli.runs.common import RUN_HELP, answered, api, runs_parser
from rlrun.cli.runs.compare import read_curve
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect.curves import Line, draw_png, draw_svg
from rlrun.inspect.source import NotFoundError
from rlrun.runs.pictures import select_curves
from rlrun.runtime import exit_codes

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
        "--svg", type=_picture(".svg"), metavar="FILE", help="write an SVG image; an existing file is replaced"
    )
    picture.add_argument(
        "--png", type=_picture(".png"), metavar="FILE", help="write a PNG image; needs the package pillow"
    )
    return p


def _picture(suffix: str) -> Callable[[str], Path]:
    """Return the argparse type of an image file with a required suffix."""

    def read(text: str) -> Path:
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

    return read


@answered("plot")
def run_plot(argv: Sequence[str]) -> int:
    """Run `rlrun plot` and return the exit code."""
    options = plot_parser().parse_args(list(argv))
    runs = [read_curve(word, api(options)) for word in options.runs]
    metric, found = select_curves(runs, options.metric, options.smooth, "--metric")
    if options.svg is not None:
        options.svg.write_text(draw_svg(metric, found))
        print(options.svg)
    elif options.png is not None:
        options.png.write_bytes(_pixels(metric, found))
        print(options.png)
    else:
        print(_text(metric, found))
    return exit_codes.OK


def _pixels(metric: str, found: Sequence[Line]) -> bytes:
    try:
        return draw_png(metric, found)
    except ModuleNotFoundError:
        raise NotFoundError("--png: the package pillow is missing; run pip install pillow, or use --svg") from None


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
