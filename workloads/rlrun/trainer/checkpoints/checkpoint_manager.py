"""Checkpoints of a run: save, retry after a refusal of the volume, complete with the orchestrator's part.

Every rank runs the same code, except for the completion on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from loguru import logger

from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume
from rlrun.runtime import exit_codes
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.checkpoints import dcp
from rlrun.trainer.checkpoints.async_saver import Saver, Written
from rlrun.trainer.checkpoints.completion import Completer
from rlrun.trainer.checkpoints.dcp import Part, Progress
from rlrun.trainer.checkpoints.unsaved import Refused, Retry
from rlrun.trainer.ranks.group import Group

COMPLETION_SECONDS = 600.0
"""Longest wait for the manifest of the last checkpoint (the file that makes it complete) at the end of the run, in seconds."""


class CheckpointManager:
    """Checkpoints of one attempt. The constructor loads the base checkpoint.

    A checkpoint has these states:
    - saving: the ranks write their shards (`Saver`).
    - saved: the shards are durable on all ranks. The orchestrator then writes its own part.
    - complete: both parts are durable, and rank 0 has written the manifest (`Completer`). Only then can an attempt start from it.
    - refused: the volume rejected a write, such as when it is full. The checkpoint does not exist; a later step is saved as a retry.
    - failed: another error. No further checkpoint can be saved, and the methods raise the error.

    Args:
        config: configuration of the run.
        attempt: attempt that has started.
        parts: trained modules and optimizers, by name.
        paths: paths of the run.
        group: all ranks.
        channel: channel to the run's orchestrator, on rank 0.
        volume: object to which writes that the volume refused are reported.
        say: logger of rank 0.

    Raises:
        RoleError: the base checkpoint cannot be loaded; with the exit code for storage if the volume fails.
    """

    def __init__(
        self,
        config: TrainerConfig,
        attempt: Attempt,
        parts: Mapping[str, Part],
        *,
        paths: RunPaths,
        group: Group,
        channel: Channel | None,
        volume: Volume,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._attempt, self._paths, self._channel = config, attempt, paths, channel
        self.step = attempt.base_step
        """Step of the last checkpoint whose save this attempt has started; the base step before the first one."""
        # Loaded before the saver and the completer exist: an attempt that cannot load its base must
        # not write or delete a checkpoint.
        self.base = self._load_base(parts, leads=group.leads)
        """Progress of training at the start of this attempt."""
        self._volume, self._retry = volume, Retry(volume)
        self._saver = Saver(parts, group, background=config.checkpoint.save_async)
        # One writer of manifests: rank 0 knows the files of all ranks and has the channel to the
        # orchestrator.
        self._completer = self._start_completer(volume, say) if group.leads else None

    def _load_base(self, parts: Mapping[str, Part], *, leads: bool) -> Progress:
        """Load the checkpoint of an earlier attempt of this run, or the checkpoint of another run from which this run starts."""
        attempt, say = self._attempt, logger.warning if leads else None
        if attempt.base_attempt is not None:
            base = self._paths.checkpoint(attempt.base_step, attempt.base_attempt)
            with storage_errors(base, "load the checkpoint"):
                return dcp.load_parts(parts, base, say=say)
        if attempt.origin is not None:
            origin = Path(attempt.origin.path)
            with storage_errors(origin, "load the checkpoint"):
                # This run starts from step 0, so the other run's progress is ignored.
                dcp.load_parts(parts, origin, say=say)
        return Progress()

    def _start_completer(self, volume: Volume, say: Callable[[str], None]) -> Completer:
        channel = self._channel

        def completed(step: int, path: Path) -> None:
            say(f"step {step}: the checkpoint is complete")
            if channel is not None:
                channel.append_event("checkpoint_complete", step, path=path)
                channel.news.set()  # wakes the training loop, which may wait for this checkpoint

        completer = Completer(
            self._paths,
            self._attempt,
            self._config.checkpoint,
            with_orchestrator=channel is not None,
            on_complete=completed,
            volume=volume,
        )
        if channel is not None:
            channel.agreed = completer.agreed  # the channel calls this when the orchestrator's part is durable
        return completer

    # ---- saving, on all ranks

    def save(self, progress: Progress) -> None:
        """Start to save this rank's shards, after the previous save has finished.

        Raises:
            RoleError: see `Saver.save`.
        """
        self._saver.save(progress, self._paths.checkpoint(progress.step, self._attempt.attempt))
        # After the call: a save that raises does not count as started, so `wait_until_complete` does not wait
        # for its manifest.
        self.step = progress.step

    def report_when_durable(self) -> None:
        """Let the saver's thread report the last save when it is durable on all ranks, and start its completion on rank 0."""
        self._saver.call_when_durable(self._report_durable)

    def _report_durable(self, written: Written) -> None:
        """Report the save, and on rank 0 start its completion. Called in the saver's thread."""
        # The orchestrator may report its part before the completer knows the shards. The completer
        # accepts the two messages in either order.
        self._retry.report_durable()
        if self._channel is not None:
            self._channel.append_event("checkpoint_saved", written.step, path=written.path)
        if self._completer is not None:
            self._completer.saved(written.step, written.path, written.files)

    def seconds(self) -> float | None:
        """Return the duration of the last write in seconds, once after the write."""
        written = self._saver.take_finished()
        return written.seconds if written is not None else None

    def wait_for_write(self) -> bool:
        """Wait for the running write; return whether the volume accepted the last save.

        A save that the volume refused (False) can be retried.

        Raises:
            RoleError: the save failed for another reason.
        """
        self._saver.wait()
        self._saver.raise_save_error()
        return self._saver.refused is None

    def wait_until_complete(self, step: int) -> bool:
        """Wait until the checkpoint of `step` is complete or cannot become complete; return on rank 0 whether it is complete.

        The base checkpoint is always complete. The result of other ranks has no meaning: only rank 0 completes checkpoints.

        Raises:
            RoleError: the save failed.
        """
        is_accepted = self.wait_for_write()
        # Without durable shards no manifest can follow, and waiting for it would use up the grace
        # period.
        if self._completer is not None and is_accepted and self.step == step > self._attempt.base_step:
            return self._completer.wait_for(step, worth=self._can_complete)
        return step == self._attempt.base_step

    def close(self, *, wait: bool) -> None:
        """Stop saving and completing. `wait`: wait for running writes, unless they have failed."""
        self._saver.close(wait=wait)
        if self._completer is not None:
            self._completer.close(COMPLETION_SECONDS if wait else 0.0)

    # ---- state, read on rank 0; methods that other ranks call, too, say so

    def failure(self) -> RoleError | None:
        """Return the error that prevents further checkpoints, or None."""
        try:
            self._saver.raise_save_error()
        except RoleError as error:
            return error
        return self._completer.failure if self._completer is not None else None

    def refused_checkpoint(self) -> Refused | None:
        """Return the last checkpoint if the volume refused its shards or its completion, else None. Only rank 0 calls it."""
        assert self._completer is not None
        refused = self._completer.refused
        # During a retry of the same step, the refusal of the earlier try does not count.
        if refused is not None and refused.step == self.step and self._saver.is_idle:
            return refused
        return self._saver.refused

    def is_retry_due(self, *, blocks: bool) -> bool:
        """Return whether the last checkpoint was refused and its retry is due.

        Args:
            blocks: true if training waits for the checkpoint.
        """
        refused = self.refused_checkpoint()
        return refused is not None and self._retry.is_due(refused, blocks=blocks)

    def should_save(self, step: int) -> bool:
        """Return whether `step` is not saved and its checkpoint can be completed; always False on ranks other than 0."""
        if self._completer is None or not self._config.checkpoint.enabled or step == self._attempt.base_step:
            return False
        # Without the orchestrator's part a checkpoint never becomes complete, and retention deletes
        # it. Saving it would only delay the end.
        return (step > self.step or self.refused_checkpoint() is not None) and self._can_complete()

    def is_pending(self) -> bool:
        """Return whether a write is running, or the manifest of the last save may still be written. Only rank 0 calls it."""
        assert self._completer is not None
        if not self._saver.is_idle:
            return True
        # A step above the base step was saved by this attempt, and it is not the newest complete one.
        incomplete = self._attempt.base_step < self.step != self._completer.completed
        return incomplete and self._can_complete() and self.refused_checkpoint() is None

    def wait_for_manifest(self) -> RoleError | None:
        """Wait for the last manifest of an ended run; return an error if it is missing."""
        assert self._completer is not None
        if not self._completer.close(COMPLETION_SECONDS):
            # A fault of the volume is the likely cause. It gets its own exit code, because another
            # attempt can succeed after the repair.
            trouble = self._volume.trouble()
            return RoleError(
                f"the last checkpoint was not completed within {COMPLETION_SECONDS:.0f} s"
                + (f": {trouble.text}" if trouble is not None else ""),
                exit_codes.FAILURE if trouble is None else exit_codes.STORAGE,
            )
        return self._completer.failure

    def _can_complete(self) -> bool:
        """Return whether an orchestrator is connected that can add its part; always true in a replay, which has no orchestrator."""
        return self._channel is None or self._channel.has_client()
