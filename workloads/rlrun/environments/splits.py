"""Generated tasks: lazily made, random access, and split by what they ask.

A problem belongs to a split by a hash of its text, so no problem can be in both, whatever the seed and the size.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import overload

from rlrun.environments.protocol import Split, Task

EVAL_ONE_IN = 8
"""Problems of which one is held out for evaluation."""

MAX_DRAWS = 10_000
"""Draws before a split counts as empty; a split that has any problem is hit far sooner."""


class EmptySplitError(ValueError):
    """The arguments leave no problem for one of the splits."""


def split_of(problem: str) -> Split:
    """The split that a problem belongs to: a function of its text alone."""
    return "eval" if hashlib.sha256(problem.encode()).digest()[0] % EVAL_ONE_IN == 0 else "train"


class GeneratedTasks(Sequence[Task]):
    """`count` tasks of one split; task `i` is a function of `(seed, split, i)` and made when asked for.

    `draw(rng)` samples a problem's text from the whole space; `make(id, problem)` turns it into a task. Problems repeat
    once `count` exceeds the space. Raises `EmptySplitError` when the space holds no problem of this split.
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
                f"make() gave the task {id!r} the id {task.id!r}; it has to keep it, for ids are distinct so"
            )
        return task

    def _problem(self, position: int) -> str:
        # Seeding with a string hashes it with SHA-512, so PYTHONHASHSEED does not reach the tasks.
        rng = random.Random(f"{self._seed}/{self._split}/{position}")
        for _ in range(MAX_DRAWS):
            problem = self._draw(rng)
            if split_of(problem) == self._split:
                return problem
        raise EmptySplitError(
            f"these arguments allow so few problems that none is left for the {self._split} split; allow more of them"
        )
