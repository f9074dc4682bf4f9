"""Collection of missing answers from external servers, like `rlrun.evaluate.play` without engines and weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from loguru import logger

from rlrun.environments.episode import EpisodeError
from rlrun.environments.stage import TaskRef
from rlrun.evaluate.answers import keep_answers
from rlrun.evaluate.play import Part, Watcher, parts_of
from rlrun.evaluate.served.job import ServedJob
from rlrun.evaluate.served.model import ServedModel, ServedRollout
from rlrun.evaluate.served.servers import RefusedError, Servers
from rlrun.orchestrator.aio.background import background_tasks
from rlrun.orchestrator.evaluation.evaluator import MAX_TRIES, Answer, Question, QuestionRunner
from rlrun.orchestrator.journal.group_commit import GroupCommit
from rlrun.orchestrator.rollouts.dispatcher import MAX_LOST
from rlrun.orchestrator.rollouts.environment_pool import Arena, open_arenas
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume


async def ask_servers(job: ServedJob, watcher: Watcher) -> list[Part]:
    """Collect all missing answers and store each as it arrives.

    Raises:
        RoleError: the work cannot continue; possibly inside an exception group.
    """
    logs = RunPaths(job.work).logs(1, "orchestrator")
    async with AsyncExitStack() as stack:
        background = await stack.enter_async_context(background_tasks())
        arenas = await stack.enter_async_context(open_arenas(job.orchestrator.environments, logs, background))
        parts = parts_of(job, arenas)
        total, left = sum(len(part.wanted) for part in parts), sum(len(part.left) for part in parts)
        watcher.tell(f"{total} answers of {job.model} requested, {total - left} already saved")
        if not left:
            return parts
        servers = await stack.enter_async_context(_open_servers(job))
        watcher.expect(left)
        kept = GroupCommit(keep_answers, Volume(job.work, say=watcher.tell), doing="keep answers")
        stack.push_async_callback(kept.close)
        files = {part.environment: part.file for part in parts}

        async def taken(question: Question, answer: Answer) -> None:
            await kept.add((files[question.arena.config.label], question, answer))
            watcher.answered()

        await ServedRunner(job, servers).collect_answers([one for part in parts for one in part.left], 0, taken=taken)
    return parts


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

    async def _answer(self, arena: Arena, task: TaskRef, sample: int, version: int) -> Answer:
        failures = lost = 0
        reason = ""
        while failures < MAX_TRIES:
            model = ServedModel(self._servers, self._model, self._sampling(arena), sample)
            try:
                async with self._slots:
                    await self._servers.ready()
                    return await self._play(arena, task, sample, model)
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

    async def _play(self, arena: Arena, task: TaskRef, sample: int, model: ServedModel) -> Answer:
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
