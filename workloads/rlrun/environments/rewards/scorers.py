"""Built-in rewards by name, for environments whose data contains the right answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlrun.environments.message_content import content_text
from rlrun.environments.protocol import Task, UnplayableTaskError
from rlrun.environments.rewards import mathematics
from rlrun.environments.rewards.bounded import BoundedCallError, BoundedCalls, ImportTimeError, UnfinishedCallError
from rlrun.environments.rewards.code_execution import Case, CodeLimits, CodeRunner, last_code_block
from rlrun.environments.rewards.judge import GroupJudge, GroupJudgeArgs, Judge, JudgeArgs
from rlrun.environments.rewards.scoring_servers import RewardModel, RewardModelArgs


@runtime_checkable
class Scorer(Protocol):
    """Reward of single replies."""

    async def __call__(self, task: Task, reply: str) -> float:
        """Return the reward of a reply. Exceptions make the rollout unusable."""
        ...


@runtime_checkable
class GroupScorer(Protocol):
    """Reward of all replies of a group together."""

    async def of_group(self, task: Task, replies: Sequence[str]) -> Sequence[float]:
        """Return the rewards in the order of the replies. Exceptions make the group unusable."""
        ...


class MathArgs(BaseModel):
    """Options of the reward `math`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    processes: int = Field(default=2, ge=1, le=256)
    """Processes that compare answers at the same time."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Time limit of one comparison. A reply that the parsers do not finish in this time scores 0."""


class CodeArgs(BaseModel):
    """Options of the reward `code`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_seconds: float = Field(default=10.0, gt=0)
    """Time limit of one test case."""
    memory_mib: int = Field(default=512, ge=64)
    """Address space of a program."""
    concurrency: int = Field(default=4, ge=1, le=256)
    """Programs at the same time."""


class ExactArgs(BaseModel):
    """Options of the reward `exact`, which has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def find_scorer(name: str, options: Mapping[str, object]) -> Scorer:
    """Return the built-in reward of this name.

    Raises:
        ValueError: an option is invalid; the message contains its name.
    """
    found = _make_scorer(name, options)
    assert isinstance(found, Scorer)
    return found


def group_scorer(name: str, options: Mapping[str, object]) -> GroupScorer:
    """Return the built-in reward of this name, which must be in `OF_GROUPS`. Raises ValueError like `find_scorer`."""
    found = _make_scorer(name, options)
    assert isinstance(found, GroupScorer)
    return found


def _make_scorer(name: str, options: Mapping[str, object]) -> Scorer | GroupScorer:
    model, make = BUILT_IN[name]
    try:
        args: Any = model.model_validate(dict(options))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f"reward_args (in a list: args) of the reward {name!r}: {problems}") from None
    return make(args)


async def _score_exact(task: Task, reply: str) -> float:
    return float(reply.strip() == (task.answer or "").strip())


class _Math:
    def __init__(self, args: MathArgs) -> None:
        self._calls = BoundedCalls(
            processes=args.processes, timeout_seconds=args.timeout_seconds, prepare=mathematics.prepare_parsers
        )
        self._parsable: set[str] = set()
        """Right answers that were parsed in time before."""
        self._unfinished = 0

    async def __call__(self, task: Task, reply: str) -> float:
        truth = task.answer or ""
        try:
            return await self._calls.call(mathematics.math_score, reply, truth)
        except BoundedCallError as error:
            # If the right answer itself cannot be parsed, the row is faulty: no reply could be right.
            await self._require_parsable(truth)
            if not isinstance(error, UnfinishedCallError):
                raise
            self._report_unfinished(task, error)
            return 0.0

    async def _require_parsable(self, truth: str) -> None:
        if truth in self._parsable:
            return
        try:
            await self._calls.call(mathematics.can_parse, truth)
        except ImportTimeError:
            raise
        except BoundedCallError as error:
            raise UnplayableTaskError(
                f"the right answer {truth[:80]!r} cannot be parsed: {error}; correct or remove the row"
            ) from error
        self._parsable.add(truth)

    def _report_unfinished(self, task: Task, error: UnfinishedCallError) -> None:
        """Print the count at 1, 10, 100, ... replies, so that the log stays short."""
        self._unfinished += 1
        if str(self._unfinished).strip("0") == "1":
            print(
                f"reward math: {self._unfinished} replies scored 0 because {error}; the latest one is of task {task.id!r}"
            )


