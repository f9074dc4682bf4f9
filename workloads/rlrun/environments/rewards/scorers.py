"""Rewards by name, for environments whose data has the right answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlrun.environments.protocol import Task
from rlrun.environments.rewards import mathematics
from rlrun.environments.rewards.bounded import BoundedCalls
from rlrun.environments.rewards.code import Case, CodeLimits, CodeRunner, last_code_block
from rlrun.environments.rewards.judge import GroupJudge, GroupJudgeArgs, Judge, JudgeArgs
from rlrun.environments.rewards.reward_model import RewardModel, RewardModelArgs


@runtime_checkable
class Scorer(Protocol):
    """Judges a reply to a task."""

    async def __call__(self, task: Task, reply: str) -> float:
        """The reward. Raises whatever makes the rollout unusable."""
        ...


@runtime_checkable
class GroupScorer(Protocol):
    """Judges all replies of a group together."""

    async def of_group(self, task: Task, replies: Sequence[str]) -> Sequence[float]:
        """The rewards, in the order of the replies. Raises whatever makes the group unusable."""
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


def scorer(name: str, options: Mapping[str, object]) -> Scorer:
    """The built-in reward of this name.

    Raises:
        ValueError: an option is wrong; says which.
    """
    found = _made(name, options)
    assert isinstance(found, Scorer)
    return found


def group_scorer(name: str, options: Mapping[str, object]) -> GroupScorer:
    """The same of one in `OF_GROUPS`."""
    found = _made(name, options)
    assert isinstance(found, GroupScorer)
    return found


def _made(name: str, options: Mapping[str, object]) -> Scorer | GroupScorer:
    model, make = BUILT_IN[name]
    try:
        args: Any = model.model_validate(dict(options))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f"reward_args (in a list: args) of the reward {name!r}: {problems}") from None
    return make(args)


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
        return await self._judge.score(question=_question(task), truth=task.answer or "", reply=reply)


class _GroupJudged:
    def __init__(self, args: GroupJudgeArgs) -> None:
        self._judge = GroupJudge(args)

    async def of_group(self, task: Task, replies: Sequence[str]) -> Sequence[float]:
        return await self._judge.scores(question=_question(task), truth=task.answer or "", replies=replies)


class _Modelled:
    def __init__(self, args: RewardModelArgs) -> None:
        self._model = RewardModel(args)

    async def __call__(self, task: Task, reply: str) -> float:
        return await self._model.score(prompt=task.prompt, question=_question(task), reply=reply)


def _question(task: Task) -> str:
    """The prompt as one text, without the system's."""
    return "\n\n".join(str(message["content"]) for message in task.prompt if message["role"] != "system")


BUILT_IN: Mapping[str, tuple[type[BaseModel], Callable[[Any], Scorer | GroupScorer]]] = {
    "exact": (ExactArgs, lambda _: _exact),
    "math": (MathArgs, _Math),
    "code": (CodeArgs, _Code),
    "judge": (JudgeArgs, _Judged),
    "reward-model": (RewardModelArgs, _Modelled),
    "group-judge": (GroupJudgeArgs, _GroupJudged),
}
"""Built-in rewards: name -> options and what makes it."""

SERVED = frozenset({"judge", "group-judge", "reward-model"})
"""Rewards that ask a server, which may want a key."""
OF_GROUPS = frozenset({"group-judge"})
"""Rewards that judge all replies of a group together."""
