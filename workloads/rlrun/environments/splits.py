"""Generated tasks: created on access and split by a hash of their text.

The hash of a problem's text determines its split, so no problem can occur in both splits, for any seed and size.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import overload

from rlrun.environments.protocol import Split, Task

EVAL_ONE_IN = 8
"""Share of the problems that are held out for evaluation: one in 8."""

MAX_DRAWS = 10_000
"""Draws after which a split counts as empty. A split with any problem needs far fewer draws."""


class EmptySplitError(ValueError):
    """Error for arguments that leave one of the splits without problems."""


def split_of(problem: str) -> Split:
    """Return the split of a problem, which depends only on the problem's text."""
    return "eval" if hashlib.sha256(problem.encode()).digest()[0] % EVAL_ONE_IN == 0 else "train"


class GeneratedTasks(Sequence[Task]):
    """`count` tasks of one split. Task `i` depends only on `(seed, split, i)` and is created on access.

    Problems repeat if `count` exceeds the number of different problems. Access raises `EmptySplitError` if the split has no problem.

    Args:
        split: split of the tasks.
        count: number of tasks.
        seed: seed of the drawings.
        draw: function that samples a problem's text from all problems.
        make: function that creates a task from an id and a problem's text.
    """

    def __init__(
        self,
        split: Split,
        *,
        count: int,
        seed: int,
        draw: Callable[[random.Random], str],
        make: Callable[[str, str], Task],
    ) -> None:
        self._split, self._count, self._seed, self._draw, self._make = split, count, seed, draw, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        position = index + self._count if index < 0 else index
        if not 0 <= position < self._count:
            raise IndexError(f"task {index} of {self._count}")
        problem = self._problem(position)
        digest = hashlib.sha256(problem.encode()).hexdigest()[:8]
        task = self._make(id := f"{self._split}-{position}-{digest}", problem)
        if task.id != id:
            raise ValueError(
                f"make() gave the task {id!r} the id {task.id!r}; it has to use the given id, which makes tasks distinct"
            )
        return task

    def _problem(self, position: int) -> str:
        # A text as seed is hashed with SHA-512, so the tasks do not depend on PYTHONHASHSEED.
        rng = random.Random(f"{self._seed}/{self._split}/{position}")
        for _ in range(MAX_DRAWS):
            problem = self._draw(rng)
            if split_of(problem) == self._split:
                return problem
        raise EmptySplitError(
            f"these arguments allow so few problems that the {self._split} split is empty; allow more problems"
        )
