"""Execution of single episodes against the engines, for training and for evaluation.

The module also parses replies in the Harmony format of GPT-OSS. Such a reply consists of several messages:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

The channel `final` is for users, `analysis` contains thoughts, and `commentary` contains calls (`to=functions.NAME`
in the header) and the text before them. Source: the Harmony response format, https://github.com/openai/harmony.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import CompleteSampling, SamplingConfig
from rlrun.environments.episode import EpisodeError
from rlrun.environments.protocol import Episode, Score, Tool
from rlrun.environments.stage import Played, TaskRef
from rlrun.inference.client.engine_client import EngineUnavailableError
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import Conversation, RolloutError, UnplayablePromptError
from rlrun.orchestrator.rollouts.engine_session import Session
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.rollouts.message_forms import ReplyParts, parse_text
from rlrun.orchestrator.types import Rollout

_TOKENS = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"})
_MESSAGE = re.compile(r"(.*?)<\|message\|>(.*?)(?=<\|start\|>|<\|end\|>|<\|call\|>|<\|return\|>|$)", re.DOTALL)
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def speaks_harmony(chat: ChatTokens) -> bool:
    """Return whether the tokenizer has the format's special tokens."""
    return {*chat.template.special_tokens} >= _TOKENS


class HarmonyParser:
    """Parser of replies by channel.

    Args:
        chat: tokenizer of the policy.
    """

    def __init__(self, chat: ChatTokens) -> None:
        self._chat = chat

    async def __call__(self, token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> ReplyParts:
        return parse_channels(self._chat.decode_all(token_ids))


def parse_channels(spelled: str) -> ReplyParts:
    """Parse a reply.

    Args:
        spelled: complete reply with special tokens.
    """
    final: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, str]] = []
    for header, body in _MESSAGE.findall(spelled):
        if recipient := _RECIPIENT.search(header):
            calls.append((recipient[1], body.strip() or "{}"))
            continue
        channel = _CHANNEL.search(header)
        (final if channel is None or channel[1] == "final" else thoughts).append(body)
    if not (final or thoughts or calls):
        return ReplyParts()
    content = "".join(final)
    return ReplyParts(content, tuple(calls), reasoning="\n".join(thoughts) or None, text=content)


class Slots:
    """Limit of concurrent episodes, shared by training and evaluation in order of arrival.

    Args:
        number: number of concurrent episodes.
    """

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)
        self.training = 0
        """Slots held by training."""
        self.questions = 0
        """Evaluation questions that wait for a slot."""

    @asynccontextmanager
    async def take(self, *, evaluates: bool) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the block."""
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
    """Player of single episodes, and the only limit of their concurrency."""

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
        """Play one episode.

        Args:
            arena: environment of the episode.
            task: task to play.
            sampling: sampling parameters, stop texts, and arguments of the chat template.
            session: sender of the requests to the engines.
            evaluates: whether the episode answers an evaluation question.

        Raises:
            EpisodeError: the episode has no usable result.
            RolloutError: the tokens cannot be trained on.
            UnplayablePromptError: no rollout of the task can be trained on.
            EngineUnavailableError: the engines are the cause, not the episode.
        """
        async with self.slots.take(evaluates=evaluates):
            began = time.monotonic()
            conversation = self._start_conversation(session, sampling)
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

    def _start_conversation(self, session: Session, sampling: SamplingConfig | CompleteSampling) -> Conversation:
        """Create the policy's conversation for one episode."""
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
        """Return the error of the engines or of the conversation that caused a failed episode, otherwise the episode's
        error.
        """
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
    """Return the rollouts of one group with the rewards of their comparison.

    Raises:
        EpisodeError: the comparison failed.
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
    """Return the conversation's refusal behind a failed model call, or None. No engine is involved in such a refusal."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RolloutError | TemplateError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
