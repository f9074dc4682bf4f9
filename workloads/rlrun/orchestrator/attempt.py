"""Lifecycle of one attempt, common to the tasks RL, SFT and Eval, with its signals (SIGTERM, SIGINT) and its reported error.

Parts start in this order: volume, progress server, background tasks, Lease, parts of the task. They end in the reverse order. The last
renewal of the Lease happens before the trainer or this process ends, so that the operator never observes an end without the last step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.hub.repository import keep_revisions
from rlrun.orchestrator.aio.event_loop import Background, Signal, background_tasks
from rlrun.orchestrator.aio.volume_access import in_thread
from rlrun.orchestrator.engines.draining import EngineRequests
from rlrun.orchestrator.progress.exposition import Measures
from rlrun.orchestrator.progress.lease import lease_from_environment, stall_of
from rlrun.orchestrator.progress.progress_server import Progress, ProgressServer, starting_progress
from rlrun.orchestrator.trainer.shared_trainer import Connection
from rlrun.orchestrator.trainer.trainer_client import Since, TrainerClient, Waiting
from rlrun.protocol.files.attempts import Attempt, read_attempt
from rlrun.protocol.files.failures import FULL_BYTES, RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import MIN_FREE_BYTES
from rlrun.protocol.files.shared_trainer_files import host_paths
from rlrun.protocol.files.volume_faults import Volume, watch_volume
from rlrun.runtime import exit_codes

TERMINATED = 128 + 15
"""Exit code after SIGTERM or SIGINT, equal to the code of a process that SIGTERM killed."""


class Stop:
    """Reaction to signals.

    The first signal ends the data flow so that the trainer can complete its last checkpoint. Before the data flow
    exists, and from the second signal on, a signal cancels everything. This needs no cleanup, because each artifact is
    either complete or ignored.
    """

    def __init__(self) -> None:
        self.act: Callable[[], None] | None = None
        """Callback that ends the data flow. None before the data flow exists."""
        self._signals = 0

    def first(self) -> bool:
        """Count a signal and return whether it is the first."""
        self._signals += 1
        return self._signals == 1


def first_cause(error: BaseException) -> BaseException:
    """Return the first `RoleError` inside an exception group, otherwise its first leaf."""
    leaves = _leaf_errors(error)
    # A `RoleError` has a message and an exit code for the user; other leaves of the group are often
    # its consequences.
    return next((leaf for leaf in leaves if isinstance(leaf, RoleError)), leaves[0])


def _leaf_errors(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaf_errors(inner)]
    return [error]


class RunningAttempt:
    """Resources of a running attempt of any task; see `open_attempt`.

    Args:
        config: configuration of the role.
        number: number of the attempt.
        waits: reason of the wait while the attempt starts, until the work reports its own progress.
        total_steps: steps of the run, reported during the start.
        stop: reaction of the role to signals. None: a signal cancels the role.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        number: int,
        *,
        waits: Callable[[Since], Waiting],
        total_steps: int,
        stop: Stop | None,
    ) -> None:
        self.paths = RunPaths(Path(config.output_dir))
        self.logs = self.paths.logs(number, "orchestrator")
        self.volume = Volume(self.paths.root, say=logger.warning)
        self.signal, self.since = Signal(), Since()
        self.background: Background
        """Function that starts endless coroutines, which end with the attempt."""
        self._number, self._waits, self._total_steps, self._stop = number, waits, total_steps, stop
        self._progress: Callable[[], Progress] | None = None
        self._measures: Callable[[], Measures] | None = None
        self.engine_requests = EngineRequests()
        """Requests of the operator."""
        # Created at the start: the operator sees the reason of the wait while the trainer loads its
        # model.
        self._lease = lease_from_environment(attempt=number, look=self.progress, engine_requests=self.engine_requests)
        self.stall = stall_of(self._lease)

    def progress(self) -> Progress:
        """Return the progress of the start, or of the work after it has started."""
        if self._progress is not None:
            return self._progress()
        return starting_progress(self._waits(self.since), self._total_steps, self.volume)

    def measures(self) -> Measures:
        """Return the values for the metrics in addition to the progress."""
        return self._measures() if self._measures is not None else Measures(volume=self.volume.space)

    def report_with(self, progress: Callable[[], Progress], measures: Callable[[], Measures]) -> None:
        """Report the work's progress and measures from now on."""
        self._progress, self._measures = progress, measures

    def stop_with(self, act: Callable[[], None]) -> None:
        """Let the first signal call `act` so that the work ends in order. Before this call the first signal cancels
        everything.
        """
        if self._stop is not None:
            self._stop.act = act

    async def read_file(self) -> Attempt:
        """Read the attempt's file, which the trainer writes when it starts.

        After the start the volume may be fuller than at the start, so the limit of free space is lowered.
        """
        # The run itself has filled the volume in the meantime. The limit of the start would report
        # it as full although writes succeed.
        self.volume.least = FULL_BYTES
        return await in_thread(partial(read_attempt, self.paths.attempt_file(self._number)))

    def begin(self, background: Background) -> None:
        """Start to renew the Lease in the task group that ends with the attempt."""
        self.background = background
        if self._lease is not None:
            background(self._lease.run())

    async def farewell(self) -> None:
        """Renew the Lease for the last time, with the last step."""
        if self._lease is not None:
            await self._lease.farewell()


