"""`reverse-text`: for the prompt "<abcd>" the right reply is "dcba". A tiny model improves on it within a minute."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlrun.environments.bundled.text import position_score
from rlrun.environments.protocol import Episode, Message, Score, SingleTurnEnvironment, Split, Task
from rlrun.environments.splits import GeneratedTasks


class ReverseTextArgs(BaseModel):
    """Arguments of `reverse-text`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    length: int = Field(default=4, ge=1, le=256)
    """Characters to reverse."""
    letters: str = Field(default="abcdef", min_length=2, max_length=90)
    """Alphabet: printable ASCII without white space, `<` and `>`, each character once."""
    seed: int = 0
    """Seed of the generated tasks."""
    num_tasks: int = Field(default=10_000, ge=1)
    """Tasks in each split. Texts repeat if there are more tasks than texts."""

    @field_validator("letters")
    @classmethod
    def _check_letters(cls, letters: str) -> str:
        bad = sorted({c for c in letters if not "!" <= c <= "~" or c in "<>"})
        if bad:
            raise ValueError(f"contains {bad}: use printable ASCII without white space, '<' and '>'")
        if len(set(letters)) != len(letters):
            raise ValueError("contains a character twice; use each one once")
        return letters


class ReverseText(SingleTurnEnvironment):
    """Reverse a short text (single turn); the reward is the share of positions that are right."""

    id = "reverse-text"

    def __init__(self, args: ReverseTextArgs) -> None:
        self.args = args

    def tasks(self, split: Split) -> Sequence[Task]:
        return GeneratedTasks(
            split, count=self.args.num_tasks, seed=self.args.seed, draw=self._draw, make=self._make_task
        )

    def _draw(self, rng: random.Random) -> str:
        return "".join(rng.choice(self.args.letters) for _ in range(self.args.length))

    @staticmethod
    def _make_task(task_id: str, text: str) -> Task:
        return Task(id=task_id, prompt=[{"role": "user", "content": f"<{text}>"}], answer=text[::-1])

    async def score(self, task: Task, episode: Episode) -> Score:
        assert task.answer is not None
        reward = position_score(episode.last_reply, task.answer)
        return Score(reward=reward, metrics={"exact": float(reward == 1.0)})

    def demonstration(self, task: Task) -> list[Message]:
        return [{"role": "assistant", "content": task.answer}]
