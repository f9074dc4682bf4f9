"""A task of so many turns in our own protocol: the twin of `vf_reverse` as `agent_in_process` plays it."""

import random
from collections.abc import Sequence

from rlrun.environments.protocol import Environment, Episode, Message, ModelClient, Score, Split, Task

AGAIN = "again"


class Turns(Environment):
    """Ask for a reversed text, and again after each reply; every rollout sends each of its requests itself."""

    id = "turns"

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def tasks(self, split: Split) -> Sequence[Task]:
        rng = random.Random(f"turns-{split}")
        letters = "abcdef" if split == "train" else "ghijkl"  # so that the splits share no text
        texts = ["".join(rng.choice(letters) for _ in range(4)) for _ in range(4000)]
        return [
            Task(id=f"{split}-{i}", prompt=[{"role": "user", "content": f"<{text}>"}], answer=text[::-1])
            for i, text in enumerate(texts)
        ]

    async def run(self, task: Task, model: ModelClient) -> Episode:
        messages: list[Message] = list(task.prompt)
        for turn in range(self.turns):
            if turn:
                messages.append({"role": "user", "content": AGAIN})
            messages.append((await model.complete(messages)).message)
        return Episode(messages, self.turns)

    async def score(self, task: Task, episode: Episode) -> Score:
        assert task.answer is not None
        return Score(sum(a == b for a, b in zip(episode.last_reply, task.answer, strict=False)) / len(task.answer))


def turns(count: int) -> Turns:
    """As `turns:turns` with `args: {count: 4}`."""
    return Turns(count)
