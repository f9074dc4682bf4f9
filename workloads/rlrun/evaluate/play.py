"""Collection of missing answers of every policy.

A command has one path, `answer_missing`, for both sources of answers: engines that load the policies (`EngineAnswers`, with the
orchestrator's evaluation and weight hand-over, without a trainer), and external servers (`rlrun.evaluate.served.served_play`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.evaluate.answers import ANSWERS, AnswerFile, Entry, StoredAnswer, answer_fingerprint, keep_answers
from rlrun.evaluate.evaluated_engines import Engines, check_given, given_engines, own_engines
from rlrun.evaluate.evaluation_job import Job
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.policies import Policy
from rlrun.evaluate.staging import Staging
from rlrun.inference.client.engine_client import EngineClient
from rlrun.orchestrator.aio.event_loop import Background, Signal, background_tasks
from rlrun.orchestrator.engines.discovery import REGULAR, Monitor, Pace
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.engines.weight_sync import WeightSync
from rlrun.orchestrator.evaluation.evaluator import Answer, Evaluator, Question, list_questions
from rlrun.orchestrator.journal.journal_writer import GroupCommit
from rlrun.orchestrator.main import load_chat
from rlrun.orchestrator.rollouts.environment_pool import Arena, open_arenas
from rlrun.orchestrator.rollouts.player import Player
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume
from rlrun.runtime import exit_codes


class Watcher(Protocol):
    """Display of the progress for a user."""

    def tell(self, line: str) -> None:
        """Print a line."""
        ...

    def expect(self, answers: int) -> None:
        """Announce the number of answers to come."""
        ...

    def answered(self) -> None:
        """Report that one of them has arrived."""
        ...


@dataclass(frozen=True)
class Part:
    """Questions of one policy and one environment, with their answers."""

    policy: Policy
    environment: str
    wanted: Sequence[Question]
    file: AnswerFile

    @property
    def left(self) -> list[Question]:
        """Questions without an answer."""
        return self.file.missing(self.wanted)

    def answers(self) -> list[StoredAnswer]:
        """Return the stored answers of this part."""
        return self.file.answers(self.wanted)


@dataclass(frozen=True)
class Session:
    """Open parts of one collection, for its source of answers."""

    arenas: Sequence[Arena]
    background: Background
    stack: AsyncExitStack
    """Stack that closes the connections of the source."""
    kept: GroupCommit[Entry]
    """Durable writer of the answers."""
    watcher: Watcher


Collect = Callable[[Policy, int, Sequence[Part]], Awaitable[None]]
"""Function that collects and stores the missing answers of a policy. The number is the policy's version for the engines."""


class AnswerSource(Protocol):
    """Source of the answers of a command."""

    @property
    def plan(self) -> Plan:
        """Plan of the command."""
        ...

    @property
    def subject(self) -> str:
        """Answering policies or model, for the first line of the progress."""
        ...

    async def open(self, session: Session) -> Collect:
        """Connect to engines or servers, and return the function that collects answers."""
        ...


def answer_missing(source: AnswerSource, watcher: Watcher) -> list[Part]:
    """Collect all missing answers and store each as it arrives.

    Raises:
        RoleError: the work cannot continue; possibly inside an exception group.
        KeyboardInterrupt: the process received a signal.
    """
    parts = asyncio.run(_until_signalled(collect_missing(source, watcher)))
    if parts is None:
        raise KeyboardInterrupt
    return parts


async def _until_signalled(asking: Coroutine[object, object, list[Part]]) -> list[Part] | None:
    """Run a coroutine and return its result, or None after a signal."""
    work = asyncio.ensure_future(asking)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        work.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        return await work
    except asyncio.CancelledError:
        if stopped:
            return None
        raise


