"""Runner of the test tiers, next to each other: `python -m tests.tiers [--full] [--seed N] [TIER ...]`.

Each tier is one pytest. Its output is printed line by line with its name, and its summary is repeated at the end, with
the failed tests. All tiers run, even after a failure.

The default is the gate: all tests without the marker `full` (docs/development.md). `--full` runs all tests.

A failed test runs twice more in isolation, after all tiers have ended. If it passes both times, it is flaky: it does
not fail the run, but gets a row in `tests/flakes.md`, and that list makes later runs fail if it grows or ages. There is
no other retry.
"""

from __future__ import annotations

import argparse
import os
import random
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
from datetime import date
from itertools import chain
from pathlib import Path

from tests import flakes
from tests.flakes import Flake
from tests.outcomes import Failure, read_failures

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
"""Arguments of pytest by tier."""
LANES: Sequence[Sequence[str]] = (("parts",), ("cluster",))
"""Two lanes of tiers that compute run next to each other, one for each of two cores."""
WAITING: Sequence[str] = ("controlplane",)
"""A third lane, which waits for controllers and stubs most of the time."""
THEN: Sequence[str] = ("processes", "thorough", "browser", "unit", "sim", "tensors")
"""Tiers for a lane that has finished, the longest first, so that both lanes end at about the same time."""
PATIENT = frozenset({"unit", "sim", "tensors"})
"""Tiers of `THEN` that also start at once, from the end of the list, with the least priority: they compute, and no
process that could time out waits for them."""
LEAST_PRIORITY = 19
"""Niceness: 1/70 of the share of a process of normal priority."""
PATIENT_TIMEOUT = "--timeout=1800"
"""Option of pytest for patient tiers: next to tiers that compute without a pause, a test takes many times as long."""
AT_LAST: Sequence[str] = ("real",)
"""Tiers that run after all others: real engines and trainers in pods, together with those of `parts`, need more than
two cores."""

LOWEST_CAPABILITY = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Variables for the oldest kernels of PyTorch, MKL and oneDNN, which every processor has. `python -m
tests.capabilities` tests others."""
NUMERIC = frozenset({"tensors"})
"""Tiers that run with these kernels: a test that compares floats gives the same result on all machines."""

GATE = ("-m", "not full")
"""Options of pytest that exclude tests of the full set."""
GATE_SEED = 0
"""Seed of the gate: each run draws the same examples, so a run fails only because of a change. The full set draws others each time."""
ISOLATED_RUNS = 2
TESTS_FAILED = 1
"""Exit code of pytest: tests ran, and some failed."""
IN_MEMORY = frozenset({"unit", "thorough", "tensors", "processes", "browser", "parts"})
"""Tiers with temporary files in memory: their processes make files durable every few milliseconds, and on a disk that
receives images and clusters at the same time one such call may take longer than a test waits."""
MEMORY = Path("/dev/shm")
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Variable of Python that no tier gets: tests start thousands of programs, and each of them would compile the modules
that it imports. That is a fifth of the CPU time of an orchestrator's start and of `rlrun validate` (1.3 s instead of
1.6 s)."""
ENOUGH_BYTES = 4 << 30


