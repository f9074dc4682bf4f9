"""Time that a rank's start takes, by phase, from the start of torchrun on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from rlrun.protocol.messages.start_times import PREFIX


def started_at(stat: str, ticks: int) -> float | None:
    """Start of a process in seconds since the machine's boot; None: the text is none of Linux.

    Args:
        stat: text of `/proc/PID/stat`. The name in brackets may itself have brackets and blanks.
        ticks: of the kernel's clock in a second.
    """
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) / ticks if len(fields) > 19 and fields[19].isdecimal() else None


def launched_ago() -> float:
    """Seconds since torchrun was started; of a rank that something else started, since that was; 0 where the machine does not say."""
    process = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        began = started_at(Path(f"/proc/{process}/stat").read_text(), os.sysconf("SC_CLK_TCK"))
        return 0.0 if began is None else max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, AttributeError):
        return 0.0


class StartClock:
    """Seconds of each phase of a start.

    Args:
        ago: seconds that have passed before now.
        clock: steady seconds.
    """

    def __init__(self, ago: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, clock() - ago
        self._seconds: dict[str, float] = {}

    def done(self, phase: str) -> None:
        """A phase has ended now, and the next one begins."""
        now = self._clock()
        self._seconds[PREFIX + phase] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Seconds by the metrics' names, once: of the attempt's first step. Nothing on later calls."""
        seconds, self._seconds = self._seconds, {}
        return seconds