async def collect_missing(source: AnswerSource, watcher: Watcher) -> list[Part]:
    """Collect the missing answers of a source, and return all parts. Nothing is connected if no answer is missing."""
    plan = source.plan
    logs = RunPaths(plan.work).logs(1, "orchestrator")
    async with AsyncExitStack() as stack:
        background = await stack.enter_async_context(background_tasks())
        arenas = await stack.enter_async_context(open_arenas(plan.orchestrator.environments, logs, background))
        parts = parts_of(plan, arenas)
        missing = {policy: [part for part in parts if part.policy == policy and part.left] for policy in plan.policies}
        total, left = sum(len(part.wanted) for part in parts), sum(len(part.left) for part in parts)
        watcher.tell(f"{total} answers of {source.subject} requested, {total - left} already saved")
        if not left:
            return parts
        watcher.expect(left)
        kept = GroupCommit(keep_answers, Volume(plan.work, say=watcher.tell), doing="keep answers")
        collect = await source.open(Session(arenas, background, stack, kept, watcher))
        # The stack closes in reverse order: the answers are saved before the source and the environments close.
        stack.push_async_callback(kept.close)
        for number, (policy, own) in enumerate(missing.items()):
            if own:
                await collect(policy, number, own)
    return parts


def answer_writer(
    kept: GroupCommit[Entry], parts: Sequence[Part], answered: Callable[[Answer], object]
) -> Callable[[Question, Answer], Awaitable[None]]:
    """Return a function that stores an answer of these parts, and then calls `answered`."""
    files = {part.environment: part.file for part in parts}

    async def store(question: Question, answer: Answer) -> None:
        await kept.add((files[question.arena.config.label], question, answer))
        answered(answer)

    return store


def parts_of(plan: Plan, arenas: Sequence[Arena]) -> list[Part]:
    """Return the questions to answer, policy by policy, with their stored answers.

    Raises:
        RoleError: an environment has no tasks.
    """
    return [part for policy in plan.policies for part in _split_parts(plan, policy, arenas)]


def _split_parts(plan: Plan, policy: Policy, arenas: Sequence[Arena]) -> Iterator[Part]:
    config = plan.orchestrator
    for index, arena in enumerate(arenas):
        sampling = plan.evaluation.sampling_over(arena.config.sampling or config.sampling)
        fingerprint = answer_fingerprint(policy, arena.config, sampling, seq_len=config.seq_len, split=plan.split)
        file = AnswerFile.open_in(plan.work / ANSWERS, policy, arena.config, fingerprint, plan.attempt)
        wanted = _wanted_questions(plan, arena)
        if not wanted:
            fix = "exclude it with --environment-ids" if plan.attempt is None else "remove it"
            raise RoleError(
                f"environments[{index}]: {arena.config.label} has no tasks in its {plan.split} split; {fix}",
                exit_codes.DATA,
            )
        yield Part(policy, arena.config.label, wanted, file)


def _wanted_questions(plan: Plan, arena: Arena) -> list[Question]:
    settings = plan.evaluation
    return list(
        list_questions([arena], plan.split, num_tasks=settings.num_tasks, samples_per_task=settings.samples_per_task)
    )


@contextmanager
def staging_of(plan: Plan, folder: Path) -> Iterator[Staging]:
    """Provide folders of the plan's policies for the engines; they are removed at the end of the block."""
    staging = Staging(folder, plan.export, plan.adapters)
    try:
        yield staging
    finally:
        staging.close()


class EngineAnswers:
    """Answers of engines that load one policy after the other.

    Args:
        job: plan of the command.
        pace: interval of the engines' health checks.
    """

    def __init__(self, job: Job, pace: Pace = REGULAR) -> None:
        self.plan = job
        self.subject = f"{len(job.policies)} policies"
        self._pace = pace

    async def open(self, session: Session) -> Collect:
        """Start or connect the engines; see `AnswerSource.open`."""
        job, watcher = self.plan, session.watcher
        if not job.engine_urls:
            watcher.tell(f"starting the engines; logs are in {RunPaths(job.work).logs(1, 'inference')}")
        engines = session.stack.enter_context(_open_engines(job))
        session.background(engines.watch())
        asking = await _connect_engines(job, engines, session)
        session.background(asking.sync.run())
        session.background(asking.monitor(self._pace).run())
        staging = session.stack.enter_context(staging_of(job, engines.weights))

        async def collect(policy: Policy, number: int, parts: Sequence[Part]) -> None:
            await asking.collect_answers(policy, number, parts, staging, answered=lambda _: watcher.answered())
            watcher.tell(f"{policy.name} answered the tasks of {', '.join(part.environment for part in parts)}")

        return collect


