"""An environment in processes of its own, each of which is started again when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from loguru import logger

from rlrun.environments.episode import EpisodeError
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.log import Log
from rlrun.environments.process.remote import Remote
from rlrun.environments.process.supervised import MAX_BACKOFF_SECONDS, Record, Supervised, first_of, log_hint
from rlrun.environments.process.talk import Ready, StartError, Talk
from rlrun.environments.protocol import ModelClient, Score, Split
from rlrun.environments.stage import Played, TaskRef, TaskRefs
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes


class IsolatedEnvironment:
    """A `Stage` whose code runs in processes of its own.

    Args:
        label: the environment's name in messages.
        command: what to start.
        limits: what each process may take.
        logs: each gets what one process prints; there are as many processes.
        host: socket of the container that starts the processes there (see `host`); None: they are started here.
    """

    def __init__(
        self, label: str, command: Command, limits: Limits, logs: Sequence[Log], host: Path | None = None
    ) -> None:
        self._label, self._command, self._limits, self._host = label, command, limits, host
        self._record = Record(label)
        self._any_up = asyncio.Event()
        self._ready: Ready | None = None
        self.workers = [Supervised(self._record, log, partial(self._new_life, log), self._changed) for log in logs]

    @property
    def id(self) -> str:
        return self._ready.id if self._ready else self._command.id

    @property
    def single_turn(self) -> bool:
        return self._ready is not None and self._ready.single_turn

    @property
    def compares(self) -> bool:
        return self._ready is not None and self._ready.compares

    @property
    def digest(self) -> str:
        """Digest of the training tasks; "" before `start`."""
        return self._ready.digest if self._ready else ""

    def tasks(self, split: Split) -> Sequence[TaskRef]:
        if self._ready is None:
            return TaskRefs(split, 0)
        return TaskRefs(split, self._ready.train if split == "train" else self._ready.eval)

    async def start(self) -> None:
        """Start the processes and load the environment in each.

        Raises:
            RoleError: it does not load.
        """
        found = await asyncio.gather(*(self._started(worker) for worker in self.workers), return_exceptions=True)
        for ready in found:
            if isinstance(ready, BaseException):
                raise ready
            self._ready = self._ready or ready
            self._check_same(ready)
        for notice in self._ready.notices if self._ready is not None else ():
            logger.warning(f"environment {self._label!r}: {notice}")

    async def _started(self, worker: Supervised) -> Ready:
        try:
            return await worker.start()
        except StartError as error:
            code = exit_codes.CONFIGURATION if error.permanent else exit_codes.FAILURE
            message = str(error) if error.permanent else f"environment {self._label!r}: {error}{log_hint(worker.log)}"
            raise RoleError(message, code) from error

    async def run(self) -> None:
        """Start each process again whenever it ends, later each time; until cancelled, after `start`.

        Raises:
            RoleError: they end again and again without one good rollout, or one came back with other tasks.
        """
        running = [asyncio.create_task(worker.run(self._check_same)) for worker in self.workers]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        """Play one episode where the fewest are played; while no process is up, wait for one. See `Stage.play`.

        The deadline does not run while the processes are started again by the fault of others. A task by which a process has ended lets
        the others play well first, for at most half of its time: else what is played again with it would end with each process.
        """
        deadline = time.monotonic() + timeout_seconds
        if task not in self._record.accused:
            with self._record.beside():
                return await self._play(task, model, deadline, reward_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds / 2):
                while not self._record.clear.is_set():  # it may have been set for a moment alone
                    await self._record.clear.wait()
        return await self._play(task, model, deadline, reward_seconds)

    async def _play(self, task: TaskRef, model: ModelClient, deadline: float, reward_seconds: float) -> Played:
        worker, left = await self._worker(task, deadline)
        return await worker.play(task, model, timeout_seconds=left, reward_seconds=reward_seconds)

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float
    ) -> list[Score]:
        worker, left = await self._worker(task, time.monotonic() + timeout_seconds)
        return await worker.compare(task, group, timeout_seconds=left, reward_seconds=reward_seconds)

    async def _worker(self, task: TaskRef, deadline: float) -> tuple[Supervised, float]:
        """A process that is up, and the seconds that are left to the task.

        A task that is not to blame for the restart loses no time by it, up to the longest time that one restart may take.

        Raises:
            EpisodeError: no process came back in time.
        """
        began = time.monotonic()
        pause = 0.0 if task in self._record.accused else self._limits.start_seconds + MAX_BACKOFF_SECONDS
        try:
            worker = await first_of(self.workers, self._any_up, deadline + pause)
        except TimeoutError as error:
            message = f"its process did not come back within {deadline + pause - began:.3g} seconds"
            raise EpisodeError("timeout", self.id, str(task), message) from error
        now = time.monotonic()
        return worker, max(0.0, deadline + min(pause, now - began) - now)

    def metrics(self) -> dict[str, float]:
        """`restarts` of all processes; of the present ones the highest memory and the longest time for which one call held an event
        loop so far."""
        each = [worker.life.metrics() for worker in self.workers]
        highest = {name: max(metrics[name] for metrics in each) for name in each[0]}
        return {"restarts": float(self._record.restarts), **highest}

    def close(self) -> None:
        """End the processes and everything that they started."""
        for worker in self.workers:
            worker.close()

    def _changed(self) -> None:
        if any(worker.up for worker in self.workers):
            self._any_up.set()
        else:
            self._any_up.clear()

    def _new_life(self, log: Log, number: int) -> Talk:
        if self._host is None:
            return Life(self._command, self._limits, log, number)
        return Remote(self._host, self._command, self._limits, log, number)

    def _check_same(self, ready: Ready) -> None:
        if ready != self._ready:
            raise RoleError(
                f"environment {self._label!r}: started again it has other tasks than before ({ready} instead of {self._ready}); "
                "tasks must be the same in every process, so use no clock and no hash() to make them",
                exit_codes.DATA,
            )
