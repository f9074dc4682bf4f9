"""Environment that prints a line and reports its environment variables."""

from __future__ import annotations

import os
from typing import Any

from rlrun.environments import Episode, Score, SingleTurnEnvironment, Split, Task


class Telling(SingleTurnEnvironment):
    id = "telling"

    def tasks(self, split: Split) -> list[Task]:
        return [Task(id=split, prompt=[{"role": "user", "content": split}])]

    async def run(self, task: Task, model: Any) -> Episode:
        print("printed by an environment: \N{GREEK SMALL LETTER ALPHA}", flush=True)
        episode = await super().run(task, model)
        return Episode(episode.messages, 1, dict(os.environ))

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(1.0)


telling = Telling
