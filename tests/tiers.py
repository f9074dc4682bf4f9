"""Runs the tiers of tests, those that mostly wait beside those that mostly compute: `python -m tests.tiers [TIER ...]`.

Every tier runs, whatever became of the others. Each is one pytest of its own; its output appears line by line under its name,
and its summary once more at the end, then the tests that failed: the tail of a log says what is wrong.

Where only a few tests of a tier failed, these run once more at the end, with the machine to themselves. They have failed all the same:
the second look says whether a failure comes from the others' load, which is where races hide, or stays.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

REAL_IMAGES = "tests/e2e/cluster/test_real_images.py"
TIERS: Mapping[str, Sequence[str]] = {
    "unit": ("tests/unit",),
    "thorough": ("tests/thorough",),
    "tensors": ("tests/tensors",),
    "processes": ("tests/processes", "tests/security"),
    "browser": ("tests/browser",),
    "sim": ("tests/sim",),
    "controlplane": ("tests/controlplane",),
    "parts": ("tests/trainer", "tests/engine", "tests/e2e/local"),
    "cluster": ("tests/cluster/selftest", "tests/e2e/cluster", f"--ignore={REAL_IMAGES}"),
    "real": (REAL_IMAGES,),
}
"""Arguments of pytest."""
LANES: Sequence[Sequence[str]] = (("parts",), ("cluster",))
"""Two lanes of tiers run side by side, and compute: one for each of two cores."""
WAITING: Sequence[str] = ("controlplane",)
"""A third lane beside them that waits for controllers and stubs in most of its time."""
THEN: Sequence[str] = ("processes", "thorough", "browser", "unit", "sim", "tensors")
"""A lane that computes and is through takes the next of these, the longest first: so both end at about the same time."""
PATIENT = frozenset({"unit", "sim", "tensors"})
"""The last of `THEN` start at once, one after the other from its end, on what the others leave of the cores: they compute, and
wait for nobody who could be late."""
LEAST = 19
"""Niceness: one 70th of what others get who want to compute as well."""
LONG = "--timeout=1800"
"""Option of pytest for patient tiers: where the others compute without a pause, a test takes many times as long."""
SHORT_SUMMARY = "= short test summary info ="
"""What pytest prints above the names of the tests that failed."""
AT_LAST: Sequence[str] = ("real",)
"""Afterwards, alone: real engines and trainers in pods beside those of `parts` keep more threads busy than two cores bear."""

FEW = 3
"""More failures than this in a tier are no accident."""
TESTS_FAILED = 1
"""Exit code of pytest: tests ran, and some failed."""
IN_MEMORY = frozenset({"unit", "thorough", "tensors", "processes", "browser", "parts"})
"""Tiers whose temporary files lie in memory: their processes make files durable every few milliseconds, and on a disk that takes
images and clusters at the same time one such call may last longer than a test waits."""
MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 4 << 30


def busy_seconds() -> float:
    """Time that the machine's cores have computed since it started, in seconds of one core; a container sees its host's."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def scratch() -> AbstractContextManager[str | None]:
    """A folder in memory that is gone afterwards; None where there is no room for one."""
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ENOUGH_BYTES:
        return tempfile.TemporaryDirectory(dir=MEMORY, prefix="rlrun-tests-", ignore_cleanup_errors=True)
    return nullcontext()


