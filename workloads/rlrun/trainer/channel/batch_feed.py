"""Sources of batches: the orchestrator's messages, or a folder of recorded batches. Only rank 0 has a feed."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Protocol

from rlrun.protocol.files.batch import Batch, BatchError, read_batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.metrics_line import keep_metrics
from rlrun.protocol.files.paths import RunPaths, artifacts_in_steps
from rlrun.protocol.files.routes import RoutesError, RouteShape, check_routes
from rlrun.runtime import exit_codes
from rlrun.trainer.channel.run_channel import Channel

TICK_SECONDS = 0.5
"""Interval at which waiting ranks receive an order from rank 0 and check for a request to stop."""
SILENCE_SECONDS = 1800.0
"""Time without any request after which the orchestrator counts as dead; a living one polls for events continuously."""


class Feed(Protocol):
    """Source of batches for rank 0."""

    def has_batch(self, step: int) -> bool:
        """Return whether the batch of `step` is available.

        Raises:
            RoleError: the batch will never arrive.
        """
        ...

    def take_batch(self, step: int, seconds: float) -> Path | None:
        """Take the batch of `step` and return its folder, or None if it does not arrive within `seconds`."""
        ...

    def is_exhausted(self) -> bool:
        """Return whether no more batches will arrive."""
        ...


class LiveFeed:
    """Batches announced by the orchestrator."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def has_batch(self, step: int) -> bool:
        if not self._channel.batches.empty():  # the channel accepts each step once, in order
            return True
        silence = time.monotonic() - self._channel.last_contact
        if silence > SILENCE_SECONDS:
            raise RoleError(
                f"no request from the orchestrator for {silence:.0f} s while waiting for the batch of step {step}",
                exit_codes.FAILURE,
            )
        return False

    def take_batch(self, step: int, seconds: float) -> Path | None:
        try:
            return Path(self._channel.batches.get(timeout=seconds).path)
        except queue.Empty:
            self.has_batch(step)
            return None

    def is_exhausted(self) -> bool:
        return self._channel.shutdown.is_set()


class ReplayFeed:
    """Recorded batches of another run's folder `rollouts/`."""

    def __init__(self, folder: Path) -> None:
        self._batches = {
            artifact.step: artifact.path for artifact in artifacts_in_steps(folder)
        }  # the latest attempt wins
        if not self._batches:
            raise RoleError(f"--replay {folder} contains no batches (step_*)", exit_codes.USAGE)
        self._folder = folder

    def has_batch(self, step: int) -> bool:
        return True

    def take_batch(self, step: int, seconds: float) -> Path | None:
        if step not in self._batches:
            raise RoleError(f"--replay {self._folder} has no batch of step {step}", exit_codes.DATA)
        return self._batches[step]

    def is_exhausted(self) -> bool:
        return False


def cut_metrics(paths: RunPaths, base_step: int) -> None:
    """Drop unreadable lines and repeated steps from `metrics.jsonl`, which the trainer owns in a replay."""
    if paths.metrics.is_file():
        keep_metrics(paths.metrics, through=base_step)


def read_checked(
    path: Path, *, step: int, vocabulary: int, seq_len: int, attempt: int | None, routes: RouteShape | None = None
) -> Batch:
    """Read a batch and check that it can be trained in `step`.

    Args:
        path: folder of the batch.
        step: expected step; the batch's tokens must be of version `step - 1` or older.
        vocabulary: number of token ids of the model.
        seq_len: longest allowed sample, in tokens.
        attempt: expected attempt of the batch; None in a replay.
        routes: size of the model's routes if they are replayed. Default: routes are ignored.

    Raises:
        RoleError: the batch is invalid; the message names its folder and the wrong value.
    """
    try:
        batch = read_batch(path)
    except BatchError as error:
        raise RoleError(str(error), exit_codes.FAILURE) from None
    try:
        _check_batch(batch, step, vocabulary, seq_len, attempt)
        if routes is not None:
            _check_batch_routes(batch, routes)
    except BatchError as error:
        raise RoleError(f"the batch {path} is refused: {error}", exit_codes.DATA) from None
    return batch


def _check_batch_routes(batch: Batch, shape: RouteShape) -> None:
    for index, sample in enumerate(batch.samples):
        if sample.routes is None:
            continue
        try:
            check_routes(sample.routes, shape)
        except RoutesError as error:
            raise BatchError(f"sample {index}: {error}") from None


def _check_batch(batch: Batch, step: int, vocabulary: int, seq_len: int, attempt: int | None) -> None:
    if batch.step != step:
        raise BatchError(f"it is for step {batch.step}, the next step is {step}")
    if attempt is not None and batch.attempt != attempt:
        raise BatchError(f"attempt {batch.attempt} wrote it, this is attempt {attempt}")
    for index, sample in enumerate(batch.samples):
        try:
            sample.check()
        except BatchError as error:
            raise BatchError(f"sample {index}: {error}") from None
        if len(sample) > seq_len:
            raise BatchError(f"sample {index} has {len(sample)} tokens, seqLen is {seq_len}")
        if not 0 <= int(sample.input_ids.min()) <= int(sample.input_ids.max()) < vocabulary:
            raise BatchError(f"sample {index} has a token id outside the model's vocabulary of {vocabulary}")
        if not sample.temperature > 0:
            raise BatchError(f"sample {index} has temperature {sample.temperature}")
    if attempt is not None and batch.max_version >= step:
        raise BatchError(f"a token was sampled by version {batch.max_version}, which step {step} cannot know")
    # The loss divides by the number of loss tokens.
    if batch.loss_tokens == 0:
        raise BatchError("its loss mask is empty")
