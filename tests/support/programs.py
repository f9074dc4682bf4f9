"""Programs that tests start: their output and their end, waited for as long as their processes make progress.

A tree of processes makes progress while it writes output, or while it uses `MOVING_SHARE` of one core: a process that only polls uses CPU
time too.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, AnyStr

import psutil

from tests.support import waiting
from tests.support.waiting import LONGEST_POLL_SECONDS, Progress, StalledError, Wait

MOVING_SHARE = 0.05
"""On two cores under a load of 40, a process that computes has as much; most processes that poll use less."""
OUTPUT_CHARACTERS = 4000


def process_tree(*pids: int) -> list[psutil.Process]:
    """Live processes with these ids, and their descendants."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return list(found.values())


def cpu_seconds(*pids: int) -> float:
    """CPU time of these processes, their descendants and their children that have ended."""
    total = 0.0
    for process in process_tree(*pids):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user and system, its own and those of its children
    return total


def tree_progress(*pids: int) -> Progress:
    """Progress of these processes and their descendants: a number that changes while they compute."""
    return lambda: f"{int(cpu_seconds(*pids) / (waiting.PATIENCE_SECONDS * MOVING_SHARE))} units of CPU time"


def tree_states(*pids: int) -> str:
    """One line for each process and descendant: its id, state, CPU time and command line."""
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


def wait_for_exit(
    process: subprocess.Popen[Any],
    *,
    progress: Progress | None = None,
    state: Callable[[], object] | None = None,
) -> int:
    """Wait for the end of a process; return its exit code. After a failure the process still runs.

    Raises:
        StalledError: its tree used no CPU time, and `progress` has not changed.
    """
    wait = _wait_for_tree(process, progress, state)
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LONGEST_POLL_SECONDS)
        wait.poll()


def finish(
    process: subprocess.Popen[AnyStr], input: AnyStr | None = None, *, progress: Progress | None = None
) -> tuple[AnyStr, AnyStr]:
    """Read a process's output to its end, as `communicate`; return stdout and stderr.

    Raises:
        StalledError: its tree used no CPU time and wrote nothing, and `progress` has not changed. The tree is killed.
    """
    written = 0
    wait = _wait_for_tree(process, lambda: (f"{written} bytes written", progress and progress()), None)
    while True:
        try:
            return process.communicate(input, timeout=LONGEST_POLL_SECONDS)
        except subprocess.TimeoutExpired as late:
            input, written = None, len(late.output or b"") + len(late.stderr or b"")
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
        StalledError: its tree used no CPU time and wrote nothing.
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


def _wait_for_tree(
    process: subprocess.Popen[Any], progress: Progress | None, state: Callable[[], object] | None
) -> Wait:
    moved = tree_progress(process.pid)
    return Wait(
        f"the end of {str(process.args)[:300]}",
        lambda: (moved(), progress and progress()),
        lambda: f"{tree_states(process.pid)}\n{state() if state is not None else ''}",
    )


def _last_output(process: subprocess.Popen[Any]) -> str:
    """The end of stdout and stderr of a killed process, even if a process outside of its tree keeps the pipes open."""
    try:
        parts = process.communicate(timeout=LONGEST_POLL_SECONDS)
    except subprocess.TimeoutExpired as late:
        parts = (late.output, late.stderr)
    texts = [part.decode(errors="replace") if isinstance(part, bytes) else part for part in parts if part]
    return "\n".join(text[-OUTPUT_CHARACTERS:] for text in texts)
