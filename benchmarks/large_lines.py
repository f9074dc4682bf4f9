"""An environment with some episodes of 60 MB in one line, for `benchmarks.event_loop_lag --large-every N`."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.environments import Episode, Score, Split, Task
from rlrun.environments.protocol import ModelClient

CHARACTERS = 10_000_000
"""Characters of two bytes each in UTF-8, and of six in the JSON of a line."""


class LargeLines:
    """Environment with one request per episode; every `every` tasks the episode has a long log.

    Args:
        every: distance of two tasks with long logs.
    """

    id = "large-lines"

    def __init__(self, every: int) -> None:
        self._every, self._played = every, 0

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return a thousand tasks."""
        return [
            Task(f"{split}-{number}", [{"role": "user", "content": f"<{split}-{number}>"}]) for number in range(1000)
        ]

    async def run(self, task: Task, model: ModelClient) -> Episode:
        """Send one request."""
        reply = await model.complete(task.prompt)
        self._played += 1
        info = {"log": "é" * CHARACTERS} if self._played % self._every == 1 else {}
        return Episode([*task.prompt, reply.message], 1, info)

    async def score(self, task: Task, episode: Episode) -> Score:
        """Return the same score for all."""
        return Score(float(len(task.id) % 2))


def environment(every: int = 64) -> LargeLines:
    """Make the environment."""
    return LargeLines(every)
