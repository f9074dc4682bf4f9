"""One worker process of an environment: it is restarted when it ends, and replaced when all its rollouts fail."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from loguru import logger

from rlrun.backoff import backoff
from rlrun.environments.episode import EpisodeError
from rlrun.environments.process.process_output import Log
from rlrun.environments.process.talk import Death, Ready, StartError, Talk
from rlrun.environments.protocol import ModelClient, Score
from rlrun.environments.stage import Played, TaskRef
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

MAX_DEATHS = 5
"""Ends in a row without a successful rollout after which the run fails. Ends because of the same task count once."""
MAX_DEATHS_IN_ALL = 25
"""Ends in a row without a successful rollout after which the run fails, if all ends are counted."""
MAX_FAILURES = 16
"""Failed rollouts in a row after which a process is replaced: one of them may have broken a state that all rollouts use."""
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0


class Record:
    """History of all workers of one environment.

    Args:
        label: name of the environment in messages.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.restarts = 0
        self.numbers = itertools.count(1)
        """Counter of the lives of all workers."""
        self.in_row = 0
        """Ends in a row without a successful rollout."""
        self.accused: set[TaskRef] = set()
        """Tasks whose code ran when a process ended, and that have not succeeded since."""
        self.innocent = 0
        """Running and waiting rollouts of tasks that are not accused."""
        self.clear = asyncio.Event()
        """Event that is set while rollouts of accused tasks may run: no rollout of another task has to succeed first."""
        self._causes: set[TaskRef | int] = set()
        """Tasks that ended the process in a row; a number for each end with an unknown cause."""
        self._first = ""

    def record_success(self, task: TaskRef) -> None:
        """Record a successful rollout."""
        self.in_row = 0
        self._causes.clear()
        self.accused.discard(task)
        self.update_clear()

    @contextmanager
    def count_innocent(self) -> Iterator[None]:
        """Count a rollout of a task that is not accused, until the end of the `with` block."""
        self.innocent += 1
        self.update_clear()
        try:
            yield
        finally:
            self.innocent -= 1
            self.update_clear()

    def update_clear(self) -> None:
        """Set or clear `clear`."""
        if self.in_row and self.innocent:
            self.clear.clear()
        else:
            self.clear.set()

    def record_end(self, death: Death, log: Log) -> None:
        """Count the end of a process.

        Raises:
            RoleError: the processes ended too often.
        """
        self.restarts += 1
        self.in_row += 1
        self.update_clear()
        self._causes.add(self.restarts if death.task is None else death.task)
        if death.task is not None:
            self.accused.add(death.task)
        self._first = self._first or death.message
        logger.warning(f"environment {self.label!r}: its process {death.message}{log_hint(log)}")
        if len(self._causes) >= MAX_DEATHS or self.in_row >= MAX_DEATHS_IN_ALL:
            raise RoleError(
                f"environment {self.label!r}: its process ended {self.in_row} times in a row without a successful rollout. "
                f"The first time it {self._first}{log_hint(log)}",
                exit_codes.DATA,
            )


def log_hint(log: Log) -> str:
    """Return a reference to the log for the end of a message."""
    return f" (see {log.path})" if log.path is not None else ""


