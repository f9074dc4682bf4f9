"""Main loop of the trainer, the same on every rank, and the order of steps among runs.

    start    choose the base checkpoint, write the attempt's file, load, publish the base version
    loop     rank 0 selects the next order and broadcasts it; all ranks carry it out: a step, the end of training, the end of the run
    stop     after a signal, all ranks stop together: between two micro-batches, while they wait, or after a write; then they save the
             last finished step

Several runs may share the model: they take turns step by step, and runs without a batch are skipped (`next_turn`, without side effects).
See `trained_run` for the state of one run, `guests.shared_runs` for runs that join and leave.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from loguru import logger

from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.attempts import RESUME_REQUIRED_VARIABLE, Attempt, read_attempt
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume
from rlrun.runtime import exit_codes
from rlrun.trainer.channel.batch_feed import TICK_SECONDS, LiveFeed, ReplayFeed, cut_metrics
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.checkpoints import resume
from rlrun.trainer.checkpoints.shared_check import SharedCheck
from rlrun.trainer.engines_beside import EnginesBeside
from rlrun.trainer.garbage import Garbage
from rlrun.trainer.guests.shared_runs import SharedRuns
from rlrun.trainer.learning.run_objective import bind_objective, log_band_warnings
from rlrun.trainer.modeling.shared_model import load_policy, model_source
from rlrun.trainer.process import Link, SharedObjects
from rlrun.trainer.proof.start_check import policy_check
from rlrun.trainer.ranks.group import Agreement, Group, process_group
from rlrun.trainer.ranks.phases import Phases
from rlrun.trainer.ranks.start_clock import StartClock, launched_ago
from rlrun.trainer.ranks.stop import Stop, StopAgreed
from rlrun.trainer.runs import (
    CloseOrder,
    DropOrder,
    EndOrder,
    FinishOrder,
    JoinOrder,
    LeaveOrder,
    OneRun,
    Order,
    SaveOrder,
    StepOrder,
    WaitOrder,
    read_order,
    start_of,
    write_order,
)
from rlrun.trainer.trained_run import Run


def next_turn(runs: Sequence[str], last: str | None, ready: Collection[str]) -> str | None:
    """Return the first ready run after the run that trained most recently, in round-robin order, or None.

    A ready run waits for at most one step of each other run.

    Args:
        runs: all runs, in a fixed order; new ones come last.
        last: run that trained the last step; None or the name of a removed run starts at the first run.
        ready: runs with a batch.
    """
    after = runs.index(last) + 1 if last in runs else 0
    return next((run for run in [*runs[after:], *runs[:after]] if run in ready), None)


def train_runs(
    config: TrainerConfig,
    *,
    attempt: int,
    api_key: str,
    replay: Path | None = None,
    config_hash: str = "",
    stop: Stop | None = None,
) -> int:
    """Train to the last step.

    Args:
        config: the role's resolved configuration.
        attempt: number of this attempt, unused so far in the run's folder.
        api_key: key of the channel to the orchestrator.
        replay: folder of recorded batches to train on, without an orchestrator.
        config_hash: hash of the run's configuration, stored in attempt file and manifests.
        stop: stop requests from signals. Default: no requests.

    Returns:
        Exit code: 0, or 128 + n if signal n ended the run early.

    Raises:
        RoleError: error message for the user, with the exit code.
    """
    clock = StartClock(launched_ago())
    clock.end_phase("imports")
    objective = bind_objective(config)  # reports an unknown loss before the model is loaded
    engines = EnginesBeside(config.engine_urls, api_key) if config.colocated else None
    if engines is not None:
        engines.wait_until_asleep()  # before this process allocates GPU memory
    with process_group(config.gpus_per_replica, config.parallelism) as group:
        if group.leads:
            log_band_warnings(config)
        agreement, news = Agreement(group, stop or Stop()), threading.Event()
        phases = Phases.of_group(group.rank, group.world_size)
        link = Link(replay=replay is not None)
        if group.leads:
            link = _open_link(config, attempt, api_key, replay, phases, news)
        paths = RunPaths(Path(config.output_dir))
        clock.end_phase("group")
        begun = _begin_attempt(config, attempt, group, config_hash, replay)
        clock.end_phase("base")
        if link.channel is not None:
            link.channel.phase("loading")
        phases.report_phase("loading", begun.base_step)
        # A checkpoint contains trained parameters only: the frozen weights below adapters are loaded from the model.
        with_weights = config.lora is not None or (begun.base_step == 0 and begun.origin is None)
        policy = load_policy(
            config, model_source(config, paths, group), group, with_weights=with_weights, check=policy_check(config)
        )
        clock.end_phase("model")
        process = SharedObjects(policy, agreement.check_stop, phases.report_phase, engines)
        host = Run(config, begun, objective, process, link, output_dir=paths.root)
        clock.end_phase("checkpoint")
        host.clock = clock
        size = 1 if config.lora is None or replay is not None else config.lora.slots
        runs = SharedRuns(host, process, agreement, size=size, api_key=api_key) if size > 1 else OneRun(host)
        return Loop(runs, group, agreement, news).run()


def _open_link(
    config: TrainerConfig, attempt: int, api_key: str, replay: Path | None, phases: Phases, news: threading.Event
) -> Link:
    """Open rank 0's source of batches: the orchestrator, or a folder."""
    if replay is not None:
        return Link(None, ReplayFeed(replay), replay=True)
    paths = RunPaths(Path(config.output_dir))
    channel = Channel.start_server(
        attempt=attempt,
        api_key=api_key,
        host=config.host,
        port=config.port,
        batch_path=lambda step: paths.batch(step, attempt),
        news=news,
    )
    channel.ranks = phases.other_states
    return Link(channel, LiveFeed(channel))


