"""Batch of a step from finished groups: choice of groups, advantages, samples. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from rlrun.advantages.of_batch import Values, batch_advantages
from rlrun.orchestrator.groups.filters import Rules, masked_by, shaped_reward
from rlrun.orchestrator.staleness import split_by_age
from rlrun.orchestrator.types import FinishedGroup, Recorded, Rollout
from rlrun.protocol.files.batch import NO_VERSION, Batch, Outcome, Sample


def choose_first(
    groups: Sequence[FinishedGroup], batch_size: int, *, step: int, max_off_policy_steps: int
) -> list[FinishedGroup] | None:
    """The groups of the batch of `step`: those that no later step may train, then the others as `choose_groups` does.

    Long answers finish late, hence old: without this they would be passed over for those that are quick.
    """
    later, last = split_by_age(groups, step=step + 1, max_off_policy_steps=max_off_policy_steps)
    missing = batch_size - sum(len(group.rollouts) for group in last)
    if missing <= 0:
        return _at_least(last, batch_size)
    rest = choose_groups(later, missing)
    return None if rest is None else [*last, *rest]


def choose_groups(groups: Sequence[FinishedGroup], batch_size: int) -> list[FinishedGroup] | None:
    """The groups of one batch in order of finishing, or None while there are too few.

    Groups are whole. With one group size the batch has exactly `batch_size` rollouts. With mixed sizes it takes those that add up to it
    exactly and are complete first; when none do, it is larger by less than one group, because waiting for a better fit could wait forever.
    """
    if sum(len(group.rollouts) for group in groups) < batch_size:
        return None
    # Bit t of entry i: some of the first i groups add up to t. A number and not a set: this runs in the event loop.
    reached = [1]
    for group in groups:
        if reached[-1] >> batch_size & 1:
            break
        reached.append((reached[-1] | reached[-1] << len(group.rollouts)) & ((1 << batch_size + 1) - 1))
    if not reached[-1] >> batch_size & 1:
        return _at_least(groups, batch_size)
    chosen: list[FinishedGroup] = []
    total = batch_size
    for group, before in reversed(list(zip(groups, reached[:-1], strict=False))):
        if not before >> total & 1:
            chosen.append(group)
            total -= len(group.rollouts)
    return chosen[::-1]


def _at_least(groups: Sequence[FinishedGroup], batch_size: int) -> list[FinishedGroup]:
    totals = accumulate(len(group.rollouts) for group in groups)
    return [group for group, total in zip(groups, totals, strict=True) if total - len(group.rollouts) < batch_size]


def assemble_batch(groups: Sequence[FinishedGroup], *, step: int, attempt: int, rules: Mapping[str, Rules]) -> Batch:
    """The batch of `step`, group by group in order of their numbers: one advantage per token that the policy sampled.

    A rollout that a filter masks keeps its part in its group's baseline, but none of its tokens carries loss.

    Raises:
        ValueError: the advantage function refuses the rewards or its options.
    """
    # Not by when each finished: where all groups of a step are in its batch, its bits are then the same each time.
    groups = sorted(groups, key=lambda group: group.number)
    outcomes = _group_outcomes(groups, rules)
    values = batch_advantages(outcomes, [rules[outcome.environment].advantage for outcome in outcomes])
    rollouts = [(group, number, rollout) for group in groups for number, rollout in enumerate(group.rollouts)]
    samples = [
        _make_sample(
            sequence,
            group,
            number,
            advantages if outcome.masked is None else None,
            # Of several sequences the last one holds the last answer.
            truncated=rollout.finish_reason == "length" and place == len(rollout.sequences) - 1,
        )
        for (group, number, rollout), outcome, per_token in zip(rollouts, outcomes, values, strict=True)
        for place, (sequence, advantages) in enumerate(_divide_advantages(rollout, per_token))
    ]
    return Batch(step, attempt, tuple(samples), outcomes=tuple(outcomes))


def _group_outcomes(groups: Sequence[FinishedGroup], rules: Mapping[str, Rules]) -> list[Outcome]:
    return [
        Outcome(
            group=group.number,
            rollout=number,
            environment=group.environment,
            reward=shaped_reward(rollout, rules[group.environment]),
            tokens=rollout.loss_tokens,
            turns=len(rollout.reply_lengths),
            masked=masked_by(rollout, rules[group.environment]),
        )
        for group in groups
        for number, rollout in enumerate(group.rollouts)
    ]


def _divide_advantages(rollout: Rollout, per_token: Values) -> Iterator[tuple[Recorded, Values]]:
    """The sequences of a rollout, each with the advantages of its own loss tokens."""
    start = 0
    for sequence in rollout.sequences:
        count = int(sequence.loss_mask.sum())
        yield sequence, per_token[start : start + count]
        start += count


def _make_sample(
    sequence: Recorded, group: FinishedGroup, number: int, advantages: Values | None, *, truncated: bool
) -> Sample:
    """A training sample; without `advantages` none of its tokens is trained on."""
    mask = sequence.loss_mask if advantages is not None else np.zeros_like(sequence.loss_mask)
    on_tokens = np.zeros(len(mask), np.float32)
    if advantages is not None:
        on_tokens[mask] = advantages
    return Sample(
        input_ids=sequence.input_ids,
        loss_mask=mask,
        logprobs=np.where(mask, sequence.logprobs, np.float32(0)),
        versions=np.where(mask, sequence.versions, np.int32(NO_VERSION)),
        advantages=on_tokens,
        temperature=group.temperature,
        environment=group.environment,
        task_id=group.task_id,
        group=group.number,
        rollout=number,
        dispatch_version=group.dispatch_version,
        reward=group.rollouts[number].reward,
        truncated=truncated,
    )
