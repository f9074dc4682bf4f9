"""An environment that makes all attempts of `attempts_in_a_pod`, and writes their outcomes to its log."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import attempts_in_a_pod

from rlrun.environments import Episode, Score, SingleTurnEnvironment, Split, Task

MARK = "ATTEMPTS "


class Intruder(SingleTurnEnvironment):
    """Makes the attempts before its first rollout."""

    id = "intruder"
    done = False

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(id=f"{split}-{n}", prompt=[{"role": "user", "content": f"{split} {n}"}]) for n in range(64)]

    async def run(self, task: Task, model: Any) -> Episode:
        if not Intruder.done:
            Intruder.done = True
            print(MARK + json.dumps(attempts_in_a_pod.try_all()), file=sys.stderr, flush=True)
        return await super().run(task, model)

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(1.0)


def load(**args: Any) -> Intruder:
    attempts_in_a_pod.PLACES.update(args)
    return Intruder()
