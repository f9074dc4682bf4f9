"""What rollouts cost, as all benchmarks of the orchestrator count it, and which functions take it."""

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
    """What a number of rollouts took."""

    rollouts: int
    seconds: float
    cpu_seconds: float

    @property
    def per_second(self) -> float:
        return self.rollouts / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU of a rollout in milliseconds: other work on the machine disturbs it little."""
        return 1000 * self.cpu_seconds / self.rollouts


def cpu() -> float:
    """Seconds of CPU of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def profiler() -> cProfile.Profile:
    """Counts the CPU of the thread that turns it on; waiting, for other work too, counts nothing."""
    return cProfile.Profile(time.thread_time)


def write_profile(profile: cProfile.Profile, path: Path, *, rollouts: int) -> None:
    """The most expensive functions: by what they take themselves, then by what they take with all that they call."""
    text = io.StringIO()
    text.write(f"CPU seconds of the event loop's thread, with the profiler on, for {rollouts} rollouts.\n")
    stats = pstats.Stats(profile, stream=text).strip_dirs()
    for order in ("tottime", "cumtime"):
        stats.sort_stats(order).print_stats(PROFILE_LINES)
    path.write_text("\n".join(line.rstrip() for line in text.getvalue().strip().splitlines()) + "\n")
