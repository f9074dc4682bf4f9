"""`arithmetic`: for the prompt "3+4=" the right reply is "7"."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlrun.environments.bundled.expression import evaluate_text
from rlrun.environments.bundled.text import position_score
from rlrun.environments.protocol import Episode, Message, Score, SingleTurnEnvironment, Split, Task
from rlrun.environments.splits import GeneratedTasks


def check_operations(operations: str) -> str:
    """Validate the operations of generated problems: some of `+`, `-`, `*`, each once. Raises ValueError."""
    if set(operations) - set("+-*") or len(set(operations)) != len(operations):
        raise ValueError("use some of '+', '-' and '*', each at most once, as in '+-'")
    return operations


def draw_expression(rng: random.Random, *, terms: int, operations: str, max_operand: int) -> str:
    """Return a random expression of `terms` integers in [0, max_operand], such as "3+4": no spaces, usual precedence."""
    text = str(rng.randint(0, max_operand))
    for _ in range(terms - 1):
        text += rng.choice(operations) + str(rng.randint(0, max_operand))
    return text


class ArithmeticArgs(BaseModel):
    """Arguments of `arithmetic`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    operations: str = Field(default="+-", min_length=1)
    """Operations of the problems, out of `+`, `-` and `*`."""
    max_operand: int = Field(default=9, ge=1, le=10**9)
    """Largest operand; the smallest is 0."""
    terms: int = Field(default=2, ge=2, le=4)
    """Operands in one problem."""
    partial_credit: bool = False
    """False: 1 for the right number, else 0. True: the share of right characters, position by position."""
    seed: int = 0
    """Seed of the generated tasks."""
    num_tasks: int = Field(default=10_000, ge=1)
    """Tasks in each split. Problems repeat if there are more tasks than problems."""

    _operations = field_validator("operations")(check_operations)


class Arithmetic(SingleTurnEnvironment):
    """Work out "3+4=" (single turn); the reward is 1 for the right number, else 0 (or partial credit)."""

    id = "arithmetic"

    def __init__(self, args: ArithmeticArgs) -> None:
        self.args = args

    def tasks(self, split: Split) -> Sequence[Task]:
        return GeneratedTasks(
            split, count=self.args.num_tasks, seed=self.args.seed, draw=self._draw, make=self._make_task
        )

    def _draw(self, rng: random.Random) -> str:
        args = self.args
        return draw_expression(rng, terms=args.terms, operations=args.operations, max_operand=args.max_operand)

    @staticmethod
    def _make_task(task_id: str, expression: str) -> Task:
        return Task(
            id=task_id, prompt=[{"role": "user", "content": f"{expression}="}], answer=evaluate_text(expression)
        )

    async def score(self, task: Task, episode: Episode) -> Score:
        assert task.answer is not None
        positions = position_score(episode.last_reply, task.answer)
        exact = float(positions == 1.0)
        return Score(reward=positions if self.args.partial_credit else exact, metrics={"exact": exact})

    def demonstration(self, task: Task) -> list[Message]:
        return [{"role": "assistant", "content": task.answer}]
