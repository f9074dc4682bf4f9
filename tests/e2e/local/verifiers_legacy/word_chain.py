"""Environments of verifiers 0.1 as their users write them: a single turn, a conversation, and one with a tool."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def exact(completion: list[Any], answer: str, **_: Any) -> float:
    last = completion[-1]
    content = last["content"] if isinstance(last, dict) else last.content
    return float(content.strip() == answer)


def spell(number: int) -> str:
    """The word of a number.

    Args:
        number: which.
    """
    return f"w{number}"


class Chain(vf.MultiTurnEnv):
    """Environment that requests another word until it has enough."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": f"word {len(state['trajectory']) + 1}?"}]


def load_environment(turns: int = 1, count: int = 20) -> vf.Environment:
    rows = [{"question": f"word of {i}?", "answer": f"w{i}"} for i in range(count)]
    rubric = vf.Rubric(funcs=[exact], weights=[0.5])
    if turns == 0:
        return vf.ToolEnv(dataset=Dataset.from_list(rows), rubric=rubric, tools=[spell])
    if turns == 1:
        return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric, system_prompt="One word.")
    return Chain(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=turns)
