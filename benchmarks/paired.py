"""Alternating measurements of two variants: ratios of neighbors with an interval, and CPU time of processes. Linux only
(/proc)."""

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
"""Smallest number of pairs with a meaningful interval."""
Verdict = Literal["shown", "missed", "undecided"]


@dataclass(frozen=True)
class Estimate:
    """A ratio, and the interval that contains it with probability `LEVEL`."""

    median: float
    low: float
    high: float
    pairs: int

    def verdict(self, goal: float) -> Verdict:
        """Compare the ratio with `goal`; the result is decided only if the whole interval is on one side."""
        if self.pairs < MIN_PAIRS or self.low <= goal < self.high:
            return "undecided"
        return "shown" if self.high <= goal else "missed"

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def estimate(pairs: Sequence[tuple[float, float]], *, seed: int = 0) -> Estimate:
    """Return the median over pairs of the first over the second, with a percentile bootstrap over pairs (Efron 1979).

    Args:
        pairs: positive values of neighbors.
        seed: seed of the resampling.
    """
    ratios = [own / other for own, other in pairs if own > 0 and other > 0]
    if not ratios:
        return Estimate(math.nan, -math.inf, math.inf, 0)
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    cut = int(RESAMPLES * (1 - LEVEL) / 2)
    return Estimate(statistics.median(ratios), medians[cut], medians[-1 - cut], len(ratios))


def turns(pairs: int) -> list[bool]:
    """Return states of a switch between two variants, turn by turn: on, off, off, on, ...; a drift affects both
    equally. Pair i: turns 2i and 2i + 1."""
    return [turn for pair in range(pairs) for turn in ((True, False) if pair % 2 == 0 else (False, True))]


def descendants(pid: int) -> list[int]:
    """Return a process and its live descendants."""
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
    """Return CPU seconds of each thread of the processes, with a resolution of a nanosecond."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    found[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return found


def used(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return CPU seconds between two times; the last ones of an ended thread are missing."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())


def cpu_seconds_with_ended(pids: Iterable[int]) -> float:
    """Return CPU seconds of processes, of their ended threads and of reaped children, in ticks of the system."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += sum(map(int, _stat(pid)[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Return fields of /proc/PID/stat after the name, which may contain any characters."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
