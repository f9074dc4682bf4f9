"""Rollouts with long-tailed lengths, and a lower bound of the training time for any scheduler. Pure."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

SIGMA = 1.2
"""Sigma of the logarithm of a rollout's length."""
LONGEST = 6.0
"""Length at which `maxTokens` cuts, as a multiple of the mean before the cut."""


def lengths(prompt: Sequence[int], n: int, mean: float) -> list[float]:
    """Return lognormal lengths of a prompt's `n` rollouts, which are equal in each call."""
    rng = random.Random(hash(tuple(prompt)))
    return [mean * min(LONGEST, rng.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)) for _ in range(n)]


@dataclass(frozen=True)
class Pace:
    """Speed of an engine: a step, which gives each running sequence one unit of length, takes `step + running *
    sequence`.

    The default is an engine that counts length in seconds and does not become slower with more sequences.
    """

    step: float = 1.0
    """Seconds of a step without sequences."""
    sequence: float = 0.0
    """Seconds that each running sequence adds to a step."""

    def seconds(self, steps: float, units: float) -> float:
        """Return the seconds of a number of steps that produce a number of units of length."""
        return self.step * steps + self.sequence * units


def steps_when_full(lengths: Sequence[int], slots: int) -> int:
    """Return steps of an engine with `slots` places that gets all sequences at once and takes them in order."""
    places = [0] * slots
    for length in lengths:
        heapq.heapreplace(places, places[0] + length)
    return max(places)


def fit(alone: tuple[int, float], full: tuple[int, int, float]) -> Pace:
    """Fit the pace of an engine to two measurements.

    Args:
        alone: units and seconds of one single sequence.
        full: steps, units and seconds of many sequences.
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
    """Return a lower bound of the time from the first version to the last, for any schedule that trains these batches
    in this order.

    `T(n)` is the end of step n. It is `train_seconds` after each of: the end of the previous step; the work of all
    batches so far on `slots` places that are never empty; and, because no rollout of batch n is dispatched before
    version n - 1 - M is published, the longest rollout of batch n and its work, from then on. Hand-overs, prompts and
    all other work cost nothing.

    Args:
        batches: length of each rollout, by step.
        slots: places of the engine.
        train_seconds: seconds of a training step.
        max_off_policy_steps: M; 0 is synchronous.
        pace: pace of the engine. Default: lengths are seconds.
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
