"""Rewards by name, for environments whose data has the right answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlrun.environments.protocol import Task
from rlrun.environments.rewards import mathematics
from rlrun.environments.rewards.bounded import BoundedCalls
from rlrun.environments.rewards.code import Case, CodeLimits, CodeRunner, last_code_block
from rlrun.environments.rewards.judge import Judge, JudgeArgs

RewardName = Literal["exact", "math", "code", "judge"]


class Scorer(Protocol):
    """Judges a reply to a task."""

    async def __call__(self, task: Task, reply: str) -> float:
        """The reward. Raises whatever makes the rollout unusable."""
        ...


class MathArgs(BaseModel):
    """Options of the reward `math`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    processes: int = Field(default=2, ge=1, le=256)
    """Processes that compare answers at the same time."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Deadline of one comparison; one that takes longer is an error."""


class CodeArgs(BaseModel):
    """Options of the reward `code`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_seconds: float = Field(default=10.0, gt=0)
    """Deadline of one case."""
    memory_mib: int = Field(default=512, ge=64)
    """Address space of a program."""
    concurrency: int = Field(default=4, ge=1, le=256)
    """Programs at the same time."""


class ExactArgs(BaseModel):
    """Options of the reward `exact`: none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def scorer(name: RewardName, options: Mapping[str, Any]) -> Scorer:
    """The reward of this name.

    Raises:
        ValueError: an option is wrong; says which.
    """
    models: dict[str, type[BaseModel]] = {"exact": ExactArgs, "math": MathArgs, "code": CodeArgs, "judge": JudgeArgs}
    try:
        args: Any = models[name].model_validate(dict(options))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f"reward_args of the reward {name!r}: {problems}") from None
    if name == "math":
        return _Math(args)
    if name == "code":
        return _Code(args)
    if name == "judge":
        return _Judged(args)
    return _exact


async def _exact(task: Task, reply: str) -> float:
    return float(reply.strip() == (task.answer or "").strip())


class _Math:
    def __init__(self, args: MathArgs) -> None:
        self._calls = BoundedCalls(
            processes=args.processes, timeout_seconds=args.timeout_seconds, prepare=mathematics.prepare
        )

    async def __call__(self, task: Task, reply: str) -> float:
        return await self._calls.call(mathematics.math_score, reply, task.answer or "")


class _Code:
    def __init__(self, args: CodeArgs) -> None:
        limits = CodeLimits(timeout_seconds=args.timeout_seconds, memory_bytes=args.memory_mib * 1024**2)
        self._runner = CodeRunner(limits, concurrency=args.concurrency)

    async def __call__(self, task: Task, reply: str) -> float:
        program = last_code_block(reply)
        return 0.0 if program is None else await self._runner.share(program, _cases(task.answer or ""))


def _cases(answer: str) -> list[Case]:
    """Test cases from a data set: `[{"stdin": ..., "stdout": ...}]`, or `{"inputs": [...], "outputs": [...]}`."""
    try:
        found = json.loads(answer)
        if isinstance(found, dict):
            return [Case(str(i), str(o)) for i, o in zip(found["inputs"], found["outputs"], strict=True)]
        return [Case(str(case["stdin"]), str(case["stdout"])) for case in found]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the ground truth holds no test cases: {error}") from error


class _Judged:
    def __init__(self, args: JudgeArgs) -> None:
        self._judge = Judge(args)

    async def __call__(self, task: Task, reply: str) -> float:
        question = "\n\n".join(str(message["content"]) for message in task.prompt if message["role"] != "system")
        return await self._judge.score(question=question, truth=task.answer or "", reply=reply)
