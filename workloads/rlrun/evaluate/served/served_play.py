"""Evaluation on external servers: the plan, the model client of one episode, and the source of answers.

The plan needs only a specification and the model's name at the servers, because no weights are loaded. The client receives and returns
messages, and takes the token counts from the server. `ServerAnswers` is the source of answers for `rlrun.evaluate.play.answer_missing`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loguru import logger

from rlrun.api.resource import RLRunSpec
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.rollout import CompleteSampling
from rlrun.environments.chat_server import chat_body
from rlrun.environments.episode import EpisodeError
from rlrun.environments.protocol import Message, Reply, Tool
from rlrun.environments.stage import TaskRef
from rlrun.evaluate.evaluation_job import (
    QuestionOptions,
    answers_folder,
    chosen_environments,
    evaluation_settings,
    resolve_rollouts,
)
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.play import Collect, Part, Session, answer_writer
from rlrun.evaluate.policies import Policy
from rlrun.evaluate.served.servers import ClientConfig, RefusedError, Servers
from rlrun.orchestrator.evaluation.evaluator import MAX_TRIES, Answer, QuestionRunner
from rlrun.orchestrator.rollouts.dispatcher import MAX_LOST
from rlrun.orchestrator.rollouts.engine_session import derived_seed
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.types import Rollout
from rlrun.protocol.files.failures import RoleError


@dataclass(frozen=True, kw_only=True)
class ServedRequest(QuestionOptions):
    """Settings of a command line and its files. None: not given."""

    name: str
    """Name of the run."""
    spec: RLRunSpec
    """Valid specification. Its model is not read."""
    model: str | None
    """Name of the model at the servers. None: their only model."""
    client: ClientConfig
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with the key."""


@dataclass(frozen=True, kw_only=True)
class ServedJob(Plan):
    """Plan of a command, with its servers."""

    client: ClientConfig
    env: Mapping[str, str]
    model: str

    def servers(self) -> Servers:
        """Create the client of the servers, without a request."""
        return Servers(self.client, self.env)


def prepare_served(request: ServedRequest) -> ServedJob:
    """Prepare a command. A server is contacted only if the model has no name.

    Raises:
        RoleError: a field or option is wrong; the message contains its value and a fix.
        OSError: the folder for answers cannot be written.
    """
    spec = request.spec
    environments = chosen_environments(spec, request.environment_ids)
    evaluation = evaluation_settings(spec, request, environments)
    model = request.model if request.model is not None else asyncio.run(_only_model(request))
    work = answers_folder(request, request.name)
    work.mkdir(parents=True, exist_ok=True)
    config = resolve_rollouts(
        spec,
        request.name,
        work,
        model=ModelConfig(name="served"),  # placeholder: only the servers have its tokenizer and weights
        environments=environments,
        evaluation=evaluation,
    )
    where = " ".join(sorted(request.client.base_url))
    return ServedJob(
        work=work,
        orchestrator=config.orchestrator,
        policies=[Policy(None, "base", None, f"{model} of {where}", served_name=model)],
        split=request.split,
        export=_no_export,
        client=request.client,
        env=request.env,
        model=model,
    )


async def _only_model(request: ServedRequest) -> str:
    servers = Servers(request.client, request.env)
    try:
        return await servers.model(None)
    finally:
        await servers.close()


def _no_export(policy: Policy, _folder: Path) -> None:
    raise AssertionError(f"{policy.name} is served, not loaded")


@dataclass(frozen=True)
class ServedRollout(Rollout):
    """Episode answered by a server, without tokens and therefore unusable for training."""

    prompt_tokens: int = 0
    """Tokens of the last prompt, counted by the server; 0 if not reported."""
    completion_tokens: int = 0
    """Tokens of all replies, counted by the server; 0 if not reported."""

    @property
    def tokens(self) -> int:
        """Number of all tokens, prompts included."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that the model sampled."""
        return self.completion_tokens


