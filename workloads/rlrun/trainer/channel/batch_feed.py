"""Sources of batches: the orchestrator's messages, or a folder of recorded batches. Rank 0 alone has a feed."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Protocol

from rlrun.protocol.files.batch import Batch, BatchError, read_batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.metrics_line import keep_metrics
from rlrun.protocol.files.paths import RunPaths, artifacts_in_steps
from rlrun.runtime import exit_codes
from rlrun.trainer.channel.run_channel import Channel

TICK_SECONDS = 0.5
"""Interval at which waiting ranks hear from rank 0, and see that they are asked to stop."""
SILENCE_SECONDS = 1800.0
"""Longest time without any request of the orchestrator; it polls for events all the time, so then it is gone."""


class Feed(Protocol):
    """Rank 0's view of what comes next."""

    def ready(self, step: int) -> bool:
        """True if the batch of `step` can be had at once.

        Raises:
            RoleError: it will never come.
        """
        ...

    def poll(self, step: int, seconds: float) -> Path | None:
        """The folder of the batch of `step`, taken; None when it has not come within `seconds`."""
        ...

    def ended(self) -> bool:
        """True if no more batches will come."""
        ...


class LiveFeed:
    """Batches that the orchestrator announces."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def ready(self, step: int) -> bool:
        if not self._channel.batches.empty():  # the channel admits each step once, in order
            return True
        silence = time.monotonic() - self._channel.last_contact
        if silence > SILENCE_SECONDS:
            raise RoleError(
                f"the orchestrator has not been heard of for {silence:.0f} s while waiting for the batch of step {step}",
                exit_codes.FAILURE,
            )
        return False

    def poll(self, step: int, seconds: float) -> Path | None:
        try:
            return Path(self._channel.batches.get(timeout=seconds).path)
        except queue.Empty:
            self.ready(step)
            return None

    def ended(self) -> bool:
        return self._channel.shutdown.is_set()


class ReplayFeed:
    """Batches of another run's `rollouts/`."""

    def __init__(self, folder: Path) -> None:
        self._batches = {
            artifact.step: artifact.path for artifact in artifacts_in_steps(folder)
        }  # the latest attempt's wins
        if not self._batches:
            raise RoleError(f"--replay {folder} holds no batches (step_*)", exit_codes.USAGE)
        self._folder = folder

    def ready(self, step: int) -> bool:
        return True

    def poll(self, step: int, seconds: float) -> Path | None:
        if step not in self._batches:
            raise RoleError(f"--replay {self._folder} has no batch of step {step}", exit_codes.DATA)
        return self._batches[step]

    def ended(self) -> bool:
        return False


def cut_metrics(paths: RunPaths, base_step: int) -> None:
    """In a replay the trainer owns `metrics.jsonl`: drop the steps that are trained again, and lines that cannot be read."""
    if paths.metrics.is_file():
        keep_metrics(paths.metrics, through=base_step)


def read_checked(path: Path, *, step: int, vocabulary: int, seq_len: int, attempt: int | None) -> Batch:
    """Read a batch and refuse one that cannot be trained in `step`.

    Args:
        path: its folder.
        step: the step that it has to be for; its tokens may be of version `step - 1` at the newest.
        vocabulary: token ids are below this.
        seq_len: longest sample, in tokens.
        attempt: who has to have written it; None in a replay.

    Raises:
        RoleError: names the batch and what is wrong with it.
    """
    try:
        batch = read_batch(path)
    except BatchError as error:
        raise RoleError(str(error), exit_codes.FAILURE) from None
    try:
        _check_batch(batch, step, vocabulary, seq_len, attempt)
    except BatchError as error:
        raise RoleError(f"the batch {path} is refused: {error}", exit_codes.DATA) from None
    return batch


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
    if batch.loss_tokens == 0:
        raise BatchError("it has no token to train on")
