"""Batch of one step, from finished groups or from the recorded batches of another run.

A batch from groups is made by the choice of groups, their advantages and their samples. Pure. Recorded batches are training data with which
two runs train on the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from rlrun.advantages.batch_advantages import Values, batch_advantages
from rlrun.orchestrator.groups.filters import Rules, masked_by, shaped_reward
from rlrun.orchestrator.staleness import split_by_age
from rlrun.orchestrator.types import FinishedGroup, Recorded, Rollout
from rlrun.protocol.files.batch import NO_VERSION, Batch, BatchError, Outcome, Sample, read_batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import artifacts_in_steps
from rlrun.runtime import exit_codes


def choose_first(
    groups: Sequence[FinishedGroup], batch_size: int, *, step: int, max_off_policy_steps: int
) -> list[FinishedGroup] | None:
    """Choose the groups of the batch of `step`, or return None if there are too few.

    Groups that are too old for the next step come first, then the others as in `choose_groups`. Long answers finish
    late and are therefore old; without this rule quick answers would displace them.
    """
    later, last = split_by_age(groups, step=step + 1, max_off_policy_steps=max_off_policy_steps)
    missing = batch_size - sum(len(group.rollouts) for group in last)
    if missing <= 0:
        return _at_least(last, batch_size)
    rest = choose_groups(later, missing)
    return None if rest is None else [*last, *rest]


def choose_groups(groups: Sequence[FinishedGroup], batch_size: int) -> list[FinishedGroup] | None:
    """Choose the groups of one batch in order of completion, or return None if there are too few.

    Groups are never split. With one group size the batch has exactly `batch_size` rollouts. With mixed sizes it takes
    the groups that complete first and add up to the size exactly. If no groups do, the batch is larger by less than one
    group, because a better fit might never come.
    """
    if sum(len(group.rollouts) for group in groups) < batch_size:
        return None
    # Subset sum. Bit t of entry i: some of the first i groups add up to t. Integers instead of sets, because this runs in the event loop.
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
    """Assemble the batch of `step`, group by group in order of their numbers, with one advantage per sampled token.

    A rollout that a filter masks keeps its part in its group's baseline, but its tokens carry no loss.

    Raises:
        ValueError: the advantage function rejects the rewards or its options.
    """
    # Not in order of completion: if the same groups are in the batch, its bytes are then the same each time.
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
    """Yield the sequences of a rollout, each with the advantages of its loss tokens."""
    start = 0
    for sequence in rollout.sequences:
        count = int(sequence.loss_mask.sum())
        yield sequence, per_token[start : start + count]
        start += count


def _make_sample(
    sequence: Recorded, group: FinishedGroup, number: int, advantages: Values | None, *, truncated: bool
) -> Sample:
    """Build a training sample. Without `advantages` none of its tokens is trained on."""
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
        routes=sequence.routes,
    )


class Recording:
    """The `rollouts/` folder of another run.

    Args:
        folder: path of the folder.
        steps: required steps.

    Raises:
        RoleError: a step is missing; the message names the first one.
    """

    def __init__(self, folder: Path, steps: range) -> None:
        # If several attempts recorded a step, the last attempt counts.
        self._found = {a.step: a.path for a in artifacts_in_steps(folder)}
        missing = [step for step in steps if step not in self._found]
        if missing:
            have = f"it has {min(self._found)} to {max(self._found)}" if self._found else "the folder has no batch"
            raise RoleError(
                f"orchestrator.replay: {folder} has no batch of step {missing[0]} ({have}); record with recordRollouts, or lower maxSteps",
                exit_codes.CONFIGURATION,
            )

    def batch(self, step: int, *, attempt: int) -> Batch:
        """Return the recorded batch of a step, with this run's attempt."""
        try:
            return dataclasses.replace(read_batch(self._found[step]), attempt=attempt)
        except BatchError as error:
            raise RoleError(f"orchestrator.replay: {error}", exit_codes.DATA) from error