def busy_seconds() -> float:
    """Return the CPU time of the machine since its start, in seconds of one core; in a container, that of the host."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def scratch() -> AbstractContextManager[str | None]:
    """Return a folder in memory that is deleted afterwards, or None if the memory has too little room."""
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ENOUGH_BYTES:
        return tempfile.TemporaryDirectory(dir=MEMORY, prefix="rlrun-tests-", ignore_cleanup_errors=True)
    return nullcontext()


@dataclass(frozen=True)
class Settings:
    """Settings of all tiers of a run.

    Attributes:
        logs: folder for the lists of failed tests.
        memory: folder for temporary files, or None for the default of the machine.
        seed: seed of drawn examples.
        full: whether tests of the full set run.
    """

    logs: Path
    memory: str | None = None
    seed: int = GATE_SEED
    full: bool = False


def environment(name: str, settings: Settings) -> dict[str, str]:
    """Return the environment variables of a tier: those of this process, with changes."""
    variables = {key: value for key, value in os.environ.items() if key != NO_BYTECODE}
    if settings.memory and name in IN_MEMORY:
        variables["TMPDIR"] = settings.memory
    if name in NUMERIC:
        variables |= LOWEST_CAPABILITY
    return variables


@dataclass
class Tier:
    """One pytest.

    Attributes:
        summary: last line of the output.
        failures: tests that failed, or that could not run.
        seconds: wall time.
        cpu_seconds: CPU time of its processes, without those of clusters, which have other parents.
        flaky: failed tests that passed twice in isolation.
        is_isolated: whether the failed tests ran again in isolation.
    """

    name: str
    process: subprocess.Popen[str]
    started: float
    outcomes: Path
    summary: str = ""
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    flaky: list[Failure] = field(default_factory=list)
    is_isolated: bool = False

    @classmethod
    def start(cls, name: str, settings: Settings, targets: Sequence[str] = (), *, patient: bool = False) -> Tier:
        """Start a tier in this process's group, so that Ctrl-C reaches it.

        A patient tier gets a session of its own: Linux may divide the cores among sessions first, then among the processes of each.

        Args:
            targets: node ids to run instead of all tests of the tier.
        """
        handle, outcomes = tempfile.mkstemp(dir=settings.logs, prefix=name, suffix=".jsonl")
        os.close(handle)
        command = [
            sys.executable, "-m", "pytest", "--durations=12", f"-ocache_dir=.pytest_cache/{name}",
            "-p", "tests.outcomes", f"--outcomes={outcomes}", f"--hypothesis-seed={settings.seed}",
            *(() if settings.full else GATE), *([PATIENT_TIMEOUT] if patient else []), *(targets or TIERS[name]),
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            env=environment(name, settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=patient,
        )
        if patient:
            with suppress(OSError):  # it has ended already, or sessions have no share on this machine
                os.setpriority(os.PRIO_PROCESS, process.pid, LEAST_PRIORITY)
                Path(f"/proc/{process.pid}/autogroup").write_text(str(LEAST_PRIORITY))
        return cls(name, process, time.monotonic(), Path(outcomes))

    def follow(self) -> None:
        """Print the output until the process ends, then read its result."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"[{self.name}] {line}", end="", flush=True)
            self.summary = line.strip() or self.summary
        _, status, used = os.wait4(self.process.pid, 0)  # wait() does not return the CPU time
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds, self.cpu_seconds = time.monotonic() - self.started, used.ru_utime + used.ru_stime
        self.failures = read_failures(self.outcomes)

    @property
    def passed(self) -> bool:
        return self.process.returncode == 0

    @property
    def refused(self) -> list[Failure]:
        """Failed tests that are not flaky."""
        return [failure for failure in self.failures if failure not in self.flaky]

    @property
    def is_accepted(self) -> bool:
        """Whether the tier does not fail the run: it passed, or each of its failures is a flaky test."""
        only_tests = self.process.returncode == TESTS_FAILED and bool(self.failures)
        return self.passed or (only_tests and not self.refused)

    @property
    def verdict(self) -> str:
        if self.passed:
            return "passed"
        return "passed with flaky tests" if self.is_accepted else f"FAILED ({self.process.returncode})"