def _begin_attempt(config: TrainerConfig, attempt: int, group: Group, config_hash: str, replay: Path | None) -> Attempt:
    """Choose the base checkpoint on rank 0 and write the attempt's file; other ranks check their part of the files, then read the
    attempt.
    """
    paths, check, beginning = RunPaths(Path(config.output_dir)), SharedCheck(group), resume.Beginning()
    if group.leads:
        new = resume.NewAttempt(
            attempt,
            group.world_size,
            config_hash,
            with_orchestrator=replay is None,
            required=RESUME_REQUIRED_VARIABLE in os.environ,
        )
        begun = Volume(paths.root, say=logger.warning).insist(
            "begin the attempt",
            lambda: resume.start_attempt(
                paths, config, new, log=logger.warning, check=check.verify_checkpoint, beginning=beginning
            ),
        )
        logger.info(
            f"attempt {attempt}: {group.world_size} ranks ({group.dims}) on {group.device.type}, from {start_of(begun)}"
        )
        if replay is not None:
            cut_metrics(paths, begun.base_step)
    # Until here the other ranks have served rank 0's checks of candidates. From here on the
    # attempt's file exists, and every rank reads the same choice.
    check.finish_checks()
    return read_attempt(paths.attempt_file(attempt))


class Loop:
    """Loop in which rank 0 selects orders and all ranks carry them out.

    Args:
        runs: the host's run, or the host and its guests.
        group: all ranks.
        agreement: point at which all ranks agree to stop.
        news: event that is set if rank 0 has to check for a new order.
    """

    def __init__(self, runs: OneRun, group: Group, agreement: Agreement, news: threading.Event) -> None:
        self._runs, self._group, self._agreement, self._news = runs, group, agreement, news
        self._garbage = Garbage()
        self._last: str | None = None
        """Name of the run that trained most recently."""

    def run(self) -> int:
        """Train all steps and return the exit code."""
        host, stop = self._runs.host, self._agreement.stop
        with ExitStack() as stack:
            if host.channel is not None:
                stack.callback(host.channel.close)
            try:
                host.publish_base()
                stop.allow_time(host.config.checkpoint.grace_period_seconds, self._group.neighbor_pids())
                if host.channel is not None:
                    host.channel.stop = stop.request_stop
                while True:
                    # Signals reach the ranks at different times. A rank that left by itself would
                    # leave the others in their next collective, so all ranks agree before each
                    # order.
                    self._agreement.check_stop()
                    # Only rank 0 knows which batches have arrived. A rank that decided by itself
                    # could enter another collective than the others, and both would wait until the
                    # timeout.
                    document = write_order(self._next_order()) if self._group.leads else None
                    order = read_order(self._group.broadcast(document))
                    if isinstance(order, EndOrder):
                        return exit_codes.OK
                    self._carry_out(order)
            except StopAgreed:
                # The step that a stop interrupts is abandoned before its update, so the last
                # finished step is consistent on all ranks and can be saved.
                return self._save_and_end()

    # ---- rank 0 decides

    def _next_order(self) -> Order:
        """Return the next order, or `wait` after one tick, so that waiting ranks can notice a request to stop."""
        deadline = time.monotonic() + TICK_SECONDS
        while True:
            # Cleared before the checks: news that arrives during a check ends the wait below.
            # Cleared after them, it would be lost and the order would be delayed by a tick.
            self._news.clear()
            # The order of the checks: a failed or finished run must not get another step, and with
            # a batch always ready a guest's request would otherwise wait forever.
            order = self._state_order() or self._runs.next_request() or self._step_order()
            if order is not None:
                return order
            if not self._runs.runs and not self._runs.expects_runs():
                return EndOrder()
            if (left := deadline - time.monotonic()) <= 0:
                return WaitOrder()
            self._news.wait(left)

    def _state_order(self) -> Order | None:
        """Return the order that the state of a run requires, or None."""
        for run in self._runs.runs:
            # An error between steps ends a guest, or the process if it is the host's.
            has_ended = run.stage == "finished" and run.has_ended()
            error = run.find_error() or (run.wait_for_manifest() if has_ended else None)
            if error is not None:
                return self._runs.handle_failure(run, error)
            # A refused checkpoint is saved again. While training continues, the next step does this; only without further steps it is a
            # separate order. The call runs in every round, because it also reports the refused write.
            retry = run.is_retry_due()
            if run.stage == "finished" or run.is_trained():
                if retry:
                    return SaveOrder(run.name)
                if run.refused_checkpoint() is not None and not has_ended:
                    continue
            # After the last step: report, then close when the orchestrator has finished, or drop a guest that has left.
            if run.stage == "training" and run.is_trained():
                return FinishOrder(run.name)
            if has_ended:
                return CloseOrder(run.name)
            if run.stage == "leaving" and run.has_left():
                return DropOrder(run.name, "Left", "the run requested to leave, or its orchestrator is gone")
        return None

    def _step_order(self) -> Order | None:
        """Return the next step: of the first run with a batch after the run that trained most recently."""
        runs = self._runs.runs
        # A leaving run gets no step: its last checkpoint is being written, and a step would make
        # that checkpoint old.
        ready = {run.name for run in runs if run.stage == "training" and run.has_batch()}
        name = next_turn([run.name for run in runs], self._last, ready)
        if name is None:
            return None
        run = self._runs.find_run(name)
        path = run.take_batch()
        return None if path is None else StepOrder(name, str(path), save=run.is_retry_due())

    # ---- all ranks carry it out

    def _carry_out(self, order: Order) -> None:
        before = len(self._runs.runs)
        self._execute_order(order)
        if len(self._runs.runs) < before or isinstance(order, JoinOrder):  # a rejected guest has loaded objects too
            self._garbage.after_run()

    def _execute_order(self, order: Order) -> None:
        match order:
            case StepOrder():
                self._last = order.run
                path, save = Path(order.path), order.save
                self._runs.run_work(self._runs.find_run(order.run), lambda run: run.step(path, save=save))
                self._garbage.after_step()
            case SaveOrder():
                self._runs.run_work(self._runs.find_run(order.run), Run.save)
            case FinishOrder():
                self._runs.run_work(self._runs.find_run(order.run), Run.finish_training)
            case LeaveOrder():
                self._runs.run_work(self._runs.find_run(order.run), Run.start_leaving)
            case CloseOrder():
                self._runs.close(self._runs.find_run(order.run))
            case JoinOrder() | DropOrder():
                self._runs.apply_order(order)
            case WaitOrder() | EndOrder():
                pass

    def _save_and_end(self) -> int:
        """Complete the checkpoint of the last finished step of every run, and return the exit code."""
        stop = self._agreement.stop
        why = f"stopped by {stop.origin}"
        # All saves start before the first wait: the runs share one grace period, and their
        # orchestrators add their parts at the same time.
        saved = [run for run in list(self._runs.runs) if self._runs.run_work(run, Run.start_leaving)]
        for run in saved:
            self._runs.run_work(run, lambda one: one.wait_until_complete(why))
            self._runs.report_stop(run, why)
        return stop.exit_code
