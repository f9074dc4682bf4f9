"""Curves of several runs as a picture or as text. Also used by `rlrun plot` and `rlrun compare`."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.config.suggest import unknown_name
from rlrun.inspect.compare import Curve, curves_table, differences_table
from rlrun.inspect.curves import DEFAULTS, Line, draw_svg, metric_curve, metric_names
from rlrun.inspect.source import NotFoundError
from rlrun.runs.results import Picture, Words
from rlrun.runtime.printable import printable


def select_curves(runs: Sequence[Curve], metric: str | None, smooth: int, what: str) -> tuple[str, list[Line]]:
    """Return metric and curves of runs.

    Args:
        runs: at least one run.
        metric: name of the metric. None: the first default metric that all runs have.
        smooth: number of steps of the moving mean.
        what: name of the option in messages.

    Raises:
        NotFoundError: a run lacks the metric; the message lists the existing ones.
    """
    if (empty := next((run for run in runs if not run.lines), None)) is not None:
        status = f"see `rlrun status {empty.argument or empty.label}`"
        raise NotFoundError(f"{empty.label} has no trained step yet, so it has no curve; {status}")
    metric = metric or next(
        (name for name in DEFAULTS if all(name in metric_names(run.lines) for run in runs)), DEFAULTS[0]
    )
    found = [metric_curve(run.label, run.lines, metric, smooth) for run in runs]
    if not all(line.steps for line in found):
        known = sorted({printable(name) for run in runs for name in metric_names(run.lines)})
        without = next(line.label for line in found if not line.steps)
        raise NotFoundError(f"{what}: {without}: {unknown_name('metric', metric, known)}")
    return metric, found


def draw_metric(runs: Sequence[Curve], metric: str | None, smooth: int) -> Picture:
    """Draw a metric of runs; see `select_curves`."""
    name, found = select_curves(runs, metric, smooth, "metric")
    return Picture(draw_svg(name, found), name)


def compare_curves(runs: Sequence[Curve]) -> Words:
    """Return the curves at the steps that all runs have, and the differences of their configurations."""
    return Words(curves_table(runs) + "\n\n" + differences_table(runs))
