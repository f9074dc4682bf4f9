"""Runs of a shared trainer: the host, guests that join and leave, and errors of one guest.

An exception in a guest's work ends the guest if all ranks have raised it at the same place. Ranks that stopped at different places have
started different collectives. Their next collectives would be paired wrongly and mix the numbers of several runs. In this case the process
must end, and all runs resume from their checkpoints. The comparison uses a separate process group, so a missing rank causes a timeout
instead of a wrong pairing. The rank whose work failed reports it before it ends, because its peers see only a closed connection. An
exception in the host's work ends the process too.

Every rank runs the same code. Only rank 0 reads and answers requests.
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger

from rlrun.config.models.roles import TrainerConfig
from rlrun.diagnostics.symptoms import between_ranks
from rlrun.protocol.files import shared_trainer_files
from rlrun.protocol.files.attempts import attempt_of
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared_trainer_files import SlotAnswer, SlotState
from rlrun.runtime import exit_codes
from rlrun.trainer.channel.batch_feed import LiveFeed
from rlrun.trainer.guests.guest_requests import Guests
from rlrun.trainer.learning.run_objective import bind_objective, log_band_warnings
from rlrun.trainer.process import Link, SharedObjects
from rlrun.trainer.ranks.group import Agreement, Group
from rlrun.trainer.ranks.stop import StopAgreed
from rlrun.trainer.runs import DropOrder, JoinOrder, LeaveOrder, OneRun, Order, start_of
from rlrun.trainer.trained_run import Run

MEETING_SECONDS = 30.0
"""Longest wait for the other ranks; exceeds the time difference of ranks within a step of a sharded model."""


class Isolation:
    """Comparison of all ranks after an exception; every rank creates one at the start."""

    def __init__(self, group: Group) -> None:
        self._peers: dist.ProcessGroup | None = None
        if group.world_size > 1:
            self._peers = dist.new_group(backend="gloo", timeout=timedelta(seconds=MEETING_SECONDS))

    def is_contained(self, error: BaseException, place: int) -> bool:
        """Return whether every rank calls this with the same type of error from the same line at the same place of the work."""
        if self._peers is None:
            return True
        mine = torch.tensor([error_mark(error), place])
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        try:
            # The ranks compare in a separate group with a short timeout: after an error on one
            # rank only, the other ranks are in a collective of the main group and never come here.
            dist.all_gather(found, mine, group=self._peers)
        except RuntimeError:  # a rank did not call it in time
            return False
        return all(torch.equal(other, mine) for other in found)


def is_work_error(error: BaseException) -> bool:
    """Return whether the work itself raised the error, not the volume and not a connection to an ended rank."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return not isinstance(error, RoleError | OSError) and not between_ranks(error)


def report_trainer_end(host: RunPaths, run: str, attempt: int, failure: RoleError) -> None:
    """Report to the run's orchestrator and to the trainer's next attempt that this run's work ends the trainer. Any rank may call it."""
    state = SlotAnswer(
        run=run,
        attempt=attempt,
        state="Failed",
        reason=str(failure),
        exit_code=failure.code,
        ended_trainer=True,
    )
    with suppress(OSError):  # the process ends in any case
        shared_trainer_files.write_answer(host, state)


