"""Display of a run in a notebook: phase, step, ETA, and the curve of its reward or loss as an inline picture. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from rlrun.inspect.curves import DEFAULTS, draw_svg, metric_curve, metric_names
from rlrun.inspect.screen import show_number, show_steps
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.times import show_span
from rlrun.inspect.why import Explanation

_COLOURS = {"Complete": "#2ca02c", "Failed": "#d62728", "Running": "#1f77b4"}
_OTHER = "#b8860b"
_WIDTH = "max-width: 44em"


def status_line(seen: Snapshot) -> str:
    """Return a run as one line for a terminal."""
    return f"<Run {seen.title}: {', '.join(_facts(seen))}>"


def _facts(seen: Snapshot) -> Iterator[str]:
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
    phase, *facts = _facts(seen)
    badge = f'<span style="color: {_COLOURS.get(seen.phase, _OTHER)}; font-weight: bold">{escape(phase)}</span>'
    head = f"<b>{escape(seen.title)}</b> {badge}{''.join(f', {escape(fact)}' for fact in facts)}"
    parts = [f"<div>{head}</div>", *_problems(told), *_picture(lines)]
    return f'<div style="{_WIDTH}">{"".join(parts)}</div>'


def _problems(told: Explanation) -> Iterator[str]:
    for one in told.now:
        if one.kind != "waits":
            yield f"<div>{escape(one.what)}: {escape(one.evidence)} <i>{escape(one.do)}</i></div>"


def _picture(lines: Sequence[Mapping[str, object]]) -> Iterator[str]:
    metric = next((name for name in DEFAULTS if name in metric_names(lines)), None)
    if metric is not None:
        found = metric_curve("", lines, metric)
        if len(found.steps) > 1:
            yield draw_svg(metric, [found])


def render_text(text: str) -> str:
    """Return a text as an HTML fragment."""
    return f"<pre>{escape(text)}</pre>"
