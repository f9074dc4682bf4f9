"""Curves of several runs as a picture, and beside each other as text. What `rlrun plot` and `rlrun compare` show, too."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.config.suggest import unknown_name
from rlrun.inspect.compare import Curve, curves_table, differences_table
from rlrun.inspect.curves import DEFAULTS, Line, draw_svg, metric_curve, metric_names
from rlrun.inspect.source import NotFoundError
from rlrun.runs.results import Picture, Words
from rlrun.runtime.printable import printable


def lines_of(runs: Sequence[Curve], metric: str | None, smooth: int, what: str) -> tuple[str, list[Line]]:
    """Metric and curves of runs.

    Args:
        runs: at least one.
        metric: None: the first usual one that all have.
        smooth: mean of so many steps.
        what: how the message calls the option.

    Raises:
        NotFoundError: a run has no such metric; says which there are.
    """
    if (empty := next((run for run in runs if not run.lines), None)) is not None:
        status = f"`rlrun status {empty.argument or empty.label}` shows how far it is"
        raise NotFoundError(f"{empty.label} has no trained step yet, so there is no curve; {status}")
    metric = metric or next(
        (name for name in DEFAULTS if all(name in metric_names(run.lines) for run in runs)), DEFAULTS[0]
    )
    found = [metric_curve(run.label, run.lines, metric, smooth) for run in runs]
    if not all(line.steps for line in found):
        known = sorted({printable(name) for run in runs for name in metric_names(run.lines)})
        without = next(line.label for line in found if not line.steps)
        raise NotFoundError(f"{what}: {without}: {unknown_name('metric', metric, known)}")
    return metric, found


def drawn(runs: Sequence[Curve], metric: str | None, smooth: int) -> Picture:
    """Picture of a metric of runs; see `lines_of`."""
    name, found = lines_of(runs, metric, smooth, "metric")
    return Picture(draw_svg(name, found), name)


def compared(runs: Sequence[Curve]) -> Words:
    """Curves at the steps that all runs have, and what differs in their configurations."""
    return Words(curves_table(runs) + "\n\n" + differences_table(runs))
