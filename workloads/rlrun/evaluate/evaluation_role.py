"""One attempt of a run of task Eval: its start, its work and its progress report.

The steps of the progress are answers. The start claims the attempt's number and selects the policies. Then the engines load one policy
after the other and answer the questions without an answer. Every answer is on the volume before it counts, so a killed attempt loses only
the running questions.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from loguru import logger

from rlrun.config.models.language_models import LoRAConfig
from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import EvaluationConfig
from rlrun.config.models.run_config import config_fingerprint
from rlrun.diagnostics import heap
from rlrun.evaluate import policies, report
from rlrun.evaluate.answers import keep_answers
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.play import Part, PolicyEvaluator, parts_of, staging_of
from rlrun.evaluate.policies import Policy
from rlrun.evaluate.staging import highest_rank, make_exporter
from rlrun.orchestrator.aio.volume_access import in_thread, retry_until_done
from rlrun.orchestrator.attempt import TERMINATED, RunningAttempt, Stop, open_attempt
from rlrun.orchestrator.engines.discovery import open_engines
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.evaluation.evaluator import Answer, Evaluator
from rlrun.orchestrator.journal.journal_writer import GroupCommit
from rlrun.orchestrator.main import REAL, Outside, load_chat, run_process
from rlrun.orchestrator.progress.exposition import Measures, engine_loads
from rlrun.orchestrator.progress.progress_server import Progress, StepClock, waiting_reason
from rlrun.orchestrator.rollouts.player import Player
from rlrun.orchestrator.trainer.trainer_client import Since, Waiting
from rlrun.protocol.files.attempts import check_number, first_attempt, write_attempt
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import FULL_BYTES, RoleError, storage_errors
from rlrun.protocol.files.paths import Role, RunPaths
from rlrun.protocol.files.run_folder import recorded_run
from rlrun.protocol.files.volume_faults import Volume
from rlrun.runtime import exit_codes


class Account:
    """Counter of answers.

    Args:
        plan: plan of the run.
        parts: questions with their stored answers.
        pool: pool of the engines.
        since: start time of the current wait.
        volume: volume of the run.
    """

    def __init__(self, plan: Plan, parts: Sequence[Part], pool: EnginePool, since: Since, volume: Volume) -> None:
        self._plan, self._parts, self._pool, self._since, self._volume = plan, parts, pool, since, volume
        self.total = sum(len(part.wanted) for part in parts)
        self.found = self.done = self.total - sum(len(part.left) for part in parts)
        self._failed = self._moves = 0
        self._rewards: list[float] = []
        self._version: int | None = None
        self._clock = StepClock()
        self._doing: tuple[Role, str] = ("inference", "starting")
        self._over = {part.policy for part in parts} - {part.policy for part in parts if part.left}
        self.results = self._result_lines()
        """Results of finished policies, one line per policy and environment."""

    def loads(self, policy: Policy) -> None:
        """Record that the engines load a policy."""
        self._doing = "inference", f"loading {policy.name}"
        self._rewards = []

    def loaded(self, policy: Policy) -> None:
        """Record that all engines have loaded the policy."""
        self._doing, self._version = ("inference", f"answering as {policy.name}"), policy.step or 0
        self._moves += 1

    def answered(self, answer: Answer) -> None:
        """Count an answer that is stored or has finally failed."""
        self._moves += 1
        if answer.rollout is None:
            self._failed += 1
            return
        self.done += 1
        self._clock.trained(self.done)
        self._rewards.append(answer.rollout.reward)

    def over(self, policy: Policy) -> None:
        """Record that a policy has no more questions."""
        self._over.add(policy)
        self.results = self._result_lines()

    def _result_lines(self) -> tuple[str, ...]:
        over = [part for part in self._parts if part.policy in self._over]
        return tuple(report.short_lines(report.results_document(self._plan, over)))

    def progress(self) -> Progress:
        """Return the current progress."""
        role, phase = self._doing
        problems = self._pool.problems() if self._pool.version is None else ""
        waiting, trouble = self._since.waiting(role, phase, problems), self._volume.trouble()
        return Progress(
            step=self.done,
            max_steps=self.total,
            policy_version=self._version,
            checkpoint_step=None,
            resumed_from_step=self.found or None,
            reward=sum(self._rewards) / len(self._rewards) if self._rewards else None,
            eval={},
            tokens_per_second=None,
            staleness_mean=None,
            waiting_on=waiting_reason(waiting, trouble),
            eta_seconds=self._clock.remaining_seconds(self.total),
            in_flight=self._pool.in_flight,
            errors=self._failed,
            waiting_role=waiting.role,
            waiting_phase=waiting.phase,
            waiting_since=waiting.since,
            activity=self._moves,
            storage=trouble,
            results=self.results,
        )


_STAGING = ".evaluation.a"


def begin_attempt(paths: RunPaths, config: OrchestratorConfig, attempt: int) -> Path:
    """Claim the attempt's number, as a trainer does for other tasks, and return the folder for the engines' weights.

    Raises:
        RoleError: the number is in use, or the volume refuses the write.
    """
    check_number(paths, attempt)
    begun = first_attempt(world_size=1, config_hash=config_fingerprint(config), attempt=attempt, uid=config.uid)
    with storage_errors(paths.root, "start the attempt"):
        try:
            write_attempt(paths, begun)
        except FileExistsError:
            check_number(paths, attempt)
            raise
        for left in paths.weights.glob(f"{_STAGING}*"):  # left by killed attempts
            shutil.rmtree(left, ignore_errors=True)
    return paths.weights / f"{_STAGING}{attempt:04d}"


def make_plan(config: OrchestratorConfig, attempt: int) -> Plan:
    """Make the plan from the current content of the volume.

    Raises:
        RoleError: a field is wrong; the message contains its value and a fix.
    """
    paths = RunPaths(Path(config.output_dir))
    model, source = config.model, config.model.source(paths.model)
    base = policies.base_policy(model, None if model.name is not None else Path(source))
    chosen, trained_with = _choose_policies(config, paths, base)
    own = recorded_run(paths)
    _check_served(chosen, own.lora if own is not None else None)
    return Plan(
        work=paths.root,
        orchestrator=config.model_copy(update={"evaluation": config.evaluation or EvaluationConfig()}),
        policies=chosen,
        split="eval",
        export=make_exporter(model, source, trained_with),
        attempt=attempt,
    )


def _choose_policies(
    config: OrchestratorConfig, paths: RunPaths, base: Policy
) -> tuple[list[Policy], LoRAConfig | None]:
    """Return the policies, and the adapter settings of the run that trained them."""
    wanted = config.policies
    if wanted is None:
        return [base], None
    folder = paths.root.parent / wanted.from_run
    field = f"policies.fromRun ({wanted.from_run})"
    if not folder.is_dir():
        raise RoleError(
            f"{field}: the folder {folder} does not exist; set a run on the same volume, or a folder with its path in the pods",
            exit_codes.DATA,
        )
    other = RunPaths(folder)
    trained = recorded_run(other)
    available = policies.in_folder(folder) if trained is None else policies.of_run(folder)
    if not available and not wanted.base:
        raise RoleError(
            f"{field}: {folder} has no policy yet; wait for its first version, or set policies.base: true",
            exit_codes.DATA,
        )
    where = f"{folder} (policies.fromRun)"
    chosen = policies.choose_policies(available, base, steps=wanted.steps, with_base=wanted.base, where=where)
    return chosen, None if trained is None else trained.lora


def _check_served(chosen: Sequence[Policy], lora: LoRAConfig | None) -> None:
    """Refuse policies that the engines cannot serve. Support for adapters is fixed at the engines' start."""
    kind = policies.served_as(chosen)
    adapters = [policy for policy in chosen if policy.kind == "adapter"]
    if kind == "adapter":
        rank = highest_rank(adapters)
        if lora is None or lora.rank < rank:
            has = "not set" if lora is None else str(lora.rank)
            raise RoleError(
                f"trainer.lora.rank is {has}, but the engines must reserve memory for {adapters[0].name}, an adapter of rank {rank}; "
                f"set trainer.lora: {{rank: {rank}}}",
                exit_codes.CONFIGURATION,
            )
    elif lora is not None and (whole := [policy.name for policy in chosen if policy.kind != "base"]):
        raise RoleError(
            f"trainer.lora is set, but {', '.join(whole)} are complete models; remove trainer.lora",
            exit_codes.CONFIGURATION,
        )