@dataclass
class Tier:
    """One pytest.

    Attributes:
        summary: its last line.
        failures: the lines of its short summary that name a test that failed, or that could not run.
        seconds: how long it took.
        cpu_seconds: what its processes computed meanwhile; those of clusters, which have no parent here, are not in it.
        passes_alone: whether what failed beside the other tiers passed alone; None: nobody looked.
    """

    name: str
    process: subprocess.Popen[str]
    began: float
    summary: str = ""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    passes_alone: bool | None = None

    @classmethod
    def start(cls, name: str, memory: str | None, *options: str, patient: bool = False) -> Tier:
        """Start it; it stays in this process's group, so that Ctrl-C reaches it. `memory` is a folder for its temporary files.

        One that is `patient` has a session of its own: Linux may share the cores among sessions first, and among processes of each then.
        """
        environment = os.environ | ({"TMPDIR": memory} if memory and name in IN_MEMORY else {})
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--durations=12",
            f"-ocache_dir=.pytest_cache/{name}",
            *options,
            *TIERS[name],
        ]
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=patient,
        )
        if patient:
            with suppress(OSError):  # it has ended already, or sessions have no share here
                os.setpriority(os.PRIO_PROCESS, process.pid, LEAST)
                Path(f"/proc/{process.pid}/autogroup").write_text(str(LEAST))
        return cls(name, process, time.monotonic())

    def follow(self) -> None:
        """Show its output until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"[{self.name}] {line}", end="", flush=True)
            self.summary = line.strip() or self.summary
            if SHORT_SUMMARY in line:
                self.failures.clear()  # what came before is output of a test that runs pytest itself
            elif line.startswith(("FAILED ", "ERROR ")):
                self.failures.append(line.strip())
        _, status, used = os.wait4(self.process.pid, 0)  # wait() does not tell what it used
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds, self.cpu_seconds = time.monotonic() - self.began, used.ru_utime + used.ru_stime

    @property
    def passed(self) -> bool:
        return self.process.returncode == 0


class Run:
    """All wanted tiers, each lane in a thread of its own that goes on with what nobody has taken yet, then what comes at last.

    A signal to end goes on to what runs, and nothing more is started.
    """

    def __init__(self, wanted: Sequence[str], memory: str | None) -> None:
        self.done: list[Tier] = []
        self._memory = memory
        *self._lanes, self._waiting, then, self._last = (
            [name for name in names if not wanted or name in wanted] for names in (*LANES, WAITING, THEN, AT_LAST)
        )
        self._then = deque(then)
        self._lock = threading.Lock()
        self._running: list[Tier] = []
        self._stopped = False

    def __call__(self) -> bool:
        """Run to the end; whether all was run and passed."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        lanes = [*(chain(lane, iter(self._next, None)) for lane in self._lanes), self._waiting]
        beside = threading.Thread(target=self._follow, args=(iter(self._next_patient, None), True))
        for threads in ([*(self._thread(lane) for lane in lanes), beside], [self._thread(self._last)]):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for tier in list(self.done):
            self._look_again(tier)
        for number, handler in before.items():
            signal.signal(number, handler)
        return not self._stopped and all(tier.passed for tier in self.done)

    def _thread(self, lane: Iterable[str]) -> threading.Thread:
        return threading.Thread(target=self._follow, args=(lane,))

    def _follow(self, lane: Iterable[str], patient: bool = False) -> None:
        for name in lane:
            if (tier := self._one(name, *([LONG] if patient else []), patient=patient)) is not None:
                self.done.append(tier)

    def _next(self) -> str | None:
        """A tier that belongs to no lane and that no lane has taken."""
        with suppress(IndexError):
            return self._then.popleft()
        return None

    def _next_patient(self) -> str | None:
        """The last tier that no lane has taken, if it is a patient one and both lanes began with something else."""
        with suppress(IndexError):  # the others take from the other end, at the same time
            if all(self._lanes) and self._then[-1] in PATIENT:
                return self._then.pop()
        return None

    def _one(self, name: str, *options: str, patient: bool = False) -> Tier | None:
        """Run a tier to its end; None after a signal to end."""
        with self._lock:
            if self._stopped:
                return None
            tier = Tier.start(name, self._memory, *options, patient=patient)
            self._running.append(tier)
        print(f"== {name}\n", end="", flush=True)  # one write: lanes print at once
        tier.follow()
        with self._lock:
            self._running.remove(tier)
        return tier

    def _look_again(self, tier: Tier) -> None:
        """Run the few tests that failed once more; that changes no verdict."""
        if tier.process.returncode != TESTS_FAILED or not 0 < len(tier.failures) <= FEW:
            return
        again = self._one(tier.name, "--last-failed", "--last-failed-no-failures=none")
        if again is not None:
            tier.passes_alone = again.passed

    def _stop(self, number: int, _frame: object) -> None:
        self._stopped = True  # without the lock: this runs in the main thread, which never holds it
        for tier in list(self._running):
            if tier.process.poll() is None:
                tier.process.send_signal(number)


def main(wanted: Sequence[str]) -> int:
    """Run the wanted tiers, all without any.

    Returns:
        The exit code: 0 when nothing failed.
    """
    if unknown := sorted(set(wanted) - set(TIERS)):
        print(f"unknown tier {', '.join(unknown)}; there are {', '.join(TIERS)}", file=sys.stderr)
        return 2
    began, busy = time.monotonic(), busy_seconds()
    os.sync()  # images that were just built: nobody shall wait for them to reach the disk
    with scratch() as memory:
        run = Run(wanted, memory)
        passed = run()
    seconds, cores = time.monotonic() - began, os.cpu_count() or 1
    share = (busy_seconds() - busy) / (seconds * cores)
    print(f"all tiers: {seconds:.0f} s, in which {share:.0%} of {cores} cores computed", flush=True)
    for tier in run.done:
        verdict = "passed" if tier.passed else f"FAILED ({tier.process.returncode})"
        took = f"{tier.seconds:.0f} s (computing: {tier.cpu_seconds:.0f} s)"
        print(f"{tier.name}: {verdict} in {took}: {tier.summary}", flush=True)
    for tier in run.done:
        for line in tier.failures:
            print(f"[{tier.name}] {line}", flush=True)
        if tier.passes_alone is not None:
            print(
                f"[{tier.name}] alone, {'all of these passed' if tier.passes_alone else 'they failed too'}", flush=True
            )
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
