"""Display of runs in notebooks and terminals: results of methods, pages and curves.

The page of a run shows its phase, step and ETA, and the curve of its reward or loss as an inline picture. Rendering
is pure. `rlrun plot` and `rlrun compare` also use the curves of several runs, as a picture or as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from rlrun.config.suggest import unknown_name
from rlrun.inspect import trace_rollouts
from rlrun.inspect.comparison import Curve, curves_table, differences_table
from rlrun.inspect.curves import DEFAULTS, Line, draw_svg, metric_curve, metric_names
from rlrun.inspect.screen import show_number, show_steps
from rlrun.inspect.snapshot import Snapshot, show_span
from rlrun.inspect.source import NotFoundError
from rlrun.inspect.why import Explanation
from rlrun.runtime.printable import escape_controls

_CHARACTERS = 2000


class Words(str):
    """Text for people, displayed without quotes."""

    def __repr__(self) -> str:
        return str(self)


class Picture:
    """A plot.

    Args:
        svg: picture as SVG.
        title: metric of the plot.
    """

    def __init__(self, svg: str, title: str) -> None:
        self.svg, self.title = svg, title

    def save(self, path: str | Path) -> Path:
        """Write the SVG file; an existing file is replaced."""
        Path(path).write_text(self.svg)
        return Path(path)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Picture of {self.title}; write it to a file with .save('FILE.svg')>"


class Rollouts(list[trace_rollouts.Row]):
    """Rollouts of a trace, one mapping each, with the display of `rlrun rollouts`.

    Args:
        rows: selected rollouts.
        summary: one line about all rollouts of the step.
    """

    def __init__(self, rows: Sequence[trace_rollouts.Row], summary: str) -> None:
        super().__init__(rows)
        self.summary = summary

    def __repr__(self) -> str:
        return "\n\n".join([self.summary, *(trace_rollouts.rollout_text(row, most=_CHARACTERS) for row in self)])


_COLOURS = {"Complete": "#2ca02c", "Failed": "#d62728", "Running": "#1f77b4"}
_OTHER = "#b8860b"
_WIDTH = "max-width: 44em"


def status_line(seen: Snapshot) -> str:
    """Return a run as one line for a terminal."""
    return f"<Run {seen.title}: {', '.join(_fact_lines(seen))}>"


def _fact_lines(seen: Snapshot) -> Iterator[str]:
    yield seen.phase + (f" ({seen.reason})" if seen.reason else "")
    if seen.progress.total_steps is not None:
        yield f"step {show_steps(seen)}"
    if seen.progress.reward is not None:
        yield f"reward {show_number(seen.progress.reward, '.3f')}"
    if seen.phase in ("Running", "Starting") and seen.progress.eta_seconds is not None:
        yield f"ETA {show_span(seen.progress.eta_seconds)}"


def render_html(seen: Snapshot, told: Explanation, lines: Sequence[Mapping[str, object]]) -> str:
    """Return a run as an HTML fragment without scripts.

    Args:
        seen: snapshot of the run.
        told: explanation of its state.
        lines: metrics of the run; empty if unknown.
    """
    phase, *facts = _fact_lines(seen)
    badge = f'<span style="color: {_COLOURS.get(seen.phase, _OTHER)}; font-weight: bold">{escape(phase)}</span>'
    head = f"<b>{escape(seen.title)}</b> {badge}{''.join(f', {escape(fact)}' for fact in facts)}"
    parts = [f"<div>{head}</div>", *_problem_blocks(told), *_curve_images(lines)]
    return f'<div style="{_WIDTH}">{"".join(parts)}</div>'


def _problem_blocks(told: Explanation) -> Iterator[str]:
    for one in told.now:
        if one.kind != "waits":
            yield f"<div>{escape(one.what)}: {escape(one.evidence)} <i>{escape(one.do)}</i></div>"


def _curve_images(lines: Sequence[Mapping[str, object]]) -> Iterator[str]:
    metric = next((name for name in DEFAULTS if name in metric_names(lines)), None)
    if metric is not None:
        found = metric_curve("", lines, metric)
        if len(found.steps) > 1:
            yield draw_svg(metric, [found])


def render_text(text: str) -> str:
    """Return a text as an HTML fragment."""
    return f"<pre>{escape(text)}</pre>"


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
        known = sorted({escape_controls(name) for run in runs for name in metric_names(run.lines)})
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
