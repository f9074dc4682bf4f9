"""Results of `Run` methods with a display for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlrun.inspect import rollouts

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


class Rollouts(list[rollouts.Row]):
    """Rollouts of a trace, one mapping each, with the display of `rlrun rollouts`.

    Args:
        rows: selected rollouts.
        summary: one line about all rollouts of the step.
    """

    def __init__(self, rows: Sequence[rollouts.Row], summary: str) -> None:
        super().__init__(rows)
        self.summary = summary

    def __repr__(self) -> str:
        return "\n\n".join([self.summary, *(rollouts.rollout_text(row, most=_CHARACTERS) for row in self)])
