"""Each episode receives its own copy of the task."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rlrun.environments.episode import EpisodeError
from rlrun.environments.protocol import Episode, Reply, Score, Split, Task
from rlrun.environments.stage import InProcessStage, Played, TaskRef


class Appending:
    """Environment with a common mistake: it appends messages to the list of the task."""

    id = "appending"
    compares = True

    def __init__(self, **info: Any) -> None:
        self._tasks = {
            split: [Task(split, [{"role": "user", "content": split}], info=info)] for split in ("train", "eval")
        }

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    async def run(self, task: Task, model: Any) -> Episode:
        messages = task.prompt
        for _ in range(2):
            messages.append((await model.complete(messages)).message)
            task.info["turns"].append(len(messages))
        return Episode(messages, 2)

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(float(len(task.info["turns"])))

    async def compare(self, task: Task, episodes: Sequence[Episode], scores: Sequence[Score]) -> list[Score]:
        return [Score(float(len(task.prompt))) for _ in scores]


class Model:
    """Model that yields to the other episodes before it answers, and records the number of messages per request."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def complete(self, messages: Sequence[Any], **_: Any) -> Reply:
        self.asked.append(len(messages))
        await asyncio.sleep(0)
        return Reply("x", completion_tokens=1)


async def play(stage: InProcessStage, model: Model) -> Played:
    return await stage.play(TaskRef("train", 0), model, timeout_seconds=60, reward_seconds=60)


async def test_task_prompt_is_unchanged_by_group_and_later_epoch() -> None:
    stage, model = InProcessStage(Appending(turns=[])), Model()
    group = await asyncio.gather(*(play(stage, model) for _ in range(4)))
    assert model.asked == [1] * 4 + [2] * 4
    assert [played.score.reward for played in group] == [2.0] * 4, "an episode and its score have the same copy"
    again = Model()
    await play(stage, again)
    assert again.asked == [1, 2]


async def test_group_comparison_receives_unchanged_task() -> None:
    stage, model = InProcessStage(Appending(turns=[])), Model()
    group = [await play(stage, model) for _ in range(2)]
    scores = await stage.compare(TaskRef("train", 0), group, timeout_seconds=60, reward_seconds=60)
    assert [score.reward for score in scores] == [1.0, 1.0]


async def test_uncopyable_task_is_an_environment_error() -> None:
    stage = InProcessStage(Appending(turns=[], generator=(number for number in range(3))))
    with pytest.raises(
        EpisodeError, match=r"train\[0\]': copying the task raised TypeError: cannot pickle 'generator'"
    ) as error:
        await play(stage, Model())
    assert error.value.kind == "environment"