async def run(
    config: OrchestratorConfig,
    *,
    attempt: int,
    api_key: str,
    stop: Stop | None = None,
    loaded: Callable[[], None] = lambda: None,
    outside: Outside = REAL,
) -> int:
    """Run the evaluation to its end; the arguments are those of `rlrun.orchestrator.main.orchestrate_attempt`.

    Returns:
        0 if every policy is evaluated; 143 if the run was stopped earlier.

    Raises:
        RoleError: the run cannot continue; possibly inside an exception group.
    """
    async with AsyncExitStack() as stack:
        opened = open_attempt(
            config, attempt, api_key, waits=_starting_wait, total_steps=0, least_bytes=FULL_BYTES, stop=stop
        )
        running = await stack.enter_async_context(opened)
        background, volume = running.background, running.volume
        staged = await in_thread(partial(begin_attempt, running.paths, config, attempt))
        plan = await in_thread(partial(make_plan, config, attempt))
        environments = outside.open_environments(config.environments, running.logs, background)
        arenas = await stack.enter_async_context(environments)
        chat = await in_thread(partial(load_chat, config))
        engines = open_engines(
            config,
            api_key,
            running.signal,
            background,
            connect=outside.connect,
            look_up=outside.look_up,
            token_limit=chat.token_limit,
        )
        pool = await stack.enter_async_context(engines)
        parts = await in_thread(partial(parts_of, plan, arenas))
        account = Account(plan, parts, pool, running.since, volume)
        running.report_with(
            account.progress, lambda: Measures(engines=engine_loads(pool.replicas), volume=volume.space)
        )
        evaluator = Evaluator(plan.orchestrator, arenas, Player(config, pool, chat), pool, chat)
        kept = GroupCommit(keep_answers, volume, doing="keep answers")
        # The stack closes in reverse order: the answers are saved before the engines' connections and the attempt close.
        stack.push_async_callback(kept.close)
        asking = PolicyEvaluator(config, evaluator, pool, running.signal, kept)
        background(asking.sync.run())
        background(asking.monitor(outside.pace).run())
        loaded()
        if not await _until_stopped(running, _answer_questions(plan, parts, asking, staged, account)):
            logger.info(
                f"stopped by a signal; the next attempt requests the {account.total - account.done} missing answers"
            )
            await running.farewell()
            return TERMINATED
        await _finish_run(running, plan, parts)
    return exit_codes.OK


