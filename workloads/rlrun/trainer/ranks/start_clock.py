"""Durations of the phases of a rank's start, from the start of torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from rlrun.protocol.messages.lease_annotations import PREFIX


def started_at(stat: str, ticks: int) -> float | None:
    """Parse the start time of a process, in seconds since boot; return None for an unknown format.

    Args:
        stat: text of `/proc/PID/stat`. The process name in parentheses may contain parentheses and spaces.
        ticks: kernel clock ticks per second.
    """
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) / ticks if len(fields) > 19 and fields[19].isdecimal() else None


def launched_ago() -> float:
    """Return the seconds since torchrun (or, without torchrun, this process) started; 0 if unknown."""
    process = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        began = started_at(Path(f"/proc/{process}/stat").read_text(), os.sysconf("SC_CLK_TCK"))
        return 0.0 if began is None else max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, AttributeError):
        return 0.0


class StartClock:
    """Durations of the phases of a start.

    Args:
        ago: seconds that have passed before now.
        clock: monotonic clock in seconds.
    """

    def __init__(self, ago: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, clock() - ago
        self._seconds: dict[str, float] = {}

    def end_phase(self, phase: str) -> None:
        """End a phase and start the next one."""
        now = self._clock()
        self._seconds[PREFIX + phase] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Return the seconds by metric name once, for the attempt's first step; later calls return an empty dict."""
        seconds, self._seconds = self._seconds, {}
        return seconds
