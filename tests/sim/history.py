"""Random histories: made from a seed, lived, and cut down to what is needed where one goes wrong."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from tests.sim.actions import ACTIONS, EVERY, QUEUE, RESIZED, SCALED
from tests.sim.world import World

LENGTH = (25, 55)
Step = tuple[str, int, int]
"""Name of an action and its two numbers."""


class Failure(NamedTuple):
    """A history in which something that must hold did not."""

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
    """A history. Each has kinds of faults of its own: where all are possible, those that need quiet between them never meet."""
    random = Random(seed)
    actions = RESIZED if elastic else ACTIONS | QUEUE if queued else ACTIONS
    actions = SCALED if engines else actions
    share = 0.2 if elastic or engines else 0.5  # most others keep the run from having a size at all
    chosen = {name: action.weight for name, action in actions.items() if action.always or random.random() < share}
    names = random.choices(list(chosen), list(chosen.values()), k=random.randint(*LENGTH))
    return [(name, random.randrange(12), random.randrange(12)) for name in names]


def replay(
    steps: Sequence[Step], seed: int, *, queued: bool = False, elastic: bool = False, engines: bool = False
) -> World:
    """Live a history, then let the run come to rest.

    Raises:
        Exception: something that must hold did not.
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
    """What goes wrong in a history; None: nothing."""
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
    """One random history; None: all held."""
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
    """A part of `steps` that still fails and of which nothing can be left out (delta debugging, Zeller and Hildebrandt 2002)."""
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
