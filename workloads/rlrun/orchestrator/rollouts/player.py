"""Single episodes against the engines, for training and for evaluation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import CompleteSampling, SamplingConfig
from rlrun.environments.episode import EpisodeError
from rlrun.environments.protocol import Episode, Score
from rlrun.environments.stage import Played, TaskRef
from rlrun.inference.client.engine_client import EngineUnavailableError
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import Conversation, RolloutError, UnplayablePromptError
from rlrun.orchestrator.rollouts.engine_session import Session
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.rollouts.harmony import HarmonyParser, speaks_harmony
from rlrun.orchestrator.rollouts.tool_parsing import parse_text
from rlrun.orchestrator.types import Rollout


class Slots:
    """Places of the episodes that are played at once, of training and evaluation together; first come, first served.

    Args:
        number: how many.
    """

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)
        self.training = 0
        """Places that training holds."""
        self.questions = 0
        """Held-out questions that wait for a place."""

    @asynccontextmanager
    async def take(self, *, evaluates: bool) -> AsyncIterator[None]:
        """Wait for a place and hold it for the block."""
        self.questions += evaluates
        try:
            await self._free.acquire()
        finally:
            self.questions -= evaluates
        self.training += not evaluates
        try:
            yield
        finally:
            self.training -= not evaluates
            self._free.release()


class Player:
    """Plays single episodes, for training and for evaluation; the only place that bounds how many are played at once."""

    def __init__(self, config: OrchestratorConfig, pool: EnginePool, chat: ChatTokens) -> None:
        self._config, self._pool, self._chat = config, pool, chat
        self.slots = Slots(config.max_concurrency)

    async def play(
        self,
        arena: Arena,
        task: TaskRef,
        *,
        sampling: SamplingConfig | CompleteSampling,
        session: Session,
        evaluates: bool = False,
    ) -> Rollout:
        """One episode; `sampling` says where the model's replies end, and how the chat template is called.

        Args:
            arena: its environment.
            task: what is played.
            sampling: of the model's replies.
            session: asks the engines.
            evaluates: whether it answers a held-out question.

        Raises:
            EpisodeError: the episode gives nothing to train on.
            RolloutError: the tokens cannot be trained on.
            UnplayablePromptError: no rollout of the task can be.
            EngineUnavailableError: the engines are to blame, not the episode.
        """
        async with self.slots.take(evaluates=evaluates):
            began = time.monotonic()
            conversation = self._converse(session, sampling)
            try:
                played = await arena.environment.play(
                    task,
                    conversation,
                    timeout_seconds=arena.config.timeout_seconds,
                    reward_seconds=arena.config.reward_timeout_seconds,
                )
            except EpisodeError as error:
                cause = self._cause_of(error, session)
                if cause is error:
                    raise
                raise cause from error
            return Rollout(
                sequences=tuple(conversation.recorded()),
                task_id=played.task_id,
                reward=played.score.reward,
                metrics=played.score.metrics,
                messages=tuple(played.episode.messages),
                texts=tuple(conversation.texts),
                finish_reason=conversation.finish_reason,
                truncated=conversation.truncated,
                seconds=time.monotonic() - began,
                tools=conversation.tools,
            )

    def _converse(self, session: Session, sampling: SamplingConfig | CompleteSampling) -> Conversation:
        """Return the policy as an episode sees it."""
        chat = self._chat.called_with(sampling.chat_template_arguments)
        thoughts = self._config.engine_parses_thoughts
        by_channel = not thoughts and speaks_harmony(chat)
        by_engine = thoughts or self._config.engine_parses_tools
        return Conversation(
            session,
            chat,
            seq_len=self._config.seq_len,
            max_tokens=sampling.max_tokens,
            strategy=self._config.trajectory_strategy,
            parse=HarmonyParser(chat) if by_channel else session.parse if by_engine else parse_text,
            parse_all=by_channel or thoughts,
            stop=sampling.stop,
        )

    def _cause_of(self, error: EpisodeError, session: Session) -> Exception:
        """Return the error of the engines or of the conversation behind a failed episode, or that of the episode."""
        if isinstance(error.__cause__, EngineUnavailableError) or (
            error.kind == "timeout" and (session.troubled or not self._pool.candidates())
        ):
            return EngineUnavailableError(str(error))
        if error.kind != "model" or (refused := _of_tokens(error)) is None:
            return error
        if isinstance(refused, UnplayablePromptError):
            return UnplayablePromptError(str(refused), refused.reason)
        return RolloutError(str(refused))


async def compare_group(arena: Arena, task: TaskRef, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """The rollouts of one group with the rewards that their comparison gives.

    Raises:
        EpisodeError: it fails.
    """
    scores = await arena.environment.compare(
        task,
        [
            Played(r.task_id, Episode(list(r.messages), max(1, len(r.texts))), Score(r.reward, dict(r.metrics)))
            for r in rollouts
        ],
        timeout_seconds=arena.config.timeout_seconds,
        reward_seconds=arena.config.reward_timeout_seconds,
    )
    return tuple(
        replace(rollout, reward=score.reward, metrics=score.metrics)
        for rollout, score in zip(rollouts, scores, strict=True)
    )


def _of_tokens(error: EpisodeError) -> Exception | None:
    """The conversation's own refusal behind a failed model call: no engine had a part in it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RolloutError | TemplateError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
