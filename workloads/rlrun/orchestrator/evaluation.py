"""Held-out evaluation: the first tasks of each environment's `eval` split, answered by exactly one policy version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loguru import logger

from rlrun.config.roles import OrchestratorConfig
from rlrun.config.rollout import EvaluationConfig, SamplingConfig
from rlrun.environments.episode import EpisodeError
from rlrun.environments.stage import TaskRef
from rlrun.inference.client import EngineUnavailableError
from rlrun.orchestrator.arenas import Arena
from rlrun.orchestrator.conversation import RolloutError
from rlrun.orchestrator.dispatcher import Player
from rlrun.orchestrator.engines import EnginePool, Session
from rlrun.orchestrator.estimates import passes
from rlrun.orchestrator.rollouts import Rollout
from rlrun.orchestrator.tokens import ChatTokens

HOLD_SECONDS = 1800.0
"""Longest time that an evaluation may hold back newer weights; then it is given up."""
MAX_TRIES = 3


def due(version: int, config: EvaluationConfig | None, *, max_steps: int) -> bool:
    """Whether a version is evaluated: every `interval` versions from 0, and the last."""
    return config is not None and (version % config.interval == 0 or version == max_steps)


@dataclass(frozen=True)
class Answer:
    """One sample of one task; `rollout` is None when all tries failed, and counts as reward 0 would be a lie: it is left out."""

    environment: str
    task_id: str
    sample: int
    rollout: Rollout | None


def evaluation_metrics(answers: Sequence[Answer]) -> dict[str, float]:
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

    async def evaluate(self, version: int) -> list[Answer]:
        """All answers of a version; the caller holds the engines at it, and brings the deadline."""
        assert self._config.evaluation is not None
        settings, began = self._config.evaluation, time.monotonic()
        async with asyncio.TaskGroup() as group:
            plays = [
                group.create_task(self._answer(arena, task, sample, version))
                for arena in self._arenas
                for task in _first(arena.environment.tasks("eval"), settings.num_tasks)
                for sample in range(settings.samples_per_task)
            ]
        answers = [play.result() for play in plays]
        shown = {k: round(v, 4) for k, v in evaluation_metrics(answers).items() if k.endswith("reward/mean")}
        logger.info(f"version {version}: {shown} ({len(answers)} answers in {time.monotonic() - began:.1f} s)")
        return answers

    async def _answer(self, arena: Arena, task: TaskRef, sample: int, version: int) -> Answer:
        sampling = self._sampling(arena)
        for _ in range(MAX_TRIES):
            session = Session(self._pool, sampling, self._chat.stop_token_ids, version)
            try:
                rollout = await self._player.play(arena, task, max_tokens=sampling.max_tokens, session=session)
            except (EpisodeError, RolloutError, EngineUnavailableError) as error:
                logger.debug(f"evaluation of task {task}: {error}")
                continue
            if all((s.versions[s.loss_mask] == version).all() for s in rollout.sequences):
                return Answer(arena.config.label, rollout.task_id, sample, rollout)
        return Answer(arena.config.label, str(task), sample, None)

    def _sampling(self, arena: Arena) -> SamplingConfig:
        assert self._config.evaluation is not None
        return self._config.evaluation.sampling or arena.config.sampling or self._config.sampling


def _first(tasks: Sequence[TaskRef], count: int) -> Iterator[TaskRef]:
    return (tasks[index] for index in range(min(count, len(tasks))))


def trace_line(answer: Answer, version: int) -> Mapping[str, Any]:
    """An answer as people read it."""
    rollout = answer.rollout
    line: dict[str, Any] = {
        "policy_version": version,
        "environment": answer.environment,
        "task_id": answer.task_id,
        "sample": answer.sample,
    }
    if rollout is None:
        return line | {"error": "every try failed"}
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
