"""Answers of a `Run` that show themselves, in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlrun.inspect import rollouts

_CHARACTERS = 2000


class Words(str):
    """Text for people: shown as it is, without quotes."""

    def __repr__(self) -> str:
        return str(self)


class Picture:
    """A plot.

    Args:
        svg: the picture as SVG.
        title: its metric.
    """

    def __init__(self, svg: str, title: str) -> None:
        self.svg, self.title = svg, title

    def save(self, path: str | Path) -> Path:
        """Write the SVG file; a file that is there is replaced."""
        Path(path).write_text(self.svg)
        return Path(path)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Picture of {self.title}; in a terminal .save('FILE.svg') writes it>"


class Rollouts(list[rollouts.Row]):
    """Rollouts as the trace has them, one mapping each, and as `rlrun rollouts` prints them.

    Args:
        rows: the chosen ones.
        summary: one line on all of the step.
    """

    def __init__(self, rows: Sequence[rollouts.Row], summary: str) -> None:
        super().__init__(rows)
        self.summary = summary

    def __repr__(self) -> str:
        return "\n\n".join([self.summary, *(rollouts.rollout_text(row, most=_CHARACTERS) for row in self)])
