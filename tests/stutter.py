"""A command with interruptions: `python -m tests.stutter [--most 2] pytest FILE...` suspends its processes at random.

Each process is suspended and resumed separately while others run, so that the order of their actions changes and each
of them is late at times. Tests that depend on timing or order fail soon, also on an idle machine. Effects of the
suspension itself are not faults: a caller that asks for suspended processes sees them, an unbuffered `print` of more
than a pipe's capacity may be cut, and a signal during a suspension may reach a thread that does not handle it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

VARIABLE = "TESTS_STUTTER"
"""Environment variable of all processes of one command that pass on their environment."""
LOOK_SECONDS = 0.06


class Processes:
    """All processes of a command: those with its mark in their environment, and their descendants."""

    def __init__(self, mark: str) -> None:
        self._mark, self._known = f"{VARIABLE}={mark}".encode(), set[int]()

    def look(self) -> set[int]:
        """Return pids of live processes, without zombies."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):  # it has ended, or is not a process
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
        self._known &= parents.keys()
        self._known |= {pid for pid in parents.keys() - self._known if self._is_marked(pid)}
        while more := {pid for pid, parent in parents.items() if parent in self._known} - self._known:
            self._known |= more
        return set(self._known)

    def _is_marked(self, pid: int) -> bool:
        with suppress(OSError):
            return self._mark in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command to its end; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.stutter", description="run a command with interruptions")
    parser.add_argument("--most", type=float, default=2.0, metavar="SECONDS", help="the longest stop of a process")
    parser.add_argument("--share", type=float, default=0.06, help="probability of a stop, 16 times a second")
    parser.add_argument("--seed", type=int, default=None, help="seed of the random suspensions")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    mark, chance = uuid.uuid4().hex, random.Random(options.seed)
    command = subprocess.Popen(options.command, env=os.environ | {VARIABLE: mark})
    processes, stopped = Processes(mark), dict[int, float]()
    signal.signal(signal.SIGTERM, lambda *_: command.terminate())  # ending by it would leave processes suspended
    try:
        while command.poll() is None:
            now = time.monotonic()
            _go_on(stopped, now)
            for pid in sorted(processes.look() - stopped.keys()):
                if chance.random() < options.share:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
                        stopped[pid] = now + chance.uniform(0.02, options.most if chance.random() < 0.6 else 0.3)
            time.sleep(LOOK_SECONDS)
    finally:
        _go_on(stopped, float("inf"))
    return command.returncode


def _go_on(stopped: dict[int, float], now: float) -> None:
    """Resume the processes whose suspension is over."""
    for pid in [pid for pid, until in stopped.items() if until <= now]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        del stopped[pid]


if __name__ == "__main__":
    sys.exit(main())