def error_mark(error: BaseException) -> int:
    """Return a checksum of an error's type and traceback lines."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return zlib.crc32(repr((type(error).__name__, frames)).encode())


SILENCE_SECONDS = 120.0
"""Time without a request of its orchestrator after which a guest is evicted."""


class SharedRuns(OneRun):
    """The host and its guests.

    Args:
        host: run for which the process was started.
        process: objects shared by all runs.
        agreement: stop point of all ranks, which counts its passes.
        size: maximum number of concurrent runs.
        api_key: key of the host.
    """

    def __init__(self, host: Run, process: SharedObjects, agreement: Agreement, *, size: int, api_key: str) -> None:
        super().__init__(host)
        self._process, self._agreement, self._size = process, agreement, size
        self._slots: dict[str, int] = {}
        """Slot of each guest, from 1."""
        group = process.policy.group
        self._isolation = Isolation(group)
        self._requests = Guests(host.config, world_size=group.world_size, api_key=api_key) if group.leads else None

    # ---- rank 0 decides

    def handle_failure(self, run: Run, error: RoleError) -> Order:
        """Return the order to drop a guest after a failure.

        Raises:
            RoleError: `error`, if the run is the host.
        """
        # The process belongs to the host. Its error ends the process with the exit code that
        # decides about a restart.
        if run is self.host:
            raise error
        return DropOrder(run.name, "Failed", str(error), error.code)

    def next_request(self) -> Order | None:
        """Return the next order to let a run leave or join, or None."""
        assert self._requests is not None
        # Requests are files, read once per round; all checks below see the same state.
        self._requests.list_requests()
        # The host never leaves by a request: its end is the end of the process.
        guests = {run.name: run for run in self.runs if run is not self.host}
        joined = {name: run.number for name, run in guests.items()}
        # First the guests that leave: replaced by a later attempt, at their request, or after their orchestrator has ended.
        for change in self._requests.required_changes(joined):
            run = guests[change.run]
            if change.at_once:
                return DropOrder(run.name, "Left", change.reason)
            if run.stage == "training":
                return LeaveOrder(run.name)
        for run in guests.values():
            if run.stage == "training" and run.silent_seconds() > SILENCE_SECONDS:
                logger.warning(f"run {run.name}: no request from its orchestrator for {run.silent_seconds():.0f} s")
                return LeaveOrder(run.name)
        # Then the next guest for a free slot.
        found = self._requests.admit_next(joined, free=len(joined) + 1 < self._size)
        if found is None:
            return None
        config = found.config.model_dump(mode="json")
        return JoinOrder(config, asdict(found.attempt), str(found.folder))

    def expects_runs(self) -> bool:
        """Return whether a request has no final answer yet."""
        return self._requests is not None and self._requests.has_open_requests()

    # ---- all ranks carry it out

    def run_work(self, run: Run, act: Callable[[Run], None]) -> bool:
        """Call `act` for one run and return whether the run continues; an exception in a guest's work ends the guest.

        Raises:
            StopAgreed: all ranks stop.
            Exception: error of the host's work, or an error that differs between ranks.
        """
        try:
            act(run)
        except StopAgreed:
            raise
        except Exception as error:
            if run is self.host:
                raise
            failure = self._contain_error(run.name, run.number, error)
            self._remove_guest(run, "Failed", str(failure), failure.code)
            return False
        return True

    def close(self, run: Run) -> None:
        """Remove an ended run; a guest's orchestrator gets an answer."""
        if run is self.host:
            super().close(run)
        else:
            self._remove_guest(run, "Left", "the run has ended")

    def apply_order(self, order: JoinOrder | DropOrder) -> None:
        """Carry out an order to join or drop a guest."""
        if isinstance(order, JoinOrder):
            self._join_guest(order)
        else:
            self._remove_guest(self.find_run(order.run), order.state, order.reason, order.code)

    def report_stop(self, run: Run, why: str) -> None:
        """Report the end of the trainer to a guest's orchestrator, which would otherwise wait for it."""
        if run is not self.host:
            code, step = exit_codes.ATTEMPT_TAKEN, run.progress.step
            self._report_state(run.name, run.number, "Left", step=step, reason=f"the trainer was {why}", exit_code=code)

    def _contain_error(self, name: str, attempt: int, error: Exception) -> RoleError:
        """Reset the model for the other runs and return the error for the user.

        Raises:
            RoleError: the ranks are at different places, so all runs must end.
        """
        failure = error if isinstance(error, RoleError) else RoleError(f"{type(error).__name__}: {error}")
        if not isinstance(error, RoleError):
            logger.opt(exception=error).error(f"run {name} failed")
        # After an error at different places the ranks have run different collectives, and no run
        # can continue in this process.
        if not self._isolation.is_contained(error, self._agreement.place):
            if is_work_error(error):
                report_trainer_end(self.host.paths, name, attempt, failure)
            raise RoleError(
                f"run {name} failed on only some ranks, so all runs must restart: {failure}", failure.code
            ) from error
        # The failed work may have left gathered parameters and gradients in the shared module.
        self._process.policy.reset()
        return failure

    def _join_guest(self, order: JoinOrder) -> None:
        config, attempt = TrainerConfig.model_validate(order.config), attempt_of(order.attempt)
        paths = RunPaths(Path(order.folder))
        link = self._guest_link(config.name, attempt.attempt, paths)
        try:
            # A guest that cannot be created is refused; all ranks must fail at the same place.
            objective = bind_objective(config)
            run = Run(config, attempt, objective, self._process, link, output_dir=paths.root, label=f"{config.name}: ")
        except Exception as error:
            failure = self._contain_error(config.name, attempt.attempt, error)
            # The failed constructor may have created them already.
            self._process.policy.adapters.delete_run(config.name)
            if link.channel is not None:
                link.channel.close()
            self._report_state(config.name, attempt.attempt, "Refused", reason=str(failure), exit_code=failure.code)
            return
        self.runs.append(run)
        if self.run_work(run, Run.publish_base):
            slot = min(set(range(1, self._size)) - set(self._slots.values()))
            self._slots[run.name] = slot
            self._report_state(run.name, run.number, "Joined", slot=slot, step=run.progress.step)
            if self._process.policy.group.leads:
                log_band_warnings(config)
                logger.info(f"{run.name}: from {start_of(attempt)}")

    def _guest_link(self, name: str, attempt: int, paths: RunPaths) -> Link:
        """Create the channel of a guest at the host's server."""
        if self.host.channel is None:
            return Link()
        channel = self.host.channel.open_guest_channel(
            name, attempt=attempt, batch_path=lambda step: paths.batch(step, attempt)
        )
        return Link(channel, LiveFeed(channel))

    def _remove_guest(self, run: Run, state: SlotState, reason: str, code: int = exit_codes.OK) -> None:
        """Answer a guest's orchestrator and remove the guest."""
        # The answer comes first: the guest's orchestrator otherwise takes the closed channel for a
        # fault of the trainer.
        self._report_state(run.name, run.number, state, step=run.progress.step, reason=reason, exit_code=code)
        self.runs.remove(run)
        self._slots.pop(run.name, None)
        # After a failure nothing waits for the guest's writes, which may never end.
        run.close(wait=state == "Left")
        if run.channel is not None:
            run.channel.close()

    def _report_state(self, name: str, attempt: int, state: SlotState, **about: Any) -> None:
        if self._requests is not None:
            self._requests.report_state(name, attempt, state, **about)
