"""A checkpoint that the volume refuses is not lost for good: training goes on, and it is tried again at a later step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rlrun.protocol.files.volume_faults import Trouble, Volume

SAVING = "save a checkpoint"
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 5.0, 120.0
"""Backoff before a refused checkpoint is tried again, doubled each time: on GPUs each try stops the loop for a copy."""


@dataclass(frozen=True)
class Refused:
    """The volume has refused a checkpoint, which is not there; the same on all ranks."""

    step: int
    trouble: Trouble


def _retry_pauses() -> Iterator[float]:
    seconds = FIRST_RETRY_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, LONGEST_RETRY_SECONDS)


class Retry:
    """Time of the next try of a refused checkpoint, and the report meanwhile.

    Args:
        volume: reports the refusals.
        clock: seconds, monotonic.
    """

    def __init__(self, volume: Volume, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._volume, self._clock = volume, clock
        self._known: Refused | None = None
        self._pauses = _retry_pauses()
        self._at = 0.0

    def due(self, refused: Refused, *, blocks: bool) -> bool:
        """True if it is to be tried again now.

        Args:
            refused: the last try.
            blocks: whether nothing else is left to do.
        """
        if refused is not self._known:
            self._known, self._at = refused, self._clock() + next(self._pauses)
        self._volume.refuse(SAVING, replace(refused.trouble, blocks=blocks))
        return self._clock() >= self._at

    def written(self) -> None:
        """A checkpoint is durable."""
        self._known, self._pauses = None, _retry_pauses()
        self._volume.accept(SAVING)
