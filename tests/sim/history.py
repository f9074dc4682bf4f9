"""Random histories: generated from a seed, replayed, and minimized if one fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from tests.sim.actions import ACTIONS, EVERY, QUEUE, RESIZED, SCALED
from tests.sim.world import World

LENGTH = (25, 55)
Step = tuple[str, int, int]
"""Name of an action with its two numbers."""


class Failure(NamedTuple):
    """History that broke an invariant."""

    seed: int
    problem: str
    steps: list[Step]
    queued: bool = False
    elastic: bool = False
    engines: bool = False

    def __str__(self) -> str:
        lines = ",\n".join(f"    {step!r}" for step in self.steps)
        queue = "\n  queued=True," if self.queued else "\n  elastic=True," if self.elastic else ""
        queue += "\n  engines=True," if self.engines else ""
        return f"seed {self.seed}: {self.problem}\nreplay(\n  [\n{lines},\n  ],\n  seed={self.seed},{queue}\n)"


def generate(seed: int, *, queued: bool = False, elastic: bool = False, engines: bool = False) -> list[Step]:
    """Generate a history with its own selection of faults: with all of them, faults that need quiet in between would
    never combine.
    """
    random = Random(seed)
    actions = RESIZED if elastic else ACTIONS | QUEUE if queued else ACTIONS
    actions = SCALED if engines else actions
    share = 0.2 if elastic or engines else 0.5  # most of the others prevent the run from having a size
    chosen = {name: action.weight for name, action in actions.items() if action.always or random.random() < share}
    names = random.choices(list(chosen), list(chosen.values()), k=random.randint(*LENGTH))
    return [(name, random.randrange(12), random.randrange(12)) for name in names]


def replay(
    steps: Sequence[Step], seed: int, *, queued: bool = False, elastic: bool = False, engines: bool = False
) -> World:
    """Replay a history, then let the run come to rest.

    Raises:
        Exception: an invariant broke.
    """
    world = World(seed=seed, queued=queued, elastic=elastic, engines=engines)
    for name, a, b in steps:
        world.memory.actions += 1
        EVERY[name].do(world, a, b)
        world.check()
    world.rest()
    return world


def problem_of(
    steps: Sequence[Step], seed: int, *, queued: bool = False, elastic: bool = False, engines: bool = False
) -> str | None:
    """Return the problem of a history, or None."""
    try:
        replay(steps, seed, queued=queued, elastic=elastic, engines=engines)
    except AssertionError as error:
        return str(error)
    except Exception as error:
        return f"the simulation itself: {type(error).__name__}: {error}: {traceback.format_exc()[-800:]}"
    return None


def live(
    seed: int, *, shrink: bool = True, queued: bool = False, elastic: bool = False, engines: bool = False
) -> Failure | None:
    """Run one random history and return its failure, or None."""
    steps = generate(seed, queued=queued, elastic=elastic, engines=engines)
    problem = problem_of(steps, seed, queued=queued, elastic=elastic, engines=engines)
    if problem is None:
        return None
    if shrink:
        kind = problem.split(":")[0]
        steps = smallest(
            steps,
            lambda some: (
                (problem_of(some, seed, queued=queued, elastic=elastic, engines=engines) or "").split(":")[0] == kind
            ),
        )
        problem = problem_of(steps, seed, queued=queued, elastic=elastic, engines=engines) or problem
    return Failure(seed, problem, steps, queued, elastic, engines)


def smallest(steps: list[Step], fails: Callable[[list[Step]], bool]) -> list[Step]:
    """Return a minimal part of `steps` that still fails (delta debugging, Zeller and Hildebrandt 2002)."""
    chunk = max(1, len(steps) // 2)
    while True:
        kept, at = steps, 0
        while at < len(kept):
            less = kept[:at] + kept[at + chunk :]
            if fails(less):
                kept = less
            else:
                at += chunk
        if chunk == 1 and len(kept) == len(steps):
            return kept
        chunk, steps = max(1, chunk // 2), kept