class ServedModel:
    """`ModelClient` of one episode.

    Args:
        servers: servers of the model.
        name: name of the model at the servers.
        sampling: sampling parameters.
        sample: number of the task's sample, from which its seed is derived.
    """

    def __init__(self, servers: Servers, name: str, sampling: CompleteSampling, sample: int) -> None:
        self._servers, self._name, self._sampling = servers, name, sampling
        self._seed = sampling.seed_of(sample)
        self.replies: list[Reply] = []
        self.waiting = False
        """Whether a request is running. It stays true if the episode is canceled during the request."""
        self.tools: tuple[Tool, ...] = ()
        """Tools offered most recently."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        """Sample the next message; see `ModelClient.complete`.

        Raises:
            RefusedError: the servers do not answer this question.
            RoleError: the servers would not answer any question.
        """
        sampling = self._sampling
        self.tools = tuple(tools or ()) or self.tools
        own = sampling.engine_parameters(self._next_seed())
        longest = sampling.max_tokens if max_tokens is None else min(max_tokens, sampling.max_tokens)
        fields = own | {
            "max_tokens": longest,
            "temperature": sampling.temperature,
            "stop": [*sampling.stop, *stop],
            "tools": list(tools or ()),
            "chat_template_kwargs": dict(sampling.chat_template_arguments),
        }
        self.waiting = True
        reply = await self._servers.ask(chat_body(self._name, messages, **fields))
        self.waiting = False
        self.replies.append(reply)
        return reply

    def _next_seed(self) -> int | None:
        number = len(self.replies)
        return self._seed if self._seed is None or not number else derived_seed(self._seed, number)


class ServerAnswers:
    """Answers of external servers that have one model.

    Args:
        job: plan of the command.
    """

    def __init__(self, job: ServedJob) -> None:
        self.plan = job
        self.subject = job.model

    async def open(self, session: Session) -> Collect:
        """Connect to the servers; see `AnswerSource.open`."""
        servers = await session.stack.enter_async_context(_open_servers(self.plan))
        runner = ServedRunner(self.plan, servers)

        async def collect(_policy: Policy, number: int, parts: Sequence[Part]) -> None:
            store = answer_writer(session.kept, parts, lambda _: session.watcher.answered())
            await runner.collect_answers([one for part in parts for one in part.left], number, store_answer=store)

        return collect


@asynccontextmanager
async def _open_servers(job: ServedJob) -> AsyncIterator[Servers]:
    """Open the servers and check that they have the model."""
    servers = job.servers()
    try:
        await servers.model(job.model)
        yield servers
    finally:
        await servers.close()


class ServedRunner(QuestionRunner):
    """Runner of questions on external servers.

    Args:
        job: plan of the command.
        servers: servers of the model.
    """

    def __init__(self, job: ServedJob, servers: Servers) -> None:
        super().__init__(job.orchestrator)
        self._model, self._servers = job.model, servers
        self._slots = asyncio.Semaphore(job.orchestrator.max_concurrency)

    async def _answer_question(self, arena: Arena, task: TaskRef, sample: int, version: int) -> Answer:
        failures = lost = 0
        reason = ""
        while failures < MAX_TRIES:
            model = ServedModel(self._servers, self._model, self._sampling_of(arena), sample)
            try:
                async with self._slots:
                    await self._servers.ready()
                    return await self._play_episode(arena, task, sample, model)
            except EpisodeError as error:
                logger.debug(f"task {task}: {error}")
                reason = str(error)
                refused = _server_failure(error)
                if isinstance(refused, RoleError):
                    raise refused from error
                if refused is not None:  # the retries are already used up
                    return Answer(arena.config.label, str(task), sample, None, str(refused))
                if error.kind == "timeout" and model.waiting:
                    reason = f"no reply within the {arena.config.timeout_seconds:g} s of an episode (environments.timeoutSeconds)"
                    self._servers.failed(reason)
                    return Answer(arena.config.label, str(task), sample, None, reason)
                if error.bystander and lost < MAX_LOST:
                    lost += 1
                else:
                    failures += 1
        return Answer(arena.config.label, str(task), sample, None, reason)

    async def _play_episode(self, arena: Arena, task: TaskRef, sample: int, model: ServedModel) -> Answer:
        """Play one episode.

        Raises:
            EpisodeError: the episode has no measurable result.
        """
        began = time.monotonic()
        played = await arena.environment.play(
            task,
            model,
            timeout_seconds=arena.config.timeout_seconds,
            reward_seconds=arena.config.reward_timeout_seconds,
        )
        last = model.replies[-1] if model.replies else None
        rollout = ServedRollout(
            sequences=(),
            task_id=played.task_id,
            reward=played.score.reward,
            metrics=played.score.metrics,
            messages=tuple(played.episode.messages),
            texts=tuple(reply.text for reply in model.replies),
            finish_reason="" if last is None else last.finish_reason,
            truncated=any(reply.truncated for reply in model.replies),
            seconds=time.monotonic() - began,
            tools=model.tools,
            prompt_tokens=0 if last is None else last.prompt_tokens,
            completion_tokens=sum(reply.completion_tokens for reply in model.replies),
        )
        return Answer(arena.config.label, played.task_id, sample, rollout)


def _server_failure(error: EpisodeError) -> RefusedError | RoleError | None:
    """Return the servers' failure that caused an episode's, or None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RefusedError | RoleError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
