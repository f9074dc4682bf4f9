"""Unplayable tasks: counted once, outside of the error budget, with their own limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlrun.environments import Episode, EpisodeError, Message, Score, Split, Task, UnplayableTaskError, run_episode
from rlrun.environments.protocol import Reply, SingleTurnEnvironment
from rlrun.environments.rewards.reward_functions import RewardEntry, RewardFunctionError, call_here
from rlrun.environments.stage import InProcessStage, TaskRef
from rlrun.orchestrator.rollouts.playable_tasks import UnplayableTasks
from tests.support.waiting import UNREACHED_SECONDS

DEADLINES = {"timeout_seconds": UNREACHED_SECONDS, "reward_seconds": UNREACHED_SECONDS}


class Model:
    async def complete(self, messages: Sequence[Message], **_: Any) -> Reply:
        return Reply("x")


class Rows(Sequence[Task]):
    """Sequence of two rows; the second row cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            raise self.error
        return Task("row-0", [{"role": "user", "content": "?"}])


class Scored(SingleTurnEnvironment):
    id = "scored"

    def __init__(self, error: Exception, rows: Exception | None = None) -> None:
        self.error, self.rows = error, rows or ValueError("line 2: no prompt")

    def tasks(self, split: Split) -> Sequence[Task]:
        return Rows(self.rows)

    async def score(self, task: Task, episode: Episode) -> Score:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnplayableTaskError("no such answer"), "task"),
        (RewardFunctionError("wrapped"), "reward"),
        (ValueError("a bug"), "reward"),
    ],
)
async def test_score_error_is_task_error_only_if_declared_unplayable(error: Exception, kind: str) -> None:
    environment = Scored(error)
    with pytest.raises(EpisodeError) as caught:
        await run_episode(environment, environment.tasks("train")[0], Model(), **DEADLINES)
    assert caught.value.kind == kind


async def test_unplayable_cause_of_score_error_is_task_error() -> None:
    error = RewardFunctionError("reward mine:score: raised")
    error.__cause__ = UnplayableTaskError("no such answer")
    environment = Scored(error)
    with pytest.raises(EpisodeError, match="no such answer") as caught:
        await run_episode(environment, environment.tasks("train")[0], Model(), **DEADLINES)
    assert caught.value.kind == "task"


@pytest.mark.parametrize(("error", "kind"), [(ValueError("line 2"), "task"), (OSError("network"), "environment")])
async def test_unreadable_row_is_task_error(error: Exception, kind: str) -> None:
    stage = InProcessStage(Scored(ValueError(), rows=error))
    with pytest.raises(EpisodeError, match="reading the task raised") as caught:
        await stage.play(TaskRef("train", 1), Model(), **DEADLINES)
    assert caught.value.kind == kind


def refuse_row(completion: str) -> float:
    raise UnplayableTaskError("this row has no tests")


def fail(completion: str) -> float:
    raise ValueError("a bug")


@pytest.mark.parametrize(("function", "is_unplayable"), [(refuse_row, True), (fail, False)])
def test_reward_function_in_its_process_refuses_a_row(
    function: Any, is_unplayable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlrun.environments.rewards.reward_functions.imported", lambda kind, path: function)
    entry = RewardEntry(name="mine:score")
    scores, problem, found = call_here(entry.name, {"completion": "x"}, None)
    assert scores == []
    assert problem is not None
    assert found is is_unplayable


def test_unplayable_task_is_recorded_once() -> None:
    tasks = UnplayableTasks({"a": 1000, "b": 1000})
    assert tasks.reason("a", 7) is None
    assert [tasks.add("a", 7, "too_long") for _ in range(3)] == [True, False, False]
    assert tasks.reason("a", 7) == "too_long"
    assert tasks.reason("b", 7) is None


def test_five_percent_unplayable_groups_never_end_run() -> None:
    tasks = UnplayableTasks({"a": 1000})
    assert [tasks.record("a", "too_long" if i % 20 == 0 else None) for i in range(5000)] == [None] * 5000


@pytest.mark.parametrize(("size", "groups"), [(1000, 51), (10, 6), (1, 1)])
def test_unplayable_limit_follows_number_of_tasks(size: int, groups: int) -> None:
    tasks = UnplayableTasks({"a": size, "b": 10})
    verdicts = [tasks.record("a", "template", "task 3: the template refuses it") for _ in range(groups)]
    assert verdicts[:-1] == [None] * (groups - 1)
    assert f"{groups} of the last {groups} groups of environment 'a'" in str(verdicts[-1])
    assert "The latest: task 3: the template refuses it" in str(verdicts[-1])
    assert tasks.record("b", "template") is None
