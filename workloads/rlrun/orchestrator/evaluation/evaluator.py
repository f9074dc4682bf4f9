"""Evaluation of exactly one policy version on the first tasks of each environment's split.

Several samples per task give unbiased estimates of pass@k. The training run evaluates its versions, and the
evaluation job (`evaluate`) evaluates policies after the training.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import Protocol, Required, TypedDict

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import CompleteSampling, EvaluationConfig, solved_rewards
from rlrun.environments.episode import EpisodeError
from rlrun.environments.protocol import Message, Split, Tool
from rlrun.environments.stage import TaskRef
from rlrun.inference.client.engine_client import EngineUnavailableError
from rlrun.orchestrator.aio.event_loop import pausable_timeout
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.progress.step_metrics import OwnMetrics
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import RolloutError
from rlrun.orchestrator.rollouts.dispatcher import MAX_LOST
from rlrun.orchestrator.rollouts.engine_session import Session
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.rollouts.playable_tasks import unplayable_reason
from rlrun.orchestrator.rollouts.player import Player, compare_group
from rlrun.orchestrator.types import Rollout


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Return the probability that at least one of `k` samples solves the task: `1 - C(n-c, k) / C(n, k)` (Chen et al.
    2021, eq. 1).

    Args:
        samples: n, number of samples drawn.
        solved: c, number of samples that solved the task.
        k: size of the subset, from 1 to n.

    Raises:
        ValueError: the counts contradict each other; the message names the argument.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; it must be from 1 to the number of samples, {samples}")
    if not 0 <= solved <= samples:
        raise ValueError(f"solved is {solved}; it must be from 0 to the number of samples, {samples}")
    return 1 - comb(samples - solved, k) / comb(samples, k)


def mean_pass_at_k(rewards: Sequence[Sequence[float]], *, solved_reward: float) -> dict[int, float]:
    """Return the mean pass@k over tasks for k = 1, 2, 4, ... up to the smallest number of samples of a task.

    Args:
        rewards: rewards of each task's samples, at least one sample per task.
        solved_reward: reward from which a sample counts as solved.
    """
    most = min((len(own) for own in rewards), default=0)
    counts = [(len(own), sum(reward >= solved_reward for reward in own)) for own in rewards]
    return {
        k: sum(pass_at_k(samples, solved, k) for samples, solved in counts) / len(counts)
        for k in (2**power for power in range(most.bit_length()))
    }


MAX_TRIES = 3


def is_due(version: int, config: EvaluationConfig | None, *, max_steps: int) -> bool:
    """Return whether a version is evaluated: every `interval` versions from 0, and the last one."""
    return config is not None and (version % config.interval == 0 or version == max_steps)


@dataclass(frozen=True)
class Question:
    """One requested sample of one task."""

    arena: Arena
    task: TaskRef
    sample: int


def list_questions(
    arenas: Iterable[Arena], split: Split, *, num_tasks: int, samples_per_task: int
) -> Iterator[Question]:
    """Yield the questions for each policy: the first tasks of each environment's split, with the requested number of
    samples each.
    """
    for arena in arenas:
        tasks = arena.environment.tasks(split)
        for index in range(min(num_tasks, len(tasks))):
            for sample in range(samples_per_task):
                yield Question(arena, tasks[index], sample)


class Judged(Protocol):
    """Measured values of a rollout: a `Rollout`, or the values stored in a file."""

    @property
    def reward(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def truncated(self) -> bool: ...
    @property
    def loss_tokens(self) -> int: ...


class Answered(Protocol):
    """One sample of one task. `rollout` is None if all tries failed; such a sample is excluded, because a reward of 0
    would be wrong.
    """

    @property
    def environment(self) -> str: ...
    @property
    def task_id(self) -> str: ...
    @property
    def rollout(self) -> Judged | None: ...
    @property
    def late(self) -> bool:
        """Whether it was cut off at the evaluation's deadline."""
        ...


@dataclass(frozen=True)
class Answer:
    """Answer of a policy to one question; an `Answered`."""

    environment: str
    task_id: str
    sample: int
    rollout: Rollout | None
    error: str = ""
    """Error of the last try."""
    late: bool = False
    """Whether it was cut off at the evaluation's deadline."""


