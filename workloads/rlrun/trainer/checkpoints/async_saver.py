"""Checkpoint saves in the background: the loop waits only for a copy in host memory, which a thread of each rank writes.

Each rank writes its own shards. The threads use a separate process group, so that their collectives never mix with those of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from loguru import logger
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.checkpoint_manifest import FileEntry
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.volume_faults import RefusedError
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints.dcp import Part, Progress, snapshot_shards, write_shards
from rlrun.trainer.checkpoints.unsaved import Refused
from rlrun.trainer.ranks.group import COLLECTIVE_TIMEOUT, Group


@dataclass(frozen=True)
class Written:
    """Checkpoint whose shards are durable on all ranks, but whose manifest is not written yet."""

    step: int
    path: Path
    seconds: float
    """Duration from the end of the copy until all ranks have written."""
    files: tuple[FileEntry, ...]
    """Files of all ranks on rank 0; empty on other ranks."""


class Saver:
    """Writer of one checkpoint at a time. Every rank has one and calls it at the same steps.

    Args:
        parts: trained modules and optimizers, by name.
        group: all ranks.
        background: write in a thread; otherwise `save` returns after the write.
    """

    def __init__(self, parts: Mapping[str, Part], group: Group, *, background: bool) -> None:
        self._parts, self._group = parts, group
        # Without CUDA, pinned memory does not exist and copies are synchronous.
        cuda = group.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
            )
        )
        self._thread = ThreadPoolExecutor(1, "save") if background else None
        # A separate group: the writer's thread meets the other ranks while training runs
        # collectives in the main group. In one group the collectives of both threads could pair up
        # in different orders on different ranks.
        self._peers = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._last: Future[Written | Refused] | None = None
        self._after: Future[None] | None = None
        self._told: Written | None = None

    def save(self, progress: Progress, path: Path) -> None:
        """Save the current state into `path`; later changes do not affect the files.

        The method waits for the previous save, because there is only one set of buffers.

        Raises:
            RoleError: the previous save failed, or this one without a background thread. A volume's refusal does not raise.
        """
        self.wait()
        self.raise_save_error()
        state = snapshot_shards(self._parts, progress)
        if self._thread is None:
            self._last = Future()
            self._last.set_result(self._write_shards(state, progress.step, path))
        else:
            # `stage` copies in this thread, before `submit` gets its result. The next optimizer
            # step changes the parameters in place.
            self._last = self._thread.submit(self._write_shards, self._stager.stage(state), progress.step, path)

    def call_when_durable(self, act: Callable[[Written], None]) -> None:
        """Call `act` in the saver's thread after the last save is durable on all ranks; not if it fails or is refused."""
        if self._last is None:
            return
        if self._thread is None:
            self._call_if_written(self._last, act)
        else:
            self._after = self._thread.submit(self._call_if_written, self._last, act)

    def raise_save_error(self) -> None:
        """Raise the error of the last save, if it failed. A volume's refusal is not an error, because the save can be retried.

        Raises:
            RoleError: the last save or its report failed.
        """
        for future in (self._last, self._after):
            if future is not None and future.done():
                future.result()

    def wait(self) -> None:
        """Wait for the running write and report; never raises."""
        pending: list[Future[Any]] = [future for future in (self._last, self._after) if future is not None]
        wait(pending)

    @property
    def is_idle(self) -> bool:
        """Whether no write and no report is running."""
        return all(future is None or future.done() for future in (self._last, self._after))

    @property
    def refused(self) -> Refused | None:
        """The last save if the volume refused it, else None; also None during the write. After `wait` it is the same on all ranks."""
        if self._last is None or not self._last.done() or self._last.exception() is not None:
            return None
        result = self._last.result()
        return result if isinstance(result, Refused) else None

    def close(self, *, wait: bool) -> None:
        """Stop the saver and destroy the process group. All ranks call it.

        Args:
            wait: wait for the running write and report. Otherwise the thread destroys the group after the write, which may hang.
        """
        if self._thread is None:
            dist.destroy_process_group(self._peers)
            return
        if wait:
            self.wait()
        # A report that has not started is dropped. A write that runs cannot be canceled.
        for future in (self._last, self._after):
            if future is not None:
                future.cancel()
        # The only worker runs its jobs in order, so the group outlives the write that uses it.
        destroyed = self._thread.submit(dist.destroy_process_group, self._peers)
        self._thread.shutdown(wait=wait)
        if wait:
            destroyed.result()

    def take_finished(self) -> Written | None:
        """Return the last save once after its write; return None before, and on later calls."""
        if self._last is None or not self._last.done() or self._last.exception() is not None:
            return None
        written = self._last.result()
        if isinstance(written, Refused) or written == self._told:
            return None
        self._told = written
        return written

    @staticmethod
    def _call_if_written(last: Future[Written | Refused], act: Callable[[Written], None]) -> None:
        if last.exception() is None:  # the only worker runs jobs in order, so the save has finished
            result = last.result()
            if isinstance(result, Written):
                act(result)

    def _write_shards(self, state: dict[str, object], step: int, path: Path) -> Written | Refused:
        began = time.perf_counter()
        try:
            reach("checkpoint.shards.before_write")
            files = write_shards(state, path, self._group, self._peers)
            reach("checkpoint.shards.durable")
        except RefusedError as error:
            # A refusal is a result and not an exception: training continues, and a later step is
            # saved instead.
            return Refused(step, error.trouble)
        except RoleError:
            raise
        except Exception as error:
            logger.opt(exception=error).error("saving a checkpoint failed")
            reason = f"saving the checkpoint of step {step} failed: {type(error).__name__}: {error}"
            raise RoleError(reason, exit_codes.FAILURE) from error
        return Written(step, path, time.perf_counter() - began, files)
