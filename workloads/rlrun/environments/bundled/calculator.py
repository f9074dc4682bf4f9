"""`calculator`: multi-turn environment with a tool in plain text.

    user       12*34-5=
    assistant  calc(12*34-5)
    user       403
    assistant  403

A reply that contains `calc(...)` is a call: the environment answers with the result, or with "error: ..." for an invalid expression.
The first reply without a call is the final answer, which is scored.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlrun.environments.bundled.arithmetic import check_operations, draw_expression
from rlrun.environments.bundled.expression import ExpressionError, evaluate_text
from rlrun.environments.protocol import Episode, Message, ModelClient, Score, Split, Task
from rlrun.environments.splits import GeneratedTasks

INSTRUCTIONS = (
    "Work out the expression. To use the calculator, reply with calc(...), for example calc(2*(3+4)); "
    "the next message is its result. When you know the answer, reply with the number alone."
)
CALL = "calc("


class CalculatorArgs(BaseModel):
    """Arguments of `calculator`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(default=4, ge=2, le=64)
    """Largest number of replies per episode, including calls and the final answer."""
    operations: str = Field(default="+-*", min_length=1)
    """Operations of the problems, out of `+`, `-` and `*`."""
    max_operand: int = Field(default=99, ge=1, le=10**9)
    """Largest operand; the smallest is 0."""
    terms: int = Field(default=3, ge=2, le=8)
    """Operands in one problem."""
    call_credit: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Reward of an episode with a wrong or missing final answer in which a call returned the right number. It is a first step for a model
    that cannot copy the result yet."""
    instructions: bool = True
    """Start with a system message that explains the calculator. Turn it off for a tiny model with a warm-up."""
    seed: int = 0
    """Seed of the generated tasks."""
    num_tasks: int = Field(default=10_000, ge=1)
    """Tasks in each split. Problems repeat if there are more tasks than problems."""

    _operations = field_validator("operations")(check_operations)


def find_call(text: str) -> str | None:
    """Return the expression of the first `calc(...)` in a reply, or None if there is no call. Without a closing parenthesis, the
    expression ends with the text."""
    start = text.find(CALL)
    if start < 0:
        return None
    start += len(CALL)
    depth = 1
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return text[start:]


def answer_call(expression: str) -> str:
    """Return the calculator's answer: the value, or "error: ..."."""
    try:
        return evaluate_text(expression)
    except ExpressionError as error:
        return f"error: {error}"


class Calculator:
    """Work out an expression with a calculator (multi-turn, tool); the reward is 1 for the right final number."""

    id = "calculator"

    def __init__(self, args: CalculatorArgs) -> None:
        self.args = args

    def tasks(self, split: Split) -> Sequence[Task]:
        return GeneratedTasks(
            split, count=self.args.num_tasks, seed=self.args.seed, draw=self._draw, make=self._make_task
        )

    def _draw(self, rng: random.Random) -> str:
        args = self.args
        return draw_expression(rng, terms=args.terms, operations=args.operations, max_operand=args.max_operand)

    def _make_task(self, task_id: str, expression: str) -> Task:
        prompt: list[Message] = [{"role": "system", "content": INSTRUCTIONS}] if self.args.instructions else []
        prompt.append({"role": "user", "content": f"{expression}="})
        return Task(id=task_id, prompt=prompt, answer=evaluate_text(expression), info={"expression": expression})

    async def run(self, task: Task, model: ModelClient) -> Episode:
        messages = list(task.prompt)
        calls = errors = 0
        found = truncated = False
        replies = 0
        for replies in range(1, self.args.max_turns + 1):
            reply = await model.complete(messages)
            messages.append(reply.message)
            truncated = reply.truncated
            expression = find_call(reply.text)
            if expression is None or truncated:
                break
            result = answer_call(expression)
            calls += 1
            errors += result.startswith("error")
            found = found or result == task.answer
            if replies < self.args.max_turns:
                messages.append({"role": "user", "content": result})
        return Episode(
            messages=messages,
            replies=replies,
            info={"calls": calls, "errors": errors, "found": found, "truncated": truncated},
        )

    async def score(self, task: Task, episode: Episode) -> Score:
        exact = episode.last_reply.strip() == task.answer
        reward = 1.0 if exact else self.args.call_credit if episode.info["found"] else 0.0
        return Score(
            reward=reward,
            metrics={
                "exact": float(exact),
                "calls": float(episode.info["calls"]),
                "call_errors": float(episode.info["errors"]),
            },
        )

    def demonstration(self, task: Task) -> list[Message]:
        return [
            {"role": "assistant", "content": f"{CALL}{task.info['expression']})"},
            {"role": "user", "content": task.answer},
            {"role": "assistant", "content": task.answer},
        ]