def evaluation_metrics(
    answers: Sequence[Answered], solved: Mapping[str, float], own_metrics: OwnMetrics | None = None
) -> dict[str, float]:
    """Compute the metrics of one evaluation.

    Args:
        answers: answers of all environments.
        solved: reward from which an answer counts as solved, by environment.
        own_metrics: names of the environments' metrics in earlier evaluations. None: this evaluation is the first.

    Returns:
        Per environment `eval/<env>/reward/mean`: the mean over tasks of each task's mean over its samples (avg@k),
        `pass@k` for k = 1, 2, 4, ..., the number of answers, of failed answers (`errors`) and of answers cut off by the
        deadline (`timeouts`), the share of truncated answers, and the mean reply length in tokens. `reward/mean` covers
        the answers; in `reward/mean_all` failed and late samples count as wrong, with reward 0.
    """
    metrics: dict[str, float] = {}
    for label in dict.fromkeys(answer.environment for answer in answers):
        own = [answer for answer in answers if answer.environment == label]
        tasks: dict[str, list[float]] = {}
        rollouts = [answer.rollout for answer in own if answer.rollout is not None]
        for answer in own:
            if answer.rollout is not None:
                tasks.setdefault(answer.task_id, []).append(answer.rollout.reward)
        prefix = f"eval/{label}"
        late = sum(answer.late for answer in own)
        metrics[f"{prefix}/answers"] = float(len(rollouts))
        metrics[f"{prefix}/errors"] = float(len(own) - len(rollouts) - late)
        metrics[f"{prefix}/timeouts"] = float(late)
        # Each task has the same number of samples, so this is also the mean over tasks.
        metrics[f"{prefix}/reward/mean_all"] = sum(rollout.reward for rollout in rollouts) / len(own)
        if not rollouts:
            continue
        metrics[f"{prefix}/reward/mean"] = _mean_reward([_mean_reward(rewards) for rewards in tasks.values()])
        metrics |= {
            f"{prefix}/pass@{k}": value
            for k, value in mean_pass_at_k(list(tasks.values()), solved_reward=solved[label]).items()
        }
        metrics[f"{prefix}/completion_length/mean"] = _mean_reward([float(r.loss_tokens) for r in rollouts])
        metrics[f"{prefix}/truncated"] = _mean_reward([float(r.truncated) for r in rollouts])
        means = (own_metrics or OwnMetrics()).means(label, (r.metrics for r in rollouts))
        metrics |= {f"{prefix}/env/{name}": mean for name, mean in sorted(means.items())}
    return metrics


def _mean_reward(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class QuestionRunner(ABC):
    """Runner of questions: all in parallel within the limits of the engines. Answers that an environment compares stay
    together.

    Args:
        config: configuration of the role.
    """

    def __init__(self, config: OrchestratorConfig) -> None:
        self._config = config
        self.answered = 0
        """Number of answers so far, of all versions."""
        self.waited_seconds = 0.0
        """Seconds of the latest evaluation during which its deadline was paused."""

    async def collect_answers(
        self,
        wanted: Iterable[Question],
        version: int,
        *,
        store_answer: Callable[[Question, Answer], Awaitable[None]] | None = None,
        seconds: float | None = None,
    ) -> list[Answer]:
        """Return the answers of a version, in the order of the questions.

        Args:
            wanted: questions, all started at once within the player's limit.
            version: policy version, which the engines hold until this returns.
            store_answer: callback with each answer as it arrives, and awaited.
            seconds: deadline for all answers, without the time during which questions wait for capacity held by
                training. A missing answer is then `late`. None: no deadline.
        """
        asked = list(wanted)
        found: dict[int, Answer] = {}

        async def answer(numbers: Sequence[int]) -> None:
            given = await self._answer_questions([asked[number] for number in numbers], version)
            for number, one in zip(numbers, given, strict=True):
                self.answered += 1
                if store_answer is not None:
                    await store_answer(asked[number], one)
                found[number] = one

        try:
            async with pausable_timeout(seconds, self._waits_for_others) as clock, asyncio.TaskGroup() as group:
                for numbers in _joint_questions(asked):
                    group.create_task(answer(numbers))
                    await asyncio.sleep(0)  # starting ten thousand tasks in one go would block the event loop
        except TimeoutError:
            logger.warning(
                f"version {version}: {len(found)} of {len(asked)} answers finished within {seconds:g} s "
                "(evaluation.timeoutSeconds); the results cover only these faster answers"
            )
        self.waited_seconds = clock.standing
        return [found.get(number) or _late_answer(question, seconds) for number, question in enumerate(asked)]

    def _waits_for_others(self) -> bool:
        """Return whether questions wait for capacity held by other work, which pauses the deadline."""
        return False

    async def _answer_questions(self, questions: Sequence[Question], version: int) -> list[Answer]:
        """Answer one question, or all questions about one task whose answers are compared as a group."""
        first = questions[0]
        if not first.arena.environment.compares:
            return [await self._answer_question(q.arena, q.task, q.sample, version) for q in questions]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._answer_question(q.arena, q.task, q.sample, version)) for q in questions]
        given = [one.result() for one in asked]
        played = [answer.rollout for answer in given if answer.rollout is not None]
        if not played:
            return given
        try:
            compared = iter(await compare_group(first.arena, first.task, played))
        except EpisodeError as error:
            logger.debug(f"evaluation of task {first.task}: {error}")
            return [replace(answer, rollout=None, error=answer.error or str(error)) for answer in given]
        return [answer if answer.rollout is None else replace(answer, rollout=next(compared)) for answer in given]

    @abstractmethod
    async def _answer_question(self, arena: Arena, task: TaskRef, sample: int, version: int) -> Answer:
        """Answer one question."""

    def _sampling_of(self, arena: Arena) -> CompleteSampling:
        assert self._config.evaluation is not None
        return self._config.evaluation.sampling_over(arena.config.sampling or self._config.sampling)


