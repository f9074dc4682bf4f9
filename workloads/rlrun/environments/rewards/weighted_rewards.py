"""Combination of an environment's rewards: a weighted sum for each `data_source`, of rewards of single replies and of groups."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlrun.config.algorithm.names import is_import_path
from rlrun.config.suggest import did_you_mean
from rlrun.environments.protocol import Score, Task
from rlrun.environments.rewards.reward_functions import ANY_SOURCE, RewardEntry, RewardFunction, describe_sources
from rlrun.environments.rewards.scorers import OF_GROUPS, GroupScorer, Scorer, check_truth, find_scorer, group_scorer

T = TypeVar("T")


@dataclass(frozen=True)
class RowTask(Task):
    """A task that was created from a row of a data set."""

    row: Mapping[str, object] = field(default_factory=dict)
    truth: Any = None
    """Unchanged ground truth of the row."""


class _Part:
    """One reward of a sum."""

    def __init__(self, entry: RewardEntry, label: str) -> None:
        self._name, self.weight, self.label = entry.name, entry.weight, label
        self._function: RewardFunction | None = None
        self._scorer: Scorer | GroupScorer
        if is_import_path(entry.name):
            self._function = RewardFunction(entry)
            self.group = self._function.signature.group
        else:
            self.group = entry.name in OF_GROUPS
            self._scorer = group_scorer(entry.name, entry.args) if self.group else find_scorer(entry.name, entry.args)

    def check(self, row: Mapping[str, object], truth: object) -> None:
        if self._function is None:
            check_truth(self._name, truth)
        else:
            self._function.check(row)

    async def score_reply(self, task: RowTask, reply: str) -> Score:
        if self._function is not None:
            return await self._function.score_reply(_given_arguments(task), task.row, reply)
        assert isinstance(self._scorer, Scorer)
        return Score(await self._scorer(task, reply))

    async def score_group(self, task: RowTask, replies: Sequence[str]) -> list[Score]:
        if self._function is not None:
            return await self._function.score_group(_given_arguments(task), task.row, replies)
        assert isinstance(self._scorer, GroupScorer)
        return [Score(reward) for reward in await self._scorer.of_group(task, replies)]


def _given_arguments(task: RowTask) -> dict[str, object]:
    return {"prompt": task.prompt, "ground_truth": task.truth}


class WeightedReward:
    """A weighted sum of rewards. If there are several, the metric `reward_<label>` reports each one.

    Args:
        entries: declarations of the rewards.

    Raises:
        ValueError: one of the rewards cannot be created; the message contains its name.
    """

    def __init__(self, entries: Sequence[RewardEntry]) -> None:
        seen: Counter[str] = Counter()
        parts = []
        for entry in entries:
            seen[entry.label] += 1
            times = seen[entry.label]
            parts.append(_Part(entry, entry.label if times == 1 else f"{entry.label}_{times}"))
        self._several = len(parts) > 1
        self._single = [part for part in parts if not part.group]
        self._of_groups = [part for part in parts if part.group]
        self._parts = parts

    @property
    def compares(self) -> bool:
        """Whether any reward scores whole groups."""
        return bool(self._of_groups)

    def check(self, row: Mapping[str, object], truth: object) -> None:
        """Raise ValueError if a row has no value that a reward needs."""
        for part in self._parts:
            part.check(row, truth)

    async def score(self, task: RowTask, reply: str) -> Score:
        """Return the sum of the rewards that score single replies."""
        found = await _gather_results(part.score_reply(task, reply) for part in self._single)
        return self._add_scores(Score(0.0), zip(self._single, found, strict=True))

    async def compare(self, task: RowTask, replies: Sequence[str], scores: Sequence[Score]) -> list[Score]:
        """Return the complete sums of a group's replies.

        Args:
            task: task of the group.
            replies: replies of the policy.
            scores: sums of the rewards that score single replies.
        """
        found = await _gather_results(part.score_group(task, replies) for part in self._of_groups)
        return [
            self._add_scores(score, zip(self._of_groups, [column[i] for column in found], strict=True))
            for i, score in enumerate(scores)
        ]

    def _add_scores(self, start: Score, found: Iterable[tuple[_Part, Score]]) -> Score:
        reward, metrics = start.reward, dict(start.metrics)
        for part, score in found:
            reward += part.weight * score.reward
            if self._several:
                metrics[f"reward_{part.label}"] = score.reward
            before = f"{part.label}_" if self._several else ""
            metrics |= {f"{before}{name}": value for name, value in score.metrics.items()}
        return Score(reward, metrics)


async def _gather_results(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results in order. After the first error, the other awaitables are canceled."""
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


class Rewards:
    """Rewards of a data set.

    Args:
        sums: rewards by `data_source`; `*` applies to all other sources.
    """

    def __init__(self, sums: Mapping[str, Sequence[RewardEntry]]) -> None:
        self._sums = {source: WeightedReward(entries) for source, entries in sums.items()}

    @property
    def compares(self) -> bool:
        """Whether any reward scores whole groups."""
        return any(found.compares for found in self._sums.values())

    def check(self, row: Mapping[str, object], truth: object) -> None:
        """Reject a row that the rewards cannot score.

        Args:
            row: row of the data set.
            truth: ground truth of the row, of any JSON type.

        Raises:
            ValueError: contains the column, the value and the fix.
        """
        self._for_row(row).check(row, truth)

    async def score(self, task: Task, reply: str) -> Score:
        """Return the reward of a single reply, without rewards that score whole groups."""
        assert isinstance(task, RowTask)
        return await self._for_row(task.row).score(task, reply)

    async def compare(self, task: Task, replies: Sequence[str], scores: Sequence[Score]) -> Sequence[Score]:
        """Return the complete rewards of a group's replies. `scores` are their results of `score`."""
        assert isinstance(task, RowTask)
        found = self._for_row(task.row)
        return await found.compare(task, replies, scores) if found.compares else scores

    def _for_row(self, row: Mapping[str, object]) -> WeightedReward:
        source = row.get("data_source")
        found = self._sums.get(str(source), self._sums.get(ANY_SOURCE))
        if found is None:
            known = (
                f"reward_by_source has {describe_sources(self._sums)}; add the source, or '{ANY_SOURCE}' for all others"
            )
            if source is None:
                raise ValueError(f"the column 'data_source' is missing; {known}")
            raise ValueError(f"data_source {source!r} has no reward{did_you_mean(str(source), self._sums)}: {known}")
        return found
