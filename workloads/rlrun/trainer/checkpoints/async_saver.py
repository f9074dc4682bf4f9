"""Save checkpoints beside training: the loop waits for a copy in host memory only, and a thread of every rank writes it.

Each rank writes its own shards. The threads meet in a process group of their own, so that their collectives never mix with the step's.
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
    """A checkpoint's shards are durable on all ranks; its manifest is not written yet."""

    step: int
    path: Path
    seconds: float
    """Time from the end of the copy to the last rank's last byte."""
    files: tuple[FileEntry, ...]
    """Files of all ranks, on rank 0."""


class Saver:
    """Writes one checkpoint at a time. Every rank has one and calls it at the same steps.

    Args:
        parts: what is trained, by name.
        group: the ranks.
        background: write in a thread; otherwise `save` returns when all is written.
    """

    def __init__(self, parts: Mapping[str, Part], group: Group, *, background: bool) -> None:
        self._parts, self._group = parts, group
        # Without CUDA there is no pinned memory, and a copy is done when the call returns.
        cuda = group.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
            )
        )
        self._thread = ThreadPoolExecutor(1, "save") if background else None
        self._peers = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._last: Future[Written | Refused] | None = None
        self._after: Future[None] | None = None
        self._told: Written | None = None

    def save(self, progress: Progress, path: Path) -> None:
        """Save everything as it is now into `path`. What changes after the return does not reach the files.

        Waits for the save before this one: there is one set of buffers, and one save in flight.

        Raises:
            RoleError: the save before this one failed, or this one, where it is not in the background; for another reason than the volume.
        """
        self.wait()
        self.check()
        state = snapshot_shards(self._parts, progress)
        if self._thread is None:
            self._last = Future()
            self._last.set_result(self._write(state, progress.step, path))
        else:
            self._last = self._thread.submit(self._write, self._stager.stage(state), progress.step, path)

    def then(self, act: Callable[[Written], None]) -> None:
        """Call `act` once what was saved last is durable on all ranks, in the saver's thread; not at all when it fails or is refused."""
        if self._last is None:
            return
        if self._thread is None:
            self._act(self._last, act)
        else:
            self._after = self._thread.submit(self._act, self._last, act)

    def check(self) -> None:
        """Raise the failure of the last save, if it has failed. A refusal is none: it can be tried again.

        Raises:
            RoleError: why.
        """
        for future in (self._last, self._after):
            if future is not None and future.done():
                future.result()

    def wait(self) -> None:
        """Wait until nothing is being written and all is reported; never raises."""
        pending: list[Future[Any]] = [future for future in (self._last, self._after) if future is not None]
        wait(pending)

    @property
    def idle(self) -> bool:
        """True if nothing is being written or reported."""
        return all(future is None or future.done() for future in (self._last, self._after))

    @property
    def refused(self) -> Refused | None:
        """The last save, when the volume has refused it; None too while it is being written. After `wait` the same on all ranks."""
        if self._last is None or not self._last.done() or self._last.exception() is not None:
            return None
        result = self._last.result()
        return result if isinstance(result, Refused) else None

    def close(self, *, wait: bool) -> None:
        """Save no more, and destroy the process group. Every rank calls it.

        Args:
            wait: wait for the write and the report in progress. Otherwise the thread destroys the group after the write, which may hang.
        """
        if self._thread is None:
            dist.destroy_process_group(self._peers)
            return
        if wait:
            self.wait()
        for future in (self._last, self._after):
            if future is not None:
                future.cancel()
        destroyed = self._thread.submit(dist.destroy_process_group, self._peers)
        self._thread.shutdown(wait=wait)
        if wait:
            destroyed.result()

    def finished(self) -> Written | None:
        """The last save, once, after it has been written; None before, and when it was returned already."""
        if self._last is None or not self._last.done() or self._last.exception() is not None:
            return None
        written = self._last.result()
        if isinstance(written, Refused) or written == self._told:
            return None
        self._told = written
        return written

    @staticmethod
    def _act(last: Future[Written | Refused], act: Callable[[Written], None]) -> None:
        if last.exception() is None:  # the one worker took this job after that one: it is done
            result = last.result()
            if isinstance(result, Written):
                act(result)

    def _write(self, state: dict[str, object], step: int, path: Path) -> Written | Refused:
        began = time.perf_counter()
        try:
            reach("checkpoint.shards.before_write")
            files = write_shards(state, path, self._group, self._peers)
            reach("checkpoint.shards.durable")
        except RefusedError as error:
            return Refused(step, error.trouble)
        except RoleError:
            raise
        except Exception as error:
            logger.opt(exception=error).error("saving a checkpoint failed")
            reason = f"saving the checkpoint of step {step} failed: {type(error).__name__}: {error}"
            raise RoleError(reason, exit_codes.FAILURE) from error
        return Written(step, path, time.perf_counter() - began, files)