@asynccontextmanager
async def open_attempt(
    config: OrchestratorConfig,
    number: int,
    api_key: str,
    *,
    waits: Callable[[Since], Waiting],
    total_steps: int,
    least_bytes: int,
    stop: Stop | None,
) -> AsyncIterator[RunningAttempt]:
    """Start the shared resources of an attempt and close them at the end of the block.

    An error in a background task ends the block.

    Args:
        config: configuration of the role.
        number: number of the attempt.
        api_key: the run's key, which protects the progress server.
        waits: reason of the wait during the start.
        total_steps: steps of the run; 0 if unknown.
        least_bytes: free bytes below which the volume counts as full during the start.
        stop: reaction of the role to signals.

    Raises:
        RoleError: the port of the progress server is in use.
    """
    folder = Path(config.output_dir)
    keep_revisions(RunPaths(folder), None if config.shared_with is None else host_paths(folder, config.shared_with))
    attempt = RunningAttempt(config, number, waits=waits, total_steps=total_steps, stop=stop)
    attempt.volume.least = least_bytes
    served = ProgressServer(
        config.host,
        config.metrics_port,
        api_key=api_key,
        look=attempt.progress,
        stall=attempt.stall,
        measures=attempt.measures,
    )
    with watch_volume(attempt.volume):
        async with served, background_tasks() as background:
            # The Lease ends with the task group, after the work: a renewal by a dead attempt would
            # hide its end.
            attempt.begin(background)
            yield attempt


def open_training(
    connection: Connection, config: OrchestratorConfig, number: int, api_key: str, stop: Stop | None
) -> AbstractAsyncContextManager[RunningAttempt]:
    """Open an attempt of RL or SFT, whose start waits for a trainer; see `open_attempt`."""
    return open_attempt(
        config,
        number,
        api_key,
        waits=connection.waits,
        total_steps=config.max_steps,
        least_bytes=MIN_FREE_BYTES,  # the trainer does not start with less
        stop=stop,
    )


class DataFlow(Protocol):
    """Source of training data for a trainer."""

    async def run(self) -> bool:
        """Run to the end or until `stop`. Returns whether all work is done."""
        ...

    def stop(self) -> None:
        """Stop making data; only let the trainer complete its last checkpoint."""
        ...

    def progress(self) -> Progress:
        """Return the current progress of the run."""
        ...

    def measures(self) -> Measures:
        """Return the values for the metrics in addition to the progress."""
        ...


async def feed_trainer(
    attempt: RunningAttempt,
    flow: DataFlow,
    connection: Connection,
    trainer: TrainerClient,
    *,
    loaded: Callable[[], None] = lambda: None,
) -> int:
    """Feed the trainer of an RL or SFT task until the end.

    Args:
        attempt: running attempt.
        flow: source of the training data.
        connection: connection to the trainer; after a stop it gives up a slot in another run's trainer.
        trainer: client of the running trainer.
        loaded: callback before the flow starts.

    Returns:
        0 if every step is trained and saved; 143 if the attempt was stopped earlier.

    Raises:
        RoleError: the run cannot continue; possibly inside an exception group.
    """

    def stop() -> None:
        flow.stop()
        connection.leave()

    # From here on the flow knows better than the start what the run waits for.
    attempt.report_with(flow.progress, flow.measures)
    attempt.stop_with(stop)
    loaded()
    if not await flow.run():
        logger.info("stopped by a signal")
        await attempt.farewell()  # before this process ends: the Lease then contains the last checkpoint
        return TERMINATED
    await attempt.farewell()  # before the trainer ends: the Lease then contains the last step
    await trainer.shutdown()
    return exit_codes.OK
