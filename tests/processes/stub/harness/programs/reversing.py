"""OpenAI client program with two requests, and the environment that trains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI

from rlrun.environments import AgentEnvironment, Episode, Score, Split, Task

WORDS = ("abcd", "bcde", "cdef", "fedc", "edcb", "dcba")


async def request_answers(client: AsyncOpenAI, word: str) -> list[str]:
    messages: list[Any] = []
    said = []
    for _ in range(2):
        messages.append({"role": "user", "content": f"<{word}>"})
        completion = await client.chat.completions.create(model="any", messages=messages)
        messages.append(completion.choices[0].message)
        said.append(completion.choices[0].message.content or "")
    return said


class Reversing(AgentEnvironment):
    id = "reversing"

    def tasks(self, split: Split) -> Sequence[Task]:
        words = WORDS[:4] if split == "train" else WORDS[4:]
        return [Task(word, [{"role": "user", "content": f"<{word}>"}], word[::-1]) for word in words]

    async def agent(self, task: Task, endpoint: Any) -> list[str]:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            return await request_answers(client, task.id)

    async def score(self, task: Task, episode: Episode) -> Score:
        right = sum(a == b for said in episode.info["result"] for a, b in zip(said, task.answer or "", strict=False))
        return Score(right / 8)


def reversing() -> Reversing:
    return Reversing()
