"""Evaluation: the first tasks of each environment's split, answered by exactly one policy version; in a run, and after it (`evaluate`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loguru import logger

from rlrun.config.roles import OrchestratorConfig
from rlrun.config.rollout import EvaluationConfig, SamplingConfig
from rlrun.environments.episode import EpisodeError
from rlrun.environments.protocol import Split
from rlrun.environments.stage import TaskRef
from rlrun.inference.client import EngineUnavailableError
from rlrun.orchestrator.arenas import Arena
from rlrun.orchestrator.conversation import RolloutError
from rlrun.orchestrator.dispatcher import Player
from rlrun.orchestrator.engines import EnginePool
from rlrun.orchestrator.estimates import passes
from rlrun.orchestrator.rollouts import Rollout
from rlrun.orchestrator.sessions import Session
from rlrun.orchestrator.tokens import ChatTokens

HOLD_SECONDS = 1800.0
"""Longest time that an evaluation may hold back newer weights; then it is given up."""
MAX_TRIES = 3


def due(version: int, config: EvaluationConfig | None, *, max_steps: int) -> bool:
    """Whether a version is evaluated: every `interval` versions from 0, and the last."""
    return config is not None and (version % config.interval == 0 or version == max_steps)


@dataclass(frozen=True)
class Question:
    """One sample of one task that is wanted."""

    arena: Arena
    task: TaskRef
    sample: int


def questions(arenas: Iterable[Arena], split: Split, *, num_tasks: int, samples_per_task: int) -> Iterator[Question]:
    """What is asked of every policy: the first tasks of each environment's split, each as often as samples are wanted."""
    for arena in arenas:
        tasks = arena.environment.tasks(split)
        for index in range(min(num_tasks, len(tasks))):
            for sample in range(samples_per_task):
                yield Question(arena, tasks[index], sample)


class Judged(Protocol):
    """What is measured of a rollout; `Rollout` is one, and so is what is left of it in a file."""

    @property
    def reward(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def truncated(self) -> bool: ...
    @property
    def loss_tokens(self) -> int: ...


class Answered(Protocol):
    """One sample of one task; `rollout` is None when all tries failed, and counts as reward 0 would be a lie: it is left out."""

    @property
    def environment(self) -> str: ...
    @property
    def task_id(self) -> str: ...
    @property
    def rollout(self) -> Judged | None: ...


@dataclass(frozen=True)
class Answer:
    """The `Answered` of a policy that was just asked."""

    environment: str
    task_id: str
    sample: int
    rollout: Rollout | None
    error: str = ""
    """Why the last try failed."""


def evaluation_metrics(answers: Sequence[Answered]) -> dict[str, float]:
    """Metrics of one evaluation.

    Returns:
        Per environment `eval/<env>/reward/mean`: the mean over tasks of each task's mean over its samples (avg@k), `pass@k` for
        k = 1, 2, 4, ..., the number of failed answers, the share of truncated ones, and the mean reply length in tokens.
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
        metrics[f"{prefix}/errors"] = float(len(own) - len(rollouts))
        if not rollouts:
            continue
        metrics[f"{prefix}/reward/mean"] = _mean([_mean(rewards) for rewards in tasks.values()])
        metrics |= {f"{prefix}/pass@{k}": value for k, value in passes(list(tasks.values())).items()}
        metrics[f"{prefix}/completion_length/mean"] = _mean([float(r.loss_tokens) for r in rollouts])
        metrics[f"{prefix}/truncated"] = _mean([float(r.truncated) for r in rollouts])
        for name in sorted({name for r in rollouts for name in r.metrics}):
            metrics[f"{prefix}/env/{name}"] = _mean([r.metrics[name] for r in rollouts if name in r.metrics])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Evaluator:
    """Evaluates one version at a time.

    Args:
        config: the role's configuration.
        arenas: the environments.
        player: plays episodes.
        pool: the engines.
        chat: for the tokens that end a reply.
    """

    def __init__(
        self, config: OrchestratorConfig, arenas: Sequence[Arena], player: Player, pool: EnginePool, chat: ChatTokens
    ) -> None:
        self._config, self._arenas, self._player, self._pool, self._chat = config, arenas, player, pool, chat
        self.answered = 0
        """Answers so far, of all versions."""

    async def evaluate(self, version: int) -> list[Answer]:
        """All answers of a version; the caller holds the engines at it, and brings the deadline."""
        assert self._config.evaluation is not None
        settings, began = self._config.evaluation, time.monotonic()
        wanted = questions(
            self._arenas, "eval", num_tasks=settings.num_tasks, samples_per_task=settings.samples_per_task
        )
        answers = await self.ask(wanted, version)
        shown = {k: round(v, 4) for k, v in evaluation_metrics(answers).items() if k.endswith("reward/mean")}
        logger.info(f"version {version}: {shown} ({len(answers)} answers in {time.monotonic() - began:.1f} s)")
        return answers

    async def ask(
        self,
        wanted: Iterable[Question],
        version: int,
        *,
        taken: Callable[[Question, Answer], Awaitable[None]] | None = None,
    ) -> list[Answer]:
        """The answers of a version, in the order of the questions.

        Args:
            wanted: the questions, all asked at once as far as the player's bound allows.
            version: the engines hold it until this returns.
            taken: told of each answer as it comes; waited for.
        """

        async def answer(question: Question) -> Answer:
            found = await self._answer(question.arena, question.task, question.sample, version)
            self.answered += 1
            if taken is not None:
                await taken(question, found)
            return found

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(answer(question)) for question in wanted]
        return [task.result() for task in asking]

    async def _answer(self, arena: Arena, task: TaskRef, sample: int, version: int) -> Answer:
        sampling, reason = self._sampling(arena), ""
        for _ in range(MAX_TRIES):
            session = Session(self._pool, sampling, self._chat.stop_token_ids, version)
            try:
                rollout = await self._player.play(arena, task, max_tokens=sampling.max_tokens, session=session)
            except (EpisodeError, RolloutError, EngineUnavailableError) as error:
                logger.debug(f"evaluation of task {task}: {error}")
                reason = str(error)
                continue
            if all((s.versions[s.loss_mask] == version).all() for s in rollout.sequences):
                return Answer(arena.config.label, rollout.task_id, sample, rollout)
            reason = "the weights were changed while it answered"
        return Answer(arena.config.label, str(task), sample, None, reason)

    def _sampling(self, arena: Arena) -> SamplingConfig:
        assert self._config.evaluation is not None
        return self._config.evaluation.sampling or arena.config.sampling or self._config.sampling


def trace_line(answer: Answer) -> dict[str, Any]:
    """An answer as people read it."""
    rollout = answer.rollout
    line: dict[str, Any] = {
        "environment": answer.environment,
        "task_id": answer.task_id,
        "sample": answer.sample,
    }
    if rollout is None:
        return line | {"error": answer.error or "every try failed"}
    return line | {
        "reward": rollout.reward,
        "metrics": dict(rollout.metrics),
        "messages": list(rollout.messages),
        "completion": "\n".join(rollout.texts),
        "finish_reason": rollout.finish_reason,
        "truncated": rollout.truncated,
        "tokens": rollout.tokens,
        "completion_tokens": rollout.loss_tokens,
    }