class Supervised:
    """One worker.

    Args:
        record: history of the environment.
        log: log for the process's output.
        make: function that creates a life, not started yet, from its number.
        changed: function that is called when the worker comes up or goes down.
    """

    def __init__(self, record: Record, log: Log, make: Callable[[int], Talk], changed: Callable[[], None]) -> None:
        self._record, self.log, self._make, self._changed = record, log, make, changed
        self.life = make(next(record.numbers))
        self._is_up = False
        self._failed_in_row = 0
        self._replaced_in_vain = False
        """Whether the process was replaced and has not played a successful rollout since."""
        self._wake_up = asyncio.Event()
        """Event that is set when the process ends, and when a rollout fails."""
        self._watch_end(self.life)
        self._leaving: set[Talk] = set()
        """Processes to end in addition to `life`: replaced ones, and one that is still starting."""
        self._draining: set[asyncio.Task[None]] = set()

    def _watch_end(self, life: Talk) -> None:
        life.ended.add_done_callback(lambda _: self._wake_up.set())

    @property
    def up(self) -> bool:
        """Whether the worker can play rollouts."""
        return self._is_up and not self.life.ended.done()

    async def start(self) -> Ready:
        """Start the process and load the environment.

        Raises:
            StartError: the environment cannot be loaded.
        """
        ready = await self.life.start()
        self._set_up(True)
        return ready

    def _set_up(self, up: bool) -> None:
        self._is_up = up
        self._changed()

    async def run(self, check: Callable[[Ready], None]) -> None:
        """Restart the process whenever it ends, with growing pauses. Call after `start`; runs until canceled.

        Args:
            check: function that raises RoleError if the restarted environment differs from the previous one.

        Raises:
            RoleError: the process ends too often without a successful rollout, or `check` raised.
        """
        while True:
            # `_wake_up` only signals a change; the state is read afterwards, because an end may follow a failure.
            await self._wake_up.wait()
            self._wake_up.clear()
            if self.life.ended.done():
                await self._start_again(self.life.ended.result(), check)
            elif self._failed_in_row >= MAX_FAILURES and not self._replaced_in_vain:
                await self._replace_process(check)

    async def _start_again(self, death: Death, check: Callable[[Ready], None]) -> None:
        self._set_up(False)
        self._record.record_end(death, self.log)
        # The environment counts as down during the pauses, so new rollouts go to other workers or wait.
        while True:
            wait = backoff(self._record.in_row, first=FIRST_BACKOFF_SECONDS, longest=MAX_BACKOFF_SECONDS)
            await asyncio.sleep(wait)
            try:
                self._use_life(await self._start_life(check))
                break
            except StartError as error:
                self._record.record_end(Death("crash", f"did not start again: {error}"), self.log)
        logger.info(f"environment {self._record.label!r} is up again")

    async def _start_life(self, check: Callable[[Ready], None]) -> Talk:
        life = self._make(next(self._record.numbers))
        self._leaving.add(life)  # `close` ends it, too, if this call is canceled
        # `check` rejects an environment with other tasks before it gets a rollout.
        check(await life.start())
        self._leaving.discard(life)
        return life

    def _use_life(self, life: Talk) -> None:
        self.life, self._failed_in_row = life, 0
        self._watch_end(life)
        self._set_up(True)

    async def _replace_process(self, check: Callable[[Ready], None]) -> None:
        """Start another process for new rollouts. The current one finishes its running rollouts."""
        logger.warning(
            f"environment {self._record.label!r}: the last {self._failed_in_row} rollouts of its process failed, so it is replaced"
        )
        # Set before the start: if the replacement fails as well, the fault is probably not in the process, so there is only one try.
        self._replaced_in_vain = True
        before = self.life
        try:
            life = await self._start_life(check)
        except StartError as error:
            logger.warning(f"environment {self._record.label!r}: the replacement process cannot be started: {error}")
            return
        self._record.restarts += 1
        self._leaving.add(before)
        self._use_life(life)
        draining = asyncio.create_task(self._drain_process(before))
        self._draining.add(draining)
        draining.add_done_callback(self._draining.discard)

    async def _drain_process(self, before: Talk) -> None:
        """End a replaced process after its running rollouts have finished."""
        await before.until_idle()
        before.end()
        self._leaving.discard(before)

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        """Play one episode; see `Stage.play`."""
        life = self.life
        with self._count_result(life, task):
            return await life.play(task, model, timeout_seconds=timeout_seconds, reward_seconds=reward_seconds)

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float
    ) -> list[Score]:
        """Compare the episodes of a group; see `Stage.compare`."""
        life = self.life
        with self._count_result(life, task):
            return await life.compare(task, group, timeout_seconds=timeout_seconds, reward_seconds=reward_seconds)

    @contextmanager
    def _count_result(self, life: Talk, task: TaskRef) -> Iterator[None]:
        """Count the result of a call to `life`."""
        try:
            yield
        except EpisodeError as error:
            if error.kind not in ("model", "task") and not error.death and life is self.life:
                self._failed_in_row += 1
                self._wake_up.set()
            raise
        self._record.record_success(task)
        if life is self.life:
            self._failed_in_row, self._replaced_in_vain = 0, False

    def close(self) -> None:
        """End the processes and all their children."""
        for draining in self._draining:
            draining.cancel()
        for life in (self.life, *self._leaving):
            life.end()


async def first_of(workers: list[Supervised], any_up: asyncio.Event, deadline: float) -> Supervised:
    """Wait for a worker that is up, and return the one with the fewest running episodes.

    Args:
        workers: workers of the environment.
        any_up: event that is set while one of them is up.
        deadline: end of the wait, on the monotonic clock.

    Raises:
        TimeoutError: no worker was up before the deadline.
    """
    while True:
        if up := [worker for worker in workers if worker.up]:
            return min(up, key=lambda worker: worker.life.in_flight)
        async with asyncio.timeout(deadline - time.monotonic()):
            await any_up.wait()
            await asyncio.sleep(0)  # gives `run` a turn to notice an end that `up` already shows
