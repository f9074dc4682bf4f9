"""Environment that compares groups and misbehaves; the task's name selects how."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from rlrun.environments import Episode, Score, SingleTurnEnvironment, Split, Task

DEEDS = ("good", "exits", "computes", "sleeps", "one_too_few", "infinite")


class Comparing(SingleTurnEnvironment):
    id = "comparing"
    compares = True

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(deed, [{"role": "user", "content": deed}]) for deed in DEEDS] if split == "train" else []

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(1.0)

    async def compare(self, task: Task, episodes: Sequence[Episode], scores: Sequence[Score]) -> list[Score]:
        deed = task.prompt[0]["content"]
        if deed == "exits":
            os._exit(3)
        if deed == "computes":
            time.sleep(60)  # noqa: ASYNC251
        if deed == "sleeps":
            await asyncio.sleep(60)
        if deed == "infinite":
            return [Score(float("inf"))] * len(episodes)
        found = [
            Score(one.reward + len(own.last_reply), {"own": 1.0}) for own, one in zip(episodes, scores, strict=True)
        ]
        return found[1:] if deed == "one_too_few" else found


def comparing() -> Comparing:
    return Comparing()
