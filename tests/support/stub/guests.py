"""Guests in the stub trainer: each is a thread, because no computation requires turns."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.channel.batch_feed import TICK_SECONDS
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.guests.guest_requests import Guest, Guests
from tests.support.stub.run import Run
from tests.support.stub.script import Script


@dataclass
class _Joined:
    """A guest in its slot."""

    run: Run
    slot: int
    thread: threading.Thread
    reason: str = "all is done"
    failure: RoleError | None = None


class GuestRuns:
    """The runs that have requested a slot, served by a separate thread from the start.

    Args:
        config: configuration of the trainer's own run.
        channel: channel of the trainer's own run.
        model: folder of the first model of all runs.
        script: durations; its faults apply only to the own run.
        api_key: key of the trainer's own run.
    """

    def __init__(self, config: TrainerConfig, channel: Channel, *, model: Path, script: Script, api_key: str) -> None:
        self._config, self._channel, self._model = config, channel, model
        self._script = script.model_copy(update={"trainer": script.trainer.model_copy(update={"faults": []})})
        self._slots = config.lora.slots if config.lora is not None else 1
        self._guests = Guests(config, world_size=config.world_size, api_key=api_key)
        self._joined: dict[str, _Joined] = {}
        self._lock = threading.Lock()
        if self._slots > 1:
            threading.Thread(target=self._watch, name="guests", daemon=True).start()

    def wait(self) -> None:
        """Wait until there are neither guests nor requests of guests."""
        while self._slots > 1:
            with self._lock:
                if not self._joined and not self._guests.has_open_requests():
                    return
            time.sleep(TICK_SECONDS)

    def _watch(self) -> None:
        while True:
            with self._lock:
                self._guests.list_requests()
                attempts = {name: joined.run.number for name, joined in self._joined.items()}
                for change in self._guests.required_changes(attempts):
                    self._joined[change.run].reason = change.reason
                    self._joined[change.run].run.leaving.set()
                for name in [name for name, joined in self._joined.items() if not joined.thread.is_alive()]:
                    self._end(name, self._joined.pop(name))
                attempts = {name: joined.run.number for name, joined in self._joined.items()}
                guest = self._guests.admit_next(attempts, free=len(attempts) + 1 < self._slots)
                if guest is not None:
                    self._join(guest)
            time.sleep(TICK_SECONDS)

    def _join(self, guest: Guest) -> None:
        name, number, paths = guest.config.name, guest.attempt.attempt, RunPaths(guest.folder)
        channel = self._channel.open_guest_channel(
            name, attempt=number, batch_path=lambda step: paths.batch(step, number)
        )
        slot = min(set(range(1, self._slots)) - {joined.slot for joined in self._joined.values()})
        try:
            run = Run(
                guest.config,
                guest.attempt,
                channel,
                model=self._model,
                script=self._script,
                before_step=lambda step: None,
                label=f"{name}: ",
            )
        except RoleError as error:
            channel.close()
            self._guests.report_state(name, number, "Failed", reason=str(error), exit_code=error.code)
            return
        joined = _Joined(run, slot, threading.Thread(target=self._train, args=(name,), name=name, daemon=True))
        self._joined[name] = joined
        self._guests.report_state(name, number, "Joined", slot=slot, step=guest.attempt.base_step)
        joined.thread.start()

    def _train(self, name: str) -> None:
        joined = self._joined[name]
        try:
            joined.run.run()
        except RoleError as error:
            joined.failure = error
        except Exception as error:
            logger.opt(exception=error).error(f"{name}: it failed")
            joined.failure = RoleError(f"{type(error).__name__}: {error}", exit_codes.FAILURE)

    def _end(self, name: str, joined: _Joined) -> None:
        joined.run.completer.close(0.0)
        joined.run.channel.close()
        step, failure = joined.run.policy.step, joined.failure
        if failure is None:
            self._guests.report_state(name, joined.run.number, "Left", step=step, reason=joined.reason)
        else:
            self._guests.report_state(
                name, joined.run.number, "Failed", step=step, reason=str(failure), exit_code=failure.code
            )
