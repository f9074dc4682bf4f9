"""Programs that tests start: their output and their end, waited for as long as their processes make progress.

A tree of processes makes progress while it writes output or computes. It computes if its threads run or wait for a core for `MOVING_SHARE`
of the time: a process that only polls uses CPU time too, and on an overloaded machine a process that computes gets little of it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, AnyStr, TypeVar

import psutil

from tests.support import waiting
from tests.support.waiting import LONG_POLL_SECONDS, Progress, StalledError, Wait, wait_until, wait_until_async

MOVING_SHARE = 0.1
OUTPUT_CHARACTERS = 4000
T = TypeVar("T")


def process_tree(*pids: int) -> list[psutil.Process]:
    """Return live processes with these ids, and their descendants."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return list(found.values())


def cpu_seconds(*pids: int) -> float:
    """Return the CPU time of these processes, their descendants and their ended children."""
    return _cpu_seconds(process_tree(*pids))


def tree_progress(*pids: int) -> Progress:
    """Return the progress of these processes and their descendants: a number that changes while they compute."""
    return lambda: _units(process_tree(*pids))


def children_progress() -> object:
    """Return the progress of all descendants of this process, without its own CPU time, which it spends on polls."""
    own = psutil.Process()
    return _units(own.children(recursive=True), ended=sum(own.cpu_times()[2:4]))


def tree_states(*pids: int) -> str:
    """Return one line for each process and descendant: id, state, CPU time and command line."""
    lines = []
    for process in process_tree(*pids):
        with suppress(psutil.NoSuchProcess), process.oneshot():
            words = " ".join(process.cmdline())[:200] or process.name()
            lines.append(f"{process.pid} {process.status()}, {sum(process.cpu_times()[:2]):.1f} s of CPU: {words}")
    return "\n".join(lines) or "no process"


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    for process in process_tree(pid):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def wait_for(
    condition: Callable[[], T],
    what: str = "",
    *,
    progress: Progress | None = None,
    state: Callable[[], object] | None = None,
    poll_seconds: float = waiting.POLL_SECONDS,
) -> T:
    """Poll `condition`, which a program makes true, until its value is true; return that value.

    Raises:
        StalledError: no descendant of this process computed, and `progress` has not changed.
    """
    return wait_until(
        condition,
        what,
        progress=lambda: (children_progress(), progress and progress()),
        state=lambda: _states(os.getpid(), state),
        poll_seconds=poll_seconds,
    )


async def wait_for_async(
    condition: Callable[[], object],
    what: str = "",
    *,
    state: Callable[[], object] | None = None,
    poll_seconds: float = waiting.POLL_SECONDS,
) -> None:
    """Poll `condition` as `wait_for`, while other tasks of the event loop run; it may be a coroutine function."""
    await wait_until_async(
        condition,
        what,
        progress=children_progress,
        state=lambda: _states(os.getpid(), state),
        poll_seconds=poll_seconds,
    )


def wait_for_exit(
    process: subprocess.Popen[Any],
    *,
    progress: Progress | None = None,
    state: Callable[[], object] | None = None,
) -> int:
    """Wait for the end of a process; return its exit code. After a failure the process still runs.

    Raises:
        StalledError: no descendant of this process computed, and `progress` has not changed.
    """
    wait = _wait_for_end(process, progress, state)
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LONG_POLL_SECONDS)
        wait.woke()
        wait.poll()


def finish(
    process: subprocess.Popen[AnyStr], input: AnyStr | None = None, *, progress: Progress | None = None
) -> tuple[AnyStr, AnyStr]:
    """Read a process's output to its end, as `communicate`; return stdout and stderr.

    Raises:
        StalledError: it wrote nothing, no descendant of this process computed, and `progress` has not changed. The tree is killed.
    """
    written = 0
    wait = _wait_for_end(process, lambda: (f"{written} bytes written", progress and progress()), None)
    while True:
        try:
            return process.communicate(input, timeout=LONG_POLL_SECONDS)
        except subprocess.TimeoutExpired as late:
            input, written = None, len(late.output or b"") + len(late.stderr or b"")
        wait.woke()
        try:
            wait.poll()
        except StalledError as error:
            kill_tree(process.pid)
            raise StalledError(f"{error}\noutput:\n{_last_output(process)}") from None


def run_program(
    command: Sequence[str | os.PathLike[str]], *, input: str | None = None, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` with captured text.

    Args:
        command: words of the command line.
        input: text for its stdin.
        check: raise `CalledProcessError` for an exit code other than 0.
        options: further options of `subprocess.Popen`.

    Raises:
        StalledError: as for `finish`.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        pipes["stdin"] = subprocess.PIPE
    with subprocess.Popen(command, text=True, **(pipes | options)) as process:
        try:
            out, err = finish(process, input)
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _wait_for_end(
    process: subprocess.Popen[Any], progress: Progress | None, state: Callable[[], object] | None
) -> Wait:
    return Wait(
        f"the end of {str(process.args)[:300]}",
        lambda: (children_progress(), progress and progress()),
        lambda: _states(os.getpid(), state),
        LONG_POLL_SECONDS,
    )


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user and system time, of the process and its children
    return total


def _delay_seconds(processes: list[psutil.Process]) -> float:
    """Return the time that live threads of the processes have waited for a core (proc_pid_schedstat(5), second field,
    in ns)."""
    nanoseconds = 0
    for process in processes:
        # A process, or one of its threads, may end while the folder is read.
        with suppress(OSError):
            threads = list(Path(f"/proc/{process.pid}/task").iterdir())
            for thread in threads:
                with suppress(OSError):
                    nanoseconds += int((thread / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def _units(processes: list[psutil.Process], ended: float = 0.0) -> str:
    """Work of processes in units of the least that counts as progress within the time of the patience.

    Args:
        processes: live processes.
        ended: CPU time of others, in seconds.
    """
    seconds = ended + _cpu_seconds(processes) + _delay_seconds(processes)
    return f"{int(seconds / (waiting.PATIENCE_SECONDS * MOVING_SHARE))} units of computing"


def _states(pid: int, more: Callable[[], object] | None) -> str:
    return f"{tree_states(pid)}\n{more() if more is not None else ''}"


def _last_output(process: subprocess.Popen[Any]) -> str:
    """The end of stdout and stderr of a killed process, even if a process outside of its tree keeps the pipes open."""
    try:
        parts = process.communicate(timeout=LONG_POLL_SECONDS)
    except subprocess.TimeoutExpired as late:
        parts = (late.output, late.stderr)
    texts = [part.decode(errors="replace") if isinstance(part, bytes) else part for part in parts if part]
    return "\n".join(text[-OUTPUT_CHARACTERS:] for text in texts)