class Run:
    """All wanted tiers: each lane in a thread of its own, then the tiers that come last, then failed tests in isolation.

    A signal to end is passed on to the running tiers, and no further one starts.
    """

    def __init__(self, wanted: Sequence[str], settings: Settings) -> None:
        self.done: list[Tier] = []
        self._settings = settings
        *self._lanes, self._waiting, then, self._last = (
            [name for name in names if not wanted or name in wanted] for names in (*LANES, WAITING, THEN, AT_LAST)
        )
        self._then = deque(then)
        self._lock = threading.Lock()
        self._running: list[Tier] = []
        self._stopped = False

    def __call__(self) -> bool:
        """Run to the end; return whether all tiers ran and are accepted."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        lanes = [*(chain(lane, iter(self._take_next, None)) for lane in self._lanes), self._waiting]
        patient = threading.Thread(target=self._follow, args=(iter(self._take_patient, None), True))
        for threads in ([*(self._thread(lane) for lane in lanes), patient], [self._thread(self._last)]):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self._isolate_failures()
        for number, handler in before.items():
            signal.signal(number, handler)
        return not self._stopped and all(tier.is_accepted for tier in self.done)

    def _thread(self, lane: Iterable[str]) -> threading.Thread:
        return threading.Thread(target=self._follow, args=(lane,))

    def _follow(self, lane: Iterable[str], patient: bool = False) -> None:
        for name in lane:
            if (tier := self._run_tier(name, patient=patient)) is not None:
                self.done.append(tier)

    def _take_next(self) -> str | None:
        """Return an unstarted tier that belongs to no lane."""
        with suppress(IndexError):
            return self._then.popleft()
        return None

    def _take_patient(self) -> str | None:
        """Return the last unstarted tier, if it is patient and both lanes have a tier of their own."""
        with suppress(IndexError):  # the lanes take tiers from the other end at the same time
            if all(self._lanes) and self._then[-1] in PATIENT:
                return self._then.pop()
        return None

    def _run_tier(self, name: str, targets: Sequence[str] = (), *, patient: bool = False) -> Tier | None:
        """Run a tier to its end; return None after a signal to end."""
        with self._lock:
            if self._stopped:
                return None
            tier = Tier.start(name, self._settings, targets, patient=patient)
            self._running.append(tier)
        print(f"== {name}\n", end="", flush=True)  # one write: lanes print at once
        tier.follow()
        with self._lock:
            self._running.remove(tier)
        return tier

    def _isolate_failures(self) -> None:
        """Run each failed test twice more without any other tier, unless there are more than the list of flaky tests may hold."""
        failed = [tier for tier in self.done if tier.process.returncode == TESTS_FAILED]
        if sum(len(tier.failures) for tier in failed) > flakes.MAX_OPEN:
            return
        for tier in failed:
            for failure in tier.failures:
                runs = (self._passes_alone(tier.name, failure) for _ in range(ISOLATED_RUNS))
                if all(runs):
                    tier.flaky.append(failure)
            tier.is_isolated = True

    def _passes_alone(self, name: str, failure: Failure) -> bool:
        """Run a failed test, and the tests that were skipped because of it, in a separate pytest."""
        again = self._run_tier(name, (failure.test, *failure.dependents))
        return again is not None and again.passed

    def _stop(self, number: int, _frame: object) -> None:
        self._stopped = True  # without the lock: this runs in the main thread, which never holds it
        for tier in list(self._running):
            if tier.process.poll() is None:
                tier.process.send_signal(number)


def record_flakes(tiers: Sequence[Tier], seed: int) -> list[str]:
    """Print the flaky tests and, outside of CI, add them to the list; return why the list makes the run fail."""
    new = [Flake(each.test, tier.name, seed, each.seconds) for tier in tiers for each in tier.flaky]
    for flake in new:
        print(f"FLAKY {flake.test} (tier {flake.tier}, seed {flake.seed}, {flake.seconds:.1f} s)")
    text, today = flakes.PATH.read_text(), date.today()
    if new and not os.environ.get("CI"):
        flakes.PATH.write_text(flakes.add_rows(text, new, today))
    elif new:
        print("Add to tests/flakes.md, with the suspected cause:", *(flake.row(today) for flake in new), sep="\n")
    return flakes.problems(text, today, new)


def print_result(tiers: Sequence[Tier], started: float, busy: float) -> None:
    """Print one line per tier, then one line per failed test."""
    seconds, cores = time.monotonic() - started, os.cpu_count() or 1
    used = busy_seconds() - busy
    print(
        f"all tiers: {seconds:.0f} s and {used:.0f} CPU seconds, {used / (seconds * cores):.0%} of {cores} cores",
        flush=True,
    )
    for tier in tiers:
        took = f"{tier.seconds:.0f} s ({tier.cpu_seconds:.0f} CPU seconds)"
        print(f"{tier.name}: {tier.verdict} in {took}: {tier.summary}", flush=True)
    for tier in tiers:
        for failure in tier.refused:
            print(
                f"[{tier.name}] FAILED {failure.test}{', in isolation as well' if tier.is_isolated else ''}", flush=True
            )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.tiers", description="Run tiers of tests.")
    parser.add_argument("tiers", nargs="*", metavar="TIER", help=f"default: all of {', '.join(TIERS)}")
    parser.add_argument("--full", action="store_true", help="run all tests, not only the gate")
    parser.add_argument(
        "--seed", type=int, help="seed of drawn examples (default: 0 for the gate, a new one for --full)"
    )
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.tiers) - set(TIERS)):
        parser.error(f"unknown tier {', '.join(unknown)}; there are {', '.join(TIERS)}")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 31) if options.full else GATE_SEED
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the wanted tiers, or all of them; return exit code 0 if no tier failed."""
    options = parse_arguments(arguments)
    if problems := flakes.problems(flakes.PATH.read_text(), date.today()):
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    print(f"{'full set' if options.full else 'gate'}, seed {options.seed}", flush=True)
    started, busy = time.monotonic(), busy_seconds()
    os.sync()  # images that were just built: no test has to wait until they are on the disk
    with scratch() as memory, tempfile.TemporaryDirectory(prefix="rlrun-outcomes-") as logs:
        run = Run(options.tiers, Settings(Path(logs), memory, options.seed, options.full))
        accepted = run()
    print_result(run.done, started, busy)
    problems = record_flakes(run.done, options.seed)
    print(*problems, sep="\n", end="\n" if problems else "", flush=True)
    return 0 if accepted and not problems else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
