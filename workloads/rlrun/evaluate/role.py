"""One attempt of a run of task Eval: its engines load one policy after the other and answer the questions without an
answer.

Every answer is on the volume before it counts. A killed attempt therefore loses only the running questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.diagnostics import heap
from rlrun.evaluate import report
from rlrun.evaluate.account import Account
from rlrun.evaluate.answers import keep_answers
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.play import Part, PolicyEvaluator, parts_of, staging_of
from rlrun.evaluate.ready import begin_attempt, make_plan
from rlrun.orchestrator.aio.volume import in_thread, retry_until_done
from rlrun.orchestrator.attempt import RunningAttempt, open_attempt
from rlrun.orchestrator.engines.connect import open_engines
from rlrun.orchestrator.evaluation.evaluator import Evaluator
from rlrun.orchestrator.journal.group_commit import GroupCommit
from rlrun.orchestrator.main import REAL, Outside, load_chat, run_process
from rlrun.orchestrator.progress.exposition import Measures, engine_loads
from rlrun.orchestrator.rollouts.player import Player
from rlrun.orchestrator.stop import TERMINATED, Stop
from rlrun.orchestrator.trainer.waiting import Since, Waiting
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import FULL_BYTES, RoleError
from rlrun.runtime import exit_codes


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
        await retry_until_done(volume, "write the results", lambda: _write_results(plan, parts))
        _report_unanswered(parts)
        await running.farewell()  # before this process ends: the Lease then contains the results
    return exit_codes.OK


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
