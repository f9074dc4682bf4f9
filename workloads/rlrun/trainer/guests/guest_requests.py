"""Requests of other runs for a slot, and their answers: rank 0's part of `protocol.files.shared_trainer_files`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TrainerConfig
from rlrun.config.models.run_config import config_fingerprint, sharing_refusal
from rlrun.protocol.files import shared_trainer_files
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared_trainer_files import SlotAnswer, SlotRequest, SlotState
from rlrun.protocol.messages.endpoints import guest_proof
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints import resume

LOOK_SECONDS = 0.5
"""Seconds between listings of the folder of requests."""
_FINAL: tuple[SlotState, ...] = ("Refused", "Left", "Failed")


@dataclass(frozen=True)
class Guest:
    """Run that may join; its attempt has been started on the volume."""

    config: TrainerConfig
    attempt: Attempt
    folder: Path


@dataclass(frozen=True)
class Change:
    """Required change for a run that has a slot."""

    run: str
    at_once: bool
    """Remove the run immediately, because a later attempt of it requested a slot; otherwise it saves first."""
    reason: str


class Guests:
    """Requests in the host's folder.

    Args:
        host: configuration of the trainer's own run.
        world_size: number of ranks of the trainer.
        api_key: key of the host.
    """

    def __init__(self, host: TrainerConfig, *, world_size: int, api_key: str) -> None:
        self._host, self._world_size, self._key = host, world_size, api_key
        self._paths = RunPaths(Path(host.output_dir))
        self._looked = 0.0
        self._requests: list[SlotRequest] = []
        self._waiting: set[tuple[str, int]] = set()
        self._final: set[tuple[str, int]] = set()
        """Attempts with a final answer."""

    def list_requests(self) -> None:
        """List the requests, at most once per `LOOK_SECONDS`."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            self._requests = shared_trainer_files.read_requests(self._paths)
        except OSError as error:  # a short fault of the volume must not remove runs
            logger.warning(f"cannot list {self._paths.shared}: {error}")

    def required_changes(self, joined: Mapping[str, int]) -> Iterator[Change]:
        """Compare the requests with the runs that have a slot.

        Args:
            joined: attempt of each guest.
        """
        asked = {join.run: join.attempt for join in self._requests}
        for run, attempt in joined.items():
            if run not in asked:
                yield Change(run, at_once=False, reason="the run requested to leave")
            elif asked[run] > attempt:
                yield Change(run, at_once=True, reason=f"its attempt {asked[run]} requested a slot")

    def admit_next(self, joined: Mapping[str, int], *, free: bool) -> Guest | None:
        """Return the next run to join after starting its attempt, and answer requests that must wait or are refused.

        Args:
            joined: attempt of each guest.
            free: true if a slot is free.
        """
        for join in self._requests:
            if join.run in joined or self._is_final(join):
                continue
            if not free:
                if (join.run, join.attempt) not in self._waiting:
                    self._waiting.add((join.run, join.attempt))
                    taken = ", ".join([self._host.name, *joined])
                    self.report_state(join.run, join.attempt, "Waiting", reason=f"all slots are taken: {taken}")
                continue
            self._waiting.discard((join.run, join.attempt))
            if (guest := self._prepare_guest(join)) is not None:
                return guest
        return None

    def has_open_requests(self) -> bool:
        """Return whether a request has no final answer yet."""
        self._looked = 0.0
        self.list_requests()
        return not all(self._is_final(join) for join in self._requests)

    def _is_final(self, join: SlotRequest) -> bool:
        key = (join.run, join.attempt)
        if key not in self._final:
            state = shared_trainer_files.read_state(self._paths, *key)
            if state is not None and state.state in _FINAL:
                self._final.add(key)
        return key in self._final

    def report_state(
        self,
        run: str,
        attempt: int,
        state: SlotState,
        *,
        slot: int | None = None,
        step: int | None = None,
        reason: str = "",
        exit_code: int = exit_codes.OK,
    ) -> None:
        """Report the state of a request to the run's orchestrator and the log.

        Raises:
            RoleError: the volume refuses the write.
        """
        logger.info(f"run {run}, attempt {attempt}: {state}{f' ({reason})' if reason else ''}")
        told = SlotAnswer(
            run=run,
            attempt=attempt,
            slot=slot,
            state=state,
            step=step,
            proof=self._key_proof(run, attempt) if state == "Joined" else "",
            reason=reason,
            exit_code=exit_code,
        )
        with storage_errors(self._paths.shared, "answer a run"):
            shared_trainer_files.write_answer(self._paths, told)

    def _key_proof(self, run: str, attempt: int) -> str:
        """Return the proof of the request's key, or an empty string if the request was withdrawn."""
        asked = (join for join in self._requests if (join.run, join.attempt) == (run, attempt))
        return next((guest_proof(self._key, run, join.key_digest) for join in asked), "")

    def _prepare_guest(self, join: SlotRequest) -> Guest | None:
        paths = RunPaths(Path(join.folder))
        try:
            self._check_place(paths, join)
            if join.attempt in paths.attempts_on_disk():
                reason = f"the trainer of attempt {join.attempt} has ended; request a slot with a higher attempt"
                self.report_state(join.run, join.attempt, "Left", reason=reason, exit_code=exit_codes.ATTEMPT_TAKEN)
                return None
            self._check_past(join)
            config = _read_request(paths, join.run)
            reason_not = sharing_refusal(self._host, config)
            if reason_not is not None:
                raise RoleError(reason_not, exit_codes.CONFIGURATION)
            fingerprint = config_fingerprint(config)
            new = resume.NewAttempt(join.attempt, self._world_size, fingerprint, with_orchestrator=True)
            attempt = resume.start_attempt(paths, config, new, log=_labeled_warning(join.run))
        except RoleError as error:
            self.report_state(join.run, join.attempt, "Refused", reason=str(error), exit_code=error.code)
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:  # the guest's files are invalid
            reason = f"{join.folder} cannot be used: {type(error).__name__}: {error}"
            self.report_state(join.run, join.attempt, "Refused", reason=reason, exit_code=exit_codes.DATA)
            return None
        return Guest(config, attempt, paths.root)

    def _check_past(self, join: SlotRequest) -> None:
        """Refuse the attempt after one that ended the trainer, so that an automatic restart does not end it again."""
        last = shared_trainer_files.last_state(self._paths, join.run)
        if last is not None and last.ended_trainer and last.attempt < join.attempt:
            raise RoleError(
                f"its attempt {last.attempt} failed on only some ranks and ended the trainer of all runs: {last.reason}; repair the cause, "
                "then restart the run",
                exit_codes.DATA,
            )

    def _check_place(self, paths: RunPaths, join: SlotRequest) -> None:
        if paths.root.resolve() != (self._paths.root.parent / join.run).resolve() or join.run == self._host.name:
            raise RoleError(
                f"the folder of run {join.run} is {join.folder}, but must be {self._paths.root.parent / join.run}; "
                "put both runs on one volume",
                exit_codes.CONFIGURATION,
            )


def _labeled_warning(run: str) -> Callable[[str], None]:
    return lambda message: logger.warning(f"{run}: {message}")


def _read_request(paths: RunPaths, run: str) -> TrainerConfig:
    try:
        config = load_file(TrainerConfig, paths.run_json, section="trainer")
    except ConfigError as error:
        raise RoleError(" / ".join(str(error).splitlines()), exit_codes.CONFIGURATION) from None
    if config.name != run:
        raise RoleError(f"{paths.run_json} belongs to run {config.name}, not to {run}", exit_codes.CONFIGURATION)
    return config
