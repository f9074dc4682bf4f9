"""CPU cost of rollouts, counted in the same way for all benchmarks of the orchestrator, and a profile by function."""

from __future__ import annotations

import cProfile
import io
import pstats
import resource
import time
from pathlib import Path

import msgspec

PROFILE_LINES = 25


class Cost(msgspec.Struct, frozen=True):
    """Cost of a number of rollouts."""

    rollouts: int
    seconds: float
    cpu_seconds: float

    @property
    def per_second(self) -> float:
        return self.rollouts / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU time of a rollout in milliseconds: other load of the machine affects it little."""
        return 1000 * self.cpu_seconds / self.rollouts


def cpu() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def profiler() -> cProfile.Profile:
    """Return a profiler of CPU time for the thread that turns it on; waiting counts nothing."""
    return cProfile.Profile(time.thread_time)


def write_profile(profile: cProfile.Profile, path: Path, *, rollouts: int) -> None:
    """Write the most expensive functions, by their own time and by their cumulative time."""
    text = io.StringIO()
    text.write(f"CPU seconds of the event loop's thread, with the profiler on, for {rollouts} rollouts.\n")
    stats = pstats.Stats(profile, stream=text).strip_dirs()
    for order in ("tottime", "cumtime"):
        stats.sort_stats(order).print_stats(PROFILE_LINES)
    path.write_text("\n".join(line.rstrip() for line in text.getvalue().strip().splitlines()) + "\n")
