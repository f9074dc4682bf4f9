"""A run in another run's trainer: ask for a slot, wait for it, and say why it was lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from loguru import logger

from rlrun.config.roles import OrchestratorConfig
from rlrun.orchestrator.trainer_client import TrainerClient
from rlrun.protocol import exit_codes, shared
from rlrun.protocol.failures import RoleError, storage_errors
from rlrun.protocol.shared import Join

LOOK_SECONDS = 0.2
REMIND_SECONDS = 60.0
"""Time between two lines in the log about a slot that does not come."""
REASON_SECONDS = 5.0
"""Longest wait for the reason, once the trainer says that it does not train the run."""


class SharedTrainer:
    """The guest's view of the host's trainer. Nothing here ends by itself: who gives a run how long to start decides that.

    Args:
        config: with `shared_with`.
        attempt: that asks.
    """

    def __init__(self, config: OrchestratorConfig, attempt: int) -> None:
        assert config.shared_with is not None
        self._folder = Path(config.output_dir)
        self._run, self._attempt = config.name, attempt
        self.host = config.shared_with
        self._paths = shared.host_paths(self._folder, self.host)
        self.url = config.trainer_url.rstrip("/") + shared.channel_of(config.name)
        self.waiting = f"the trainer of {self.host}"
        """What is waited for, in words."""

    async def join(self) -> None:
        """Ask, and wait until the run is joined.

        Raises:
            RoleError: it is refused; says why.
        """
        join = Join(run=self._run, attempt=self._attempt, folder=str(self._folder))
        with storage_errors(self._paths.shared, "ask for a slot"):
            await asyncio.to_thread(shared.ask, self._paths, join)
        logger.info(f"asked for a slot in the trainer of {self.host}")
        reminded = time.monotonic()
        while True:
            state = await asyncio.to_thread(shared.read_state, self._paths, self._run, self._attempt)
            if state is not None and state.state == "Joined":
                logger.info(f"joined the trainer of {self.host} in slot {state.slot}")
                return
            if state is not None and state.state != "Waiting":
                raise self._failure(f"has {state.state.lower()} the run", state.reason, state.exit_code)
            waiting = f"a slot in the trainer of {self.host}" + (f": {state.reason}" if state is not None else "")
            if waiting != self.waiting or time.monotonic() - reminded > REMIND_SECONDS:
                self.waiting, reminded = waiting, time.monotonic()
                logger.info(f"waiting for {waiting}")
            await asyncio.sleep(LOOK_SECONDS)

    async def lost(self) -> RoleError:
        """Why the trainer does not train the run any more."""
        deadline = time.monotonic() + REASON_SECONDS
        while time.monotonic() < deadline:
            state = await asyncio.to_thread(shared.read_state, self._paths, self._run, self._attempt)
            if state is not None and state.state not in ("Waiting", "Joined"):
                return self._failure("has ended the run's attempt", state.reason, state.exit_code)
            await asyncio.sleep(LOOK_SECONDS)
        return self._failure("does not train the run any more", "it was started again", exit_codes.FAILURE)

    def leave(self) -> None:
        """Ask for no slot any more: the trainer saves the last finished step, and frees the slot."""
        with storage_errors(self._paths.shared, "leave"):
            shared.take_back(self._paths, self._run)

    def _failure(self, what: str, reason: str, code: int) -> RoleError:
        return RoleError(f"the trainer of {self.host} {what}: {reason}", code or exit_codes.FAILURE)


class Connection:
    """The way to the trainer, the run's own or another run's: a context that gives a client of it, with a slot where one is needed.

    Args:
        config: of the role.
        api_key: the trainer's.
        attempt: this one.
    """

    def __init__(self, config: OrchestratorConfig, api_key: str, *, attempt: int) -> None:
        self._shared = None if config.shared_with is None else SharedTrainer(config, attempt)
        url = config.trainer_url if self._shared is None else self._shared.url
        self._client = TrainerClient(
            url, api_key, attempt=attempt, lost=None if self._shared is None else self._shared.lost
        )
        self._url = config.trainer_url

    @property
    def waiting(self) -> str:
        """What the start waits for, in words."""
        return f"the trainer at {self._url}" if self._shared is None else self._shared.waiting

    def leave(self) -> None:
        """The run is stopped: give up the slot, if it has one. The trainer of its own is told by whoever stops the run."""
        if self._shared is not None:
            self._shared.leave()

    async def __aenter__(self) -> TrainerClient:
        """The client, once the run's trainer is up and has it.

        Raises:
            RoleError: it refuses the run, or does not come up in time.
        """
        try:
            if self._shared is not None:
                await self._shared.join()
            await self._client.wait_until_begun()
        except BaseException:
            await self.__aexit__()
            raise
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        self.leave()
