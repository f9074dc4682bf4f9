"""A page of memory that an environment's process shares with the one that watches it: signs of life beside the event loop.

A thread beats there, so that an event loop with much to do is not taken for one that hangs: what counts is how long one single call
has held the loop. The page outlives the process, so it also shows whose code ran when the process ended.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import sys
import threading
from dataclasses import dataclass
from time import monotonic, sleep
from types import FrameType

BEAT_SECONDS = 0.1
_BYTES = mmap.PAGESIZE
_BEAT, _HELD, _WORST, _IDLE = struct.Struct("d"), struct.Struct("d"), struct.Struct("d"), struct.Struct("d")
_NUMBER = struct.Struct("q")
_BEAT_AT, _HELD_AT, _WORST_AT, _ROLLOUT_AT, _PID_AT, _IDLE_AT = 0, 8, 16, 24, 32, 40
_RUN = asyncio.Handle._run.__code__
_current_frames = sys._current_frames
_MAX_FRAMES = 100_000


@dataclass(frozen=True)
class Pulse:
    """Values on the page."""

    beat: float
    """Last beat, on the monotonic clock of the machine; 0: none yet."""
    held_seconds: float
    """Time for which one call has held the event loop by then."""
    worst_seconds: float
    """The longest of these so far."""
    rollout: int
    """Rollout whose code runs; 0: none, or it is not known."""
    pid: int
    """Pid of the process that beats; 0: not known yet."""
    idle_seconds: float
    """Time for which the event loop has waited for events so far, all together."""


class Page:
    """The memory of one process's life.

    Args:
        descriptor: of a file in memory; None: a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("rlrun-heartbeat") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, _BYTES)
        self._memory = mmap.mmap(self.descriptor, _BYTES)

    def forget_descriptor(self) -> None:
        """Close the descriptor; the memory stays."""
        os.close(self.descriptor)

    def read(self) -> Pulse:
        """Values that were written last."""
        rollout, pid = _NUMBER.unpack_from(self._memory, _ROLLOUT_AT)[0], _NUMBER.unpack_from(self._memory, _PID_AT)[0]
        beat, held, worst = struct.unpack_from("ddd", self._memory, 0)
        (idle,) = _IDLE.unpack_from(self._memory, _IDLE_AT)
        return Pulse(beat, held, worst, rollout, pid, idle)

    def enter(self, rollout: int) -> None:
        """Note that the code of this rollout runs from now on; 0: that of none."""
        _NUMBER.pack_into(self._memory, _ROLLOUT_AT, rollout)

    def start(self) -> None:
        """Beat from a thread for as long as this process lives; called in the thread of the event loop."""
        _NUMBER.pack_into(self._memory, _PID_AT, os.getpid())
        arguments = (threading.get_ident(),)
        threading.Thread(target=self._beat, args=arguments, name="heartbeat", daemon=True).start()

    def _beat(self, thread: int) -> None:
        call: FrameType | None = None
        since = worst = idle = 0.0
        before = monotonic()
        while True:
            now, present = monotonic(), _running_call(_current_frames().get(thread))
            if present is None:
                # A beat that comes late shows nothing about the time before: perhaps the whole process had no turn.
                idle += min(now - before, 2 * BEAT_SECONDS)
            before = now
            if present is None or present is not call:
                call, since = present, now
            held = now - since
            worst = max(worst, held)
            _HELD.pack_into(self._memory, _HELD_AT, held)
            _WORST.pack_into(self._memory, _WORST_AT, worst)
            _IDLE.pack_into(self._memory, _IDLE_AT, idle)
            _BEAT.pack_into(self._memory, _BEAT_AT, now)
            present = None
            sleep(BEAT_SECONDS)


def _running_call(frame: FrameType | None) -> FrameType | None:
    """The frame with which the event loop called what it runs now; None: it waits. Each call has a frame of its own."""
    for _ in range(_MAX_FRAMES):
        if frame is None or frame.f_code is _RUN:
            return frame
        frame = frame.f_back
    return frame
