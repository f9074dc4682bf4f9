"""One worker process of an environment that is started again when it ends, and replaced when it only fails."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from loguru import logger

from rlrun.backoff import backoff
from rlrun.environments.episode import EpisodeError
from rlrun.environments.process.log import Log
from rlrun.environments.process.talk import Death, Ready, StartError, Talk
from rlrun.environments.protocol import ModelClient, Score
from rlrun.environments.stage import Played, TaskRef
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

MAX_DEATHS = 5
"""Ends in a row, without one good rollout between, after which the run fails; those by rollouts of the same task count once."""
MAX_DEATHS_IN_ALL = 25
"""The same, whatever the tasks."""
MAX_FAILURES = 16
"""Rollouts of one process that may fail in a row; then another takes its place: one of them may have broken what all of them use."""
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0


class Record:
    """History of all workers of one environment.

    Args:
        label: the environment's name in messages.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.restarts = 0
        self.numbers = itertools.count(1)
        """Counter of the lives of all workers."""
        self.in_row = 0
        """Ends without one good rollout between."""
        self.accused: set[TaskRef] = set()
        """Tasks whose code ran when a process ended, and that have not been played well since."""
        self.innocent = 0
        """Rollouts that are played or wait, of tasks that are not accused."""
        self.clear = asyncio.Event()
        """Set while a rollout of an accused task ends nothing that has not played well first."""
        self._causes: set[TaskRef | int] = set()
        """Tasks by which the process ended in a row; a number where none is known."""
        self._first = ""

    def played(self, task: TaskRef) -> None:
        """Record that a rollout went well."""
        self.in_row = 0
        self._causes.clear()
        self.accused.discard(task)
        self.look()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Play a rollout of a task that is not accused."""
        self.innocent += 1
        self.look()
        try:
            yield
        finally:
            self.innocent -= 1
            self.look()

    def look(self) -> None:
        """Set or unset `clear`."""
        if self.in_row and self.innocent:
            self.clear.clear()
        else:
            self.clear.set()

    def died(self, death: Death, log: Log) -> None:
        """Count the end of a process.

        Raises:
            RoleError: it was one too many.
        """
        self.restarts += 1
        self.in_row += 1
        self.look()
        self._causes.add(self.restarts if death.task is None else death.task)
        if death.task is not None:
            self.accused.add(death.task)
        self._first = self._first or death.message
        logger.warning(f"environment {self.label!r}: its process {death.message}{log_hint(log)}")
        if len(self._causes) >= MAX_DEATHS or self.in_row >= MAX_DEATHS_IN_ALL:
            raise RoleError(
                f"environment {self.label!r}: its process ended {self.in_row} times in a row without one good rollout. "
                f"The first time it {self._first}{log_hint(log)}",
                exit_codes.DATA,
            )


def log_hint(log: Log) -> str:
    """Place to read on, for the end of a message."""
    return f" (see {log.path})" if log.path is not None else ""


class Supervised:
    """One worker.

    Args:
        record: of the environment.
        log: gets what the process prints.
        make: makes a life that is not started, by its number.
        changed: called when it begins and when it ceases to be up.
    """

    def __init__(self, record: Record, log: Log, make: Callable[[int], Talk], changed: Callable[[], None]) -> None:
        self._record, self.log, self._make, self._changed = record, log, make, changed
        self.life = make(next(record.numbers))
        self._is_up = False
        self._failed_in_row = 0
        self._replaced_in_vain = False
        """True if it was replaced and has played nothing good since."""
        self._something = asyncio.Event()
        """Set when the process ends, and when it fails again."""
        self._look_after(self.life)
        self._leaving: set[Talk] = set()
        """Processes to end beside `life`: former ones, and one that is not it yet."""
        self._draining: set[asyncio.Task[None]] = set()

    def _look_after(self, life: Talk) -> None:
        life.ended.add_done_callback(lambda _: self._something.set())

    @property
    def up(self) -> bool:
        """True if it can be given rollouts."""
        return self._is_up and not self.life.ended.done()

    async def start(self) -> Ready:
        """Start the process and load the environment.

        Raises:
            StartError: it does not load.
        """
        ready = await self.life.start()
        self._set_up(True)
        return ready

    def _set_up(self, up: bool) -> None:
        self._is_up = up
        self._changed()

    async def run(self, check: Callable[[Ready], None]) -> None:
        """Start the process again whenever it ends, later each time; until cancelled, after `start`.

        Args:
            check: refuses an environment that is not the one from before.

        Raises:
            RoleError: it ends again and again without one good rollout, or `check` refuses it.
        """
        while True:
            await self._something.wait()
            self._something.clear()
            if self.life.ended.done():
                await self._start_again(self.life.ended.result(), check)
            elif self._failed_in_row >= MAX_FAILURES and not self._replaced_in_vain:
                await self._replace(check)

    async def _start_again(self, death: Death, check: Callable[[Ready], None]) -> None:
        self._set_up(False)
        self._record.died(death, self.log)
        while True:
            wait = backoff(self._record.in_row, first=FIRST_BACKOFF_SECONDS, longest=MAX_BACKOFF_SECONDS)
            await asyncio.sleep(wait)
            try:
                self._begin(await self._started(check))
                break
            except StartError as error:
                self._record.died(Death("crash", f"did not start again: {error}"), self.log)
        logger.info(f"environment {self._record.label!r} is up again")

    async def _started(self, check: Callable[[Ready], None]) -> Talk:
        life = self._make(next(self._record.numbers))
        self._leaving.add(life)  # ended with all others, should this be cancelled
        check(await life.start())
        self._leaving.discard(life)
        return life

    def _begin(self, life: Talk) -> None:
        self.life, self._failed_in_row = life, 0
        self._look_after(life)
        self._set_up(True)

    async def _replace(self, check: Callable[[Ready], None]) -> None:
        """Start another process; this one plays to their end what it has begun."""
        logger.warning(
            f"environment {self._record.label!r}: the last {self._failed_in_row} rollouts of its process failed, so another takes its place"
        )
        self._replaced_in_vain = True
        before = self.life
        try:
            life = await self._started(check)
        except StartError as error:
            logger.warning(f"environment {self._record.label!r}: the other process does not start: {error}")
            return
        self._record.restarts += 1
        self._leaving.add(before)
        self._begin(life)
        draining = asyncio.create_task(self._drain(before))
        self._draining.add(draining)
        draining.add_done_callback(self._draining.discard)

    async def _drain(self, before: Talk) -> None:
        """End a process that gets no more rollouts once it has played those that it has."""
        await before.until_idle()
        before.end()
        self._leaving.discard(before)

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        """Play one episode; see `Stage.play`."""
        life = self.life
        with self._counted(life, task):
            return await life.play(task, model, timeout_seconds=timeout_seconds, reward_seconds=reward_seconds)

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float
    ) -> list[Score]:
        """Compare the episodes of a group; see `Stage.compare`."""
        life = self.life
        with self._counted(life, task):
            return await life.compare(task, group, timeout_seconds=timeout_seconds, reward_seconds=reward_seconds)

    @contextmanager
    def _counted(self, life: Talk, task: TaskRef) -> Iterator[None]:
        """Count how an answer of `life` ended."""
        try:
            yield
        except EpisodeError as error:
            if error.kind not in ("model", "task") and not error.death and life is self.life:
                self._failed_in_row += 1
                self._something.set()
            raise
        self._record.played(task)
        if life is self.life:
            self._failed_in_row, self._replaced_in_vain = 0, False

    def close(self) -> None:
        """End its processes and everything that they started."""
        for draining in self._draining:
            draining.cancel()
        for life in (self.life, *self._leaving):
            life.end()


async def first_of(workers: list[Supervised], any_up: asyncio.Event, deadline: float) -> Supervised:
    """The worker that is up and has the fewest episodes in flight, as soon as there is one.

    Args:
        workers: of the environment.
        any_up: set while one of them is up.
        deadline: on the monotonic clock.

    Raises:
        TimeoutError: there was none before the deadline.
    """
    while True:
        if up := [worker for worker in workers if worker.up]:
            return min(up, key=lambda worker: worker.life.in_flight)
        async with asyncio.timeout(deadline - time.monotonic()):
            await any_up.wait()
            await asyncio.sleep(0)  # `run` has not yet seen the end that this has
