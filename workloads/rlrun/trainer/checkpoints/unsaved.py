"""Retries of checkpoints that the volume refused: training continues, and a later step is saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rlrun.protocol.files.volume_faults import Trouble, Volume

SAVING = "save a checkpoint"
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 5.0, 120.0
"""Backoff of retries, doubled each time, because on GPUs each try blocks the loop for a copy."""


@dataclass(frozen=True)
class Refused:
    """Checkpoint that the volume refused and that does not exist; the same on all ranks."""

    step: int
    trouble: Trouble


def _retry_pauses() -> Iterator[float]:
    seconds = FIRST_RETRY_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, LONGEST_RETRY_SECONDS)


class Retry:
    """Time of the next try of a refused checkpoint, and the report of the fault until then.

    Args:
        volume: receiver of the refusals.
        clock: monotonic clock in seconds.
    """

    def __init__(self, volume: Volume, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._volume, self._clock = volume, clock
        self._known: Refused | None = None
        self._pauses = _retry_pauses()
        self._at = 0.0

    def is_due(self, refused: Refused, *, blocks: bool) -> bool:
        """Report the refusal and return whether a retry is due.

        Args:
            refused: refused checkpoint of the last try.
            blocks: true if training waits for the checkpoint.
        """
        if refused is not self._known:
            self._known, self._at = refused, self._clock() + next(self._pauses)
        self._volume.refuse(SAVING, replace(refused.trouble, blocks=blocks))
        return self._clock() >= self._at

    def report_durable(self) -> None:
        """Report that a checkpoint is durable, and reset the backoff."""
        self._known, self._pauses = None, _retry_pauses()
        self._volume.accept(SAVING)
