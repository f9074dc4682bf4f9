"""Order of steps among runs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def next_turn(runs: Sequence[str], last: str | None, ready: Collection[str]) -> str | None:
    """The first ready run after the one that trained last, going round; None when none is ready.

    A run that is ready waits for at most one step of each other run.

    Args:
        runs: all runs, in a fixed order; new ones come last.
        last: the run that trained the last step; None, or one that has left: none of them.
        ready: runs whose batch is there.
    """
    after = runs.index(last) + 1 if last in runs else 0
    return next((run for run in [*runs[after:], *runs[:after]] if run in ready), None)
