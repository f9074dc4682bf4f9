"""Unbiased estimates of pass@k from several samples per task. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Return the probability that at least one of `k` samples solves the task: `1 - C(n-c, k) / C(n, k)` (Chen et al.
    2021, eq. 1).

    Args:
        samples: n, number of samples drawn.
        solved: c, number of samples that solved the task.
        k: size of the subset, from 1 to n.

    Raises:
        ValueError: the counts contradict each other; the message names the argument.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; it must be from 1 to the number of samples, {samples}")
    if not 0 <= solved <= samples:
        raise ValueError(f"solved is {solved}; it must be from 0 to the number of samples, {samples}")
    return 1 - comb(samples - solved, k) / comb(samples, k)


def mean_pass_at_k(rewards: Sequence[Sequence[float]], *, solved_reward: float) -> dict[int, float]:
    """Return the mean pass@k over tasks for k = 1, 2, 4, ... up to the smallest number of samples of a task.

    Args:
        rewards: rewards of each task's samples, at least one sample per task.
        solved_reward: reward from which a sample counts as solved.
    """
    most = min((len(own) for own in rewards), default=0)
    counts = [(len(own), sum(reward >= solved_reward for reward in own)) for own in rewards]
    return {
        k: sum(pass_at_k(samples, solved, k) for samples, solved in counts) / len(counts)
        for k in (2**power for power in range(most.bit_length()))
    }
