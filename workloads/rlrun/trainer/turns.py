"""Order of steps among runs that share a trainer, without side effects."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def next_turn(runs: Sequence[str], last: str | None, ready: Collection[str]) -> str | None:
    """Return the first ready run after the run that trained most recently, in round-robin order, or None.

    A ready run waits for at most one step of each other run.

    Args:
        runs: all runs, in a fixed order; new ones come last.
        last: run that trained the last step; None or the name of a removed run starts at the first run.
        ready: runs with a batch.
    """
    after = runs.index(last) + 1 if last in runs else 0
    return next((run for run in [*runs[after:], *runs[:after]] if run in ready), None)