class Evaluator(QuestionRunner):
    """Evaluation of one version at a time.

    Args:
        config: configuration of the role.
        arenas: environments.
        player: player of the episodes.
        pool: pool of the engines.
        chat: tokenizer, for the tokens that end a reply.
    """

    def __init__(
        self, config: OrchestratorConfig, arenas: Sequence[Arena], player: Player, pool: EnginePool, chat: ChatTokens
    ) -> None:
        super().__init__(config)
        self._arenas, self._player, self._pool, self._chat = arenas, player, pool, chat
        self._own_metrics = OwnMetrics()

    async def evaluate(self, version: int) -> list[Answer]:
        """Return the answers of a version, while the caller holds the engines at it. Answers after the deadline are
        `late`.
        """
        assert self._config.evaluation is not None
        settings = self._config.evaluation
        wanted = list_questions(
            self._arenas, "eval", num_tasks=settings.num_tasks, samples_per_task=settings.samples_per_task
        )
        return await self.collect_answers(wanted, version, seconds=settings.timeout_seconds)

    def metrics(self, answers: Sequence[Answered]) -> dict[str, float]:
        """Return the metrics of the answers of one version, see `evaluation_metrics`."""
        return evaluation_metrics(answers, solved_rewards(self._config.environments), self._own_metrics)

    def _waits_for_others(self) -> bool:
        slots = self._player.slots
        return slots.training > 0 and (slots.questions > 0 or self._pool.waiting_for_version > 0)

    async def _answer_question(self, arena: Arena, task: TaskRef, sample: int, version: int) -> Answer:
        sampling, reason = self._sampling_of(arena), ""
        stops = self._chat.called_with(sampling.chat_template_arguments).stop_token_ids
        failures = lost = 0
        while failures < MAX_TRIES:
            session = Session(self._pool, sampling, stops, version, seed=sampling.seed_of(sample))
            try:
                rollout = await self._player.play(arena, task, sampling=sampling, session=session, evaluates=True)
            except (EpisodeError, RolloutError, EngineUnavailableError) as error:
                logger.debug(f"evaluation of task {task}: {error}")
                reason = str(error)
                if unplayable_reason(error) is not None:
                    break
                if isinstance(error, EpisodeError) and error.bystander and lost < MAX_LOST:
                    lost += 1
                else:
                    failures += 1
                continue
            if all((s.versions[s.loss_mask] == version).all() for s in rollout.sequences):
                return Answer(arena.config.label, rollout.task_id, sample, rollout)
            failures += 1
            reason = "the weights changed during the answer"
        return Answer(arena.config.label, str(task), sample, None, reason)


def _joint_questions(asked: Sequence[Question]) -> list[list[int]]:
    """Return the positions of the questions that are answered together: those about one task if its environment
    compares answers, otherwise one each.
    """
    found: list[list[int]] = []
    groups: dict[tuple[int, TaskRef], list[int]] = {}
    for number, question in enumerate(asked):
        if not question.arena.environment.compares:
            found.append([number])
            continue
        key = id(question.arena), question.task
        if key not in groups:
            found.append(groups.setdefault(key, []))
        groups[key].append(number)
    return found


def _late_answer(question: Question, seconds: float | None) -> Answer:
    error = f"it did not finish within the evaluation's {seconds:g} s (evaluation.timeoutSeconds)"
    return Answer(question.arena.config.label, str(question.task), question.sample, None, error, late=True)


class TraceLine(TypedDict, total=False):
    """An answer in a trace file or in the results of an evaluation job: the first three fields, and either `error` or
    the other fields.
    """

    environment: Required[str]
    task_id: Required[str]
    sample: Required[int]
    error: str
    tools: list[Tool]
    reward: float
    metrics: dict[str, float]
    messages: list[Message]
    completion: str
    finish_reason: str
    truncated: bool
    tokens: int
    completion_tokens: int


def trace_line(answer: Answer) -> TraceLine:
    """Return an answer as a line of a file for people."""
    rollout = answer.rollout
    line: TraceLine = {
        "environment": answer.environment,
        "task_id": answer.task_id,
        "sample": answer.sample,
    }
    if rollout is None:
        return {**line, "error": answer.error or "all tries failed"}
    if rollout.tools:
        line["tools"] = list(rollout.tools)
    return {
        **line,
        "reward": rollout.reward,
        "metrics": dict(rollout.metrics),
        "messages": list(rollout.messages),
        "completion": "\n".join(rollout.texts),
        "finish_reason": rollout.finish_reason,
        "truncated": rollout.truncated,
        "tokens": rollout.tokens,
        "completion_tokens": rollout.loss_tokens,
    }
