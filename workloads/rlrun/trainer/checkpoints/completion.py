"""Completion of checkpoints in a background thread of rank 0: trainer's part, orchestrator's part, manifest, then retention."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.checkpoint_manifest import (
    ORCHESTRATOR_PART,
    TRAINER_PART,
    FileEntry,
    Manifest,
    check_sizes,
    describe_part,
    flush_trainer_part,
    remove_trainer_part,
    write_manifest,
)
from rlrun.protocol.files.failures import RoleError, exit_code_of
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume, trouble_of
from rlrun.trainer.checkpoints.resume import delete_superfluous
from rlrun.trainer.checkpoints.unsaved import Refused

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 5.0
"""Longest wait for a faulty volume at the end of the process."""


@dataclass(frozen=True)
class _Saved:
    """Message: the shards of a step are durable."""

    step: int
    path: Path
    files: Sequence[FileEntry]


@dataclass(frozen=True)
class _Agreed:
    """Message: the orchestrator's part of a step is durable."""

    step: int


class Completer:
    """Only writer of manifests. Its thread owns the state; the methods only add messages to its queue."""

    def __init__(
        self,
        paths: RunPaths,
        attempt: Attempt,
        config: CheckpointConfig,
        *,
        with_orchestrator: bool,
        on_complete: Callable[[int, Path], None],
        volume: Volume,
    ) -> None:
        self._volume = volume
        self._paths, self._attempt, self._config = paths, attempt, config
        self._with_orchestrator, self._on_complete = with_orchestrator, on_complete
        self._inbox: queue.Queue[_Saved | _Agreed | None] = queue.Queue()
        self._saved: dict[int, _Saved] = {}
        self._agreed: set[int] = set()
        self.failure: RoleError | None = None
        """Error that ended the thread, read by the training loop between steps."""
        self.refused: Refused | None = None
        """Newest checkpoint that the volume refused. Its files are deleted, and it can be saved again."""
        self.completed = 0
        """Step of the newest checkpoint that this attempt completed."""
        # A thread, because the fsync of a large checkpoint would block training. One thread with a
        # queue needs no locks for the state.
        self._thread = threading.Thread(target=self._handle_messages, name="checkpoints", daemon=True)
        self._thread.start()

    def saved(self, step: int, path: Path, files: Sequence[FileEntry]) -> None:
        """Report that the shards of `step` are durable on all ranks; `files` are their entries."""
        # Delete the refusal of an earlier try of this step. Otherwise the step would be saved again, into files that are being completed.
        self.refused = None
        self._inbox.put(_Saved(step, path, files))

    def agreed(self, step: int) -> None:
        """Report that the orchestrator's part of `step` is durable."""
        self._inbox.put(_Agreed(step))

    def wait_for(self, step: int, *, worth: Callable[[], bool]) -> bool:
        """Wait until the checkpoint of `step` is complete; return whether it is.

        Args:
            step: step with durable shards.
            worth: polled condition: whether the orchestrator may still add its part.
        """
        began = time.monotonic()
        while self.completed < step:
            patient = time.monotonic() - began < _PATIENCE_SECONDS
            if self.failure is not None or not worth() or self._is_refused(step, patient):
                return self.completed >= step
            time.sleep(_LOOK_SECONDS)
        return True

    def _is_refused(self, step: int, patient: bool) -> bool:
        if self.refused is not None and self.refused.step == step:
            return True
        return not patient and self._volume.trouble() is not None

    def close(self, timeout: float) -> bool:
        """Process the queue and stop; return False if that takes longer than `timeout` seconds."""
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _handle_messages(self) -> None:
        while (message := self._inbox.get()) is not None:
            try:
                self._handle_message(message)
            except RoleError as error:
                self.failure = error
                return
            except (
                Exception
            ) as error:  # a checkpoint that cannot be completed is a bug or a broken volume, so the loop ends the group
                logger.opt(exception=error).error("completing a checkpoint failed")
                self.failure = RoleError(f"completing a checkpoint failed: {error}", exit_code_of(error))
                return

    def _handle_message(self, message: _Saved | _Agreed) -> None:
        if isinstance(message, _Saved):
            try:
                flush_trainer_part(message.path)
                check_sizes(message.path, message.files)
                self._saved[message.step] = message
            except OSError as error:
                # After a failed fsync a second one does not write the lost pages, so the shards must be saved again.
                trouble = trouble_of(error, message.path)
                if trouble is None:
                    raise
                remove_trainer_part(message.path)
                self.refused = Refused(message.step, trouble)
        else:
            self._agreed.add(message.step)
        # Two messages are needed for a checkpoint and arrive in any order, so each message looks at
        # all steps. Older steps come first, because a completed newer one discards them.
        for step in sorted(self._saved):
            if step in self._agreed or not self._with_orchestrator:
                self._complete_checkpoint(self._saved.pop(step))
        # Retention has deleted older incomplete checkpoints. A late message of the orchestrator must not complete one of them.
        self._saved = {step: saved for step, saved in self._saved.items() if step > self.completed}

    def _complete_checkpoint(self, saved: _Saved) -> None:
        step, path, files = saved.step, saved.path, saved.files
        doing = f"complete the checkpoint of step {step}"
        part = path / ORCHESTRATOR_PART
        # Read before the manifest is written: the manifest contains sizes and checksums of both
        # parts, with which the next attempt detects damage.
        theirs = (
            self._volume.insist(doing, lambda: describe_part(path, part), blocks=False)
            if self._with_orchestrator
            else []
        )
        for name, entries in ((TRAINER_PART, files), (ORCHESTRATOR_PART, theirs)):
            if not entries and (name == TRAINER_PART or self._with_orchestrator):
                raise FileNotFoundError(f"{path / name} contains no files")
        attempt = self._attempt
        manifest = Manifest(
            step=step,
            attempt=attempt.attempt,
            world_size=attempt.world_size,
            config_hash=attempt.config_hash,
            files=(*files, *theirs),
            created_at=time.time(),
            lineage=attempt.lineage,
            origin=attempt.origin,
        )
        # The last write: a checkpoint without a manifest does not exist for later attempts. A
        # process killed before this line leaves only files that retention deletes.
        self._volume.insist(doing, lambda: write_manifest(path, manifest), blocks=False)
        # Old checkpoints are deleted only now. With `keepLast: 1` the previous checkpoint is the
        # only usable one until the new manifest is durable.
        self.completed = step
        self._on_complete(step, path)
        try:
            delete_superfluous(self._paths, attempt=attempt, config=self._config)
        except OSError as error:
            if trouble_of(error, path) is None:
                raise
            # Deletion is repeated after the next checkpoint, so a volume that refuses it does not
            # end the run.
            logger.warning(f"cannot delete old checkpoints yet: {error}")
