"""Measures of two ways of one thing that take turns: ratios of neighbours with an interval, and CPU of processes. Linux only (/proc)."""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

RESAMPLES = 2000
LEVEL = 0.95
MIN_PAIRS = 5
"""With fewer an interval says nothing."""
Verdict = Literal["shown", "missed", "undecided"]


@dataclass(frozen=True)
class Estimate:
    """A ratio, and the interval that holds it with probability `LEVEL`."""

    median: float
    low: float
    high: float
    pairs: int

    def verdict(self, goal: float) -> Verdict:
        """Judge whether the ratio is at most `goal`: decided only where the whole interval lies on one side."""
        if self.pairs < MIN_PAIRS or self.low <= goal < self.high:
            return "undecided"
        return "shown" if self.high <= goal else "missed"

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def estimate(pairs: Sequence[tuple[float, float]], *, seed: int = 0) -> Estimate:
    """Median over pairs of the first over the second, with a percentile bootstrap over pairs (Efron 1979).

    Args:
        pairs: positive values of neighbours.
        seed: of the resampling.
    """
    ratios = [own / other for own, other in pairs if own > 0 and other > 0]
    if not ratios:
        return Estimate(math.nan, -math.inf, math.inf, 0)
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    cut = int(RESAMPLES * (1 - LEVEL) / 2)
    return Estimate(statistics.median(ratios), medians[cut], medians[-1 - cut], len(ratios))


def turns(pairs: int) -> list[bool]:
    """States of a switch between two ways, turn by turn: on, off, off, on, ...; a drift meets both alike. Pair i: turns 2i and 2i + 1."""
    return [turn for pair in range(pairs) for turn in ((True, False) if pair % 2 == 0 else (False, True))]


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, which live."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                parents.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += parents.get(one, ())
    return found


def cpu_by_thread(pids: Iterable[int]) -> dict[int, float]:
    """CPU seconds of each thread of the processes, to the nanosecond."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    found[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return found


def used(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """CPU seconds between two times; the last ones of a thread that has ended are missing."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())


def cpu_seconds_with_ended(pids: Iterable[int]) -> float:
    """CPU seconds of processes, of their ended threads and of children that they have waited for; in ticks of the system."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += sum(map(int, _stat(pid)[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
