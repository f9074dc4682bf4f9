"""An environment in its own processes, each of which is restarted when it ends."""

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
    """`Stage` whose code runs in separate processes.

    Args:
        label: name of the environment in messages.
        command: environment to start.
        limits: resource limits of each process.
        logs: log of each process; their number is the number of processes.
        host: socket of the container that starts the processes (see `host`). None: start them in this container.
    """

    def __init__(
        self, label: str, command: Command, limits: Limits, logs: Sequence[Log], host: Path | None = None
    ) -> None:
        self._label, self._command, self._limits, self._host = label, command, limits, host
        self._record = Record(label)
        self._any_up = asyncio.Event()
        self._ready: Ready | None = None
        self.workers = [
            Supervised(self._record, log, partial(self._new_life, log), self._update_any_up) for log in logs
        ]

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
        """Digest of the training tasks, or "" before `start`."""
        return self._ready.digest if self._ready else ""

    def tasks(self, split: Split) -> Sequence[TaskRef]:
        if self._ready is None:
            return TaskRefs(split, 0)
        return TaskRefs(split, self._ready.train if split == "train" else self._ready.eval)

    async def start(self) -> None:
        """Start the processes and load the environment in each.

        Raises:
            RoleError: the environment cannot be loaded.
        """
        found = await asyncio.gather(*(self._start_worker(worker) for worker in self.workers), return_exceptions=True)
        for ready in found:
            if isinstance(ready, BaseException):
                raise ready
            self._ready = self._ready or ready
            self._check_same(ready)
        for notice in self._ready.notices if self._ready is not None else ():
            logger.warning(f"environment {self._label!r}: {notice}")

    async def _start_worker(self, worker: Supervised) -> Ready:
        try:
            return await worker.start()
        except StartError as error:
            code = exit_codes.CONFIGURATION if error.permanent else exit_codes.FAILURE
            message = str(error) if error.permanent else f"environment {self._label!r}: {error}{log_hint(worker.log)}"
            raise RoleError(message, code) from error

    async def run(self) -> None:
        """Restart each process whenever it ends, with growing pauses. Call after `start`; runs until canceled.

        Raises:
            RoleError: the processes end too often without one successful rollout, or an environment has other tasks after a restart.
        """
        running = [asyncio.create_task(worker.run(self._check_same)) for worker in self.workers]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        """Play one episode in the process with the fewest episodes. If no process is up, wait for one. See `Stage.play`.

        The deadline is extended while processes restart because of other rollouts. If a process ended because of this task before, the
        task first waits until rollouts of other tasks succeed, for at most half of its time. Otherwise it would end each new process
        together with the rollouts that are repeated there.
        """
        deadline = time.monotonic() + timeout_seconds
        if task not in self._record.accused:
            with self._record.count_innocent():
                return await self._play(task, model, deadline, reward_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds / 2):
                while not self._record.clear.is_set():  # the event may have been cleared again before this task runs
                    await self._record.clear.wait()
        return await self._play(task, model, deadline, reward_seconds)

    async def _play(self, task: TaskRef, model: ModelClient, deadline: float, reward_seconds: float) -> Played:
        worker, left = await self._wait_for_worker(task, deadline)
        return await worker.play(task, model, timeout_seconds=left, reward_seconds=reward_seconds)

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float
    ) -> list[Score]:
        worker, left = await self._wait_for_worker(task, time.monotonic() + timeout_seconds)
        return await worker.compare(task, group, timeout_seconds=left, reward_seconds=reward_seconds)

    async def _wait_for_worker(self, task: TaskRef, deadline: float) -> tuple[Supervised, float]:
        """Return a process that is up, and the seconds that remain for the task.

        A task that did not cause the restart loses no time by it, up to the longest duration of one restart.

        Raises:
            EpisodeError: no process restarted in time.
        """
        began = time.monotonic()
        # A task that ended a process before gets no extra time, because it may have caused the current restart as well.
        pause = 0.0 if task in self._record.accused else self._limits.start_seconds + MAX_BACKOFF_SECONDS
        try:
            worker = await first_of(self.workers, self._any_up, deadline + pause)
        except TimeoutError as error:
            message = f"its process did not restart within {deadline + pause - began:.3g} seconds"
            raise EpisodeError("timeout", self.id, str(task), message) from error
        now = time.monotonic()
        # The time of the wait is given back to the task, up to `pause`.
        return worker, max(0.0, deadline + min(pause, now - began) - now)

    def metrics(self) -> dict[str, float]:
        """Return `restarts` of all processes, and of the current ones the highest memory and the longest time for which one call blocked
        an event loop."""
        each = [worker.life.metrics() for worker in self.workers]
        highest = {name: max(metrics[name] for metrics in each) for name in each[0]}
        return {"restarts": float(self._record.restarts), **highest}

    def close(self) -> None:
        """End the processes and all their children."""
        for worker in self.workers:
            worker.close()

    def _update_any_up(self) -> None:
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
                f"environment {self._label!r}: after a restart it has other tasks than before ({ready} instead of {self._ready}); "
                "tasks must be the same in every process, so do not create them with a clock or hash()",
                exit_codes.DATA,
            )
