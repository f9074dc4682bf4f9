"""Metrics of a run: columns in memory, and curves as SVG and PNG images.

Columns need a tenth of the memory of one mapping per step. Curves are smoothed points of one or several runs. No side effects.
"""

from __future__ import annotations

import io
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, TypeGuard, overload

_ABSENT, _INTEGER, _FLOAT, _OTHER = range(4)
_EXACT = 2**53
"""Absolute value from which integers are not exact as doubles."""


class MetricColumns(Sequence[Mapping[str, object]]):
    """Lines of `metrics.jsonl`, stored as columns.

    A run of 100,000 steps with 60 metrics needs 54 MB: 9 bytes per value.

    Args:
        lines: mappings of all steps, read once.
    """

    def __init__(self, lines: Iterable[Mapping[str, object]] = ()) -> None:
        self.length = 0
        self._columns: dict[str, _Column] = {}
        for line in lines:
            for name, value in line.items():
                if (column := self._columns.get(name)) is None:
                    column = self._columns[name] = _Column()
                column.set(self.length, value)
            self.length += 1

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Mapping[str, object]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, object]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, object] | Sequence[Mapping[str, object]]:
        if isinstance(index, slice):
            return [_Row(self._columns, at) for at in range(self.length)[index]]
        return _Row(self._columns, range(self.length)[index])

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        return (_Row(self._columns, at) for at in range(self.length))

    def names(self) -> list[str]:
        """Return the names of all metrics, in the order of their first line."""
        return list(self._columns)


class _Column:
    """Values of one metric; lines before the first and after the last value have none."""

    def __init__(self) -> None:
        self._values, self._kinds = array("d"), bytearray()
        self._others: dict[int, object] = {}
        """Values that are not numbers, or not exact as doubles, by line."""

    def set(self, at: int, value: object) -> None:
        missing = at - len(self._kinds)
        if missing:
            self._values.frombytes(bytes(8 * missing))
            self._kinds += bytes(missing)
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) >= _EXACT:
            self._others[at] = value
            self._kinds.append(_OTHER)
            self._values.append(0.0)
        else:
            self._kinds.append(_INTEGER if isinstance(value, int) else _FLOAT)
            self._values.append(value)

    def has(self, at: int) -> bool:
        return at < len(self._kinds) and self._kinds[at] != _ABSENT

    def get(self, at: int) -> object:
        kind = self._kinds[at]
        if kind == _OTHER:
            return self._others[at]
        return int(self._values[at]) if kind == _INTEGER else self._values[at]


class _Row(Mapping[str, object]):
    """View of one line of the columns, without a copy."""

    __slots__ = ("_at", "_columns")

    def __init__(self, columns: Mapping[str, _Column], at: int) -> None:
        self._columns, self._at = columns, at

    def __getitem__(self, name: str) -> object:
        column = self._columns.get(name)
        if column is None or not column.has(self._at):
            raise KeyError(name)
        return column.get(self._at)

    def get(self, name: str, default: object = None) -> object:  # faster: Mapping.get raises and catches an error
        column = self._columns.get(name)
        return column.get(self._at) if column is not None and column.has(self._at) else default

    def __iter__(self) -> Iterator[str]:
        return (name for name, column in self._columns.items() if column.has(self._at))

    def __len__(self) -> int:
        return sum(1 for _ in self)


DEFAULTS = ("reward/mean", "loss")
"""Default metrics; the first one that a run has is drawn."""
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 360, 70, 20, 40, 40
_TICKS = 5
_GREY, _FAINT = "#888", "#8884"
"""Colors of axes and of grid lines; the second is mostly transparent."""
_PIXELS = 2
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
"""Text anchors on the base line: name in SVG -> name in Pillow."""
_POINTS_MAX = 1000


@dataclass(frozen=True)
class Line:
    """One curve."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]


def metric_names(lines: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the sorted names of all metrics."""
    skipped = ("step", "attempt", "time")
    return sorted({key for line in lines for key, value in line.items() if _is_number(value)} - {*skipped})


def metric_curve(label: str, lines: Sequence[Mapping[str, object]], metric: str, smooth: int = 1) -> Line:
    """Return the curve of a metric; each value is the mean of the last `smooth` values. Values that are not numbers are skipped."""
    found = [
        (int(step), float(value))
        for line in lines
        if _is_number(value := line.get(metric)) and _is_number(step := line.get("step"))
    ]
    steps = [step for step, _ in found]
    return thin_curve(Line(label, steps, smooth_values([value for _, value in found], smooth)), _POINTS_MAX)


