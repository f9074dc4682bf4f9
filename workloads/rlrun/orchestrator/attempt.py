"""One attempt from its first moment to its last: what the tasks RL, SFT and Eval have in common.

Parts start in the order volume, progress server, background tasks, Lease, then those of the task, and end in the reverse order. The last
renewal of the Lease comes before the end of everything that others see end: a trainer, or this process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.hub.revisions import keep_revisions
from rlrun.orchestrator.aio.background import Background, background_tasks
from rlrun.orchestrator.aio.condition import Signal
from rlrun.orchestrator.aio.volume import in_thread
from rlrun.orchestrator.engines.operator_requests import Wishes
from rlrun.orchestrator.progress.exposition import Measures
from rlrun.orchestrator.progress.lease import lease_from_environment, stall_of
from rlrun.orchestrator.progress.server import Progress, ProgressServer, starting_progress
from rlrun.orchestrator.stop import TERMINATED, Stop
from rlrun.orchestrator.trainer.client import TrainerClient
from rlrun.orchestrator.trainer.shared_trainer import Connection
from rlrun.orchestrator.trainer.waiting import Since, Waiting
from rlrun.protocol.files.attempts import Attempt, read_attempt
from rlrun.protocol.files.failures import FULL_BYTES
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import MIN_FREE_BYTES
from rlrun.protocol.files.shared import host_paths
from rlrun.protocol.files.volume_faults import Volume, watch_volume
from rlrun.runtime import exit_codes


class RunningAttempt:
    """Resources of an attempt while it runs, whatever its task; see `open_attempt`.

    Args:
        config: the role's configuration.
        number: the attempt's.
        waits: what the start waits for, until the work reports its own progress.
        total_steps: steps of the run, for the same time.
        stop: how a signal ends the role; None: by cancelling it.
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
        """Runs what has no end of its own, until the attempt ends."""
        self._number, self._waits, self._total_steps, self._stop = number, waits, total_steps, stop
        self._progress: Callable[[], Progress] | None = None
        self._measures: Callable[[], Measures] | None = None
        self.wishes = Wishes()
        """Wishes of the operator."""
        self._lease = lease_from_environment(attempt=number, look=self.progress, wishes=self.wishes)
        self.stall = stall_of(self._lease)

    def progress(self) -> Progress:
        """Current progress: of the start, and of the work once there is one."""
        if self._progress is not None:
            return self._progress()
        return starting_progress(self._waits(self.since), self._total_steps, self.volume)

    def measures(self) -> Measures:
        """Values for the metrics beside the progress."""
        return self._measures() if self._measures is not None else Measures(volume=self.volume.space)

    def report_with(self, progress: Callable[[], Progress], measures: Callable[[], Measures]) -> None:
        """Report the work's progress and measures from now on."""
        self._progress, self._measures = progress, measures

    def stop_with(self, act: Callable[[], None]) -> None:
        """Let the first signal call `act` from now on, which lets the work end; before, it cancels everything."""
        if self._stop is not None:
            self._stop.act = act

    async def read_file(self) -> Attempt:
        """The attempt's file, which the trainer writes when it begins; from then on the volume may be fuller."""
        self.volume.least = FULL_BYTES
        return await in_thread(partial(read_attempt, self.paths.attempt_file(self._number)))

    def begin(self, background: Background) -> None:
        """Begin to renew the Lease, in the group of tasks that ends with the attempt."""
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
    """Begin an attempt, and end what it has begun with the block; an error in a background task ends the block.

    Args:
        config: the role's configuration.
        number: the attempt's.
        api_key: the run's key, for its progress.
        waits: what the start waits for.
        total_steps: steps of the run; 0: not known yet.
        least_bytes: space below which the volume counts as full, at the start.
        stop: how a signal ends the role.

    Raises:
        RoleError: the port of the progress is in use.
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
            attempt.begin(background)
            yield attempt


def open_training(
    connection: Connection, config: OrchestratorConfig, number: int, api_key: str, stop: Stop | None
) -> AbstractAsyncContextManager[RunningAttempt]:
    """`open_attempt` of an attempt that feeds a trainer, for which the start waits: the tasks RL and SFT."""
    return open_attempt(
        config,
        number,
        api_key,
        waits=connection.waits,
        total_steps=config.max_steps,
        least_bytes=MIN_FREE_BYTES,  # with less the trainer does not begin
        stop=stop,
    )


class DataFlow(Protocol):
    """Flow of data to a trainer."""

    async def run(self) -> bool:
        """Run to the end, or until `stop`; true if all is done."""
        ...

    def stop(self) -> None:
        """Make no more data; only help the trainer to complete its last checkpoint."""
        ...

    def progress(self) -> Progress:
        """Current progress of the run."""
        ...

    def measures(self) -> Measures:
        """Values for the metrics beside the progress."""
        ...


async def feed_trainer(
    attempt: RunningAttempt,
    flow: DataFlow,
    connection: Connection,
    trainer: TrainerClient,
    *,
    loaded: Callable[[], None] = lambda: None,
) -> int:
    """Feed the trainer to the end: the tasks RL and SFT.

    Args:
        attempt: the attempt.
        flow: its data.
        connection: the way to the trainer; a slot in another run's trainer is given up once the attempt is stopped.
        trainer: the trainer, which is up.
        loaded: called before the flow begins.

    Returns:
        0 when every step is trained and saved; 143 when the attempt was stopped before.

    Raises:
        RoleError: why the run cannot go on; possibly inside an exception group.
    """

    def stop() -> None:
        flow.stop()
        connection.leave()

    attempt.report_with(flow.progress, flow.measures)
    attempt.stop_with(stop)
    loaded()
    if not await flow.run():
        logger.info("stopped by a signal")
        await attempt.farewell()  # the end of this process is seen with the checkpoint that it was completed for
        return TERMINATED
    await attempt.farewell()  # the end of the trainer is seen with the last step
    await trainer.shutdown()
    return exit_codes.OK
