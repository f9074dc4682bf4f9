"""Journal records of earlier attempts: which ones are accepted, and which ones are refused for age, task or a dropped group."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
from orch_journal_world import a_rollout

from rlrun.config.models.rollout import CurriculumConfig
from rlrun.orchestrator.journal.frames import DroppedEntry, Entry, RolloutEntry
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.journal.recovery import Found, Readmitted, readmit_entries
from rlrun.orchestrator.tasks.sampler import Draw, Sampler, Source
from rlrun.orchestrator.types import FinishedGroup

SIZE = 2


class GroupsAsTasks:
    """Sampler that draws task N of the first environment for group N."""

    def draw(self, group: int) -> Draw:
        return Draw(0, group, 0)

    def draw_before(self, group: int) -> None:
        """Accept the call: all draws are known."""


@dataclass
class Recovery:
    """Result of one recovery."""

    made: Readmitted = field(default_factory=Readmitted)
    finished: list[FinishedGroup] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    """Groups to dispatch again."""


def rollout(group: int, member: int, *, version: int = 3, reward: float = 1.0, task: int | None = None) -> RolloutEntry:
    return RolloutEntry(group, member, "e", group if task is None else task, version, 0.7, a_rollout([version], reward))


def given_up(group: int) -> DroppedEntry:
    return DroppedEntry(group, "zero_variance", 0.5, group + 1, 3)


def recover(
    *entries: Entry, oldest: int = 0, changed: Collection[str] = (), sampler: Any = None, drop: Any = None
) -> Recovery:
    found, result, ledger = Found(), Recovery(), Ledger()
    for entry in entries:
        found.add(entry, None, uncounted=True)
    steps = readmit_entries(
        found,
        is_old=lambda version: version < oldest,
        ledger=ledger,
        sampler=sampler or GroupsAsTasks(),
        environments=[("e", SIZE)],
        finish=result.finished.append,
        drop=drop or (lambda entry: result.dropped.append(entry.group)),
        changed=changed,
    )
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result.made = end.value
    result.again = [ledger.take() for _ in range(len(ledger.state().open_groups) - len(ledger._out))]
    return result


def test_group_of_fresh_members_is_accepted() -> None:
    result = recover(rollout(0, 1), rollout(0, 0))
    assert [group.number for group in result.finished] == [0]
    assert [made.reward for made in result.finished[0].rollouts] == [1.0, 1.0]
    assert (result.made.rollouts, result.made.refused, result.again) == (2, {}, [])


def test_stale_member_is_played_again() -> None:
    result = recover(rollout(0, 0, version=1), rollout(0, 1, version=3), oldest=2)
    assert result.finished == []
    assert list(result.made.unfinished[0].members) == [1]
    assert (result.made.refused, result.again) == ({"age": 1}, [0])


def test_fresh_record_replaces_stale_record_of_member() -> None:
    result = recover(rollout(0, 0, version=1), rollout(0, 1), rollout(0, 0, version=3, reward=0.5), oldest=2)
    assert [made.reward for made in result.finished[0].rollouts] == [0.5, 1.0]
    assert result.made.refused == {}


def test_dropped_group_is_not_played_again() -> None:
    result = recover(rollout(0, 0), given_up(0))
    assert (result.dropped, result.finished, result.again) == ([0], [], [])
    assert result.made.refused == {}


def test_group_replayed_after_drop_is_accepted() -> None:
    """The attempt that dropped the group belonged to a lost branch."""
    result = recover(given_up(0), rollout(0, 0), rollout(0, 1))
    assert (result.dropped, [group.number for group in result.finished]) == ([], [0])


@pytest.mark.parametrize(("task", "changed"), [(5, ()), (None, ("e",))], ids=["another task", "another data set"])
def test_rollout_of_another_task_is_generated_again(task: int | None, changed: tuple[str, ...]) -> None:
    result = recover(rollout(0, 0, task=task), rollout(0, 1, task=task), changed=changed)
    assert (result.finished, dict(result.made.refused), result.again) == ([], {"task": 2}, [0])


def test_member_beyond_smaller_group_size_is_refused() -> None:
    result = recover(rollout(0, 0), rollout(0, SIZE))
    assert (result.made.refused, list(result.made.unfinished[0].members)) == ({"task": 1}, [0])


def test_recovered_drop_keeps_the_draws_of_the_killed_attempt() -> None:
    """A drop changes the step that later groups of a warm-up are drawn for."""

    def new_sampler() -> Sampler:
        warmup = CurriculumConfig(shuffle=False, warmup_steps=2)
        return Sampler(0, [Source("e", 4, group_size=1, curriculum=warmup)], batch_size=4)

    killed, restarted = new_sampler(), new_sampler()
    before = [killed.draw(group) for group in range(4)]
    killed.drop(1, 2, 0.0)
    dropped = DroppedEntry(2, "too_hard", 0.0, 4, 3)
    recover(dropped, sampler=restarted, drop=lambda entry: restarted.drop(1, entry.group, entry.mean_reward))
    assert [restarted.draw(group) for group in (0, 1, 3)] == [before[group] for group in (0, 1, 3)]
    assert [restarted.draw(group) for group in range(4, 8)] == [killed.draw(group) for group in range(4, 8)]