def _open_engines(job: Job) -> AbstractContextManager[Engines]:
    if job.engine_urls:
        return given_engines(job.engine_urls, job.api_key, job.engine_weights)
    return own_engines(job.config, job.gpu_ids, share_gpus=job.share_gpus)


async def _connect_engines(job: Job, engines: Engines, session: Session) -> PolicyEvaluator:
    """Create the clients and the pool of the engines. The stack of the session closes the connections."""
    config = job.orchestrator
    longest = max(environment.timeout_seconds for environment in config.environments)
    update = config.weight_sync.timeout_seconds
    clients = [
        EngineClient(url, engines.api_key, generate_timeout=longest, update_timeout=update) for url in engines.urls
    ]
    for client in clients:
        session.stack.push_async_callback(client.close)
    if engines.supervisor is None:
        await check_given(clients)
    chat = await asyncio.to_thread(load_chat, config)
    signals = Signal()
    replicas = [Replica(client.base_url, client) for client in clients]
    pool = EnginePool(replicas, signals, max_concurrency=config.max_concurrency, token_limit=chat.token_limit)
    evaluator = Evaluator(config, session.arenas, Player(config, pool, chat), pool, chat)
    return PolicyEvaluator(config, evaluator, pool, signals, session.kept)


class PolicyEvaluator:
    """Engines with their weight hand-over, and the questions to them.

    Args:
        config: configuration of the orchestrator.
        evaluator: runner of the questions.
        pool: pool of the engines.
        signals: signal notified of changes of the engines.
        kept: durable writer of the answers.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        evaluator: Evaluator,
        pool: EnginePool,
        signals: Signal,
        kept: GroupCommit[Entry],
    ) -> None:
        self._evaluator, self._pool, self._signals, self._kept = evaluator, pool, signals, kept
        self.sync = WeightSync(pool, signals, timeout_seconds=config.weight_sync.timeout_seconds)

    def monitor(self, pace: Pace) -> Monitor:
        """Return a monitor that detects a hanging engine long before the timeout of an episode."""
        return Monitor(self._pool, self._signals, pace)

    async def collect_answers(
        self,
        policy: Policy,
        number: int,
        parts: Sequence[Part],
        staging: Staging,
        *,
        loaded: Callable[[], object] = lambda: None,
        answered: Callable[[Answer], object],
    ) -> None:
        """Load a policy into the engines and collect its missing answers.

        Args:
            policy: policy to load.
            number: its version for the engines, greater than all earlier ones.
            parts: parts with its questions.
            staging: folders for its weights.
            loaded: callback when the engines have loaded the policy.
            answered: callback with each answer after it is stored.

        Raises:
            RoleError: the engines cannot load it.
        """
        path = await asyncio.to_thread(staging.put, policy, number)
        self.sync.publish(number, None if path is None else str(path), hold=True)
        await self._signals.until(lambda: self._pool.version == number or not self.sync.held(number))
        if not self.sync.held(number):
            raise RoleError(f"{policy.name} cannot be loaded: {self._pool.problems()}", exit_codes.DATA)
        loaded()
        await self._evaluator.collect_answers(
            [question for part in parts for question in part.left],
            number,
            store_answer=answer_writer(self._kept, parts, answered),
        )
        self.sync.release(number)
        staging.remove(path)
