"""From finished groups to the batch of a step: which groups, which advantages, which samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from rlrun.algorithms import advantages
from rlrun.config.learning import AdvantageConfig
from rlrun.orchestrator.rollouts import FinishedGroup
from rlrun.orchestrator.staleness import too_old
from rlrun.protocol.batch import Batch, Sample


def split_by_age(
    groups: Sequence[FinishedGroup], *, step: int, max_off_policy_steps: int
) -> tuple[list[FinishedGroup], list[FinishedGroup]]:
    """Groups that may be trained in `step`, and those that no later step may train either."""
    usable: list[FinishedGroup] = []
    expired: list[FinishedGroup] = []
    for group in groups:
        old = too_old(group.dispatch_version, step=step, max_off_policy_steps=max_off_policy_steps)
        (expired if old else usable).append(group)
    return usable, expired


def choose(groups: Sequence[FinishedGroup], batch_size: int) -> list[FinishedGroup] | None:
    """The groups of one batch in order of finishing, or None while there are too few.

    Groups are whole. With one group size the batch has exactly `batch_size` rollouts. With mixed sizes it takes those that add up to it
    exactly and are complete first; when none do, it is larger by less than one group, because waiting for a better fit could wait forever.
    """
    if sum(len(group.rollouts) for group in groups) < batch_size:
        return None
    # Sum of rollouts -> the last group of the first selection that has this sum, and the sum without it.
    reached: dict[int, tuple[int, int]] = {0: (-1, 0)}
    for index, group in enumerate(groups):
        for total in list(reached):
            larger = total + len(group.rollouts)
            if larger <= batch_size:
                reached.setdefault(larger, (index, total))
        if batch_size in reached:
            break
    if batch_size not in reached:
        return _at_least(groups, batch_size)
    chosen: list[FinishedGroup] = []
    total = batch_size
    while total:
        index, total = reached[total]
        chosen.append(groups[index])
    return chosen[::-1]


def _at_least(groups: Sequence[FinishedGroup], batch_size: int) -> list[FinishedGroup]:
    totals = accumulate(len(group.rollouts) for group in groups)
    return [group for group, total in zip(groups, totals, strict=True) if total - len(group.rollouts) < batch_size]


def assemble(groups: Sequence[FinishedGroup], *, step: int, attempt: int, advantage: AdvantageConfig) -> Batch:
    """The batch of `step`: one advantage per rollout, repeated on each token that the policy sampled.

    Raises:
        ValueError: the advantage function refuses the rewards or its options.
    """
    rewards = [rollout.reward for group in groups for rollout in group.rollouts]
    ids = [index for index, group in enumerate(groups) for _ in group.rollouts]
    lengths = [rollout.loss_tokens for group in groups for rollout in group.rollouts]
    options: dict[str, Any] = dict(advantage.options)
    values = iter(advantages(advantage.name, rewards, group_ids=ids, lengths=lengths, **options).tolist())
    samples: list[Sample] = []
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            value = next(values)
            samples += [
                Sample(
                    input_ids=sequence.input_ids,
                    loss_mask=sequence.loss_mask,
                    logprobs=sequence.logprobs,
                    versions=sequence.versions,
                    advantages=np.where(sequence.loss_mask, np.float32(value), np.float32(0)).astype(np.float32),
                    temperature=group.temperature,
                    environment=group.environment,
                    task_id=group.task_id,
                    group=group.number,
                    rollout=number,
                    dispatch_version=group.dispatch_version,
                    reward=rollout.reward,
                )
                for sequence in rollout.sequences
            ]
    return Batch(step, attempt, tuple(samples))
