"""Complete checkpoints in the background on rank 0: the trainer's part, then the orchestrator's part, then the manifest, then retention."""

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
"""Longest wait at the end of the process for a volume that is in trouble."""


@dataclass(frozen=True)
class _Saved:
    """The shards of a step are durable."""

    step: int
    path: Path
    files: Sequence[FileEntry]


@dataclass(frozen=True)
class _Agreed:
    """The orchestrator's part of a step is durable."""

    step: int


class Completer:
    """The one writer of manifests. Its thread owns all state here; the methods only put messages into its queue."""

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
        """Error that ended the thread; read by the training loop between steps."""
        self.refused: Refused | None = None
        """The newest checkpoint that the volume would not keep; it is removed, and can be saved again."""
        self.completed = 0
        """The step of the newest checkpoint that this attempt completed."""
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def saved(self, step: int, path: Path, files: Sequence[FileEntry]) -> None:
        """All ranks' shards of `step` are durable; `files` are their entries as the ranks wrote them."""
        # The refusal of an earlier try of this step: if it stayed, the step would be saved again, into files that are being completed.
        self.refused = None
        self._inbox.put(_Saved(step, path, files))

    def agreed(self, step: int) -> None:
        """The orchestrator's part of `step` is durable."""
        self._inbox.put(_Agreed(step))

    def wait_for(self, step: int, *, worth: Callable[[], bool]) -> bool:
        """Wait until the checkpoint of `step` is complete; False when it is not, and never will be.

        Args:
            step: whose shards are durable.
            worth: whether the orchestrator may still bring its part; asked again and again.
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
        """Finish what can be finished; False when that takes longer than `timeout` seconds."""
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None:
            try:
                self._take(message)
            except RoleError as error:
                self.failure = error
                return
            except (
                Exception
            ) as error:  # the loop ends the group: a checkpoint that is never completed is a bug or a broken volume
                logger.opt(exception=error).error("completing a checkpoint failed")
                self.failure = RoleError(f"completing a checkpoint failed: {error}", exit_code_of(error))
                return

    def _take(self, message: _Saved | _Agreed) -> None:
        if isinstance(message, _Saved):
            try:
                flush_trainer_part(message.path)
                check_sizes(message.path, message.files)
                self._saved[message.step] = message
            except OSError as error:
                # A later flush does not write what a failed one has not written: it has to be saved again.
                trouble = trouble_of(error, message.path)
                if trouble is None:
                    raise
                remove_trainer_part(message.path)
                self.refused = Refused(message.step, trouble)
        else:
            self._agreed.add(message.step)
        for step in sorted(self._saved):
            if step in self._agreed or not self._with_orchestrator:
                self._complete(self._saved.pop(step))
        # Older ones that were never agreed on have just been deleted; should the orchestrator name one late, it is not completed.
        self._saved = {step: saved for step, saved in self._saved.items() if step > self.completed}

    def _complete(self, saved: _Saved) -> None:
        step, path, files = saved.step, saved.path, saved.files
        doing = f"complete the checkpoint of step {step}"
        part = path / ORCHESTRATOR_PART
        theirs = (
            self._volume.insist(doing, lambda: describe_part(path, part), blocks=False)
            if self._with_orchestrator
            else []
        )
        for name, entries in ((TRAINER_PART, files), (ORCHESTRATOR_PART, theirs)):
            if not entries and (name == TRAINER_PART or self._with_orchestrator):
                raise FileNotFoundError(f"{path / name} holds no files")
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
        self._volume.insist(doing, lambda: write_manifest(path, manifest), blocks=False)
        self.completed = step
        self._on_complete(step, path)
        try:
            delete_superfluous(self._paths, attempt=attempt, config=self._config)
        except OSError as error:
            if trouble_of(error, path) is None:
                raise
            logger.warning(f"old checkpoints stay for now: {error}")
