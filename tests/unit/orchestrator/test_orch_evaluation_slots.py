"""Evaluation deadline, which runs only while the questions have the resources they need."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from orch_simulation import FakeEngine

from rlrun.config.models.rollout import EvaluationConfig, SamplingConfig
from rlrun.environments.episode import EpisodeError
from rlrun.orchestrator.aio.event_loop import Signal, pausable_timeout
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.evaluation.evaluator import MAX_TRIES, Answer, Evaluator, Question
from rlrun.orchestrator.rollouts.conversation import RolloutError, UnplayablePromptError
from rlrun.orchestrator.rollouts.player import Player
from rlrun.orchestrator.types import Rollout

VERSION = 3


class Answering(Evaluator):
    """Evaluator that answers each question after a delay, with one player slot and one engine request."""

    def __init__(self, slots: int, engine_slots: int = 64, seconds: float = 0.01) -> None:
        replica = Replica("http://e", FakeEngine(), version=VERSION)
        pool = EnginePool([replica], Signal(), max_concurrency=engine_slots)
        config: Any = SimpleNamespace(max_concurrency=slots)
        chat: Any = None
        super().__init__(config, [], Player(config, pool, chat), pool, chat)
        self.seconds = seconds

    async def _answer_question(self, arena: Any, task: Any, sample: int, version: int) -> Answer:
        async with self._player.slots.take(evaluates=True):
            replica = await self._pool.acquire(None, version, 1)
            await asyncio.sleep(self.seconds)
            self._pool.release(replica, 1)
        return Answer("e", str(task), sample, None)

    async def late(self, questions: int, seconds: float) -> int:
        """Return the number of questions that the deadline cut off."""
        arena: Any = SimpleNamespace(environment=SimpleNamespace(compares=False), config=SimpleNamespace(label="e"))
        task: Any = "t"
        answers = await self.collect_answers(
            [Question(arena, task, i) for i in range(questions)], VERSION, seconds=seconds
        )
        return sum(answer.late for answer in answers)


async def train(evaluator: Answering, seconds: float) -> None:
    """Play one training rollout."""
    async with evaluator._player.slots.take(evaluates=False):
        replica = await evaluator._pool.acquire(None, None, 1)
        await asyncio.sleep(seconds)
        evaluator._pool.release(replica, 1)


@pytest.mark.parametrize(("slots", "engine_slots"), [(2, 64), (8, 2)])
async def test_evaluation_deadline_pauses_while_training_rollouts_hold_slots(slots: int, engine_slots: int) -> None:
    evaluator = Answering(slots, engine_slots)
    training = [asyncio.create_task(train(evaluator, 0.5)) for _ in range(2)]
    await asyncio.sleep(0)
    assert await evaluator.late(4, seconds=0.3) == 0
    assert 0.3 <= evaluator.waited_seconds <= 5
    await asyncio.gather(*training)
    assert (evaluator._pool.waiting_for_version, evaluator._player.slots.training) == (0, 0)


async def test_evaluation_deadline_runs_while_questions_wait_for_each_other() -> None:
    evaluator = Answering(slots=1, seconds=3600.0)
    assert await evaluator.late(3, seconds=0.15) == 3
    assert evaluator.waited_seconds == 0


async def test_evaluation_deadline_runs_during_training_without_contention() -> None:
    evaluator = Answering(slots=8, seconds=3600.0)
    training = asyncio.create_task(train(evaluator, 3600.0))
    await asyncio.sleep(0)
    assert await evaluator.late(3, seconds=0.15) == 3
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)


async def test_pausable_timeout_without_limit_does_not_expire() -> None:
    async with pausable_timeout(None, lambda: False):
        await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError):
        async with pausable_timeout(0.02, lambda: False):
            await asyncio.sleep(3600)


class Refusing(Player):
    """Player that refuses each episode and counts the calls."""

    def __init__(self, error: Exception) -> None:
        self.error, self.played = error, 0

    async def play(self, *_: Any, **__: Any) -> Rollout:
        self.played += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (UnplayablePromptError("too long", "too_long"), 1),
        (EpisodeError("task", "e", "t", "row 2 cannot be read"), 1),
        (EpisodeError("environment", "e", "t", "a bug"), MAX_TRIES),
        (RolloutError("no token"), MAX_TRIES),
    ],
)
async def test_unplayable_question_is_tried_once(error: Exception, tries: int) -> None:
    player = Refusing(error)
    config: Any = SimpleNamespace(evaluation=EvaluationConfig(), sampling=SamplingConfig(max_tokens=8))
    chat: Any = SimpleNamespace(called_with=lambda _: SimpleNamespace(stop_token_ids=(2,)))
    pool: Any = None
    arena: Any = SimpleNamespace(config=SimpleNamespace(label="e", sampling=None))
    task: Any = "t"
    answer = await Evaluator(config, [], player, pool, chat)._answer_question(arena, task, 0, VERSION)
    assert (answer.rollout, answer.error, player.played) == (None, str(error), tries)
