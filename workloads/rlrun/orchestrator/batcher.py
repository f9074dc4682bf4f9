"""From finished groups to the batch of a step: which groups, which advantages, which samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from rlrun.advantages import advantages
from rlrun.config.learning import AdvantageConfig
from rlrun.orchestrator.conversation import Recorded
from rlrun.orchestrator.filters import Rules, is_trained_on, shaped_reward
from rlrun.orchestrator.rollouts import FinishedGroup
from rlrun.orchestrator.staleness import too_old
from rlrun.protocol.batch import NO_VERSION, Batch, Sample

PER_TOKEN = "gae"
"""The estimator that the trainer's critic makes: the batch then carries the rewards in place of the advantages."""


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


def choose_first(
    groups: Sequence[FinishedGroup], batch_size: int, *, step: int, max_off_policy_steps: int
) -> list[FinishedGroup] | None:
    """The groups of the batch of `step`: those that no later step may train, then the others as `choose` does.

    Long answers finish late, hence old: without this they would be passed over for those that are quick.
    """
    later, last = split_by_age(groups, step=step + 1, max_off_policy_steps=max_off_policy_steps)
    missing = batch_size - sum(len(group.rollouts) for group in last)
    if missing <= 0:
        return _at_least(last, batch_size)
    rest = choose(later, missing)
    return None if rest is None else [*last, *rest]


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


def assemble(groups: Sequence[FinishedGroup], *, step: int, attempt: int, rules: Mapping[str, Rules]) -> Batch:
    """The batch of `step`: one advantage per rollout, repeated on each token that the policy sampled.

    A rollout that a filter masks keeps its part in its group's baseline, but none of its tokens carries loss.

    Raises:
        ValueError: the advantage function refuses the rewards or its options.
    """
    values = _advantages(groups, rules)
    samples = [
        _sample(sequence, group, number, value if is_trained_on(rollout, rules[group.environment]) else None)
        for group, own in zip(groups, values, strict=True)
        for (number, rollout), value in zip(enumerate(group.rollouts), own, strict=True)
        for sequence in rollout.sequences
    ]
    return Batch(step, attempt, tuple(samples))


def _advantages(groups: Sequence[FinishedGroup], rules: Mapping[str, Rules]) -> list[list[float]]:
    """One advantage per rollout of each group. Groups with the same settings are estimated together, as one batch."""
    found: list[list[float]] = [[] for _ in groups]
    settings: list[AdvantageConfig] = []
    for group in groups:
        if (own := rules[group.environment].advantage) not in settings:
            settings.append(own)
    for advantage in settings:
        places = [i for i, group in enumerate(groups) if rules[group.environment].advantage == advantage]
        members = [(i, rollout) for i in places for rollout in groups[i].rollouts]
        values = _estimated(
            advantage,
            rewards=[shaped_reward(rollout, rules[groups[i].environment]) for i, rollout in members],
            group_ids=[i for i, _ in members],
            lengths=[rollout.loss_tokens for _, rollout in members],
            turns=[len(rollout.reply_lengths) for _, rollout in members],
        )
        for (i, _), value in zip(members, values, strict=True):
            found[i].append(value)
    return found


def _estimated(
    advantage: AdvantageConfig,
    *,
    rewards: Sequence[float],
    group_ids: Sequence[int],
    lengths: Sequence[int],
    turns: Sequence[int],
) -> list[float]:
    if advantage.name == PER_TOKEN:
        return list(rewards)
    options: dict[str, Any] = dict(advantage.options)
    values = advantages(advantage.name, rewards, group_ids=group_ids, lengths=lengths, turns=turns, **options)
    return [float(value) for value in values.tolist()]


def _sample(sequence: Recorded, group: FinishedGroup, number: int, advantage: float | None) -> Sample:
    """A training sample; without an `advantage` none of its tokens is trained on."""
    mask = sequence.loss_mask if advantage is not None else np.zeros_like(sequence.loss_mask)
    return Sample(
        input_ids=sequence.input_ids,
        loss_mask=mask,
        logprobs=np.where(mask, sequence.logprobs, np.float32(0)),
        versions=np.where(mask, sequence.versions, np.int32(NO_VERSION)),
        advantages=np.where(mask, np.float32(advantage or 0), np.float32(0)).astype(np.float32),
        temperature=group.temperature,
        environment=group.environment,
        task_id=group.task_id,
        group=group.number,
        rollout=number,
        dispatch_version=group.dispatch_version,
        reward=group.rollouts[number].reward,
    )
