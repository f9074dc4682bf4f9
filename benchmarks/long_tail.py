"""Rollouts with long-tailed lengths, and the least time in which any scheduler could train them. Pure."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

SIGMA = 1.2
"""Of the logarithm of a rollout's length."""
LONGEST = 6.0
"""What `maxTokens` cuts off, as a multiple of the mean before it."""


def lengths(prompt: Sequence[int], n: int, mean: float) -> list[float]:
    """Lognormal lengths of a prompt's `n` rollouts: the same each time that they are asked for."""
    rng = random.Random(hash(tuple(prompt)))
    return [mean * min(LONGEST, rng.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)) for _ in range(n)]


@dataclass(frozen=True)
class Pace:
    """How quickly an engine computes: a step, which gives each running sequence one unit of length, takes `step + running * sequence`.

    The default is an engine that counts length in seconds and is not slowed down by what runs beside.
    """

    step: float = 1.0
    """Seconds that a step takes by itself."""
    sequence: float = 0.0
    """Seconds that each running sequence adds to a step."""

    def seconds(self, steps: float, units: float) -> float:
        """Of so many steps that give so many units of length."""
        return self.step * steps + self.sequence * units


def steps_when_full(lengths: Sequence[int], slots: int) -> int:
    """Steps of an engine with `slots` places that gets all sequences at once and takes them in order."""
    places = [0] * slots
    for length in lengths:
        heapq.heapreplace(places, places[0] + length)
    return max(places)


def fit(alone: tuple[int, float], full: tuple[int, int, float]) -> Pace:
    """The pace of an engine, from two measurements.

    Args:
        alone: units and seconds of one sequence by itself.
        full: steps, units and seconds of many.
    """
    steps, units, seconds = full
    one = alone[1] / alone[0]
    sequence = max(0.0, (seconds - steps * one) / (units - steps))
    return Pace((seconds - sequence * units) / steps, sequence)


def least_seconds(
    batches: Sequence[Sequence[float]],
    *,
    slots: int,
    train_seconds: float,
    max_off_policy_steps: int,
    pace: Pace | None = None,
) -> float:
    """No schedule trains these batches in this order in less time, from the first version to the last.

    With `T(n)` for the end of step n, which takes `train_seconds` beyond each of: the end of the step before; the work of all batches so
    far on `slots` places that are never empty; and, because nothing of batch n is dispatched before version n - 1 - M is published, the
    longest rollout of batch n and its work, from then on. Hand-overs, prompts and all that is not generating or training cost nothing.

    Args:
        batches: length of each rollout, by step.
        slots: places of the engine.
        train_seconds: of a step.
        max_off_policy_steps: M; 0 is synchronous.
        pace: of the engine; default: lengths are seconds.
    """
    pace = pace or Pace()
    ends, done = [0.0], 0.0
    for step, batch in enumerate(batches, start=1):
        work = sum(batch)
        done += work
        dispatched = ends[max(0, step - 1 - max_off_policy_steps)]
        alone = pace.seconds(max(max(batch), work / slots), work)
        ends.append(max(ends[-1], pace.seconds(done / slots, done), dispatched + alone) + train_seconds)
    return ends[-1]
