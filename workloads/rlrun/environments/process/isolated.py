"""An environment in a process of its own that is started again when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from rlrun.environments.episode import EpisodeError
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.log import Log
from rlrun.environments.process.remote import Remote
from rlrun.environments.process.talk import Death, Ready, StartError, Talk
from rlrun.environments.protocol import ModelClient, Split
from rlrun.environments.stage import Played, TaskRef, TaskRefs
from rlrun.protocol import exit_codes
from rlrun.protocol.failures import RoleError

MAX_DEATHS = 5
"""Ends in a row, without one good rollout between, after which the run fails."""
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0


class IsolatedEnvironment:
    """A `Stage` whose code runs in a process of its own.

    Args:
        label: the environment's name in messages.
        command: what to start.
        limits: what the process may take.
        log: gets what it prints.
        host: socket of the container that starts the process there (see `host`); None: it is started here.
    """

    def __init__(self, label: str, command: Command, limits: Limits, log: Log, host: Path | None = None) -> None:
        self._label, self._command, self._limits, self._log, self._host = label, command, limits, log, host
        self._life = self._new_life(1)
        self._up = asyncio.Event()
        self._ready: Ready | None = None
        self._deaths = 0
        self._first_death = ""

    @property
    def id(self) -> str:
        return self._ready.id if self._ready else self._command.id

    @property
    def single_turn(self) -> bool:
        return self._ready is not None and self._ready.single_turn

    def tasks(self, split: Split) -> Sequence[TaskRef]:
        if self._ready is None:
            return TaskRefs(split, 0)
        return TaskRefs(split, self._ready.train if split == "train" else self._ready.eval)

    async def start(self) -> None:
        """Start the process and load the environment.

        Raises:
            RoleError: it does not load.
        """
        try:
            self._ready = await self._life.start()
        except StartError as error:
            code = exit_codes.CONFIGURATION if error.permanent else exit_codes.FAILURE
            message = str(error) if error.permanent else f"environment {self._label!r}: {error}{self._see_log()}"
            raise RoleError(message, code) from error
        self._up.set()

    async def run(self) -> None:
        """Start the process again whenever it ends, later each time; until cancelled, after `start`.

        Raises:
            RoleError: it ends again and again without one good rollout, or came back with other tasks.
        """
        in_row = 0
        while True:
            death = await self._life.ended
            self._up.clear()
            in_row = 1 if self._life.played else in_row + 1
            self._died(death, in_row)
            while True:
                await asyncio.sleep(min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (in_row - 1)))
                self._life = self._new_life(self._deaths + 1)
                try:
                    self._check_same(await self._life.start())
                    break
                except StartError as error:
                    in_row += 1
                    self._died(Death("crash", f"did not start again: {error}"), in_row)
            logger.info(f"environment {self._label!r} is up again")
            self._up.set()

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        """Play one episode; while the process is down, wait for the next one within the deadline. See `Stage.play`."""
        began = time.monotonic()
        while not self._up.is_set() or self._life.ended.done():
            try:
                async with asyncio.timeout(began + timeout_seconds - time.monotonic()):
                    await self._up.wait()
                    await asyncio.sleep(0)  # `run` has not yet seen the end that this has
            except TimeoutError as error:
                message = f"its process did not come back within the episode's {timeout_seconds:g} seconds"
                raise EpisodeError("timeout", self.id, str(task), message) from error
        left = max(0.0, began + timeout_seconds - time.monotonic())
        return await self._life.play(task, model, timeout_seconds=left, reward_seconds=reward_seconds)

    def metrics(self) -> dict[str, float]:
        """`restarts`; of the present process the highest memory and the longest stand-still of its event loop so far."""
        return {"restarts": float(self._deaths), **self._life.metrics()}

    def close(self) -> None:
        """End the process and everything it started."""
        self._life.end()

    def _new_life(self, number: int) -> Talk:
        if self._host is None:
            return Life(self._command, self._limits, self._log, number)
        return Remote(self._host, self._command, self._limits, number)

    def _died(self, death: Death, in_row: int) -> None:
        self._deaths += 1
        self._first_death = self._first_death or death.message
        logger.warning(f"environment {self._label!r}: its process {death.message}{self._see_log()}")
        if in_row >= MAX_DEATHS:
            raise RoleError(
                f"environment {self._label!r}: its process ended {in_row} times in a row without one good rollout. "
                f"The first time it {self._first_death}{self._see_log()}",
                exit_codes.DATA,
            )

    def _check_same(self, ready: Ready) -> None:
        if ready != self._ready:
            raise RoleError(
                f"environment {self._label!r}: started again it has other tasks than before ({ready} instead of {self._ready}); "
                "tasks must be the same in every process, so use no clock and no hash() to make them",
                exit_codes.DATA,
            )

    def _see_log(self) -> str:
        return f" (see {self._log.path})" if self._log.path is not None else ""