async def _finish_run(running: RunningAttempt, plan: Plan, parts: Sequence[Part]) -> None:
    await retry_until_done(running.volume, "write the results", lambda: _write_results(plan, parts))
    _report_unanswered(parts)
    await running.farewell()  # before this process ends: the Lease then contains the results


def _starting_wait(since: Since) -> Waiting:
    return since.waiting("orchestrator", "starting", "loading policies and environments")


async def _until_stopped(running: RunningAttempt, work: Coroutine[object, object, None]) -> bool:
    """Run the work until its end or a signal. Returns whether it ended."""
    task, stopped = asyncio.ensure_future(work), False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    running.stop_with(stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise
        return False
    return True


async def _answer_questions(
    plan: Plan, parts: Sequence[Part], asking: PolicyEvaluator, staged: Path, account: Account
) -> None:
    logger.info(f"{account.total} answers of {len(plan.policies)} policies requested, {account.found} already saved")
    with staging_of(plan, staged) as staging:
        for number, policy in enumerate(plan.policies):
            # Link all versions at the start, because a running training may delete them. Other policies are prepared in their turn.
            if policy.kind in ("whole", "adapter") and any(part.left for part in parts if part.policy == policy):
                await in_thread(partial(staging.put, policy, number))
        for number, policy in enumerate(plan.policies):
            own = [part for part in parts if part.policy == policy]
            missing = [part for part in own if part.left]
            if missing:
                account.loads(policy)
                loaded = partial(account.loaded, policy)
                await asking.collect_answers(policy, number, missing, staging, loaded=loaded, answered=account.answered)
                account.over(policy)
            for line in report.short_lines(report.results_document(plan, own)):
                logger.info(line)


def _write_results(plan: Plan, parts: Sequence[Part]) -> None:
    write_json(report.write_path(plan.work), report.results_document(plan, parts))


def _report_unanswered(parts: Sequence[Part]) -> None:
    """Log the unanswered questions.

    Raises:
        RoleError: a policy has no answer in an environment.
    """
    for line in report.unanswered_lines(parts):
        logger.warning(line)
    for part in parts:
        if len(part.left) == len(part.wanted):
            raise RoleError(
                f"{part.policy.name} has no answer in {part.environment}; the first of {len(part.wanted)} errors: "
                f"{part.file.first_error()}",
                exit_codes.DATA,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the role and return the exit code."""
    return run_process(argv, "rlrun.evaluate", partial(run, loaded=heap.Slices().begin))
