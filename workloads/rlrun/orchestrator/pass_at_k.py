"""Unbiased estimates from several samples per task. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Probability that at least one of `k` samples of a task solves it: `1 - C(n-c, k) / C(n, k)` (Chen et al. 2021, eq. 1).

    Args:
        samples: n, samples that were drawn.
        solved: c, how many of them solved the task.
        k: at most n.

    Raises:
        ValueError: the counts contradict each other; names the argument.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; with {samples} samples it has to be 1 to {samples}")
    if not 0 <= solved <= samples:
        raise ValueError(f"solved is {solved}; of {samples} samples it has to be 0 to {samples}")
    return 1 - comb(samples - solved, k) / comb(samples, k)


def mean_pass_at_k(rewards: Sequence[Sequence[float]], *, solved_reward: float) -> dict[int, float]:
    """Mean pass@k over tasks for k = 1, 2, 4, ... up to the number of samples that every task has.

    Args:
        rewards: of each task's samples; no task is without one.
        solved_reward: a sample of this reward or more has solved its task.
    """
    most = min((len(own) for own in rewards), default=0)
    counts = [(len(own), sum(reward >= solved_reward for reward in own)) for own in rewards]
    return {
        k: sum(pass_at_k(samples, solved, k) for samples, solved in counts) / len(counts)
        for k in (2**power for power in range(most.bit_length()))
    }