class _Code:
    def __init__(self, args: CodeArgs) -> None:
        limits = CodeLimits(timeout_seconds=args.timeout_seconds, memory_bytes=args.memory_mib * 1024**2)
        self._runner = CodeRunner(limits, concurrency=args.concurrency)

    async def __call__(self, task: Task, reply: str) -> float:
        program = last_code_block(reply)
        return 0.0 if program is None else await self._runner.score_cases(program, _read_cases(task.answer or ""))


def check_truth(reward: str, truth: object) -> None:
    """Reject a row's ground truth that a built-in reward cannot compare with.

    Args:
        reward: name in `BUILT_IN`.
        truth: value of the column `ground_truth`, of any JSON type.

    Raises:
        ValueError: contains the value and the fix.
    """
    if (check := _TRUTHS.get(reward)) is not None:
        check(truth)


def _check_text(truth: object) -> None:
    if not isinstance(truth, str | int | float):
        fix = (
            f"the reward exact compares texts: write it as the text that a reply must have, {mathematics.OWN_FUNCTION}"
        )
        raise mathematics.TruthError(truth, fix)


def _check_cases(truth: object) -> None:
    if not _read_cases(truth if isinstance(truth, str) else json.dumps(truth)):
        raise ValueError(
            "ground_truth has no test case, so the reward code cannot score a reply; add one, or remove the row"
        )


_TRUTHS: Mapping[str, Callable[[object], object]] = {
    "math": mathematics.truth_text,
    "exact": _check_text,
    "code": _check_cases,
}
"""Checks of the ground truth. Rewards without a check accept any ground truth."""


def _read_cases(answer: str) -> list[Case]:
    """Return the test cases of a ground truth: `[{"stdin": ..., "stdout": ...}]`, or `{"inputs": [...], "outputs": [...]}`."""
    try:
        found = json.loads(answer)
        if isinstance(found, dict):
            return [Case(str(i), str(o)) for i, o in zip(found["inputs"], found["outputs"], strict=True)]
        return [Case(str(case["stdin"]), str(case["stdout"])) for case in found]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the ground truth contains no test cases: {error}") from error


class _Judged:
    def __init__(self, args: JudgeArgs) -> None:
        self._judge = Judge(args)

    async def __call__(self, task: Task, reply: str) -> float:
        return await self._judge.score(question=_prompt_text(task), truth=task.answer or "", reply=reply)


class _GroupJudged:
    def __init__(self, args: GroupJudgeArgs) -> None:
        self._judge = GroupJudge(args)

    async def of_group(self, task: Task, replies: Sequence[str]) -> Sequence[float]:
        return await self._judge.scores(question=_prompt_text(task), truth=task.answer or "", replies=replies)


class _Modelled:
    def __init__(self, args: RewardModelArgs) -> None:
        self._model = RewardModel(args)

    async def __call__(self, task: Task, reply: str) -> float:
        return await self._model.score(prompt=task.prompt, question=_prompt_text(task), reply=reply)


def _prompt_text(task: Task) -> str:
    """Return the prompt as one text, without system messages."""
    texts = [content_text(message.get("content"), f"prompt[{i}].content") for i, message in enumerate(task.prompt)]
    return "\n\n".join(text for text, message in zip(texts, task.prompt, strict=True) if message["role"] != "system")


BUILT_IN: Mapping[str, tuple[type[BaseModel], Callable[[Any], Scorer | GroupScorer]]] = {
    "exact": (ExactArgs, lambda _: _score_exact),
    "math": (MathArgs, _Math),
    "code": (CodeArgs, _Code),
    "judge": (JudgeArgs, _Judged),
    "reward-model": (RewardModelArgs, _Modelled),
    "group-judge": (GroupJudgeArgs, _GroupJudged),
}
"""Built-in rewards: class of the options, and constructor, by name."""

SERVED = frozenset({"judge", "group-judge", "reward-model"})
"""Rewards that send requests to a server, which may need a key."""
OF_GROUPS = frozenset({"group-judge"})
"""Rewards that score all replies of a group together."""
