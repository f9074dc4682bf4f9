"""Curves of metrics: points of several runs, smoothed, and as an SVG picture. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeGuard

DEFAULTS = ("reward/mean", "loss")
"""The first of these that a run has is drawn where none is named."""
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 360, 70, 20, 40, 40
_TICKS = 5
_POINTS_MAX = 1000


@dataclass(frozen=True)
class Line:
    """One curve."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]


def names(lines: Sequence[Mapping[str, object]]) -> list[str]:
    """Metrics that were measured at some step, sorted."""
    skipped = ("step", "attempt", "time")
    return sorted({key for line in lines for key, value in line.items() if _is_number(value)} - {*skipped})


def curve(label: str, lines: Sequence[Mapping[str, object]], metric: str, smooth: int = 1) -> Line:
    """Curve of a metric; each value is the mean of the last `smooth` ones, and values that are no numbers are left out."""
    found = [
        (int(step), float(value))
        for line in lines
        if _is_number(value := line.get(metric)) and _is_number(step := line.get("step"))
    ]
    steps = [step for step, _ in found]
    return thinned(Line(label, steps, smoothed([value for _, value in found], smooth)), _POINTS_MAX)


def smoothed(values: Sequence[float], smooth: int) -> list[float]:
    """Mean of the last `smooth` values at each of them; fewer at the beginning."""
    if smooth <= 1:
        return list(values)
    # Sums of parts, not differences of running sums: one huge value (a loss that diverged) would spoil all that follow it.
    return [
        math.fsum(part) / len(part) for at in range(len(values)) for part in [values[max(0, at - smooth + 1) : at + 1]]
    ]


def thinned(line: Line, most: int) -> Line:
    """A curve of at most `most` points: of each span of equal length the lowest and the highest, so that no peak is lost.

    Args:
        line: any curve, by ascending steps.
        most: at least 4. The first and the last point always stay.
    """
    count = len(line.values)
    if count <= most:
        return line
    spans = (most - 2) // 2
    kept = [0]
    for at in range(spans):
        first, last = 1 + at * (count - 2) // spans, 1 + (at + 1) * (count - 2) // spans
        part = line.values[first:last]
        low, high = first + part.index(min(part)), first + part.index(max(part))
        kept += sorted({low, high})
    kept.append(count - 1)
    return Line(line.label, [line.steps[at] for at in kept], [line.values[at] for at in kept])


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def svg(title: str, curves: Sequence[Line]) -> str:
    """The curves of one metric as a picture, readable on white and on black.

    Args:
        title: the metric.
        curves: at least one, each with at least one point.
    """
    steps = [step for line in curves for step in line.steps]
    values = [value for line in curves for value in line.values]
    left, right, low, high = min(steps), max(steps), min(values), max(values)

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - left) / ((right - left) or 1)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - low) / ((high - low) or 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" fill="#888">',
        f"<title>{escape(title)}</title>",
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for tick in range(_TICKS):
        part = tick / (_TICKS - 1)
        value, step = low + part * (high - low), left + part * (right - left)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#8884"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{step:.0f}</text>')
    for at, line in enumerate(curves):
        colour = _COLOURS[at % len(_COLOURS)]
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(line.steps, line.values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{_LEFT + 160 + 150 * at}" y="20" fill="{colour}">{escape(line.label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