def smooth_values(values: Sequence[float], smooth: int) -> list[float]:
    """Return the mean of the last `smooth` values for each position; fewer at the start."""
    if smooth <= 1:
        return list(values)
    # Sum each window instead of using running sums: one huge value (a diverged loss) would distort all later means.
    return [
        math.fsum(part) / len(part) for at in range(len(values)) for part in [values[max(0, at - smooth + 1) : at + 1]]
    ]


def thin_curve(line: Line, most: int) -> Line:
    """Reduce a curve to at most `most` points: the minimum and maximum of spans of equal length, so that no peak is lost.

    Args:
        line: curve with ascending steps.
        most: maximum number of points, at least 4. The first and the last point are always kept.
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


@dataclass(frozen=True)
class _Label:
    x: float
    y: float
    """Position of the text's base line."""
    text: str
    colour: str = _GREY
    size: int = 12
    anchor: Literal["start", "middle", "end"] = "start"


@dataclass(frozen=True)
class _Stroke:
    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1.0


def _draw_shapes(title: str, curves: Sequence[Line]) -> Iterator[_Label | _Stroke]:
    """Yield the shapes of an image of `_WIDTH` x `_HEIGHT` with the origin at the upper left; later shapes cover earlier ones."""
    steps = [step for line in curves for step in line.steps]
    values = [value for line in curves for value in line.values]
    left, right, low, high = min(steps), max(steps), min(values), max(values)

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - left) / ((right - left) or 1)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - low) / ((high - low) or 1)

    yield _Label(_LEFT, 20, title, size=14)
    for tick in range(_TICKS):
        part = tick / (_TICKS - 1)
        value, step = low + part * (high - low), left + part * (right - left)
        yield _Stroke([(_LEFT, y(value)), (_WIDTH - _RIGHT, y(value))], _FAINT)
        yield _Label(_LEFT - 6, y(value) + 4, f"{value:.4g}", anchor="end")
        yield _Label(x(step), _HEIGHT - _BOTTOM + 18, f"{step:.0f}", anchor="middle")
    for at, line in enumerate(curves):
        colour = _COLOURS[at % len(_COLOURS)]
        yield _Stroke([(x(a), y(b)) for a, b in zip(line.steps, line.values, strict=True)], colour, 1.5)
        yield _Label(_LEFT + 160 + 150 * at, 20, line.label, colour)


def draw_svg(title: str, curves: Sequence[Line]) -> str:
    """Return the curves of one metric as an SVG image that is readable on white and on black.

    Args:
        title: name of the metric.
        curves: at least one curve with at least one point each.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" fill="{_GREY}">',
        f"<title>{escape(title)}</title>",
    ]
    for shape in _draw_shapes(title, curves):
        if isinstance(shape, _Label):
            look = f' font-size="{shape.size}"' if shape.size != 12 else ""
            look += f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
            look += f' fill="{shape.colour}"' if shape.colour != _GREY else ""
            parts.append(
                f'<text x="{_short_number(shape.x)}" y="{_short_number(shape.y)}"{look}>{escape(shape.text)}</text>'
            )
        elif shape.colour == _FAINT:
            (x1, y1), (x2, y2) = shape.points
            place = (
                f'x1="{_short_number(x1)}" x2="{_short_number(x2)}" y1="{_short_number(y1)}" y2="{_short_number(y2)}"'
            )
            parts.append(f'<line {place} stroke="{_FAINT}"/>')
        else:
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in shape.points)
            drawn = f'fill="none" stroke="{shape.colour}" stroke-width="{shape.width:g}"'
            parts.append(f'<polyline points="{points}" {drawn}/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _short_number(place: float) -> str:
    return str(place) if isinstance(place, int) else f"{place:.1f}"


def draw_png(title: str, curves: Sequence[Line]) -> bytes:
    """Return the same image as PNG, with two pixels per unit, on white.

    Args:
        title: name of the metric.
        curves: at least one curve with at least one point each.

    Raises:
        ImportError: Pillow is missing.
    """
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (_WIDTH * _PIXELS, _HEIGHT * _PIXELS), "white")
    draw = ImageDraw.Draw(picture, "RGBA")
    for shape in _draw_shapes(title, curves):
        if isinstance(shape, _Label):
            place = (shape.x * _PIXELS, shape.y * _PIXELS)
            font = ImageFont.load_default(shape.size * _PIXELS)
            draw.text(place, shape.text, shape.colour, font, anchor=_ANCHORS[shape.anchor])
        else:
            points = [(a * _PIXELS, b * _PIXELS) for a, b in shape.points]
            draw.line(points, shape.colour, round(shape.width * _PIXELS), joint="curve")
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()
