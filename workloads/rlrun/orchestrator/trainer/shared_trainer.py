"""Training in another run's trainer: request a slot, wait for it, and report why it was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.orchestrator.trainer.trainer_client import SILENCE_SECONDS, STARTUP_SECONDS, Since, TrainerClient, Waiting
from rlrun.protocol.files import shared_trainer_files
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.shared_trainer_files import SlotRequest
from rlrun.protocol.messages.endpoints import guest_key, key_digest
from rlrun.runtime import exit_codes

LOOK_SECONDS = 0.2
REMIND_SECONDS = 60.0
"""Interval between two log lines about a slot that is not yet granted."""
ASK_SECONDS = 2.0
"""Interval between two checks whether the trainer exists."""
ENGINES_FIRST_SECONDS = 7200.0
"""Longest start of engines for which a trainer on the same GPUs waits before it loads anything."""
REASON_SECONDS = 5.0
"""Timeout of the reason after the trainer has reported that it no longer trains the run."""


class SharedTrainer:
    """Guest's view of the host's trainer. The guest waits for a slot as long as the trainer answers.

    Args:
        config: configuration of the role, with `shared_with`.
        attempt: number of the requesting attempt.
        api_key: key of the guest.
        silence: reader of the seconds since the trainer's last answer.
    """

    def __init__(
        self, config: OrchestratorConfig, attempt: int, api_key: str, silence: Callable[[], Awaitable[float]]
    ) -> None:
        assert config.shared_with is not None
        self._folder = Path(config.output_dir)
        self._run, self._attempt, self._key, self._silence = config.name, attempt, api_key, silence
        self.host = config.shared_with
        self._paths = shared_trainer_files.host_paths(self._folder, self.host)
        self.url = config.trainer_url.rstrip("/") + shared_trainer_files.channel_of(config.name)
        self.waiting = f"the trainer of {self.host}"
        """Description of the current wait."""

    async def join(self) -> str:
        """Request a slot, wait until the run has joined, and return the key for the host's trainer and engines.

        Raises:
            RoleError: the request is refused or the trainer is gone; the message contains the reason.
        """
        join = SlotRequest(
            run=self._run, attempt=self._attempt, folder=str(self._folder), key_digest=key_digest(self._key)
        )
        with storage_errors(self._paths.shared, "request a slot"):
            await asyncio.to_thread(shared_trainer_files.write_request, self._paths, join)
        logger.info(f"requested a slot in the trainer of {self.host}")
        asked = reminded = time.monotonic()
        answered = False
        while True:
            state = await asyncio.to_thread(shared_trainer_files.read_state, self._paths, self._run, self._attempt)
            if state is not None and state.state == "Joined":
                logger.info(f"joined the trainer of {self.host} in slot {state.slot}")
                return guest_key(self._run, self._key, state.proof)
            if state is not None and state.state != "Waiting":
                raise self._role_error(f"has {state.state.lower()} the run", state.reason, state.exit_code)
            if time.monotonic() - asked > ASK_SECONDS:
                asked, silence = time.monotonic(), await self._silence()
                answered = answered or silence == 0
                if silence > (SILENCE_SECONDS if answered else STARTUP_SECONDS):
                    raise RoleError(
                        f"the trainer of {self.host} has not answered for {silence:.0f} s while this run waited for a slot; "
                        f"check that run {self.host} exists and runs"
                    )
            waiting = f"a slot in the trainer of {self.host}" + (f": {state.reason}" if state is not None else "")
            if waiting != self.waiting or time.monotonic() - reminded > REMIND_SECONDS:
                self.waiting, reminded = waiting, time.monotonic()
                logger.info(f"waiting for {waiting}")
            await asyncio.sleep(LOOK_SECONDS)

    async def lost(self) -> RoleError:
        """Return the error with the reason why the trainer no longer trains the run."""
        deadline = time.monotonic() + REASON_SECONDS
        while time.monotonic() < deadline:
            if (verdict := await self.verdict()) is not None:
                return verdict
            await asyncio.sleep(LOOK_SECONDS)
        return self._role_error("no longer trains the run", "it was restarted", exit_codes.FAILURE)

    async def verdict(self) -> RoleError | None:
        """Return the error with the reported reason why this attempt is over, or None. The trainer may have ended
        since.
        """
        state = await asyncio.to_thread(shared_trainer_files.read_state, self._paths, self._run, self._attempt)
        if state is None or state.state in ("Waiting", "Joined"):
            return None
        what = "ended, and has ended" if state.ended_trainer else "has ended"
        return self._role_error(f"{what} the run's attempt", state.reason, state.exit_code)

    def leave(self) -> None:
        """Withdraw the request for a slot: the trainer saves the last finished step and frees the slot."""
        with storage_errors(self._paths.shared, "give up the slot"):
            shared_trainer_files.delete_request(self._paths, self._run)

    def _role_error(self, what: str, reason: str, code: int) -> RoleError:
        return RoleError(f"the trainer of {self.host} {what}: {reason}", code or exit_codes.FAILURE)


class Connection:
    """Connection to the run's trainer or to another run's: a context that provides its client, with a slot if needed.

    Args:
        config: configuration of the role.
        api_key: key of the run.
        attempt: number of this attempt.
    """

    def __init__(self, config: OrchestratorConfig, api_key: str, *, attempt: int) -> None:
        guest = None if config.shared_with is None else SharedTrainer(config, attempt, api_key, self._measure_silence)
        self._shared = guest
        self.api_key = api_key
        """Key for trainer and engines: the run's key, or the key that a host has confirmed."""
        self._client = TrainerClient(
            config.trainer_url if guest is None else guest.url,
            api_key,
            attempt=attempt,
            lost=None if guest is None else guest.lost,
            verdict=None if guest is None else guest.verdict,
        )
        self._url = config.trainer_url
        self._first = ENGINES_FIRST_SECONDS if config.colocated else 0.0

    async def _measure_silence(self) -> float:
        return await self._client.silence()

    @property
    def waiting(self) -> str:
        """Description of the reason why the start waits."""
        return f"the trainer at {self._url}" if self._shared is None else self._shared.waiting

    def waits(self, since: Since) -> Waiting:
        """Return the reason of the wait by role and phase; from the trainer itself once it reports one."""
        state = self._client.state
        if state is None and self._shared is not None:
            return since.waiting("trainer", "slot", self.waiting)
        if state is None:
            return since.waiting(
                "trainer", "starting", f"{self.waiting} has not answered yet; it is starting or loading"
            )
        return Waiting("trainer", state.phase.replace("_", " "), state.phase_since)

    def leave(self) -> None:
        """Give up the slot, if there is one, when the run is stopped. The caller stops the run's own trainer."""
        if self._shared is not None:
            self._shared.leave()

    async def __aenter__(self) -> TrainerClient:
        """Return the client after the run's trainer is ready and has joined the run.

        Raises:
            RoleError: the trainer refuses the run or does not start in time.
        """
        try:
            if self._shared is not None:
                self.api_key = await self._shared.join()
                await self._client.use_key(self.api_key)
            await self._client.wait_until_ready(STARTUP_SECONDS + self._first)
        except BaseException:
            await self.__aexit__()
            raise
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        self.leave()
