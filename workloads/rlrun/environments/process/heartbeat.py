"""Heartbeat of an environment's process: a page of memory that the process shares with the process that monitors it.

A thread writes the heartbeat, so an event loop with much work is not taken for a hanging one: the page shows for how long one single call
has blocked the loop. The page outlives the process, so it also shows whose code ran when the process ended.
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
    """Values of the page."""

    beat: float
    """Time of the last heartbeat on the machine's monotonic clock; 0 before the first one."""
    held_seconds: float
    """Time for which the current call had blocked the event loop at the last heartbeat."""
    worst_seconds: float
    """Longest time for which one call has blocked the event loop."""
    rollout: int
    """Number of the rollout whose code runs, or 0 if none runs or it is unknown."""
    pid: int
    """Pid of the process that writes the heartbeat, or 0 before its start."""
    idle_seconds: float
    """Total time for which the event loop has waited for events."""


class Page:
    """Shared memory of one process.

    Args:
        descriptor: descriptor of an existing memory file. None: create a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("rlrun-heartbeat") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, _BYTES)
        self._memory = mmap.mmap(self.descriptor, _BYTES)

    def close_descriptor(self) -> None:
        """Close the descriptor. The memory stays mapped."""
        os.close(self.descriptor)

    def read(self) -> Pulse:
        """Return the current values."""
        rollout, pid = _NUMBER.unpack_from(self._memory, _ROLLOUT_AT)[0], _NUMBER.unpack_from(self._memory, _PID_AT)[0]
        beat, held, worst = struct.unpack_from("ddd", self._memory, 0)
        (idle,) = _IDLE.unpack_from(self._memory, _IDLE_AT)
        return Pulse(beat, held, worst, rollout, pid, idle)

    def enter(self, rollout: int) -> None:
        """Record that the code of this rollout runs from now on; 0 for none."""
        _NUMBER.pack_into(self._memory, _ROLLOUT_AT, rollout)

    def start(self) -> None:
        """Start the heartbeat thread of this process. Call it in the thread of the event loop."""
        _NUMBER.pack_into(self._memory, _PID_AT, os.getpid())
        arguments = (threading.get_ident(),)
        threading.Thread(target=self._write_heartbeat, args=arguments, name="heartbeat", daemon=True).start()

    def _write_heartbeat(self, thread: int) -> None:
        call: FrameType | None = None
        since = worst = idle = 0.0
        before = monotonic()
        while True:
            now, present = monotonic(), _running_call(_current_frames().get(thread))
            if present is None:
                # A late heartbeat may mean that the whole process did not run, so it does not prove that the loop was idle all the time.
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
    """Return the frame of the event loop's current call, or None if the loop waits. Each call has a new frame."""
    for _ in range(_MAX_FRAMES):
        if frame is None or frame.f_code is _RUN:
            return frame
        frame = frame.f_back
    return frame
